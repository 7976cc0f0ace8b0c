from __future__ import annotations

import random

from fastserve_hpc.batch import ordering
from fastserve_hpc.batch.ordering import Item, by_prefix, text_of
from fastserve_hpc.batch.reader import BatchItem, LineError
from fastserve_hpc.openai.bodies import parse_body, parse_score

EXAMPLES = "".join(f"Question {i}: how much is {i} and {i}? Answer: {2 * i}.\n" for i in range(5))


def item(index: int, prompt: object) -> BatchItem:
    return BatchItem(index, f"id-{index}", parse_body("completion", {"prompt": prompt}))


def indexes(items: list[Item]) -> list[int]:
    return [found.index for found in by_prefix(items)]


def test_lines_with_a_common_beginning_come_together() -> None:
    prompts = [f"{EXAMPLES}{subject} {i}?" for i in range(20) for subject in ("apples", "pears", "plums")]
    random.Random(1).shuffle(prompts)
    items: list[Item] = [item(i, prompt) for i, prompt in enumerate(prompts, 1)]
    found = [text_of(i.ask).split()[-2] for i in by_prefix(items) if isinstance(i, BatchItem)]
    assert found == sorted(found)
    assert sorted(indexes(items)) == list(range(1, 61))


def test_lines_that_have_nothing_in_common_stay_in_their_order() -> None:
    items: list[Item] = [item(i, f"{random.Random(i).random()} is a number {'x' * 100}") for i in range(1, 100)]
    assert indexes(items) == list(range(1, 100))


def test_errors_come_at_once_and_windows_are_bounded(monkeypatch: object) -> None:
    monkeypatch.setattr(ordering, "WINDOW_LINES", 10)  # type: ignore[attr-defined]
    prompts = [EXAMPLES + str(i % 7) for i in range(25)]
    items: list[Item] = [item(i, prompt) for i, prompt in enumerate(prompts, 1)]
    items.insert(3, LineError(99, None, "invalid_json", "line 99: no"))
    found = indexes(items)
    assert found[0] == 99
    assert sorted(found[1:11]) == list(range(1, 11))
    assert sorted(found) == [*range(1, 26), 99]


def test_every_kind_of_prompt_has_a_text() -> None:
    chat = parse_body("chat", {"messages": [{"role": "user", "content": "hi"}]})
    ids = parse_body("completion", {"prompt": [1, 2, 3]})
    score = parse_score({"context": "a", "continuation": " b"})
    assert [text_of(ask) for ask in (chat, ids, score)] == ['[{"role": "user", "content": "hi"}]', "[1, 2, 3]", "a\0 b"]
