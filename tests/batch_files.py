"""Shared by the tests of batch files: items, manifests, outputs, and what lies in result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastserve_hpc.batch.manifest import Manifest
from fastserve_hpc.batch.output import Mode, Output, Place
from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.batch.survey import Survey
from fastserve_hpc.client.results import Choice, Generation
from fastserve_hpc.openai.bodies import parse_body
from fastserve_hpc.protocol import Usage

GENERATION = Generation([Choice(0, "Pâris", [5], finish_reason="stop")], [], Usage(3, 1))
SURVEY = Survey(10, 10, 100, "abc", None, frozenset())
MANIFEST = Manifest(
    input_sha256="abc", input_bytes=100, input_lines=10, shard="0/1", errors=None, model="smol", vocab_size=9
)


def item(index: int, custom_id: str | None = None, **fields: Any) -> BatchItem:
    ask = parse_body("completion", {"prompt": f"prompt {index}.", **fields})
    return BatchItem(index, custom_id or f"id-{index}", ask)


def items(count: int, **fields: Any) -> list[BatchItem | LineError]:
    return [item(i, **fields) for i in range(1, count + 1)]


def open_output(path: Path, manifest: Manifest = MANIFEST, errors: Path | None = None, **mode: bool) -> Output:
    return Output.open(Place(path, errors), manifest, SURVEY, mode=Mode(**mode))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def indexes(path: Path) -> list[int]:
    """The lines that a result file has records of, in its order."""
    return [int(record["id"].removeprefix("batch_req_")) for record in records(path)]
