"""The rules of skip-join, and how much work a request stands for under them, in output tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastserve_hpc.core.cost import CostModel
from fastserve_hpc.core.hints import HintTrust
from fastserve_hpc.core.lengths import FinishedLengths
from fastserve_hpc.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipJoinRules:
    """The rules and their numbers; each can be switched off."""

    quantum: int = 16
    """Output tokens of level 0; each level has twice as many as the one before."""
    joins_by_prompt: bool = True
    """New requests skip levels by the cost of their prompt; else they join as if they had none."""
    sinks_prompt: bool = True
    """Once the prompt is computed it no longer counts; else the level stays that of the arrival."""
    replaces: bool = True
    """Waiting requests may take the place of running ones."""
    min_gap: float = 1.0
    """Levels by which a candidate must be better than the one that it replaces."""
    spared_levels: float = 1.0
    """Nobody is replaced before it is so many levels past that of a usual answer."""
    spares_finishing: bool = True
    """Nobody is replaced who, as recent answers go, is as near to its end as the candidate."""
    min_finished: int = 32
    """Answers that must be known before anyone is replaced."""
    aging: float = 0.8
    """A request that has been there for this part of the time to drain the backlog goes first; infinite: never."""
    oldest_share: float = 0.05
    """The part of all work that goes to the oldest waiting requests, whatever their levels."""
    uses_hints: bool = True
    """Hints of the output length count, while they have been right."""
    hinted_gap: float = 0.58
    """As `min_gap`, for candidates with a trusted hint."""
    hinted_ratio: float = 1.5
    """Between levels of requests with a trusted hint."""
    uses_classes: bool = True
    """`batch` requests stand behind all others."""
    uses_sessions: bool = True
    """Requests of one session count their tokens together."""

    def without(self, names: Iterable[str]) -> SkipJoinRules:
        """These rules but for those named, as `config.RULES` names them."""
        changes: dict[str, Any] = {}
        for name in names:
            changes |= _SWITCHED_OFF[name]
        return replace(self, **changes)


_SWITCHED_OFF: Mapping[str, Mapping[str, Any]] = {
    "join": {"joins_by_prompt": False},
    "sink": {"sinks_prompt": False},
    "replace": {"replaces": False},
    "spare": {"spared_levels": -math.inf},
    "finishing": {"spares_finishing": False},
    "aging": {"aging": math.inf},
    "oldest": {"oldest_share": 0.0},
    "hints": {"uses_hints": False},
    "classes": {"uses_classes": False},
    "sessions": {"uses_sessions": False},
}


class Sizing:
    """Levels from what is known of a request, and from what became of others.

    Level l stands for `quantum * 2^l` output tokens; levels of requests with a trusted hint lie between.
    """

    def __init__(self, rules: SkipJoinRules, max_batch: int, cost: CostModel, num_stages: int = 1):
        """Costs are those of a stage; a plan holds the stage's part of the batch."""
        self.lengths = FinishedLengths()
        self._hints = HintTrust()
        self._rules = rules
        self._plan_batch = max(1, max_batch // num_stages)
        self._cost = cost

    def learn(self, sequence: Sequence) -> None:
        """A request has its whole answer."""
        count = len(sequence.outputs)
        self.lengths.note(count)
        hint = sequence.request.expected_tokens
        if hint is not None:
            self._hints.note(hint, count)

    def prompt_ratio(self) -> float:
        """Output tokens whose cost is that of one prompt token."""
        costs = self._cost.costs
        return costs.prefill_token_s / costs.output_token_s(self._plan_batch)

    def drain_s(self, prompt_tokens: int, num_requests: int) -> float:
        """Seconds that a backlog takes: so many prompt tokens, and the usual answers of so many requests."""
        costs = self._cost.costs
        output_s = costs.output_token_s(self._plan_batch)
        return costs.prefill_token_s * prompt_tokens + output_s * self.lengths.mean * num_requests

    def quantum_s(self, level: float) -> float:
        """Seconds that the output tokens of a level take."""
        tokens = self._rules.quantum * 2 ** min(level, 40.0)
        return tokens * self._cost.costs.output_token_s(self._plan_batch)

    def usual_level(self) -> float:
        """Where a request is whose prompt is done and of which nothing is known."""
        return self._level_of(self.lengths.harmonic)

    def plain_level(self, num_prompt: int, is_prompt_done: bool, outputs: int) -> tuple[float, int]:
        """The level of a request whose length nobody knows, and the outputs at which it ends."""
        usual = self.lengths.harmonic
        if not (is_prompt_done and self._rules.sinks_prompt):
            prompt = num_prompt * self.prompt_ratio() * self._rules.joins_by_prompt
            usual = math.sqrt((prompt + usual) * usual)
        level = max(self._level_of(usual), self._level_of(outputs + 1))
        return level, int(self._rules.quantum * 2**level)

    def hinted_level(self, sequence: Sequence, prompt_left: int) -> tuple[float, int] | None:
        """The same with a hint; None without, while hints are not trusted, and once it was too small.

        By the geometric mean of what is left and the whole: the level falls as the answer grows.
        """
        hint, outputs = sequence.request.expected_tokens, len(sequence.outputs)
        expected = None if hint is None or not self._rules.uses_hints else self._hints.expected(hint)
        if expected is None or outputs >= expected:
            return None
        ratio, quantum = self._rules.hinted_ratio, self._rules.quantum
        size = math.sqrt((prompt_left * self.prompt_ratio() + expected - outputs) * expected)
        steps = max(0, math.ceil(math.log(size / quantum, ratio) - 1e-9))
        below = quantum * ratio ** (steps - 1)
        end = expected if steps == 0 else expected - below * below / expected
        return steps * math.log2(ratio), max(outputs + 1, math.ceil(end))

    def is_less(self, sequence: Sequence, prompt_left: int, other: Sequence) -> bool:
        """Whether, as recent answers went, the first has no more before it than the other."""
        prompt = prompt_left * self.prompt_ratio()
        size = self.lengths.size(len(sequence.outputs), prompt)
        return size <= self.lengths.size(len(other.outputs))

    def _level_of(self, num_tokens: float) -> float:
        """The highest level whose quantum holds so many tokens."""
        return max(0.0, float(math.ceil(math.log2(num_tokens / self._rules.quantum) - 1e-9)))
