"""Sets that stay small with millions of lines: a bit a line, 16 to 32 bytes a hash."""

from __future__ import annotations

from array import array

_MASK = 2**64 - 1


class LineSet:
    """Line indexes, as a bitmap."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, index: int) -> bool:
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (index & 7) & 1)

    def add(self, index: int) -> bool:
        """Whether it was not there yet."""
        if index in self:
            return False
        byte = index >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(4096, byte + 1 - len(self._bits))))
        self._bits[byte] |= 1 << (index & 7)
        self._count += 1
        return True


class HashSet:
    """64-bit hashes, by open addressing in one array."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._count = 0

    def add(self, hash_: int) -> bool:
        """Whether it was not there yet."""
        value = hash_ & _MASK or 1  # 0 is an empty slot
        if 2 * self._count >= len(self._slots):
            self._grow()
        if not self._place(self._slots, value):
            return False
        self._count += 1
        return True

    @staticmethod
    def _place(slots: array[int], value: int) -> bool:
        last = len(slots) - 1
        slot = value & last
        while found := slots[slot]:
            if found == value:
                return False
            slot = (slot + 1) & last
        slots[slot] = value
        return True

    def _grow(self) -> None:
        slots = array("Q", bytes(16 * len(self._slots)))
        for value in self._slots:
            if value:
                self._place(slots, value)
        self._slots = slots
