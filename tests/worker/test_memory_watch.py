"""Free memory: NVML by UUID against a fake library, cgroups v1 and v2 against made-up trees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastserve_hpc.worker.memory_watch import HostMemory, MemoryWatch, watch_host

MIB = 2**20

ASK_NVML = """
import sys
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.worker.memory_watch import NvmlMemory
try:
    nvml = NvmlMemory(sys.argv[1])
    print(nvml(), nvml.energy_j())
except ConfigError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="session")
def ask_nvml(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Asks the fake NVML, in a process of its own, for the free memory of a UUID."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake NVML with")
    directory = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    library = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)

    def ask(uuid: str, library_path: str = str(directory)) -> str:
        env = {**os.environ, "LD_LIBRARY_PATH": library_path}
        command = [sys.executable, "-c", ASK_NVML, uuid]
        return subprocess.run(command, env=env, check=True, timeout=60, capture_output=True, text=True).stdout.strip()

    return ask


@pytest.mark.parametrize(
    ("uuid", "free", "energy_j"),
    [
        ("11111111-1111-1111-1111-111111111111", "1000", "5.0"),  # as CUDA names it
        ("GPU-22222222-2222-2222-2222-222222222222", "2000", "10.0"),
        ("33333333-3333-3333-3333-333333333333", "3000", "0.0"),  # a MIG slice, which counts no energy
    ],
)
def test_nvml_finds_the_device_by_uuid(ask_nvml: Callable[[str], str], uuid: str, free: str, energy_j: str) -> None:
    assert ask_nvml(uuid) == f"{free} {energy_j}"


def test_nvml_that_does_not_know_the_device_is_refused_with_a_cure(ask_nvml: Callable[[str], str]) -> None:
    answer = ask_nvml("44444444-4444-4444-4444-444444444444")
    assert answer.startswith("refused: GPU 44444444")
    assert "Not Found" in answer
    assert "nvidia-smi -L" in answer


def test_energy_is_read_with_the_memory() -> None:
    watch = MemoryWatch(lambda: 1, read_energy=lambda: 7.5)
    assert watch.energy_j == 0
    watch.free_bytes()
    assert watch.energy_j == 7.5


def test_reads_are_rate_limited() -> None:
    now, reads = [0.0], iter([10, 20, 30])
    watch = MemoryWatch(lambda: next(reads), interval_s=1.0, clock=lambda: now[0])
    assert [watch.free_bytes(), watch.free_bytes()] == [10, 10]
    now[0] = 0.99
    assert watch.free_bytes() == 10
    now[0] = 1.0
    assert watch.free_bytes() == 20


def test_this_machine_has_memory() -> None:
    assert 0 < watch_host().free_bytes() < 2**60


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Node:
    """A made-up /proc and cgroup mount."""

    def __init__(self, root: Path, available_mib: int, cgroup: str):
        self.proc, self.cgroup_root = root / "proc", root / "cgroup"
        write(self.proc / "meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available_mib * 1024} kB\n")
        write(self.proc / "self" / "cgroup", cgroup)

    def v2(self, path: str, limit: int | str, used_mib: int, cache_mib: int) -> None:
        group = self.cgroup_root / path
        write(group / "memory.max", f"{limit}\n")
        write(group / "memory.current", f"{used_mib * MIB}\n")
        write(group / "memory.stat", f"anon 5\ninactive_file {cache_mib * MIB}\n")

    def v1(self, path: str, limit: int, used_mib: int, cache_mib: int) -> None:
        group = self.cgroup_root / "memory" / path
        write(group / "memory.limit_in_bytes", f"{limit}\n")
        write(group / "memory.usage_in_bytes", f"{used_mib * MIB}\n")
        write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache_mib * MIB}\n")

    def free_mib(self) -> float:
        return HostMemory(self.proc, self.cgroup_root)() / MIB


def test_without_cgroups_the_nodes_available_memory_counts(tmp_path: Path) -> None:
    assert Node(tmp_path, 500, "0::/\n").free_mib() == 500


def test_v2_limit_of_a_job_above_the_process_counts(tmp_path: Path) -> None:
    node = Node(tmp_path, 5000, "0::/slurm/job_7/step_0\n")
    node.v2("slurm/job_7/step_0", "max", 900, 0)
    node.v2("slurm/job_7", 1000 * MIB, 900, 150)
    node.v2("slurm", 4000 * MIB, 3000, 0)
    assert node.free_mib() == 250  # the cache of 150 can be dropped


def test_v2_seen_from_inside_a_container_whose_path_does_not_exist(tmp_path: Path) -> None:
    node = Node(tmp_path, 5000, "0::/docker/not/visible/here\n")
    node.v2(".", 300 * MIB, 100, 0)
    assert node.free_mib() == 200


def test_v1_memory_controller_counts(tmp_path: Path) -> None:
    node = Node(tmp_path, 5000, "9:name=systemd:/\n4:cpu,memory:/job_7\n0::/\n")
    node.v1("job_7", 1000 * MIB, 800, 100)
    node.v1(".", 2**63 - 4096, 4000, 0)
    assert node.free_mib() == 300


def test_limit_that_is_overdrawn_is_no_memory_rather_than_a_negative_number(tmp_path: Path) -> None:
    node = Node(tmp_path, 5000, "0::/job\n")
    node.v2("job", 100 * MIB, 200, 0)
    assert node.free_mib() == 0


def test_group_that_vanishes_is_ignored(tmp_path: Path) -> None:
    node = Node(tmp_path, 500, "0::/job\n")
    node.v2("job", 100 * MIB, 0, 0)
    memory = HostMemory(node.proc, node.cgroup_root)
    assert memory() == 100 * MIB
    shutil.rmtree(node.cgroup_root / "job")
    assert memory() == 500 * MIB
