"""Looking at this rank: what is installed, what it may use, what it can see. Quick, and nothing hangs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import fastserve_hpc
from fastserve_hpc.doctor.facts import UNLIMITED, Gpu, Limits, ModelProbe
from fastserve_hpc.errors import FastServeError
from fastserve_hpc.models.locate import locate

T = TypeVar("T")

HEADER_BYTES = 4096
"""Of each file of a model: enough to tell weights apart, little enough for every rank to read."""


def within(seconds: float, look: Callable[[], T]) -> T:
    """The result of `look`, which a dead file system may never let return. Raises `TimeoutError`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(look())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]


def probe_versions(mpi_library: str | None) -> dict[str, str]:
    """Versions of what all ranks must share."""
    found = {"fastserve-hpc": fastserve_hpc.__version__, "Python": platform.python_version()}
    for name in ("torch", "mpi4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found if mpi_library is None else found | {"MPI": mpi_library}


def probe_model(model: str, timeout_s: float) -> ModelProbe:
    """Find the model and read a little of every file of it."""
    began = time.monotonic()
    try:
        path, fingerprint = within(timeout_s, lambda: _look_at(model))
    except TimeoutError as error:
        return ModelProbe(model, error=f"{model}: {error}", seconds=time.monotonic() - began)
    except FastServeError as error:
        return ModelProbe(model, error=str(error))
    except OSError as error:
        return ModelProbe(model, error=f"{error.filename or model}: {error.strerror}")
    return ModelProbe(path, fingerprint, seconds=time.monotonic() - began)


def _look_at(model: str) -> tuple[str, str]:
    """(path, fingerprint)"""
    path = locate(model).path
    return str(path), fingerprint_of(path)


def fingerprint_of(path: Path) -> str:
    """A digest of the names, sizes and first bytes of a model's files. Raises `OSError` where one cannot be read."""
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            digest.update(content.read(HEADER_BYTES))
    return digest.hexdigest()[:16]


def probe_limits() -> Limits:
    def limit(kind: int, which: int) -> int:
        value = resource.getrlimit(kind)[which]
        return UNLIMITED if value == resource.RLIM_INFINITY else value

    return Limits(open_files=limit(resource.RLIMIT_NOFILE, 1), locked_bytes=limit(resource.RLIMIT_MEMLOCK, 0))


def probe_shm(path: str = "/dev/shm") -> int:
    """Bytes that still fit into shared memory."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def has_infiniband(path: Path = Path("/sys/class/infiniband")) -> bool:
    return path.is_dir() and any(path.iterdir())


def host_name() -> str:
    return socket.gethostname()


def probe_gpus(environ: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """The GPUs that CUDA will show this process, and what went wrong in asking NVML. No driver: none, and no error."""
    try:
        import pynvml
    except ImportError:
        return [], ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], ""
    try:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        return visible_gpus([*_whole_gpus(pynvml), *_slices(pynvml, visible)], visible), ""
    except pynvml.NVMLError as error:
        return [], str(error)
    finally:
        pynvml.nvmlShutdown()


def _whole_gpus(nvml: ModuleType) -> list[Gpu]:
    return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]


def _slices(nvml: ModuleType, visible: str | None) -> list[Gpu]:
    """MIG slices are not counted with the GPUs; only their names lead to them."""
    names = [name.strip() for name in (visible or "").split(",")]
    return [_gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(name)) for name in names if name.startswith("MIG-")]


def _gpu(nvml: ModuleType, handle: object) -> Gpu:
    return Gpu(str(nvml.nvmlDeviceGetUUID(handle)), int(nvml.nvmlDeviceGetMemoryInfo(handle).free))


def torch_has_cuda() -> bool:
    """Whether the installed torch can use NVIDIA GPUs, without importing it."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and any(Path(spec.origin).parent.glob("lib/libtorch_cuda*.so"))


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: indices or beginnings of UUIDs, up to the first that fits nothing."""
    if visible is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in map(str.strip, visible.split(",")):
        found = _gpu_called(name, gpus)
        if found is None:
            break
        chosen.append(found)
    return chosen


def _gpu_called(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    matches = [gpu for gpu in gpus if name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None
