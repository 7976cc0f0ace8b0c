"""Puts the results of shards together into one output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fastserve_hpc.batch import manifest as manifests
from fastserve_hpc.batch.attached import BatchFiles, Ending, survey_for
from fastserve_hpc.batch.lines import Inputs
from fastserve_hpc.batch.manifest import Manifest
from fastserve_hpc.batch.output import Output, Place, sort_files
from fastserve_hpc.batch.results import read_record
from fastserve_hpc.batch.stopping import StopSignals
from fastserve_hpc.batch.summary import Counts
from fastserve_hpc.batch.survey import Shard, Survey, survey
from fastserve_hpc.errors import ConfigError, FastServeError


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's output."""

    place: Place
    manifest: Manifest

    @classmethod
    def of(cls, output: Path) -> Part:
        """Raises `ConfigError` for what no batch run has written."""
        found = manifests.load(Place(output).manifest, output)
        if found is None:
            raise ConfigError(f"--merge {output}: {Place(output).manifest} is missing, so nobody knows of what input")
        errors = None if found.errors is None else output.parent / found.errors
        return cls(Place(output, errors), found)

    def lines(self) -> Iterator[bytes]:
        for _, path in self.place.files:
            if path.exists():
                with path.open("rb") as file:
                    yield from file


def merge(files: BatchFiles, outputs: Sequence[Path]) -> Ending:
    """Append what `outputs` hold and `files.place` does not. Asks no server.

    Raises `ConfigError` where they are not results of the same input, model and settings.
    """
    with StopSignals():
        parts = [Part.of(path) for path in outputs]
        inputs = Inputs(files.inputs)
        found = survey_for(files, inputs)
        now = _common_manifest(files, inputs, found, parts)
        with Output.open(files.place, now, found, mode=files.mode) as output:
            counts = Counts(skipped=len(output.done.lines), failed_before=output.done.num_failed)
            _append(parts, output, counts)
            missing = found.num_lines - counts.finished
            output.sync()
            if files.sorts and not missing:
                sort_files(files.place)
    stopped = f"{missing} lines are in none of the merged files" if missing else None
    return Ending(counts, found.num_lines, stopped)


def _common_manifest(files: BatchFiles, inputs: Inputs, found: Survey, parts: Sequence[Part]) -> Manifest:
    """Of the whole input and the parts' model and settings."""
    engine: dict[str, str] = {}
    for part in parts:
        engine = {**engine, **part.manifest.engine}
    now = msgspec.structs.replace(
        parts[0].manifest,
        input_sha256=found.sha256,
        input_bytes=found.num_bytes,
        input_lines=found.last_index,
        shard=str(Shard()),
        errors=files.place.errors_name(),
        engine=engine,
    )
    for part in parts:
        then = msgspec.structs.replace(part.manifest, shard=now.shard, errors=now.errors)
        # The input may have grown since.
        at_its_end = found if then.input_sha256 == found.sha256 else survey(inputs, Shard(), then.input_bytes)
        manifests.check_same(part.place.output, then, now, at_its_end)
    return now


def _append(parts: Sequence[Part], output: Output, counts: Counts) -> None:
    for part in parts:
        try:
            for raw in part.lines():
                record = read_record(raw)
                if record is not None and output.done.lines.add(record.index):
                    output.append_raw(raw, is_error=record.error is not None)
                    counts.failed += record.error is not None
                    counts.succeeded += record.error is None
        except OSError as error:
            raise FastServeError(f"--merge {part.place.output}: {error}") from error
