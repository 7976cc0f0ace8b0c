"""Issue 5, one started server: Shows 1, 6, 7, 8 and 5, in this order because 5 ends it. And the tunnel to it."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_support import OUR_PATH, PROMPT, SRUN, Cluster, Login, wait_until
from weights_read import bytes_needed_by_stage, bytes_read, watched

from fastserve_hpc.endpoint import Endpoint, load

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SUBNET = "10.77.0.0/24"
STRANGER = 4242
MODEL = ("--model", "smollm2-135m", "--device-kv", "64M", "--host-kv", "16M", "--max-model-len", "1024")
PROMPTS = [PROMPT, "def fibonacci(n):", "Water boils at", "Once upon a time, in a small village,"]

ASK = """
import json, sys
from fastserve_hpc.client import Client
with Client(job=sys.argv[1]) as client:
    for prompt in sys.argv[2:]:
        events = list(client.stream(prompt, max_tokens=24))
        print(json.dumps([sum(1 for e in events if e.token_ids), [t for e in events for t in e.token_ids]]))
"""


@dataclass(frozen=True)
class Served:
    """A server on two nodes, started as Show 1, 6, 7 and 8 want it, and one of a single process."""

    login: Login
    directory: Path
    job_id: str
    alone: str

    @property
    def endpoint(self) -> Endpoint:
        return load(self.endpoint_file)

    @property
    def endpoint_file(self) -> Path:
        return self.directory / "home" / "endpoints" / f"job-{self.job_id}.json"


@pytest.fixture(scope="module")
def served(session_cluster: Cluster) -> Iterator[Served]:
    directory = Path(tempfile.mkdtemp(dir="/var/tmp"))  # all machines see it
    directory.chmod(0o755)  # and every user: what protects the server is the server's
    (directory / "traces").mkdir()
    login = Login(session_cluster, directory / "home")
    for node in ("n1", "n2"):
        refuse_outside(session_cluster, node)
    login.environ["TRACES"] = str(directory / "traces")
    job_id = login.serve(*MODEL, "--pp", "2", launcher=(*SRUN, *watched()))
    alone = login.serve(*MODEL, launcher=("srun", "-N1", "-n1", "--mpi=pmi2"))
    yield Served(login, directory, job_id, alone)
    login.end()
    for node in ("n1", "n2"):
        session_cluster.run("nft", "flush", "ruleset", node=node)
    shutil.rmtree(directory)


def refuse_outside(cluster: Cluster, node: str) -> None:
    """Refuse, and count, what a node sends to anything but itself and the cluster's hosts."""
    rules = (
        "table inet offline { chain out { type filter hook output priority 0; "
        f'ip daddr {SUBNET} accept; oif "lo" accept; meta l4proto ipv6-icmp accept; counter reject; }}; }}'
    )
    done = cluster.run("nft", rules, node=node)
    if done.returncode != 0:  # not installed, or the kernel has none
        pytest.skip(f"no nftables here: {done.stderr.strip()}")


def num_refused(cluster: Cluster, node: str) -> int:
    found = re.search(r"counter packets (\d+)", cluster.run("nft", "list", "ruleset", node=node).stdout)
    assert found is not None
    return int(found[1])


def ask(served: Served, job_id: str) -> list[tuple[int, list[int]]]:
    """For each prompt, in how many pieces the answer came and its tokens."""
    command = (sys.executable, "-c", ASK, job_id, *PROMPTS)
    done = served.login.cluster.run(*command, **served.login.environ)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_show_1_pp_2_in_bf16_streams_the_ids_of_one_process_to_the_login_host(served: Served) -> None:
    two, one = ask(served, served.job_id), ask(served, served.alone)
    assert [tokens for _, tokens in two] == [tokens for _, tokens in one]
    assert all(pieces > 1 for pieces, _ in two), "a busy machine joins tokens, but not all of them"
    assert "Paris" in served.login.answer(served.job_id)
    status = served.login.status(served.job_id)
    assert (status["world_size"], status["pp"]) == (2, 2)


def test_show_6_a_node_reads_what_it_needs_of_the_model_once(served: Served) -> None:
    needs = bytes_needed_by_stage(2)
    for stage, node in enumerate(("n1", "n2")):
        assert needs[stage] <= bytes_read(served.directory / "traces", node) <= 1.05 * needs[stage]


def test_show_7_serves_where_nothing_but_the_nodes_can_be_reached(served: Served) -> None:
    """It does not even try: no packet to anywhere else was refused."""
    cluster = served.login.cluster
    served.login.answer(served.job_id)
    assert [num_refused(cluster, node) for node in ("n1", "n2")] == [0, 0]
    outside = "import socket; socket.create_connection(('192.0.2.1', 443), timeout=5)"
    cluster.run("ip", "route", "add", "default", "dev", "eth0", node="n2")
    assert cluster.run(sys.executable, "-c", outside, node="n2").returncode != 0
    cluster.run("ip", "route", "del", "default", node="n2")
    assert num_refused(cluster, "n2") > 0, "the rule must be one that counts"


