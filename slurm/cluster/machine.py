"""A machine of the test cluster: a process 1 in namespaces of its own, and how to reach it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.config import Cluster, ClusterError, daemons

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")


def boot(cluster: Cluster, machine: str) -> None:
    """Start a machine and plug it into the bridge that lies in ctl's network."""
    argv = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "slave"]
    argv += [sys.executable, os.path.abspath(sys.argv[0]), "--run", cluster.run, "init", machine]
    owner = os.pidfd_open(cluster.owner) if cluster.owner else -1
    with cluster.path("log", f"{machine}.out").open("w") as log:
        process = subprocess.Popen(
            [*argv, str(owner)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[owner] if owner >= 0 else [],
        )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: process.poll() is not None or children.read_text().strip(), 10, f"{machine}: no process 1")
    if process.poll() is not None:
        raise ClusterError(f"{machine} did not start: {cluster.path('log', f'{machine}.out').read_text()}")
    pid = int(children.read_text())
    cluster.path("machines", machine).write_text(f"{pid} {start_time(pid)}")
    plug_in(cluster, machine, pid)
    assert process.stdin is not None
    process.stdin.close()  # tells process 1 that its network is up


def plug_in(cluster: Cluster, machine: str, pid: int) -> None:
    """Give a machine its address: ctl on the bridge, a node on its end of a cable (veth) to the bridge."""
    device = device_of(machine)
    if machine == "ctl":
        ip_commands(pid, [f"link add {device} type bridge forward_delay 0"])
    else:
        port = f"to-{machine}"
        cable = f"link add {port} type veth peer name {device} netns {pid}"
        ip_commands(pid_of(cluster, "ctl"), [cable, f"link set {port} master br0 up"])
        # A revived node has its old network card: its peers need not find out that the card has changed.
        ip_commands(pid, [f"link set {device} address 02:00:00:00:01:{cluster.machines.index(machine):02x}"])
    address = f"addr add {cluster.address(machine)}/24 dev {device}"
    ip_commands(pid, ["link set lo up", address, f"link set {device} up"])


def device_of(machine: str) -> str:
    """The network device that has the machine's address."""
    return "br0" if machine == "ctl" else "eth0"


def init(cluster: Cluster, machine: str, owner: int) -> None:
    """Be process 1 of a machine: set it up, start its daemons, reap orphans. Ends with a daemon or with the owner."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    socket.sethostname(machine)
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    mount("-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")  # slurmd wants the directory, whatever the real machine has
    mount("--bind", str(cluster.path("hosts")), "/etc/hosts")
    own_tmp(cluster, machine)
    sys.stdin.read()
    pids = [start_daemon(argv) for argv in daemons(cluster, machine)]
    while not (owner >= 0 and select.select([owner], [], [], 0)[0]):
        signal.sigtimedwait({signal.SIGCHLD}, 1.0)
        for pid in reap():
            if pid in pids:
                raise ClusterError(f"{machine}: daemon {pids.index(pid)} has ended, see {cluster.path('log')}")


def own_tmp(cluster: Cluster, machine: str) -> None:
    """Replace /tmp by an empty one that holds only what is shared."""
    staged = cluster.path("machines", f"{machine}.tmp")
    staged.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(staged))
    for path in (cluster.run, *cluster.share):
        if path.startswith("/tmp/"):
            inside = staged / Path(path).relative_to("/tmp")
            inside.mkdir(parents=True, exist_ok=True)
            mount("--bind", path, str(inside))
    mount("--rbind", str(staged), "/tmp")


def start_daemon(argv: list[str]) -> int:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=unblock_signals)
    ready = [arg.partition("=")[2] for arg in argv if arg.startswith("--socket=")]
    wait_for(lambda: all(map(os.path.exists, ready)), 10, f"{argv[0]} made no socket")
    return process.pid


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def reap() -> list[int]:
    ended: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, timeout=10)


def ip_commands(pid: int, commands: list[str]) -> None:
    """Run `ip` commands in the network of a machine."""
    argv = ["nsenter", "-t", str(pid), "--net", "ip", "-batch", "-"]
    subprocess.run(argv, input="\n".join(commands), text=True, check=True, timeout=10)


# --- finding machines again ---------------------------------------------------------------------------------------


def start_time(pid: int) -> str | None:
    """A process's start in clock ticks, None if there is no such process: tells it from a later one of the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def find_pid(cluster: Cluster, machine: str) -> int | None:
    """Process 1 of a running machine, as seen from outside."""
    if machine not in cluster.machines:
        raise ClusterError(f"no machine {machine!r}: there are {', '.join(cluster.machines)}")
    record = cluster.path("machines", machine)
    pid, started = record.read_text().split() if record.exists() else ("0", "")
    return int(pid) if started and start_time(int(pid)) == started else None


def pid_of(cluster: Cluster, machine: str) -> int:
    pid = find_pid(cluster, machine)
    if pid is None:
        raise ClusterError(f"{machine} is not running: testcluster revive {machine}, or start")
    return pid


def enter(cluster: Cluster, machine: str, command: list[str]) -> list[str]:
    """The argv that runs a command on a machine, to be given `slurm_environment`. It dies with its caller."""
    here = os.getcwd() if is_shared(cluster, os.getcwd()) else "/"
    then = ["setpriv", "--pdeathsig", "TERM", "--", "env", "-C", here, "--"]
    return ["nsenter", "-t", str(pid_of(cluster, machine)), *NAMESPACES, "--", *then, *command]


def is_shared(cluster: Cluster, path: str) -> bool:
    """Whether all machines see the path."""
    return not path.startswith("/tmp") or any(Path(path).is_relative_to(s) for s in (cluster.run, *cluster.share))


def slurm_environment(cluster: Cluster) -> dict[str, str]:
    return {**os.environ, "SLURM_CONF": str(cluster.path("slurm.conf"))}


def output_of(cluster: Cluster, *command: str) -> str:
    """What a command prints on ctl; empty where it fails."""
    argv = enter(cluster, "ctl", list(command))
    done = subprocess.run(argv, env=slurm_environment(cluster), capture_output=True, text=True, timeout=30)
    return done.stdout


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} after {timeout_s:g} s")
        time.sleep(0.02)
