"""The test cluster itself: are its nodes machines of their own, and does it fail the way that machines fail?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_support import SCRIPT, Cluster, wait_until

pytestmark = pytest.mark.slurm

ECHO_SERVER = """
import socket
with socket.create_server(("", 4711)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(100):
            connection.sendall(data)
    print("closed", flush=True)
"""

# Sends a byte whenever told to and says whether it came back within a second.
ECHO_CLIENT = """
import socket, sys
with socket.create_connection(("n2", 4711), timeout=5) as connection:
    connection.settimeout(1)
    for line in sys.stdin:
        connection.sendall(b"x")
        try:
            print("echo" if connection.recv(1) else "closed", flush=True)
        except TimeoutError:
            print("silence", flush=True)
"""


def srun_lines(cluster: Cluster, *command: str) -> list[str]:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", "--label", *command)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split("\n")[:-1])


def test_nodes_are_machines_of_their_own(cluster: Cluster) -> None:
    assert srun_lines(cluster, "hostname") == ["0: n1", "1: n2"]
    addresses = srun_lines(cluster, "ip", "-4", "-o", "address", "show", "eth0")
    assert [re.search(r"inet (\S+)", line)[1] for line in addresses] == ["10.77.0.11/24", "10.77.0.12/24"]  # type: ignore[index]
    cluster.run("touch", "/tmp/mine", "/dev/shm/mine", node="n1")
    assert cluster.run("ls", "/tmp/mine", "/dev/shm/mine", node="n1").returncode == 0
    assert cluster.run("ls", "/tmp/mine", "/dev/shm/mine", node="n2").stdout == ""
    processes = [cluster.run("ps", "-eo", "comm=", node=node).stdout.split() for node in ("n1", "n2")]
    assert [names.count("slurmd") for names in processes] == [1, 1]
    assert all("slurmctld" not in names for names in processes)


def test_shared_paths_are_one_file_system(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", "sh", "-c", f"hostname > {tmp_path}/$(hostname)")
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"n1": "n1\n", "n2": "n2\n"}


def test_exit_status_and_environment_pass_through(cluster: Cluster) -> None:
    done = cluster.run("sh", "-c", 'echo "$COLOUR"; exit 7', node="n2", COLOUR="blue")
    assert (done.stdout, done.returncode) == ("blue\n", 7)
    assert "there are ctl, n1, n2" in cluster.run("true", node="n7").stderr


def test_a_command_ends_with_its_caller(cluster: Cluster) -> None:
    running: Callable[[], bool] = lambda: cluster.run("pgrep", "-x", "sleep", node="n1").returncode == 0  # noqa: E731
    process = cluster.popen("sleep", "50", node="n1")
    wait_until(running, 5, "sleep to run")
    process.terminate()
    assert process.wait(5) != 0
    wait_until(lambda: not running(), 5, "sleep to end")


def test_killed_node_is_silent_and_comes_back(cluster: Cluster) -> None:
    with echo_through_n2(cluster) as client:
        assert ask(client) == "echo"
        cluster.kill("n2")
        assert ask(client) == "silence"  # a machine without power sends no FIN
        assert "n2 10.77.0.12 process none" in cluster.command("status").stdout
        cluster.revive("n2")
    assert srun_lines(cluster, "hostname") == ["0: n1", "1: n2"]


def test_cut_drops_packets_between_two_machines_only(cluster: Cluster) -> None:
    with echo_through_n2(cluster) as client:
        assert ask(client) == "echo"
        cluster.cut("n1", "n2")
        assert ask(client) == "silence"
        assert srun_lines(cluster, "hostname") == ["0: n1", "1: n2"]  # both still hear ctl
        cluster.heal()
        wait_until(lambda: ask(client) == "echo", 30, "an echo")  # when TCP next tries


def test_clusters_live_side_by_side_and_end_with_their_owner(cluster: Cluster) -> None:
    run = tempfile.mkdtemp(prefix="fs-slurm-", dir="/tmp")
    program = f"import subprocess; subprocess.run([{str(SCRIPT)!r}, '--run', {run!r}, 'start', '1', '--owner',"
    program += " str(__import__('os').getpid())], check=True)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.DEVNULL)
    second = type(cluster)(Path(run))
    machines = [Path(run, "machines", name).read_text().split()[0] for name in ("ctl", "n1")]
    wait_until(lambda: not any(Path("/proc", pid, "cwd").exists() for pid in machines), 10, "the machines to go")
    assert second.command("status").stdout.count("process none") == 2
    second.command("stop")
    assert not os.path.exists(run)
    assert srun_lines(cluster, "hostname") == ["0: n1", "1: n2"]


def test_start_leaves_a_foreign_directory_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = subprocess.run([str(SCRIPT), "--run", str(tmp_path), "start"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no test cluster" in done.stderr
    assert (tmp_path / "thesis.tex").exists()


class echo_through_n2:
    """A TCP connection from n1 to an echo server on n2; `ask` sends a byte through it."""

    def __init__(self, cluster: Cluster):
        self.server = cluster.popen(sys.executable, "-c", ECHO_SERVER, node="n2")
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "listening\n"
        self.client = subprocess.Popen(
            cluster.argv([sys.executable, "-c", ECHO_CLIENT], node="n1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.client

    def __exit__(self, *_: object) -> None:
        for process in (self.client, self.server):
            process.kill()
            process.communicate(timeout=10)


def ask(client: subprocess.Popen[str]) -> str:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write("\n")
    client.stdin.flush()
    return client.stdout.readline().strip()
