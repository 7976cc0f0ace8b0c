from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fastserve_kernels.kernels import Kernels
from fastserve_kernels.shared import SharedGroup, create_segment

PACKAGES = Path(__file__).parents[2] / "kernels"

RANK = """
import json, statistics, sys, time
from pathlib import Path
import torch
from fastserve_kernels import open_kernels
from fastserve_kernels.shared import SharedGroup

torch.set_num_threads(1)
path, rank, num_ranks, slot_bytes, mode = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
kernels = open_kernels(num_threads=1)
group = SharedGroup(path, rank, num_ranks, slot_bytes)


def data(of_rank, n, dtype, call):
    generator = torch.Generator().manual_seed(1000 * call + of_rank)
    return torch.randn(n, generator=generator).to(dtype)


def reduce_many():
    for call in range(60):
        n, dtype = [1, 19, 2048, 20_000, 70_001][call % 5], [torch.float32, torch.bfloat16][call % 2]
        expected = torch.zeros(n)
        for r in range(num_ranks):
            expected += data(r, n, dtype, call).float()
        result = kernels.all_reduce(data(rank, n, dtype, call), group)
        assert torch.equal(result, expected.to(dtype)), (call, n, dtype)


def gather_many():
    for call in range(40):
        rows, n = [1, 3, 40][call % 3], [1, 19, 5000][call % 3]
        parts = [data(r, rows * n, torch.float32, call).view(rows, n) for r in range(num_ranks)]
        assert torch.equal(kernels.all_gather(parts[rank], group), torch.cat(parts, dim=1)), call


def measure():
    x = torch.zeros(1024)
    medians = []
    for _ in range(8):
        times = []
        for _ in range(400):
            start = time.perf_counter()
            kernels.all_reduce(x, group)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    print(json.dumps(min(medians)))


{"reduce": reduce_many, "gather": gather_many, "measure": measure}[mode]()
"""


def run_ranks(num_ranks: int, mode: str, slot_bytes: int = 1 << 16) -> list[str]:
    path = create_segment(num_ranks, slot_bytes)
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(path), str(rank), str(num_ranks), str(slot_bytes), mode],
                env={"PYTHONPATH": str(PACKAGES)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        deadline = time.monotonic() + 100
        outputs = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * num_ranks
        return outputs
    finally:
        path.unlink()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_reduce_sums_in_rank_order(num_ranks: int) -> None:
    run_ranks(num_ranks, "reduce")


@pytest.mark.usefixtures("library")
def test_all_gather() -> None:
    run_ranks(3, "gather", slot_bytes=1 << 14)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_4_kb_among_three_ranks_take_under_100_us() -> None:
    """More ranks than cores, whatever else runs: the best of 8 medians."""
    for output in run_ranks(3, "measure"):
        assert json.loads(output) < 100e-6


def test_segments_are_private_and_checked(tmp_path: Path, kernels: Kernels) -> None:
    path = create_segment(2, 4096, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="rank 2 is not in"):
        SharedGroup(path, 2, 2, 4096)
    with pytest.raises(ValueError, match="is not a segment of"):
        SharedGroup(path, 0, 3, 4096)
    group = SharedGroup(create_segment(1, 4096, tmp_path), 0, 1, 4096)
    with pytest.raises(ValueError, match="contiguous bf16 or float32"):
        kernels.all_reduce(torch.zeros(4, dtype=torch.int64), group)


def test_no_room_for_a_segment(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"File too large|No space left"):
        create_segment(3, 1 << 60, tmp_path)
    assert list(tmp_path.iterdir()) == []
