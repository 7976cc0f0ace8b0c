"""What a test cluster is, and the files that its daemons read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SUBNET = "10.77.0"
NUM_GPUS = 8
"""What each node claims to have."""


class ClusterError(Exception):
    """What the user reads; `status` is the exit status."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Cluster:
    """What `start` was told; the other commands read it back from the run directory."""

    run: str
    num_nodes: int
    cpus: int
    share: tuple[str, ...]
    owner: int | None

    @property
    def nodes(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.num_nodes + 1)]

    @property
    def machines(self) -> list[str]:
        return ["ctl", *self.nodes]

    def path(self, *parts: str) -> Path:
        return Path(self.run, *parts)

    def address(self, machine: str) -> str:
        return f"{SUBNET}.{1 if machine == 'ctl' else 10 + self.nodes.index(machine) + 1}"


def load(run: Path) -> Cluster:
    try:
        fields = json.loads((run / "cluster.json").read_text())
    except FileNotFoundError:
        raise ClusterError(f"no cluster in {run}: testcluster --run {run} start") from None
    return Cluster(**{**fields, "share": tuple(fields["share"])})


def slurm_conf(cluster: Cluster) -> str:
    """One file for the controller and all nodes. Short time-outs: a dead node is to be noticed within a test."""
    run = cluster.run
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"ctl({cluster.address('ctl')})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        # cred_expire bounds how long a requeued job waits before it starts again.
        "AuthInfo": f"socket={run}/munge/socket,cred_expire=5",
        "StateSaveLocation": f"{run}/state",
        "SlurmdSpoolDir": f"{run}/spool/%n",
        "SlurmctldPidFile": f"{run}/slurmctld.pid",
        "SlurmdPidFile": f"{run}/slurmd-%n.pid",
        "SlurmctldLogFile": f"{run}/log/slurmctld.log",
        "SlurmdLogFile": f"{run}/log/slurmd-%n.log",
        # No cgroups, no systemd, no pinning: the real machine may be a container with two cores.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "GresTypes": "gpu",
        "MpiDefault": "pmi2",
        "ReturnToService": "2",
        "SlurmdTimeout": "10",
        "MessageTimeout": "10",
        "KillWait": "5",
        "MinJobAge": "600",
        "SchedulerType": "sched/builtin",
        "SchedulerParameters": "sched_interval=2,batch_sched_delay=0",
        "PropagateResourceLimits": "NONE",
        "MailProg": "/bin/true",
    }
    shape = f"CPUs={cluster.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cluster.cpus} ThreadsPerCore=1"
    lines = [f"{key}={value}" for key, value in settings.items()]
    for node in cluster.nodes:
        lines.append(f"NodeName={node} NodeAddr={cluster.address(node)} {shape} RealMemory=1000000 Gres=gpu:{NUM_GPUS}")
    return "\n".join([*lines, "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""])


def write_files(cluster: Cluster) -> None:
    for name in ("state", "log", "spool", "munge", "machines", "gpus", *(f"spool/{node}" for node in cluster.nodes)):
        cluster.path(name).mkdir(parents=True)
    hosts = ["127.0.0.1 localhost", *(f"{cluster.address(m)} {m}" for m in cluster.machines)]
    cluster.path("hosts").write_text("\n".join(hosts) + "\n")
    cluster.path("slurm.conf").write_text(slurm_conf(cluster))
    cluster.path("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for i in range(NUM_GPUS):  # to be asked for, not to be used
        cluster.path("gpus", str(i)).touch()
    cluster.path("gres.conf").write_text(f"Name=gpu File={cluster.path('gpus')}/[0-{NUM_GPUS - 1}]\n")
    key = cluster.path("munge", "key")
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    cluster.path("cluster.json").write_text(json.dumps(asdict(cluster)))


def daemons(cluster: Cluster, machine: str) -> list[list[str]]:
    """What runs on a machine, in the order of its start."""
    conf = str(cluster.path("slurm.conf"))
    if machine != "ctl":
        return [["slurmd", "-D", "-N", machine, "-f", conf]]
    munge = cluster.path("munge")
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{flag}={munge / name}" for flag, name in files.items())]
    return [munged, ["slurmctld", "-D", "-c", "-f", conf]]
