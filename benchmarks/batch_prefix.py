"""Questions behind the same worked examples: what the prefix cache saves a batch, and what it brings.

python benchmarks/batch_prefix.py --questions gsm8k.jsonl [--count 100] [--shots 5] [--max-tokens 32] [--json]

The questions are JSON lines of "question" and "answer"; the first ones are the examples. Without a file they are made
up. Each run is `fastserve-hpc batch` on a server of its own, with the cache and without.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from serving import RunningServer


def questions(path: Path | None, count: int) -> list[tuple[str, str]]:
    if path is not None:
        rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
        return [(row["question"], row["answer"]) for row in rows]
    return [made_up(i) for i in range(count)]


def made_up(i: int) -> tuple[str, str]:
    """A question and a worked answer."""
    a, b, c = 3 + i % 17, 2 + i % 11, 5 + i % 23
    question = (
        f"A baker makes {a} trays of {b} loaves in the morning and {c} single loaves in the afternoon. "
        "How many loaves does the baker make in a day?"
    )
    answer = (
        f"In the morning the baker makes {a} trays. Each of these trays holds {b} loaves of bread. That is {a} times "
        f"{b}, or <<{a}*{b}={a * b}>>{a * b} loaves in the morning. In the afternoon there are {c} single loaves more. "
        f"Morning and afternoon together are {a * b} + {c} = <<{a * b}+{c}={a * b + c}>>{a * b + c} loaves in a day."
    )
    return question, f"{answer}\n#### {a * b + c}"


def examples_of(asked: list[tuple[str, str]]) -> str:
    return "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in asked)


def run(args: argparse.Namespace, source: Path, directory: Path, examples: str, settings: list[str]) -> dict[str, Any]:
    """The summary of a batch on a fresh server, with the number of tokens that its lines share."""
    with RunningServer(directory, "--model", args.model, "--max-batch", str(args.max_batch), *settings) as server:
        files = ("--input", str(source), "--output", str(directory / "out.jsonl"))
        found: dict[str, Any] = json.loads(server.command("batch", "--endpoint", server.endpoint, *files, "--json"))
        alone = json.loads(
            server.command("submit", "--endpoint", server.endpoint, examples, "--max-tokens", "1", "--json")
        )
        return {**found, "shared_tokens": alone["prompt_tokens"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    asked = questions(args.questions, args.count + args.shots)
    examples, found = examples_of(asked[: args.shots]), {}
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "in.jsonl")
        prompts = [f"{examples}Question: {question}\nAnswer:" for question, _ in asked[args.shots :]]
        source.write_text("".join(json.dumps({"prompt": p, "max_tokens": args.max_tokens}) + "\n" for p in prompts))
        for kind, setting in (("with", "on"), ("without", "off")):
            directory = Path(name, kind)
            directory.mkdir()
            found[kind] = run(args, source, directory, examples, ["--prefix-cache", setting])
            print(f"{kind} the cache: {json.dumps(found[kind])}", file=sys.stderr)
    cached = found["with"]["prefix_tokens"]
    reuse = cached / ((len(prompts) - 1) * found["with"]["shared_tokens"])
    share = cached / found["with"]["prompt_tokens"]
    gain = found["with"]["output_tokens_per_s"] / found["without"]["output_tokens_per_s"]
    text = f"{reuse:.1%} of the shared tokens from the cache, {share:.1%} of all; {gain:.2f} times the tokens/s"
    print(json.dumps({**found, "reuse": reuse, "share": share, "gain": gain}) if args.json else text)


if __name__ == "__main__":
    main()
