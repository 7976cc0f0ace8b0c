"""Builds the C++ kernels: `python kernels/build.py` makes the library that `fastserve_kernels.load()` opens.

Best effort: without a compiler, or on another processor family, it says so in one line and exits 0, and the server
runs on torch alone. Needs nothing but Python and g++ (or clang++); torch's headers are not used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "fastserve_kernels"
LIBRARY = "libfastserve_kernels.so"
COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall")
"""No contraction: whether a * b + c rounds once or twice must not depend on the instruction set."""
AVX512_FLAGS = ("-fno-exceptions", "-march=x86-64-v4")
ISA_FLAGS = {
    "isa_avx2.cpp": ("-fno-exceptions", "-march=x86-64-v3"),
    "isa_avx512.cpp": AVX512_FLAGS,
    "isa_avx512_bf16.cpp": (*AVX512_FLAGS, "-mavx512bf16"),
    "isa_amx.cpp": (*AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g", "-O1")


class BuildError(Exception):
    """Why there is no library, in one line."""


def sources(package: Path) -> list[Path]:
    return sorted(package.glob("cpu/*.cpp"))


def source_hash(package: Path) -> str:
    """Of all that is compiled; the library carries it, so that a stale one is noticed."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("cpu/*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found (looked for {wanted or 'g++, c++, clang++'}; set CXX to name another)")


def commands(compiler: str, package: Path, objects: Path, flags: tuple[str, ...]) -> Iterator[list[str]]:
    define = f'-DFS_SOURCE_HASH="{source_hash(package)}"'
    for source in sources(package):
        isa = ISA_FLAGS.get(source.name, ("-march=x86-64-v2",))
        yield [
            compiler,
            *COMMON_FLAGS,
            *isa,
            *flags,
            define,
            "-c",
            str(source),
            "-o",
            str(objects / f"{source.stem}.o"),
        ]


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'exit status {result.returncode}'}")


def build(target: Path, package: Path = PACKAGE, flags: tuple[str, ...] = ()) -> str:
    """Compiles to `target` and returns what was built. Raises BuildError."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise BuildError(f"the kernels are for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    compiler = find_compiler()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastserve-kernels-") as directory:
        objects = Path(directory)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(run, commands(compiler, package, objects, flags)))
        linked = objects / LIBRARY
        run([compiler, "-shared", *flags, *map(str, sorted(objects.glob("*.o"))), "-o", str(linked), "-pthread"])
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copy(linked, staged)
        os.replace(staged, target)  # a server that has the old library open keeps it
    return f"{target} in {time.monotonic() - start:.1f} s with {compiler}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the C++ kernels (best effort, always exits 0).")
    parser.add_argument("--out", type=Path, default=PACKAGE / LIBRARY, help="the library to write")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan, for tests")
    arguments = parser.parse_args()
    flags = SANITIZE_FLAGS if arguments.sanitize else ()
    try:
        print(f"kernels: built {build(arguments.out, flags=flags)}")
    except (BuildError, OSError) as error:
        print(f"kernels: not built, the server will use torch alone: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
