"""`fastserve-hpc submit`: one prompt, the answer as it comes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from fastserve_hpc.cli.generation import Timed, follow
from fastserve_hpc.cli.options import endpoint_options, input_path, json_option, output_path, sampling_options
from fastserve_hpc.errors import ConfigError, ExitCode, StoppedError

_EPILOG = """\b
A question, a file's text, a pipe, a text to go on with:
  fastserve-hpc submit "What is the capital of France?"
  fastserve-hpc submit --file report.txt --system "Summarise in two lines."
  git diff | fastserve-hpc submit --system "Write a commit message." -
  fastserve-hpc submit --raw "Once upon a time" --temperature 0.8 --seed 7
"""


@click.command(epilog=_EPILOG, short_help="Send one prompt and stream the answer.")
@click.argument("text", metavar="[PROMPT]", required=False)
@click.option("--prompt", help="The prompt, as an option instead of an argument.")
@click.option("--file", "file", type=input_path, help="Read the prompt from a file.")
@click.option("--system", help="What the model is told before the prompt.")
@click.option("--raw", is_flag=True, help="Go on with the prompt as it is, without the model's chat template.")
@click.option("--n", type=int, default=1, show_default=True, help="How many different answers.")
@click.option("--session", help="Requests of one session that are there together count as one to the scheduler.")
@click.option("--expected-tokens", type=click.IntRange(min=1), help="About how long the answer will be, if you know.")
@click.option(
    "--class",
    "service_class",
    type=click.Choice(["interactive", "batch"]),
    help="batch: behind all interactive requests. Default: interactive.",
)
@endpoint_options()
@sampling_options
@json_option("Print one JSON object at the end: text, token_ids, finish_reason, choices, ttft_s, latency_s.")
@click.option("--stats", type=output_path, help="Append one JSON line with token count and times to this file.")
def command(
    text: str | None,
    prompt: str | None,
    file: Path | None,
    system: str | None,
    raw: bool,
    n: int,
    endpoint: str | None,
    job: str | None,
    as_json: bool,
    stats: Path | None,
    **options: Any,
) -> ExitCode:
    """Send one PROMPT and stream the answer. '-', or no prompt and a pipe, reads standard input."""
    from fastserve_hpc.client import Client

    content = _the_prompt(text, prompt, file)
    if not (content if raw else content.strip()):
        raise ConfigError("the prompt is empty")
    what = _as_chat(content, system) if not raw else _as_text(content, system)
    live = n == 1 and not as_json
    with Client(endpoint, job=job) as client:
        answer = follow(client.stream(what, n=n, **_given(**options)), n, _write if live else _ignore)
    _show(answer, live, as_json)
    if stats is not None:
        with stats.open("a", encoding="utf-8") as out:
            out.write(json.dumps(answer.timing()) + "\n")
    if answer.was_cut_off:
        raise StoppedError("the server ended before the answer was finished")
    return ExitCode.DONE


def _given(sampling: dict[str, Any], **hints: Any) -> dict[str, Any]:
    """Sampling, and what the scheduler is told; the client has the defaults."""
    return {**sampling, **{name: value for name, value in hints.items() if value is not None}}


def _the_prompt(text: str | None, prompt: str | None, file: Path | None) -> str:
    given = [value for value in (text, prompt, file) if value is not None]
    if len(given) > 1:
        raise ConfigError("more than one prompt: give it as an argument, with --prompt or with --file")
    if text == "-" or (not given and not sys.stdin.isatty()):
        return sys.stdin.read()
    if file is not None:
        return file.read_text(encoding="utf-8", errors="surrogateescape")  # refused as from a pipe
    if not given:
        raise ConfigError('no prompt: write fastserve-hpc submit "your question", or pipe it in')
    return str(given[0])


def _as_chat(content: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": content}]


def _as_text(content: str, system: str | None) -> str:
    if system:
        raise ConfigError("--system has no place in a --raw prompt: put its text before the prompt")
    return content


def _show(answer: Timed, live: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer.record(), ensure_ascii=False))
    elif live:
        click.echo()
    else:
        choices = answer.generation.choices
        for choice in choices:
            click.echo(f"--- {choice.index + 1} of {len(choices)}\n{choice.text}")


def _write(piece: str) -> None:
    click.echo(piece, nl=False)
    sys.stdout.flush()


def _ignore(piece: str) -> None:
    """The text is shown at the end."""
