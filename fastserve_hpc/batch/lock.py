"""One writer for an output, on any file system, also after a SIGKILL or a node that died.

Kernel locks are not to be relied upon: many shared file systems keep them to one node, without a word. What all of
them have is a file that only one of many can create. So a lock is a file `lock-N` beside the output; whoever creates
`lock-N+1` becomes the holder after the one of `lock-N`, who must be gone:

- it has said so in its file (a run that ended),
- or its process is gone, where that can be looked up: the same kernel and process namespace (a killed run, at once),
- or its file has not changed for `LEASE_S`, by the clock of the one who waits; holders change it all the time.

A holder that slept through all this (a stopped process, a node that hung) notices before its next write, because its
own file is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fastserve_hpc.errors import ConfigError, FastServeError

LEASE_S = 30.0
RENEW_S = 2.0
PATIENCE_S = 10.0
"""How long a run that is just ending is waited for."""
_POLL_S = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock, as its file says."""

    host: str
    kernel: str
    """Boot id and process namespace: where `pid` means anything."""
    pid: int
    started: str
    """Tells the process from a later one with the same number."""
    token: str
    beat: int = 0
    released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        return cls(os.uname().nodename, _kernel(), os.getpid(), _started(os.getpid()) or "", secrets.token_hex(8))

    @property
    def is_gone(self) -> bool:
        """Whether it surely is; False where nothing can be known."""
        if self.released:
            return True
        return self.kernel == _kernel() and _started(self.pid) != self.started


class OutputLock:
    """Held from `acquire` to `release`, and renewed by a thread of its own. `renew` may be called by any thread."""

    def __init__(self, directory: Path, output: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._directory = directory
        self._output = output
        self._say = say
        self._holder = Holder.this_process()
        self._path: Path | None = None
        self._renewed = 0.0
        self._lost: FastServeError | None = None
        self._mutex = threading.Lock()
        self._released = threading.Event()

    def acquire(self) -> None:
        """Become the only writer. Raises `ConfigError` if another one lives, `OSError`."""
        watch = _Watch()
        while True:
            number, content = self._newest()
            if (number == 0 or watch.is_free(content)) and self._create(number + 1):
                self._clean_up(number + 1)
                threading.Thread(target=self._keep, name="output-lock", daemon=True).start()
                return
            if watch.is_hopeless:
                raise ConfigError(
                    f"--output {self._output}: {_describe(content)} is writing to it; wait for its end, or end it"
                )
            if watch.first_wait():
                self._say(f"waiting for {_describe(content)} to let go of {self._output}")
            time.sleep(_POLL_S)

    def renew(self) -> None:
        """Show that we are here, if it is time to. Raises `FastServeError` when the lock is no longer ours."""
        with self._mutex:
            if self._path is not None and time.monotonic() - self._renewed >= RENEW_S:
                self._renewed = time.monotonic()
                self._holder = msgspec.structs.replace(self._holder, beat=self._holder.beat + 1)
                self._rewrite(self._path)
            if self._lost is not None:
                raise self._lost

    def _keep(self) -> None:
        """Renew it while nothing is written."""
        while not self._released.wait(RENEW_S):
            with contextlib.suppress(FastServeError):  # whoever writes next hears of it
                self.renew()

    def release(self) -> None:
        """Let the next one in at once. The file stays, so that numbers never start again. Idempotent."""
        self._released.set()
        with self._mutex:
            path, self._path = self._path, None
            if path is not None and self._lost is None:
                self._holder = msgspec.structs.replace(self._holder, released=True)
                self._rewrite(path)

    def _newest(self) -> tuple[int, bytes]:
        """The highest number and what its file says; 0 where nobody has ever held the lock."""
        while True:
            numbers = [int(m[1]) for name in os.listdir(self._directory) if (m := re.fullmatch(r"lock-(\d+)", name))]
            number = max(numbers, default=0)
            try:
                return number, self._file(number).read_bytes() if number else b""
            except FileNotFoundError:  # its successor has removed it meanwhile
                continue

    def _create(self, number: int) -> bool:
        """Whether we and nobody else have created this one."""
        path, temporary = self._file(number), self._directory / f".lock-{self._holder.token}"
        temporary.write_bytes(msgspec.json.encode(self._holder))
        try:
            os.link(temporary, path)  # with its content at once, which O_EXCL does not give
        except FileExistsError:
            if path.read_bytes() != temporary.read_bytes():  # NFS may repeat a call that has worked
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS or not self._create_exclusive(path):
                raise
        finally:
            temporary.unlink(missing_ok=True)
        self._path, self._renewed = path, time.monotonic()
        return True

    def _create_exclusive(self, path: Path) -> bool:
        try:
            with path.open("xb") as file:
                file.write(msgspec.json.encode(self._holder))
        except FileExistsError:
            return False
        return True

    def _clean_up(self, number: int) -> None:
        """Remove what earlier holders left: one that still runs finds out by that."""
        for path in self._directory.iterdir():
            match = re.fullmatch(r"lock-(\d+)", path.name)
            if match and int(match[1]) < number:
                path.unlink(missing_ok=True)

    def _rewrite(self, path: Path) -> None:
        try:
            # Opening revalidates what a network file system has cached; without O_CREAT a lost lock stays lost.
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            self._lost = FastServeError(
                f"--output {self._output}: {path} is gone ({error.strerror}): the directory was removed, or another "
                "run has taken over because this one was silent for too long. Nothing more is written; "
                "run the same command again to go on"
            )
            return
        try:
            content = msgspec.json.encode(self._holder)
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
        except OSError as error:
            # A disk that is full says so to the writer of results; the lock is still there.
            self._lost = None if error.errno in _FULL else FastServeError(f"{path}: {error.strerror}")
        finally:
            os.close(descriptor)

    def _file(self, number: int) -> Path:
        return self._directory / f"lock-{number:06d}"


class _Watch:
    """Watches a holder that may or may not live."""

    def __init__(self) -> None:
        self._started = self._since = time.monotonic()
        self._content: bytes | None = None
        self._num_changes = -1
        self._has_waited = False

    def is_free(self, content: bytes) -> bool:
        """Whether the holder is gone, having seen its file now."""
        now = time.monotonic()
        if content != self._content:
            self._content, self._since = content, now
            self._num_changes += 1
        holder = _holder(content)
        return (holder is not None and holder.is_gone) or now - self._since >= LEASE_S

    @property
    def is_hopeless(self) -> bool:
        """Whether it lives and does not look like ending."""
        holder = _holder(self._content or b"")
        lives = self._num_changes > 0 or (holder is not None and holder.kernel == _kernel())
        return lives and time.monotonic() - self._started >= PATIENCE_S

    def first_wait(self) -> bool:
        has_waited, self._has_waited = self._has_waited, True
        return not has_waited


def _holder(content: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(content, type=Holder)
    except msgspec.MsgspecError:
        return None


def _describe(content: bytes) -> str:
    holder = _holder(content)
    return "another run" if holder is None else f"another run (process {holder.pid} on {holder.host})"


def _kernel() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # nothing can be looked up: equal to nobody's


def _started(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; None where there is none, or it is only waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
