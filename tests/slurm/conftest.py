"""Fixtures that boot a real Slurm cluster, once a session."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_support import REPOSITORY, Cluster, prepare


@pytest.fixture(scope="session")
def session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    prepare()
    run = Path(tempfile.mkdtemp(prefix="fs-slurm-", dir="/tmp"))  # short: it holds a unix socket
    shared = (sys.prefix, str(REPOSITORY), str(tmp_path_factory.getbasetemp()))
    options = [f"--share={path}" for path in shared if path.startswith("/tmp/")]
    cluster = Cluster(run)
    cluster.command("start", "2", "--cpus=64", f"--owner={os.getpid()}", *options)
    yield cluster
    cluster.command("stop")
    shutil.rmtree(run, ignore_errors=True)


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """Two idle nodes, n1 and n2. `tmp_path`, the repository and the environment are shared by all machines."""
    yield session_cluster
    session_cluster.restore()
