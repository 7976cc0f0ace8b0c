"""How malloc treats the tensors that come and go with every iteration."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_KEPT_BYTES = 256 * 2**20
_LARGEST_KEPT_BYTES = 32 * 2**20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Keep what is freed for the next iteration instead of handing it back to the system.

    A batch's probabilities alone are megabytes: taking them anew costs thousands of page faults each time, a fifth of
    the time to sample 64 tokens. Does nothing where there is no glibc.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
