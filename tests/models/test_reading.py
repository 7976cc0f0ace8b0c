"""Reading once a node: ranks are readers with descriptors of their own for one file."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastserve_hpc.errors import ModelError
from fastserve_hpc.models import reading as module
from fastserve_hpc.models import weights
from fastserve_hpc.models.reading import Progress, Reading, read_through
from fastserve_hpc.models.source_safetensors import SINGLE, SafetensorsSource
from fastserve_hpc.models.weights import Extent, Part, WeightReader


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[list[int]]:
    opened = [os.open(tmp_path / "board", os.O_RDWR | os.O_CREAT) for _ in range(3)]
    yield opened
    for board in opened:
        os.close(board)


def test_each_tensor_is_read_by_one_rank_and_waited_for_by_the_others(
    boards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the ranks' threads go in, which is a deadlock by the rules of POSIX locks."""
    extents = [Extent(Path("x"), i, 1) for i in range(40)]
    read: Counter[int] = Counter()
    complete: set[int] = set()

    def slowly(extent: Extent, _: memoryview) -> None:
        read[extent.start] += 1
        time.sleep(0.002)
        complete.add(extent.start)

    monkeypatch.setattr(module, "read_through", slowly)
    readings = [Reading(board) for board in boards]

    def get(rank: int, number: int) -> None:
        readings[rank].fetch(number, extents[number])
        assert number in complete

    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(get, rank, n if rank else 39 - n) for n in range(40) for rank in range(3) for _ in range(2)]
    assert [job.result() for job in jobs] == [None] * 240
    assert read == Counter(range(40))
    assert [reading.progress.num_bytes for reading in readings] == [40] * 3


def test_an_extent_is_read_from_its_start_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(1000))
    places: list[tuple[int, int]] = []

    def preadv(_file: int, buffers: list[memoryview], position: int) -> int:
        places.append((position, len(buffers[0])))
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    read_through(Extent(tmp_path / "f", 100, 700), memoryview(bytearray(256)))
    assert places == [(100, 256), (356, 256), (612, 188)]


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(ModelError, match=r"f has become shorter than its header says: copy it again"):
        Reading().fetch(0, Extent(tmp_path / "f", 0, 101))


def test_a_failure_is_no_reading(tmp_path: Path, boards: list[int]) -> None:
    with pytest.raises(ModelError, match="gone: No such file or directory"):
        Reading(boards[0]).fetch(0, Extent(tmp_path / "gone", 0, 1))
    (tmp_path / "gone").write_bytes(b"x")
    other = threading.Thread(target=Reading(boards[1]).fetch, args=(0, Extent(tmp_path / "gone", 0, 1)))
    other.start()
    other.join(5)
    assert not other.is_alive()
    assert os.pread(boards[2], 1, 0) == b"\1"


def test_progress_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAY_EVERY_S", 0.0)
    lines: list[str] = []
    reading = Reading(say=lines.append)
    reading.expect(4)
    reading.finished_unit()
    assert lines[0].startswith("loading: 25 % of the layers, 0.0 GB at ")
    text = str(Progress(30_000_000_000, 20.0, 0.25))
    assert text == "25 % of the layers, 30.0 GB at 1.50 GB/s, 60 s left"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_pieces_and_the_whole_are_what_the_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: torch.dtype
) -> None:
    """Whole rows and columns of some, in pieces and blocks smaller than the matrices."""
    monkeypatch.setattr(module, "READ_BYTES", 1000)
    monkeypatch.setattr(weights, "_PIECE_ELEMENTS", 64 * 40)
    stored = {name: torch.randn(150, 40).to(dtype) for name in ("a", "b")}
    save_file(stored, tmp_path / SINGLE)
    reading = Reading()
    reader = WeightReader(reading.of(SafetensorsSource(tmp_path)), wanted, torch.device("cpu"))
    for columns in (range(40), range(20), range(20, 40)):
        parts = [Part.of("a", (150, 40), range(7, 150), columns), Part.of("b", (150, 40), range(99), columns)]
        rows = reader.rows(*parts, num_rows=250)
        expected = torch.cat([stored["a"][7:], stored["b"][:99], torch.zeros(8, 40, dtype=dtype)]).to(wanted)
        joined = torch.zeros(250, len(columns), dtype=wanted)
        for first, piece in rows.pieces():
            joined[first : first + len(piece)] = piece
        assert rows.shape == joined.shape
        assert torch.equal(joined, expected[:, columns.start : columns.stop])
        assert torch.equal(rows.whole(), joined)


def test_rows_of_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    with pytest.raises(ModelError, match="f has become shorter"):
        Reading().read_to(torch.empty(20), tmp_path / "f", 21)
    with pytest.raises(ModelError, match="gone: No such file or directory"):
        Reading().read_to(torch.empty(20), tmp_path / "gone", 0)


def test_large_tensors_are_mapped_and_can_be_written() -> None:
    large = weights.empty([3 * 2**20, 2], torch.bfloat16, torch.device("cpu"))
    assert large.shape == (3 * 2**20, 2)
    assert not large.any()
    large[-1] = 1
    assert large.sum() == 2
