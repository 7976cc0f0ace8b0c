"""One block of the KV cache, as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass

NOWHERE = -1
NOT_YET = 2**62
"""`Block.written` before the block is full."""


@dataclass(slots=True, eq=False)
class Block:
    """The KV of `block_size` positions, or of the first few of them."""

    device: int = NOWHERE
    """Its slot on the device."""
    host: int = NOWHERE
    """Its slot on the host; once no copy is in flight its content is the device's."""
    refs: int = 0
    """Sequences whose KV it is part of."""
    pins: int = 0
    """Those of them that may run: it must be on the device."""
    key: bytes | None = None
    """Names its content, if it is in the prefix cache."""
    written: int = NOT_YET
    """The plan that fills it: later ones may read it."""
    last_plan: int = 0
    """The last plan that used its device slot, of sequences that have let go of it."""
    last_copy: int = 0
    """The last copy from or to one of its slots."""
    upload: int = 0
    """The copy that brought it to the device: plans may read it from then on."""

    @property
    def is_lost(self) -> bool:
        return self.device < 0 and self.host < 0
