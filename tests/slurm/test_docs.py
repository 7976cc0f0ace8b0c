"""docs/slurm.md is what a new user has (issue 5, Show 10): its commands, copied and pasted on the login host."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from slurm_support import REPOSITORY, Cluster, Completed, Login, wait_until

from fastserve_hpc.cli import main

TEXT = (REPOSITORY / "docs" / "slurm.md").read_text()


def commands(heading: str) -> list[str]:
    """The command lines below a heading, in order."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    assert lines, heading
    return [line for line in lines.replace("\\\n", " ").splitlines() if line]


def test_every_command_is_one_that_exists() -> None:
    """With options that it has; `--help` behind them keeps it from being run."""
    headings = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    for line in (line for heading in headings if f"## {heading}\n" in TEXT for line in _blocks(heading)):
        words = shlex.split(line, comments=True)
        if "fastserve-hpc" in words:
            arguments = words[words.index("fastserve-hpc") + 1 :]
            done = CliRunner().invoke(main, [*arguments, "--help"])
            assert done.exit_code == 0, f"{line}\n{done.output}"
            options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            assert options <= set(re.findall(r"--[a-z-]+", done.output)), line


def _blocks(heading: str) -> list[str]:
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return commands(heading) if "```bash" in section else []


class NewUser:
    """Someone in a directory of his own, with the package installed and nothing else."""

    def __init__(self, login: Login, directory: Path):
        self._login = login
        self._directory = directory
        bin_directory = directory / "bin"
        bin_directory.mkdir()
        program = bin_directory / "fastserve-hpc"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fastserve_hpc "$@"\n')
        program.chmod(0o755)
        self._path = f"{bin_directory}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"

    def paste(self, line: str) -> Completed:
        """Run a line as it stands in the docs."""
        shell = f"cd {shlex.quote(str(self._directory))} && {line}"
        done = self._login.cluster.run("bash", "-c", shell, timeout_s=120, PATH=self._path, **self._login.environ)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done

    def log(self, job_id: str) -> str:
        path = self._directory / f"fastserve-{job_id}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def new_user(cluster: Cluster, tmp_path: Path) -> Iterator[NewUser]:
    login = Login(cluster, tmp_path / "home")
    yield NewUser(login, tmp_path)
    login.end()


def submitted(done: Completed) -> str:
    found = re.match(r"submitted job (\d+)", done.stdout)
    assert found is not None, done.stdout
    return found[1]


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_show_10_the_first_job_and_its_clients(new_user: NewUser) -> None:
    submit, *clients, cancel = (line for line in commands("The first job") if line.startswith(("fastserve", "scancel")))
    job_id = submitted(new_user.paste(submit))
    wait_until(lambda: f"ready endpoint=job-{job_id}" in new_user.log(job_id), 90, "the line that the docs promise")
    said = [new_user.paste(f"{line.replace('812', job_id)} < /dev/null").stdout for line in clients]
    assert "ready" in said[0]
    assert "Paris" in said[1]
    connect = commands("Clients")[0]
    assert "ssh -N -L " in new_user.paste(connect.replace("812", job_id)).stdout
    new_user.paste(cancel.replace("812", job_id))
    wait_until(lambda: "state" not in new_user.paste("squeue -h -o state").stdout, 30, "the end")


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_show_10_batches(new_user: NewUser, tmp_path: Path) -> None:
    for line in commands("Batches"):
        new_user.paste(line)
    results = [tmp_path / name for name in ("out.jsonl", "results/aa.results.jsonl", "results/ab.results.jsonl")]
    wait_until(lambda: all(path.exists() and path.read_text() for path in results), 200, "all results")
    wait_until(lambda: not new_user.paste("squeue -h").stdout, 60, "the jobs to end")
    assert [len(path.read_text().splitlines()) for path in results] == [2, 1, 1]
