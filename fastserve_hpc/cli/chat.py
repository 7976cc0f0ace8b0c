"""`fastserve-hpc chat`: a conversation in the terminal, or one turn a line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from fastserve_hpc.cli.generation import follow
from fastserve_hpc.cli.options import endpoint_options, sampling_options
from fastserve_hpc.errors import ExitCode, RequestError

if TYPE_CHECKING:
    from rich.console import Console

_EPILOG = """\b
Talk; /reset forgets what was said, /system TEXT sets what the model is told,
/quit or Ctrl-D ends, Ctrl-C stops an answer:
  fastserve-hpc chat --endpoint demo --system "You are terse."
  printf 'My name is Ada.\\nWhat is my name?\\n' | fastserve-hpc chat
"""

_HELP = "/reset forgets the conversation, /system TEXT sets what the model is told first, /quit ends"

_COLOURED_PROMPT = "\001\033[1;32m\002you>\001\033[0m\002 "
"""Given to input() itself, with marks round what takes no room: line editing must know where it begins."""


@dataclass(slots=True)
class Conversation:
    """The turns so far, oldest first; `system` stands before them."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *self.turns]

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})


@click.command(epilog=_EPILOG, short_help="Chat with a server.")
@click.option("--system", help="What the model is told before the conversation.")
@endpoint_options()
@sampling_options
def command(system: str | None, endpoint: str | None, job: str | None, sampling: dict[str, Any]) -> ExitCode:
    """Chat with a running server."""
    from rich.console import Console

    from fastserve_hpc.client import Client

    console = Console(highlight=False, soft_wrap=True)
    conversation = Conversation(system)
    with Client(endpoint, job=job) as client:
        if sys.stdin.isatty():
            console.print(f"[dim]{client.status().model}. {_HELP}[/dim]")
        for line in _lines(console):
            if line.startswith("/"):
                if not _obeyed(line, conversation, console):
                    break
            elif line:
                _answer(client, line, conversation, sampling, console)
    return ExitCode.DONE


def _lines(console: Console) -> Iterator[str]:
    """What the user types, without line ends; ends at the end of input."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  line editing and history for input()

    prompt = _COLOURED_PROMPT if console.color_system else "you> "
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("[dim](Ctrl-D or /quit ends)[/dim]")


def _obeyed(line: str, conversation: Conversation, console: Console) -> bool:
    """Carry out a /command; False ends the chat."""
    word, _, rest = line.partition(" ")
    if word in ("/quit", "/exit", "/q"):
        return False
    if word == "/reset":
        conversation.turns.clear()
        console.print("[dim]forgotten[/dim]")
    elif word == "/system":
        conversation.system = rest.strip() or None
        console.print("[dim]noted[/dim]")
    else:
        console.print(_HELP, style="dim")
    return True


def _answer(client: Any, line: str, conversation: Conversation, sampling: dict[str, Any], console: Console) -> None:
    conversation.add("user", line)
    heard: list[str] = []

    def show(piece: str) -> None:
        heard.append(piece)
        console.out(piece, end="")

    events = None
    try:
        events = client.stream(conversation.messages(), **sampling)
        if follow(events, 1, show).was_cut_off:
            console.print("[dim] (cut off: the server is ending)[/dim]", end="")
    except KeyboardInterrupt:
        if events is not None:
            events.close()
        console.print("[dim] (stopped)[/dim]", end="")
    except RequestError as error:
        conversation.turns.pop()
        click.echo(f"error: {error}; /reset starts over", err=True)
        return
    console.print()
    conversation.add("assistant", "".join(heard))
