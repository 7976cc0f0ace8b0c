"""The private directory of one server: short (socket paths end at 107 bytes), ours alone, gone at the end.

TMPDIR is not asked: it may be long, or on a file system that knows no sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from fastserve_hpc.errors import ConfigError

RUNTIME_VARIABLE = "FASTSERVE_HPC_RUNTIME"
MAX_ROOT_BYTES = 70
"""Leaves room for a server's own directory and its sockets below."""
_LOCK = "lock"
_SWEEP_AGE_S = 60.0


def runtime_root(environ: Mapping[str, str]) -> Path:
    """The directory that all servers of this user on this node share, made if need be, mode 0700.

    $FASTSERVE_HPC_RUNTIME if set, else below $XDG_RUNTIME_DIR where that is ours and short, else in /tmp.
    Raises `ConfigError` where it is a link, somebody else's or too long.
    """
    root = _chosen_root(environ)
    if len(os.fsencode(root)) > MAX_ROOT_BYTES:
        raise ConfigError(
            f"{root} is too long for sockets: set {RUNTIME_VARIABLE} to a local path of up to {MAX_ROOT_BYTES} bytes"
        )
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        _make_private(root)
    except OSError as error:
        raise _unusable(root, error) from error
    return root


def _unusable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{root}: {error.strerror}; set {RUNTIME_VARIABLE} to a local directory of your own")


def _chosen_root(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get(RUNTIME_VARIABLE):
        return Path(chosen).absolute()  # clients elsewhere are told it, too
    given = environ.get("XDG_RUNTIME_DIR")
    if given and _is_private(Path(given)):
        below = Path(given) / "fastserve-hpc"
        if len(os.fsencode(below)) <= MAX_ROOT_BYTES:
            return below
    return Path(f"/tmp/fastserve-hpc-{os.getuid()}")


def _is_private(directory: Path) -> bool:
    """Whether it is a directory of ours alone. After a logout the variable may name one that is gone."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return ours and os.access(directory, os.W_OK | os.X_OK)


def _make_private(directory: Path) -> None:
    """Refuse what may be another's trap; close what a wide umask left open."""
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(f"{directory} is a symbolic link, which somebody else may turn: remove it")
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{directory} is not a directory: remove it")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{directory} belongs to user {found.st_uid}: set {RUNTIME_VARIABLE} to a local directory of your own"
        )
    if found.st_mode & 0o077:
        directory.chmod(0o700)


class RuntimeDir:
    """A fresh directory below the root, held by a lock on a file in it: who dies leaves it to the next to sweep."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises `ConfigError` where nothing can be made there."""
        root = runtime_root(environ)
        try:
            _sweep(root)
            self.path = Path(tempfile.mkdtemp(dir=root, prefix=""))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise _unusable(root, error) from error

    def close(self) -> None:
        """Remove the directory. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sweep(root: Path) -> None:
    """Remove directories of servers that died. Young ones are left: their owner may not hold the lock yet."""
    for directory in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - directory.lstat().st_mtime > _SWEEP_AGE_S and _is_abandoned(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
