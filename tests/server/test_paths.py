"""The private directory: short, ours alone, and gone at the end, whatever the environment."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserve_hpc.errors import ConfigError
from fastserve_hpc.server.paths import MAX_ROOT_BYTES, RUNTIME_VARIABLE, RuntimeDir, runtime_root


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def short() -> Iterator[Path]:
    """A short directory of this test's own; pytest's are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="fs-") as name:
        yield Path(name)


def test_xdg_runtime_dir_is_used_if_it_is_there_ours_private_and_short(short: Path, tmp_path: Path) -> None:
    short.chmod(0o700)
    assert runtime_root({"XDG_RUNTIME_DIR": str(short)}) == short / "fastserve-hpc"
    usual = Path(f"/tmp/fastserve-hpc-{os.getuid()}")
    assert runtime_root({}) == usual
    assert runtime_root({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}) == usual
    short.chmod(0o755)
    assert runtime_root({"XDG_RUNTIME_DIR": str(short)}) == usual
    long = tmp_path / ("x" * MAX_ROOT_BYTES)
    long.mkdir(mode=0o700)
    assert runtime_root({"XDG_RUNTIME_DIR": str(long)}) == usual


def test_modes_do_not_depend_on_the_umask(short: Path) -> None:
    before = os.umask(0)
    try:
        with RuntimeDir({RUNTIME_VARIABLE: str(short / "run")}) as runtime:
            assert [mode(p) for p in (short / "run", runtime.path, runtime.path / "lock")] == [0o700, 0o700, 0o600]
    finally:
        os.umask(before)


def test_a_root_that_others_could_enter_is_closed(short: Path) -> None:
    short.chmod(0o777)
    runtime_root({RUNTIME_VARIABLE: str(short)})
    assert mode(short) == 0o700


def test_a_link_a_file_a_long_path_and_a_missing_parent_are_refused_with_the_cure(short: Path) -> None:
    (short / "link").symlink_to(short)
    (short / "file").touch()
    for name, text in (
        ("link", "symbolic link"),
        ("file", "not a directory"),
        ("x" * 80, "too long"),
        ("a/b", "No such"),
    ):
        with pytest.raises(ConfigError, match=text) as refused:
            runtime_root({RUNTIME_VARIABLE: str(short / name)})
        assert str(short / name) in str(refused.value)


def test_a_relative_root_means_the_same_place_to_clients_elsewhere(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short)
    with RuntimeDir({RUNTIME_VARIABLE: "run"}) as runtime:
        assert runtime.path.parent == short / "run"


def test_a_root_that_nothing_can_be_made_in_is_refused_with_the_cure(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=f"{short}: Read-only file system; set {RUNTIME_VARIABLE}"):
        RuntimeDir({RUNTIME_VARIABLE: str(short)})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(short: Path) -> None:
    os.chown(short, 65534, 65534)
    with pytest.raises(ConfigError, match=f"belongs to user 65534: set {RUNTIME_VARIABLE}"):
        runtime_root({RUNTIME_VARIABLE: str(short)})


def test_each_server_has_its_own_directory_and_takes_it_away(short: Path) -> None:
    environ = {RUNTIME_VARIABLE: str(short)}
    with RuntimeDir(environ) as first, RuntimeDir(environ) as second:
        assert first.path != second.path
        assert len(os.fsencode(first.path / "clients")) < 107
    assert list(short.iterdir()) == []
    second.close()


def test_what_the_dead_left_is_swept_and_the_living_and_the_young_stay(short: Path) -> None:
    environ = {RUNTIME_VARIABLE: str(short)}
    living, dead, young = (RuntimeDir(environ) for _ in range(3))
    os.close(dead._lock)
    os.close(young._lock)
    for runtime in (living, dead):
        os.utime(runtime.path, (time.time() - 3600, time.time() - 3600))
    with RuntimeDir(environ):
        assert living.path.exists()
        assert not dead.path.exists()
        assert young.path.exists()
    living.close()
