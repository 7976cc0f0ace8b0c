"""Batch scripts as text: a pure function from what is wanted to a script that sbatch takes.

Two readers, two ways to quote: sbatch itself reads the #SBATCH lines, bash the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastserve_hpc.errors import ConfigError

Option = tuple[str, str | None]
"""(name without dashes, value), value None for a flag."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a batch and where its results go."""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Everything that a script says; nothing is looked up when it is made."""

    directives: tuple[Option, ...]
    """#SBATCH lines."""
    env_file: str | None
    """A shell file to source first."""
    srun: tuple[Option, ...]
    program: tuple[str, ...]
    """What starts `fastserve-hpc`."""
    command: str
    options: tuple[Option, ...]
    """Of the command."""
    shards: tuple[Shard, ...] = ()
    """Input files of a batch; several make a job array, an element a file."""
    restarts: bool = False
    """Whether to go on in a new run after exit code 75."""
    notes: tuple[str, ...] = ()
    """For the reader."""


def render(script: Script) -> str:
    """The script's text. Raises `ConfigError` for a value that an #SBATCH line cannot hold."""
    array = len(script.shards) > 1
    blocks = [
        ["#!/bin/bash", *(directive(name, value) for name, value in script.directives)],
        [comment(note) for note in script.notes],
        _environment(script.env_file),
        _file_lists(script.shards) if array else [],
        [*_start(script), 'ranks="$!"'],
        _wait(script.restarts),
        _restart(array) if script.restarts else [],
        ['exit "$code"'],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def directive(name: str, value: str | None) -> str:
    """One #SBATCH line. sbatch knows quotes and backslashes there, and a # outside of quotes starts a comment."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ConfigError(f"--{name} is no option of sbatch: write the name in small letters, without the dashes")
    if value is None:
        return f"#SBATCH --{name}"
    if not value.isprintable() or not value:
        raise ConfigError(f"--{name} {value!r}: sbatch cannot read this from a script; use printable characters")
    if re.fullmatch(r"[\w@%+=:,./*&|!\[\]()-]+", value, re.ASCII):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def comment(text: str) -> str:
    """A line that neither bash nor sbatch acts upon, whatever the text."""
    return f"# {''.join(c if c.isprintable() else '?' for c in text)}".rstrip()


def _environment(env_file: str | None) -> list[str]:
    """Site files often read unset variables, so `set -u` comes after them."""
    source = (
        []
        if env_file is None
        else ["# shellcheck source=/dev/null", f"source {shlex.quote(_as_path(env_file))} || exit", ""]
    )
    return [
        *source,
        "set -u",
        "# Since Slurm 22.05 srun does not take this over from sbatch.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]


def _as_path(name: str) -> str:
    """`source` looks up a name without a slash in PATH, and takes a leading dash for an option."""
    return name if name.startswith("/") else f"./{name.removeprefix('./')}"


def _file_lists(shards: Sequence[Shard]) -> list[str]:
    columns = {"inputs": [s.input for s in shards], "outputs": [s.output for s in shards]}
    return [
        line
        for name, paths in columns.items()
        for line in (f"{name}=(", *(f"    {shlex.quote(path)}" for path in paths), ")")
    ]


def _start(script: Script) -> list[str]:
    """The ranks, in the background, because only a waiting shell hears signals. An option a line."""
    launch = " ".join(["srun", *map(_word, script.srun), *map(shlex.quote, script.program), script.command])
    lines = [launch, *map(_word, script.options), *_files(script.shards)]
    return " \\\n    ".join([*lines[:-1], f"{lines[-1]} &"]).split("\n")


def _word(option: Option) -> str:
    name, value = option
    return f"--{name}" if value is None else f"--{name}={shlex.quote(value)}"


def _files(shards: Sequence[Shard]) -> Iterable[str]:
    if len(shards) > 1:
        return ['--input="${inputs[SLURM_ARRAY_TASK_ID]}"', '--output="${outputs[SLURM_ARRAY_TASK_ID]}"']
    return [_word(option) for shard in shards for option in (("input", shard.input), ("output", shard.output))]


# `wait` returns early when a trapped signal arrives: once the child has gone, another gives its exit status.
_WAIT = """\
# USR1 comes ahead of the time limit, to this shell alone: srun passes it on and the ranks finish what runs.
# TERM (scancel, preemption) has been sent to the ranks as well{never_again}.
{before}trap 'kill -USR1 "$ranks"' USR1
trap '{on_term}' TERM
while
    wait "$ranks"
    kill -0 "$ranks" 2>/dev/null
do :; done
wait "$ranks"
code="$?\""""

_RESTART = """\
# 75: there is more to do. A site that refuses to requeue gets a successor in the queue.
if [ "$code" -eq 75 ] && [ -z "$cancelled" ]; then
    scontrol requeue "$SLURM_JOB_ID" ||
        sbatch --dependency="afterany:$SLURM_JOB_ID"{same_element} "$0"
fi"""


def _wait(restarts: bool) -> list[str]:
    if not restarts:
        return _WAIT.format(never_again="", before="", on_term=":").splitlines()
    never_again = "; nothing is to start again then"
    return _WAIT.format(never_again=never_again, before="cancelled=''\n", on_term="cancelled=yes").splitlines()


def _restart(array: bool) -> list[str]:
    same_element = ' --array="$SLURM_ARRAY_TASK_ID"' if array else ""
    return _RESTART.format(same_element=same_element).splitlines()
