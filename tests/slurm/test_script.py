"""Scripts as text: quoting for sbatch, quoting for bash (by running it), signals, starting again."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_support import wait_until

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.slurm.script import Script, Shard, comment, directive, render

HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "a; touch pwned",
    "a && touch pwned #",
    "two\nlines\n#SBATCH --uid=0",
    "it's",
    'say "hi"',
    "back\\slash\\",
    "*",
    "~",
    "$HOME",
    "",
    " ",
    "-rf",
    "ünï/çødé ☃",
    "tab\there",
    "!!",
    "{a,b}",
)


def script(**changes: object) -> Script:
    settings: dict[str, object] = {
        "directives": (("job-name", "test"),),
        "env_file": None,
        "srun": (("mpi", "pmi2"),),
        "program": ("fastserve-hpc",),
        "command": "batch",
        "options": (),
    }
    return Script(**(settings | changes))  # type: ignore[arg-type]


class Site:
    """A directory with an srun, an scontrol and an sbatch that write down how they were called."""

    def __init__(self, path: Path, srun: str = "exit 0", scontrol: str = "exit 0"):
        self.path = path
        for name, action in (("srun", srun), ("scontrol", scontrol), ("sbatch", "exit 0")):
            program = path / name
            program.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {shlex.quote(str(path))}/{name}.args\n{action}\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.environ = {"PATH": f"{path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "3", "SLURM_JOB_ID": "71"}

    def start(self, text: str, **environ: str) -> subprocess.Popen[str]:
        (self.path / "job").write_bytes(text.encode())
        return subprocess.Popen(
            ["bash", "job"],
            cwd=self.path,
            env=self.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, text: str, **environ: str) -> int:
        process = self.start(text, **environ)
        _, errors = process.communicate(timeout=20)
        assert errors == ""
        return process.returncode

    def called(self, name: str) -> list[str] | None:
        """The arguments of the last call, None if there was none."""
        record = self.path / f"{name}.args"
        return record.read_bytes().decode().split("\0")[:-1] if record.exists() else None


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_hostile_values_reach_the_program_unchanged(site: Site) -> None:
    options = tuple((f"option-{i}", value) for i, value in enumerate(HOSTILE))
    shard = Shard("$(touch pwned)/in", "out\n`touch pwned`")
    text = render(script(options=options, shards=(shard,), notes=HOSTILE, program=("/a b/python", "-m", "it's")))
    assert site.run(text) == 0
    expected = ["--mpi=pmi2", "/a b/python", "-m", "it's", "batch", *(f"--{name}={value}" for name, value in options)]
    assert site.called("srun") == [*expected, f"--input={shard.input}", f"--output={shard.output}"]
    assert not (site.path / "pwned").exists()


texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)


@settings(max_examples=40, deadline=None)
@given(st.lists(texts, max_size=4), texts, texts)
def test_any_text_survives_bash(values: list[str], file: str, note: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        site = Site(Path(directory))
        options = tuple(("option", value) for value in values)
        shards = (Shard(file, "x"), Shard(f"{file}2", "y"))
        assert site.run(render(script(options=options, shards=shards, notes=(note,))), SLURM_ARRAY_TASK_ID="1") == 0
        wanted = ["--mpi=pmi2", "fastserve-hpc", "batch", *(f"--option={value}" for value in values)]
        assert site.called("srun") == [*wanted, f"--input={file}2", "--output=y"]


@pytest.mark.parametrize("name", ["env.sh", "-n", "a b.sh", "$(touch pwned).sh", "sub/env.sh"])
def test_env_file_is_sourced_whatever_its_name(site: Site, name: str) -> None:
    (site.path / "sub").mkdir()
    (site.path / name).write_text('echo "$UNSET" > sourced\nexport PATH="$PATH:/site"\n')
    assert site.run(render(script(env_file=name))) == 0
    assert (site.path / "sourced").exists()
    assert not (site.path / "pwned").exists()


def test_missing_env_file_ends_the_job(site: Site) -> None:
    process = site.start(render(script(env_file="gone.sh")))
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "gone.sh: No such file" in errors
    assert site.called("srun") is None


@pytest.mark.parametrize("value", [v for v in HOSTILE if v.isprintable() and v])
def test_directives_are_one_line_each(value: str) -> None:
    assert "\n" not in directive("job-name", value)


@pytest.mark.parametrize("value", ["", "two\nlines", "a\rb", "\0", "tab\t", "\u2028"])
def test_directives_refuse_what_would_break_the_line(value: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        directive("account", value)


@pytest.mark.parametrize("name", ["", "Upper", "a b", "a\n#SBATCH", "-x", "a=b"])
def test_directive_names_are_names(name: str) -> None:
    with pytest.raises(ConfigError, match="no option of sbatch"):
        directive(name, "x")


@given(st.text())
def test_comments_are_one_harmless_line(text: str) -> None:
    line = comment(text)
    assert line.startswith("#")
    assert len(line.splitlines()) == 1
    assert not line.startswith("#SBATCH")


def test_exit_status_is_the_ranks(tmp_path: Path) -> None:
    site = Site(tmp_path, srun="exit 3")
    assert site.run(render(script(restarts=True))) == 3
    assert site.called("scontrol") is None


def test_srun_gets_the_cores_per_task(tmp_path: Path) -> None:
    site = Site(tmp_path, srun=f"echo $SRUN_CPUS_PER_TASK > {shlex.quote(str(tmp_path))}/cores")
    assert site.run(render(script())) == 0
    assert (tmp_path / "cores").read_text() == "3\n"


def test_work_left_over_is_queued_again(tmp_path: Path) -> None:
    site = Site(tmp_path, srun="exit 75")
    assert site.run(render(script(restarts=True))) == 75
    assert site.called("scontrol") == ["requeue", "71"]
    assert site.called("sbatch") is None


def test_a_site_without_requeue_gets_a_successor(tmp_path: Path) -> None:
    site = Site(tmp_path, srun="exit 75", scontrol="exit 1")
    shards = (Shard("a", "b"), Shard("c", "d"))
    assert site.run(render(script(restarts=True)), SLURM_ARRAY_TASK_ID="1") == 75
    assert site.called("sbatch") == ["--dependency=afterany:71", "job"]
    assert site.run(render(script(restarts=True, shards=shards)), SLURM_ARRAY_TASK_ID="1") == 75
    assert site.called("sbatch") == ["--dependency=afterany:71", "--array=1", "job"]


def test_a_server_is_not_queued_again(tmp_path: Path) -> None:
    site = Site(tmp_path, srun="exit 75")
    assert site.run(render(script())) == 75
    assert site.called("scontrol") is None


UNTIL_SIGNALLED = """
trap 'sleep 0.3; exit 75' USR1 TERM
touch srun.ready
for ((i = 0; i < 100; i++)); do sleep 0.1; done
"""


def is_caught(number: signal.Signals, pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, ["requeue", "71"]), (signal.SIGTERM, None)])
def test_signals_reach_the_ranks_and_their_exit_status_is_kept(
    tmp_path: Path, number: signal.Signals, requeued: list[str] | None
) -> None:
    """The time limit's USR1 is passed on, and the rest queued again. scancel's TERM, which Slurm also sends to the
    ranks, is not followed by a new start."""
    site = Site(tmp_path, srun=UNTIL_SIGNALLED)
    process = site.start(render(script(restarts=True)))
    wait_until((tmp_path / "srun.ready").exists, 30, "srun")
    wait_until(lambda: is_caught(number, process.pid), 30, "the script's traps")
    process.send_signal(number)
    if number == signal.SIGTERM:
        [srun] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(srun), number)
    for _ in range(20):  # an impatient site
        process.send_signal(number)
        time.sleep(0.02)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert site.called("scontrol") == requeued
