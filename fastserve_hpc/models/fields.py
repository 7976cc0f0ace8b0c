"""Typed look-ups in a model's settings; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fastserve_hpc.errors import ModelError

_MISSING = object()


class Fields:
    """A mapping from a file, with the file's name for messages. Null counts as missing, as in config.json."""

    def __init__(self, place: str, values: Mapping[str, Any]):
        self.place = place
        self.values = values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | object = _MISSING) -> int:
        """A whole number of at least 1."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a whole number of at least 1")
        return value

    def count_or_quotient(self, key: str, total: str, parts: str) -> int:
        """`key`, or where that is missing total / parts, which must go in evenly."""
        if self.get(key) is not None:
            return self.count(key)
        quotient, rest = divmod(self.count(total), self.count(parts))
        if rest or not quotient:
            raise ModelError(f"{self.place}: {total} {self.get(total)} is not a multiple of {parts} {self.get(parts)}")
        return quotient

    def number(self, key: str, default: float | object = _MISSING) -> float:
        """A number above 0; the default may be any."""
        if self.get(key) is None and default is not _MISSING:
            return float(cast(float, default))
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: none, one, or a list."""
        value = self._value(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(ids)

    def error(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.place}: {key} is {self.values.get(key)!r}, not {wanted}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelError(f"{self.place} lacks {key}")
        return default
