from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fastserve_kernels import KernelsUnavailableError, load, open_kernels
from fastserve_kernels.library import LIBRARY, cure, source_hash

SCRIPT = Path(__file__).parents[2] / "kernels" / "build.py"


def run_build(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "lib.so")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_compiler_says_so_in_one_line_and_succeeds(tmp_path: Path) -> None:
    result = run_build(tmp_path, PATH=str(tmp_path))
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 1
    assert "not built" in result.stdout
    assert "no C++ compiler" in result.stdout
    assert not (tmp_path / "lib.so").exists()


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    result = run_build(tmp_path, PATH="/usr/bin:/bin", CXX=str(compiler))
    assert result.returncode == 0
    assert "fatal error: out of ideas" in result.stdout


def test_builder_and_loader_agree_on_the_sources(builder: ModuleType) -> None:
    assert builder.source_hash(builder.PACKAGE) == source_hash()
    assert builder.PACKAGE / builder.LIBRARY == LIBRARY


def test_a_stale_library_is_refused(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fastserve_kernels"
    (package / "cpu").mkdir(parents=True)
    (package / "cpu" / "other.cpp").write_text('extern "C" const char* fs_source_hash() { return "old"; }\n')
    builder.build(package / "lib.so", package, ("-fvisibility=default",))
    monkeypatch.setenv("FASTSERVE_KERNELS_LIBRARY", str(package / "lib.so"))
    with pytest.raises(KernelsUnavailableError, match=r"other sources; run python .*kernels/build\.py"):
        open_kernels()
    assert load() is None


def test_the_cure_fits_where_the_package_lies(tmp_path: Path) -> None:
    assert cure() == f"run python {SCRIPT.resolve()}"
    installed = cure(tmp_path / "site-packages" / "fastserve_kernels")
    assert "build.py" not in installed
    assert "g++" in installed
    assert "--force-reinstall" in installed


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERVE_KERNELS_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(KernelsUnavailableError, match=r"not built .*none\.so"):
        open_kernels()


@pytest.mark.usefixtures("library")
def test_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERVE_KERNELS_ISA", "avx2")
    assert open_kernels(num_threads=1).isa == "avx2"
    monkeypatch.setenv("FASTSERVE_KERNELS_ISA", "none")
    assert load() is None
    monkeypatch.setenv("FASTSERVE_KERNELS_ISA", "sse9")
    with pytest.raises(KernelsUnavailableError, match="unknown instruction set 'sse9'"):
        open_kernels()


def test_importing_does_not_load_torch() -> None:
    code = "import fastserve_kernels, sys; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    path = str(SCRIPT.parent)
    assert subprocess.run(command, env={"PYTHONPATH": path}, timeout=30, check=False).returncode == 0
