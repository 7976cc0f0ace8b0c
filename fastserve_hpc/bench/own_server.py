"""A server for the time of a benchmark: on this machine, in a state directory of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fastserve_hpc.bench.processes import cpu_s, family, peak_rss_bytes, role
from fastserve_hpc.errors import ConfigError, RankError

ENDPOINT = "bench"
_STOP_S = 30.0


class OwnServer:
    """`fastserve-hpc serve` with `options`, under mpiexec where --tp and --pp make several ranks.

    Ready once made, ended by `close`. Its standard error is this process's. Raises `ConfigError` without an mpiexec,
    `RankError` where it ends before it is ready.
    """

    def __init__(self, options: Sequence[str]) -> None:
        command = [*_launcher(_num_ranks(options)), sys.executable, "-m", "fastserve_hpc", "serve", *options]
        self._home = tempfile.mkdtemp(prefix="fastserve-bench-")
        environment = {**os.environ, "FASTSERVE_HPC_HOME": self._home, "FASTSERVE_HPC_ENDPOINT": ENDPOINT}
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=os.setpgrp,  # Ctrl-C is for the benchmark, which then ends it
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """What a client finds it by."""
        return str(Path(self._home, "endpoints", f"{ENDPOINT}.json"))

    def usage(self) -> dict[str, Any]:
        """Processor seconds and peak resident bytes of each rank and of the ingress, so far."""
        members = {name: pid for pid in family(self._process.pid) if (name := role(pid)) is not None}
        return {
            "cpu_s": {name: cpu_s(pid) for name, pid in sorted(members.items())},
            "peak_rss_bytes": {name: peak_rss_bytes(pid) for name, pid in sorted(members.items())},
        }

    def close(self) -> None:
        """End it: politely, then for good."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self) -> None:
        """However long it loads: a server that cannot start ends by itself."""
        output = self._process.stdout
        assert output is not None
        for line in output:
            if line.startswith("ready "):
                threading.Thread(target=_drain, args=(output,), daemon=True).start()
                return
        raise RankError(f"the server ended with exit status {self._process.wait()} before it was ready")


def _drain(output: IO[str]) -> None:
    for _ in output:
        pass


def _num_ranks(options: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("tp", "pp"):
        parser.add_argument(f"--{name}", type=int, default=int(os.environ.get(f"FASTSERVE_HPC_{name.upper()}", "1")))
    try:
        sizes, _ = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise ConfigError(f"options of the server: {error}") from None
    return int(sizes.tp * sizes.pp)


def _launcher(num_ranks: int) -> list[str]:
    if num_ranks == 1:
        return []
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise ConfigError(
            f"{num_ranks} ranks need mpiexec: pip install 'fastserve-hpc[mpich]', or load your site's MPI"
        )
    return [found, "-n", str(num_ranks)]
