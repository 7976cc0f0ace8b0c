"""When a sequence will probably be scheduled next: whose KV may leave first, and whose must be back first.

    ENST(i) = min(T_promote(i), T_execute(i))
    T_execute(i) = (1 / B) * sum over j of higher levels of (quantum(level(i)) - quantum(level(j)))

T_promote is the time until the policy promotes i, T_execute the time until those of higher levels, B at a time, have
sunk to i's level: with quantum(k) = q0 * 2^k the quanta from level(j) to the one above level(i) sum up to that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from fastserve_hpc.core.sequence import Sequence


class Standing(NamedTuple):
    """Where a policy of levels has a sequence."""

    quantum_s: float
    """The quantum of its level."""
    promoted_in_s: float
    """Infinite where it never is."""


@runtime_checkable
class Leveled(Protocol):
    """A policy that knows levels and quanta."""

    def standing(self, sequence: Sequence, now: float) -> Standing: ...


def by_next_run(
    policy: Leveled, behind: list[Sequence], ahead: Iterable[Sequence], batch: int, now: float
) -> list[Sequence]:
    """`behind`, the one first that runs next; of those that are alike the order stays. `ahead` come before all."""
    standings = {sequence: policy.standing(sequence, now) for sequence in (*behind, *ahead)}
    levels: dict[float, int] = {}
    for standing in standings.values():
        levels[standing.quantum_s] = levels.get(standing.quantum_s, 0) + 1
    execute_s: dict[float, float] = {}
    count = total = 0.0
    for quantum_s in sorted(levels):
        execute_s[quantum_s] = (count * quantum_s - total) / batch
        count += levels[quantum_s]
        total += levels[quantum_s] * quantum_s

    def next_s(sequence: Sequence) -> float:
        standing = standings[sequence]
        return min(standing.promoted_in_s, execute_s[standing.quantum_s])

    return sorted(behind, key=next_s)
