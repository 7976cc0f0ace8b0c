"""How much memory a rank still has: of its GPU by NVML, on CPUs within cgroup limits and the node's memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Protocol

from fastserve_hpc.errors import ConfigError

_UNLIMITED = 2**63 - 1


class MemoryReader(Protocol):
    """Reads the free memory now, in bytes."""

    def __call__(self) -> int: ...


class MemoryWatch:
    """Free memory of a rank's device, read at most once in `interval_s`, so that asking is cheap."""

    def __init__(
        self,
        read: MemoryReader,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        read_energy: Callable[[], float] = lambda: 0.0,
    ):
        self.energy_j = 0.0
        """What the device had used in all when it was last looked at; 0 where that is not known."""
        self._read = read
        self._read_energy = read_energy
        self._interval_s = interval_s
        self._clock = clock
        self._read_at = float("-inf")
        self._free_bytes = 0

    def free_bytes(self) -> int:
        now = self._clock()
        if now - self._read_at >= self._interval_s:
            self._free_bytes = self._read()
            self.energy_j = self._read_energy()
            self._read_at = now
        return self._free_bytes


def watch_host() -> MemoryWatch:
    """Watches what this process may still allocate on a CPU node."""
    return MemoryWatch(HostMemory())


def watch_cuda(device_index: int) -> MemoryWatch:
    """Watches one CUDA device. NVML is asked by UUID: its indices do not know CUDA_VISIBLE_DEVICES."""
    import torch

    nvml = NvmlMemory(str(torch.cuda.get_device_properties(device_index).uuid))
    return MemoryWatch(nvml, read_energy=nvml.energy_j)


class NvmlMemory:
    """Free memory of the GPU, or MIG slice, with this UUID (as CUDA gives it, or with NVML's prefix).

    Raises `ConfigError` where NVML is missing or does not know the device.
    """

    def __init__(self, uuid: str):
        import pynvml

        self._nvml: ModuleType = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = self._find(uuid.removeprefix("GPU-").removeprefix("MIG-"))
        except pynvml.NVMLError as error:
            raise ConfigError(
                f"GPU {uuid}: NVML says {error}; `nvidia-smi -L` must list it here, in a container too "
                "(apptainer --nv, NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            ) from error

    def __call__(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    def energy_j(self) -> float:
        """Joules since the driver was loaded; 0 where the device does not count them."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        except self._nvml.NVMLError:
            return 0.0

    def _find(self, uuid: str) -> object:
        for prefix in ("GPU-", "MIG-"):
            with contextlib.suppress(self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
                return self._nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
        raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_FOUND)


class HostMemory:
    """What the node has available, or less where a cgroup (v1 or v2) of this process or one above is nearer its limit.

    Page cache that a cgroup can drop counts as free. `proc` and `cgroup_root` are the mount points.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")):
        self._meminfo = proc / "meminfo"
        self._groups = [
            *_groups(cgroup_root, _own_path(proc, ""), "memory.max", "memory.current", "inactive_file"),
            *_groups(
                cgroup_root / "memory",
                _own_path(proc, "memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
        ]

    def __call__(self) -> int:
        available = _keyed(self._meminfo, "MemAvailable:") * 1024
        return max(0, min([available, *(group.free_bytes() for group in self._groups)]))


class _CgroupLimit:
    def __init__(self, directory: Path, limit: str, usage: str, reclaimable: str):
        self._limit = directory / limit
        self._usage = directory / usage
        self._stat = directory / "memory.stat"
        self._reclaimable = reclaimable

    def is_readable(self) -> bool:
        return self._limit.is_file() and self._usage.is_file()

    def free_bytes(self) -> int:
        try:
            limit, usage = self._limit.read_text().strip(), int(self._usage.read_text())
        except OSError:  # the group is gone: the process was moved to another
            return _UNLIMITED
        if limit == "max":
            return _UNLIMITED
        return int(limit) - usage + _keyed(self._stat, self._reclaimable)


def _groups(root: Path, own: PurePosixPath, limit: str, usage: str, reclaimable: str) -> list[_CgroupLimit]:
    """The group at `own` and those above it, as far as they can be seen from here."""
    paths = [root / own, *(root / parent for parent in own.parents)]
    groups = [_CgroupLimit(path, limit, usage, reclaimable) for path in dict.fromkeys(paths)]
    return [group for group in groups if group.is_readable()]


def _own_path(proc: Path, controller: str) -> PurePosixPath:
    """This process's group under the controller's mount; "" is cgroup v2. The mount itself where there is none."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return PurePosixPath()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()


def _keyed(path: Path, key: str) -> int:
    """The number behind `key` in a file of "key number" lines; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)
