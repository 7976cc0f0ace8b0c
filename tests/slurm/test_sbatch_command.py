"""`fastserve-hpc sbatch` as a command: what it refuses, and what it chooses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastserve_hpc.cli import main
from fastserve_hpc.errors import FastServeError
from fastserve_hpc.slurm import submit


def sbatch(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sbatch", *arguments])


def refusal(*arguments: str) -> str:
    result = sbatch(*arguments)
    assert result.exit_code == 2, result.output
    return result.output


FAKE = ("--model", "fake")


def test_this_installation_is_what_the_ranks_run() -> None:
    script = sbatch("serve", *FAKE, "--mpi", "pmix", "--pp", "2").output
    assert f"srun --mpi=pmix --distribution=block {sys.executable} -m fastserve_hpc serve" in script
    assert "--mpi=" not in sbatch("serve", *FAKE, "--mpi", "site").output


def test_an_env_file_leads_to_another_installation(tmp_path: Path) -> None:
    env = tmp_path / "env.sh"
    env.touch()
    script = sbatch("serve", *FAKE, "--env", str(env)).output
    assert f"source {env} || exit" in script
    assert "--distribution=block fastserve-hpc serve" in script
    assert "copy slurm/env.sh" in refusal("serve", *FAKE, "--env", str(tmp_path / "gone.sh"))


def test_a_pattern_becomes_an_array(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "other.txt"):
        (tmp_path / name).touch()
    options = ("--input", f"{tmp_path}/*.jsonl", "--output-dir", str(tmp_path), "--array-limit", "1")
    script = sbatch("batch", *FAKE, *options).output
    assert "#SBATCH --array=0-1%1" in script
    assert script.index(f"{tmp_path}/a.jsonl") < script.index(f"{tmp_path}/b.jsonl")
    assert f"{tmp_path}/b.results.jsonl" in script


def test_a_file_whose_name_is_a_pattern(tmp_path: Path) -> None:
    odd = tmp_path / "[1].jsonl"
    odd.touch()
    assert f"--input='{odd}'" in sbatch("batch", *FAKE, "--input", str(odd), "--output", "x").output


def test_inputs_and_outputs_must_fit(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.touch()
    two.touch()
    inputs = ("--input", str(one), "--input", str(two))
    assert "no file matches it" in refusal("batch", *FAKE, "--input", "nothing*", "--output", "x")
    assert "give --output FILE" in refusal("batch", *FAKE, *inputs)
    assert "there are 2: use --output-dir" in refusal("batch", *FAKE, *inputs, "--output", "x")
    assert "create it first" in refusal("batch", *FAKE, *inputs, "--output-dir", str(tmp_path / "gone"))


def test_wrong_options_are_named() -> None:
    assert "is no option" in refusal("serve", *FAKE, "--sbatch-option", "two words")
    assert "no such file or directory" in refusal("serve", "--model", "/gone")
    assert "--time soon" in refusal("serve", *FAKE, "--time", "soon")


def fake_sbatch(path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "sbatch").write_text(f"#!/bin/sh\ncat > /dev/null\n{program}\n")
    (path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")


def test_job_ids_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sbatch(tmp_path, "echo '812;cluster'", monkeypatch)
    assert submit.submit("script") == "812"
    assert sbatch("serve", *FAKE, "--submit").output.startswith("submitted job 812;")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1",
            "script: Batch job .* account",
        ),
        ("exit 3", "exit status 3"),
        ("echo hello", "printed 'hello' where a job id was due"),
        ("sleep 5", r"not answered for 0\.5 s"),
    ],
)
def test_what_sbatch_says_is_passed_on(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(tmp_path, program, monkeypatch)
    with pytest.raises(FastServeError, match=message):
        submit.submit("script", timeout_s=0.5 if "sleep" in program else 20)


def test_a_host_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch here: run this on a login node" in refusal("serve", *FAKE, "--submit")