def test_show_8_what_a_stranger_on_the_node_can_see(served: Served) -> None:
    """Modes under umask 000, and what a second user finds who knows all the names."""
    cluster, endpoint = served.login.cluster, served.endpoint
    [socket_file] = [a.removeprefix("ipc://") for a in endpoint.addresses if a.startswith("ipc://")]
    assert stat.S_IMODE(served.endpoint_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(served.endpoint_file.parent.stat().st_mode) == 0o700
    modes = cluster.run("stat", "-c", "%a", socket_file, str(Path(socket_file).parent), node="n1").stdout.split()
    assert modes == ["600", "700"]
    own_files = cluster.run("find", "/tmp", "/dev/shm", "-xdev", "-user", "root", "-newer", "/proc/1", node="n1")
    for path in own_files.stdout.split():
        if "fastserve" in path:
            mode = cluster.run("stat", "-c", "%a", path, node="n1").stdout.strip()
            assert mode in ("600", "700"), path
    assert endpoint.keys is not None
    file, tcp = str(served.endpoint_file), next(a for a in endpoint.addresses if a.startswith("tcp://"))
    ways_in = (
        f"open({file!r})",
        f"socket.socket(socket.AF_UNIX).connect({socket_file!r})",
        f"Client({file!r}).status()",
    )
    outcomes = as_user(cluster, 0, endpoint.keys.server_public, *ways_in)
    assert outcomes == ["came in"] * 3, "what is to be refused must work for the owner"
    guesses = (
        f"connect(Endpoint('x', [{tcp!r}]), 3)",
        f"connect(Endpoint('x', [{tcp!r}], keys=keys_of_ones_own()), 3)",
    )
    outcomes = as_user(cluster, STRANGER, endpoint.keys.server_public, *ways_in, *guesses)
    assert outcomes == ["PermissionError"] * 3 + ["EndpointError"] * 2
    assert served.login.answer(served.job_id)


AS_USER = """
import os, socket, sys, zmq
from fastserve_hpc.client import Client
from fastserve_hpc.client.connection import connect
from fastserve_hpc.endpoint import CurveKeys, Endpoint
user, server_public = int(sys.argv[1]), sys.argv[2]
def keys_of_ones_own():
    public, secret = zmq.curve_keypair()
    return CurveKeys(server_public, public.decode(), secret.decode())
if user:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
for attempt in sys.argv[3:]:
    try:
        exec(attempt)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        print(type(error).__name__)
    else:
        print("came in")
"""


def as_user(cluster: Cluster, user: int, server_public: str, *attempts: str) -> list[str]:
    """What comes of each attempt: "came in", or what it ends with."""
    command = (sys.executable, "-c", AS_USER, str(user), server_public, *attempts)
    done = cluster.run(*command, node="n1", PYTHONPATH=OUR_PATH)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_tunnel_from_elsewhere_leads_to_the_server(served: Served, tmp_path: Path) -> None:
    """`connect` on the login host; what it prints, with a forwarder in ssh's place, where no endpoints are known."""
    said = served.login.fastserve("connect", served.job_id, "--login", "me@ctl", "--local-port", "4711").stdout
    tunnel = re.search(r"ssh -N -L (\d+):(\S+):(\d+) me@ctl\n", said)
    copied = re.search(r"scp me@ctl:(\S+) \.\n", said)
    assert tunnel is not None
    assert copied is not None
    file = shutil.copy(copied[1], tmp_path)
    command = (sys.executable, "-c", FORWARD_AND_ASK, *tunnel.groups(), str(file), PROMPT)
    elsewhere = {**served.login.environ, "FASTSERVE_HPC_HOME": str(tmp_path / "home")}
    done = served.login.cluster.run(*command, **elsewhere)
    assert "Paris" in done.stdout, done.stderr


FORWARD_AND_ASK = """
import asyncio, sys, threading
from fastserve_hpc.client import Client
port, host, far_port, file, prompt = sys.argv[1:]
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
async def forward(reader, writer):
    far_reader, far_writer = await asyncio.open_connection(host, int(far_port))
    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
ready = threading.Event()
async def serve():
    await asyncio.start_server(forward, "127.0.0.1", int(port))
    ready.set()
    await asyncio.Event().wait()
threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
ready.wait()
with Client(file) as client:
    print(client.generate(prompt, max_tokens=8).text)
"""


# Requests run; then scancel. Says when the server was first seen to drain, and how each request ended.
CANCELLED = """
import json, subprocess, sys, threading, time
from fastserve_hpc.client import Client
from fastserve_hpc.errors import FastServeError
job, lengths = sys.argv[1], sys.argv[2:]
ends, started = {}, []
def run(length):
    try:
        with Client(job=job) as client:
            events = client.stream("Count:", max_tokens=int(length), ignore_eos=True)
            started.append(next(iter(events)))
            ends[length] = [e.finish_reason for e in events][-1]
    except FastServeError as error:
        ends[length] = f"error: {error}"
threads = [threading.Thread(target=run, args=[length]) for length in lengths]
for thread in threads:
    thread.start()
with Client(job=job) as watching:
    while len(started) < len(lengths):
        time.sleep(0.01)
    began = time.monotonic()
    subprocess.run(["scancel", job], check=True)
    while watching.status().state != "draining":
        time.sleep(0.01)
    draining_s = time.monotonic() - began
for thread in threads:
    thread.join()
print(json.dumps([draining_s, time.monotonic() - began, ends]))
"""


def test_show_5_scancel_of_a_serving_job_ends_it_in_good_order(served: Served) -> None:
    login = served.login
    command = (sys.executable, "-c", CANCELLED, served.job_id, "40", "900")
    done = login.cluster.run(*command, **login.environ)
    assert done.returncode == 0, done.stderr
    draining_s, ended_s, ends = json.loads(done.stdout)
    assert draining_s < 1.0
    assert ended_s < 10.0
    print(f"draining after {draining_s:.2f} s, over after {ended_s:.1f} s: {ends}")
    assert set(ends.values()) <= {"length", "cancelled"}, "a connection that is lost tells nobody anything"
    login.cluster.run("scancel", served.alone)
    wait_until(lambda: not login.ranks(), 20, "the ranks to end")
    assert served.endpoint.state == "ended"
    assert "has ended" in login.fastserve("status", "--job", served.job_id).stderr
