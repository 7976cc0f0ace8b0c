"""Level queues against a plain list."""

from __future__ import annotations

import random

from scheduling import request

from fastserve_hpc.core.policy.levels import Levels
from fastserve_hpc.core.sequence import Sequence


def test_levels_are_queues_by_level() -> None:
    rng = random.Random(5)
    levels, model = Levels(), list[tuple[float, int, Sequence]]()
    assert levels.last() is None
    for i in range(400):
        if model and rng.random() < 0.45:
            item = model.pop(rng.randrange(len(model)))
            levels.take_out(item[0], item[2])
        else:
            item = (rng.choice([0.0, 1.0, 1.5, 7.0]), i, Sequence(request(i), 0.0))
            levels.put(item[0], item[2])
            model.append(item)
        expected = [sequence for _, _, sequence in sorted(model, key=lambda item: item[:2])]
        assert list(levels) == expected
        assert levels.last() is (expected[-1] if expected else None)
        assert sum(levels.counts().values()) == len(model)
