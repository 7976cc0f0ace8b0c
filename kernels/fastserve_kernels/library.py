"""Finds and opens the library that build.py makes, and takes one instruction set's table from it."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserve_kernels.abi import OPERATIONS, Ops, PackArgs

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "libfastserve_kernels.so"
ISA_VARIABLE = "FASTSERVE_KERNELS_ISA"
LIBRARY_VARIABLE = "FASTSERVE_KERNELS_LIBRARY"
INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2")

Operation = Callable[[int, ctypes.Structure], None]


class KernelsUnavailableError(RuntimeError):
    """No kernels here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """One instruction set of an opened library."""

    handle: ctypes.CDLL
    isa: str
    dot_order: str
    operations: dict[str, Operation]


def cure(package: Path = PACKAGE) -> str:
    """How to get the library of a package that lies in a checkout or was installed."""
    script = package.parent / "build.py"
    if package.parent.name == "kernels" and script.is_file():
        return f"run python {script}"
    return (
        "with a C++ compiler (g++) at hand, repeat the pip install of fastserve-hpc with --force-reinstall --no-deps "
        "--no-cache-dir"
    )


def processors() -> int:
    return len(os.sched_getaffinity(0))


def open_library(isa: str | None = None) -> Library:
    """Raises KernelsUnavailableError."""
    wanted = isa or os.environ.get(ISA_VARIABLE, "")
    if wanted and wanted not in INSTRUCTION_SETS:
        if wanted == "none":
            raise KernelsUnavailableError(f"C++ kernels are switched off ({ISA_VARIABLE}=none)")
        raise KernelsUnavailableError(f"unknown instruction set {wanted!r}; use one of {', '.join(INSTRUCTION_SETS)}")
    handle = _open(Path(os.environ.get(LIBRARY_VARIABLE, LIBRARY)))
    table = handle.fs_ops(wanted.encode())
    if not table:
        raise KernelsUnavailableError(f"this processor has no {wanted or 'AVX2'}, which the C++ kernels need")
    ops: Ops = table.contents
    for name, arguments in OPERATIONS:
        if getattr(ops, f"{name}_args_size") != ctypes.sizeof(arguments):
            raise KernelsUnavailableError(f"the C++ kernels do not match this package; {cure()}")
    operations = {name: _operation(getattr(ops, name), arguments) for name, arguments in OPERATIONS}
    return Library(handle, ops.isa.decode(), ops.dot_order.decode(), operations)


def _operation(address: int, arguments: type[ctypes.Structure]) -> Operation:
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(arguments))
    function: Operation = prototype(address)
    return function


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise KernelsUnavailableError(f"C++ kernels are not built ({path} is missing); {cure()}")
    try:
        handle = ctypes.CDLL(str(path))
        handle.fs_source_hash.restype = ctypes.c_char_p
        built_from = handle.fs_source_hash().decode()
    except (OSError, AttributeError) as error:
        raise KernelsUnavailableError(f"C++ kernels do not load: {error}; {cure()}") from error
    if built_from != source_hash():
        raise KernelsUnavailableError(f"C++ kernels were built from other sources; {cure()}")
    handle.fs_ops.restype = ctypes.POINTER(Ops)
    handle.fs_ops.argtypes = [ctypes.c_char_p]
    handle.fs_pool_create.restype = ctypes.c_void_p
    handle.fs_pool_create.argtypes = [ctypes.c_int, ctypes.c_bool]
    handle.fs_pool_destroy.restype = None
    handle.fs_pool_destroy.argtypes = [ctypes.c_void_p]
    handle.fs_pack.restype = None
    handle.fs_pack.argtypes = [ctypes.POINTER(PackArgs)]
    return handle


def source_hash(package: Path = PACKAGE) -> str:
    """Of the C++ sources, which are installed beside the library; build.py computes the same."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("cpu/*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
