"""zstd input. The package `zstandard` is an extra; a file that ends too early is an error, never a short input."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO, cast

from fastserve_hpc.errors import ConfigError

_CHUNK_BYTES = 2**17


class ZstdError(Exception):
    """The bytes are no zstd, or not all of it."""


def open_zstd(path: Path) -> BinaryIO:
    """The decompressed file. Raises `ConfigError` without the package, `ZstdError` when broken bytes are read."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"--input {path}: zstd files need a package: pip install zstandard") from None
    return cast(BinaryIO, io.BufferedReader(_ZstdReader(path.open("rb"), zstandard), 2**18))


class _ZstdReader(io.RawIOBase):
    """Frames one after the other."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file = file
        self._zstandard = zstandard
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._refill():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _refill(self) -> bool:
        """Decompress some more; False at the end of the file."""
        self._compressed = self._compressed or self._file.read(_CHUNK_BYTES)
        if not self._compressed:
            if self._frame is not None:
                raise ZstdError("the file ends inside a zstd frame: it was cut or is still being written")
            return False
        frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._ready = memoryview(frame.decompress(self._compressed))
        except self._zstandard.ZstdError as error:
            raise ZstdError(str(error)) from None
        self._frame, self._compressed = (None, frame.unused_data) if frame.eof else (frame, b"")
        return True
