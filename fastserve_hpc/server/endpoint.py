"""The server's side of its endpoint file: claiming a name, publishing, taking it back."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path

import msgspec

from fastserve_hpc.config import check_endpoint_name
from fastserve_hpc.endpoint import Endpoint, default_name, file_of, load, load_all, without_ended_jobs, write
from fastserve_hpc.errors import ConfigError, EndpointError

MAX_DEFAULT_NAMES = 100
CLAIM_TIMEOUT_S = 10.0
REMEMBERED_S = 86400.0
"""How long the file of a job that has ended may stay."""


class EndpointFile:
    """One server's endpoint file, from the claim to the end. Owned by the ingress process."""

    def __init__(self, path: Path, endpoint: Endpoint) -> None:
        self._path = path
        self.endpoint = endpoint
        self._write()

    def update(self, **changes: object) -> None:
        """Publish other values of some fields of the endpoint, if the disk allows."""
        old, self.endpoint = self.endpoint, msgspec.structs.replace(self.endpoint, **changes)
        if self.endpoint == old:
            return
        try:
            self._write()
        except OSError as error:  # the file is a hint; a full disk must not end the server
            print(f"endpoint file {self._path} could not be updated: {error.strerror}", file=sys.stderr)

    def take_back(self) -> None:
        """Say that this is over, unless another server has taken the name over."""
        take_back(self._path, self.endpoint)

    def _write(self) -> None:
        write(self._path, self.endpoint)


def take_back(path: Path, endpoint: Endpoint) -> None:
    """Remove an endpoint's file if it still is that endpoint's; that of a job stays and says that it has ended.

    People come back to a job whose number they know, and are to hear more than that there is no such thing.
    """
    with contextlib.suppress(OSError, EndpointError):
        if load(path).instance_id != endpoint.instance_id:
            return
        if endpoint.job_id is None:
            path.unlink()
        else:
            write(path, msgspec.structs.replace(endpoint, state="ended", addresses=[], keys=None))


def publish(
    directory: Path,
    name: str | None,
    environ: Mapping[str, str],
    describe: Callable[[str], Endpoint],
    answers: Callable[[Endpoint], bool],
) -> EndpointFile:
    """Claim a name and write the file of the endpoint that `describe(name)` makes.

    `answers` asks a server of another host whether it lives. Raises `ConfigError` where a name
    that was asked for is taken; the default name moves on to default-2 and so forth.
    """
    _make_directory(directory)
    _prune(directory)
    for candidate in [name] if name is not None else _default_names(environ):
        path = file_of(candidate, directory)
        with _claim(path):
            if not _in_use(path, answers):
                return EndpointFile(path, describe(candidate))
        if name is not None:
            raise ConfigError(
                f"--endpoint {name}: a server of that name is running; end it with 'fastserve-hpc stop --endpoint "
                f"{name}', choose another name, or remove {path} if you know that it is dead"
            )
    raise ConfigError(f"{MAX_DEFAULT_NAMES} servers are running: give this one a name with --endpoint")


def _default_names(environ: Mapping[str, str]) -> Iterator[str]:
    first = default_name(environ)
    check_endpoint_name(first)
    yield first
    for number in count(2):
        if number > MAX_DEFAULT_NAMES:
            return
        yield f"{first}-{number}"


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"{directory}: {error.strerror}; set FASTSERVE_HPC_HOME to a directory that servers and clients share"
        ) from error


def _prune(directory: Path) -> None:
    """Remove what is over: servers that were killed, jobs that ended long ago."""
    everyone = load_all(directory)
    living = {e.instance_id for e in without_ended_jobs(everyone) if not e.is_dead()}
    for endpoint in everyone:
        path = file_of(endpoint.name, directory)
        if endpoint.instance_id not in living and not (endpoint.state == "ended" and _is_recent(path)):
            with _claim(path):
                _remove(path, endpoint)


def _is_recent(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < REMEMBERED_S
    except OSError:
        return False


def _remove(path: Path, endpoint: Endpoint) -> None:
    with contextlib.suppress(OSError, EndpointError):
        if load(path).instance_id == endpoint.instance_id:
            path.unlink()


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[None]:
    """Judging a file and writing ours is one act: a directory beside it is the lock, which works on NFS too."""
    lock = path.with_suffix(".claim")
    while not _made(lock):
        _wait_for(lock)
    try:
        yield
    finally:
        lock.rmdir()


def _made(lock: Path) -> bool:
    try:
        lock.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _wait_for(lock: Path) -> None:
    """Until it is gone. Whoever holds the same lock for longer than a claim takes has died."""
    with contextlib.suppress(FileNotFoundError):
        inode, deadline = lock.stat().st_ino, time.monotonic() + CLAIM_TIMEOUT_S
        while lock.stat().st_ino == inode:
            if time.monotonic() > deadline:
                lock.rmdir()
            time.sleep(0.02)


def _in_use(path: Path, answers: Callable[[Endpoint], bool]) -> bool:
    try:
        endpoint = load(path)
    except FileNotFoundError:
        return False
    except EndpointError:
        return False
    if endpoint.is_dead():
        return False
    if endpoint.process is not None and endpoint.process.is_here:
        return True
    if not without_ended_jobs([endpoint]):
        return False
    return answers(endpoint)
