from __future__ import annotations

import gzip
import io
import random
import sys
from pathlib import Path

import pytest
import zstandard

from fastserve_hpc.batch.lines import Inputs
from fastserve_hpc.batch.linesets import HashSet, LineSet
from fastserve_hpc.batch.survey import Shard, survey
from fastserve_hpc.errors import ConfigError

TEXT = b"".join(b'{"prompt": "%d"}\n' % i for i in range(5000))


def lines_of(*paths: Path) -> list[bytes]:
    return [line.raw for line in Inputs(paths).lines()]


def test_gzip_and_zstd_by_suffix(tmp_path: Path) -> None:
    packed = {"a.gz": gzip.compress(TEXT), "a.zst": zstandard.compress(TEXT[:9]) + zstandard.compress(TEXT[9:])}
    for name, content in packed.items():
        (tmp_path / name).write_bytes(content)
        assert lines_of(tmp_path / name) == TEXT.splitlines(keepends=True)
    for name, content in packed.items():
        for broken in (content[:-5], content[:40] + b"x" + content[41:]):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ConfigError, match=f"{name}: cannot be read to its end"):
                lines_of(tmp_path / name)


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        lines_of(tmp_path / "a.zst")


def test_standard_input_can_be_read_again_but_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT)))
    inputs = Inputs([Path("-")])
    assert len(list(inputs.lines())) == len(list(inputs.lines())) == 5000
    with pytest.raises(ConfigError, match="twice"):
        Inputs([Path("-"), Path("-")])


def test_utf16_is_named_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "x"}\n', encoding="utf-16")
    with pytest.raises(ConfigError, match="UTF-16"):
        lines_of(tmp_path / "in")


def test_a_survey_knows_an_input_that_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(TEXT[:-1])
    before = survey(Inputs([path]), Shard())
    assert (before.num_lines, before.last_index, before.num_bytes) == (5000, 5000, len(TEXT))
    path.write_bytes(TEXT)
    assert survey(Inputs([path]), Shard()).sha256 == before.sha256
    path.write_bytes(TEXT + b"{}\n")
    assert survey(Inputs([path]), Shard(), before.num_bytes).sha256_at_mark == before.sha256
    path.write_bytes(TEXT[:-1] + b"{}\n")
    assert survey(Inputs([path]), Shard(), before.num_bytes).sha256_at_mark != before.sha256


def test_shards_share_all_lines() -> None:
    shards = [Shard.parse(f"{i}/3") for i in range(3)]
    assert [[i for i in range(1, 8) if i in shard] for shard in shards] == [[1, 4, 7], [2, 5], [3, 6]]
    for text in ("3/3", "1", "-1/3", "a/b", "0/0", "1/"):
        with pytest.raises(ConfigError, match="--shard"):
            Shard.parse(text)


def test_sets_hold_what_was_added() -> None:
    rng = random.Random(1)
    lines, hashes, seen = LineSet(), HashSet(), set[int]()
    for _ in range(20_000):
        value = rng.randrange(30_000)
        assert lines.add(value) == hashes.add(hash(str(value))) == (value not in seen)
        seen.add(value)
    assert len(lines) == len(seen)
    assert all((value in lines) == (value in seen) for value in range(40_000))
