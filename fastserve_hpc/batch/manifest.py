"""What an output file holds results of: the input, the model and what else decides about answers.

It lies beside the output, is written before the first result, and keeps a rerun from mixing two runs' results.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from fastserve_hpc.batch.reader import Task
from fastserve_hpc.batch.survey import Survey
from fastserve_hpc.errors import ConfigError

VERSION = 1
_SAMPLE_BYTES = 2**20


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Equal manifests, equal answers (for greedy requests, or with seeds)."""

    version: int = VERSION
    task: Task = "batch"
    input_sha256: str
    """Of all input files, decompressed, one after the other."""
    input_bytes: int
    input_lines: int
    shard: str
    errors: str | None
    """The file of the error records, relative to the output's directory; None: the output itself."""
    model: str
    """The name that it is served by."""
    vocab_size: int
    engine: dict[str, str] = {}
    """Settings of the engine that change answers, and a hash of the model's files; empty on a server that was
    running already, which does not tell."""

    def differences(self, now: Manifest, found: Survey) -> Iterator[str]:
        """Where a run that goes on with `now` would differ. An input that only grew at its end does not."""
        has_grown = found.sha256_at_mark == self.input_sha256
        if self.input_sha256 != now.input_sha256 and not has_grown:
            yield f"the input was another ({_count(self.input_lines)}, {self.input_bytes} bytes; now {now.input_bytes})"
        for name in ("version", "task", "shard", "errors", "model", "vocab_size"):
            then, wanted = getattr(self, name), getattr(now, name)
            if then != wanted:
                yield f"{name.replace('_', ' ')} was {then}, now {wanted}"
        for name in sorted(self.engine.keys() & now.engine.keys()):
            if self.engine[name] != now.engine[name]:
                yield f"{name} was {self.engine[name]}, now {now.engine[name]}"


def _count(lines: int) -> str:
    return f"{lines} line{'' if lines == 1 else 's'}"


def check_same(output: Path, then: Manifest, now: Manifest, found: Survey) -> None:
    """Raise `ConfigError` naming everything that is not as it was."""
    differences = "; ".join(then.differences(now, found))
    if differences:
        raise ConfigError(
            f"--output {output} holds results of a run with other settings: {differences}. "
            "Go back to those, write to another --output, or start again with --overwrite"
        )


def load(path: Path, output: Path) -> Manifest | None:
    """None where there is none. Raises `ConfigError` for one that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}), so nobody knows what {output} holds results of: "
            "start again with --overwrite"
        ) from None


def save(path: Path, manifest: Manifest) -> None:
    """Whole and on disk, or not at all; the output's lock is held. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new files in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(model: Path) -> str:
    """Tells model files apart without reading gigabytes: names, sizes, first and last MiB of each.

    Raises `OSError`.
    """
    files = sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else [model]
    sha256 = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        sha256.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            sha256.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            sha256.update(file.read(_SAMPLE_BYTES))
    return sha256.hexdigest()[:16]


def engine_settings(model: Path | None, settings: Mapping[str, object]) -> dict[str, str]:
    """What a manifest keeps of an engine's settings; `model` None for a model without files."""
    files = {} if model is None else {"model files": fingerprint(model)}
    return {**files, **{name: str(value) for name, value in settings.items()}}
