"""The endpoint file: all that a client needs to find a server, and how it is looked up.

The file lies in the state directory, which all nodes share. It is a hint: network file systems
show it late, and who was killed leaves it behind. The handshake's instance id decides.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fastserve_hpc.config import state_dir
from fastserve_hpc.core.engine import EngineState
from fastserve_hpc.errors import EndpointError
from fastserve_hpc.slurm.queue import active_jobs

DEFAULT_NAME = "default"
ENDPOINT_VARIABLE = "FASTSERVE_HPC_ENDPOINT"


class ServerProcess(msgspec.Struct, frozen=True):
    """A process, told apart from a later one that got its pid."""

    host: str
    pid: int
    pid_namespace: str
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ServerProcess:
        """A process of this host that is alive."""
        return cls(socket.gethostname(), pid, _pid_namespace(), _start_ticks(pid) or 0)

    @property
    def is_here(self) -> bool:
        """Whether this process could see it."""
        return self.host == socket.gethostname() and self.pid_namespace == _pid_namespace()

    def is_dead(self) -> bool:
        """True only if that is certain: it ran where we can see it and is there no more."""
        return self.is_here and _start_ticks(self.pid) != self.start_ticks


class CurveKeys(msgspec.Struct, frozen=True):
    """Z85 keys for TCP. Who can read the client's secret key may enter."""

    server_public: str
    client_public: str
    client_secret: str


class Endpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server as its endpoint file describes it."""

    name: str
    addresses: list[str]
    """ZeroMQ addresses, the nearest first."""
    instance_id: str | None = None
    """None where all that is known is an address."""
    state: EngineState = "ready"
    keys: CurveKeys | None = None
    model: str = ""
    max_model_len: int = 0
    job_id: str | None = None
    cluster: str | None = None
    """The Slurm cluster that counted the job."""
    process: ServerProcess | None = None
    started: float = 0.0
    """Seconds since 1970."""

    def is_dead(self) -> bool:
        """True only if that is certain."""
        return self.state == "ended" or (self.process is not None and self.process.is_dead())

    @property
    def is_of_a_job_elsewhere(self) -> bool:
        """Whether Slurm alone knows if it has died without a word."""
        return self.job_id is not None and (self.process is None or not self.process.is_here)

    def reachable_addresses(self) -> list[str]:
        """Those that make sense from this host, the nearest first."""
        local = self.process is None or self.process.host == socket.gethostname()
        return [a for a in self.addresses if local or not a.startswith("ipc://")]


def endpoints_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's servers leave their endpoint files."""
    return state_dir(dict(os.environ if environ is None else environ), Path.home()) / "endpoints"


def file_of(name: str, directory: Path) -> Path:
    return directory / f"{name}.json"


def load(path: Path) -> Endpoint:
    """Read an endpoint file. Raises `OSError` or `EndpointError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Endpoint)
    except msgspec.MsgspecError as error:
        raise EndpointError(f"{path} is not an endpoint file ({error}): remove it and start the server again") from None


def write(path: Path, endpoint: Endpoint) -> None:
    """For this user alone. Readers see the old file or the new one, also after a crash."""
    temporary = path.with_suffix(f".{endpoint.instance_id}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(msgspec.json.format(msgspec.json.encode(endpoint)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # the disk was full


def load_all(directory: Path) -> list[Endpoint]:
    """All endpoints that can be read, by name."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(load(path))
        except (OSError, EndpointError):
            continue
    return found


def without_ended_jobs(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Leave out those whose Slurm job is over: who was killed leaves a file behind that calls it ready."""
    jobs = active_jobs() if any(e.is_of_a_job_elsewhere for e in endpoints) else None
    if jobs is None:
        return list(endpoints)
    return [e for e in endpoints if not (e.is_of_a_job_elsewhere and e.job_id and jobs.has_ended(e.job_id, e.cluster))]


def find(
    target: str | os.PathLike[str] | None = None,
    *,
    job: str | int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """The endpoint that a client means: a name, a file's path, a tcp:// or ipc:// address, or a Slurm job.

    Without any: $FASTSERVE_HPC_ENDPOINT, this Slurm job's, the default one, or the only one there is.
    Raises `EndpointError` naming what was looked for, where, and the cure.
    """
    env = os.environ if environ is None else environ
    directory = endpoints_dir(env)
    if job is not None:
        if target is not None:
            raise EndpointError(f"both endpoint {os.fspath(target)!r} and job {job} were given: give one")
        return _alive(_of_job(str(job), directory), directory)
    target = target if target is not None else env.get(ENDPOINT_VARIABLE) or None  # empty: not set
    if target is None:
        return _alive(_usual(env, directory), directory)
    return _alive(_named(os.fspath(target), directory), directory)


def _named(target: str, directory: Path) -> Endpoint:
    if "://" in target:
        return _at_address(target, directory)
    is_path = "/" in target or target.endswith(".json")
    path = Path(target).expanduser() if is_path else file_of(target, directory)
    try:
        return load(path)
    except FileNotFoundError:
        where = f"no file {path}" if is_path else f"no endpoint named {target!r} in {directory}"
        raise EndpointError(f"{where}; {_alternatives(directory)}") from None
    except OSError as error:
        raise EndpointError(f"{path}: {error.strerror}") from error


def _at_address(address: str, directory: Path) -> Endpoint:
    """An address alone; the keys for TCP come from the endpoint file that lists it."""
    if not address.startswith(("tcp://", "ipc://")):
        raise EndpointError(f"address {address!r}: it must start with tcp:// or ipc://")
    for endpoint in load_all(directory):
        if address in endpoint.addresses:
            return msgspec.structs.replace(endpoint, addresses=[address])
    if address.startswith("tcp://"):
        raise EndpointError(
            f"no endpoint file in {directory} lists {address}, and TCP needs the keys that are in it: "
            "copy the server's endpoint file here and name that"
        )
    return Endpoint(name=address, addresses=[address])


def _of_job(job: str, directory: Path) -> Endpoint:
    all_of_it = [e for e in load_all(directory) if e.job_id == job]
    found = [e for e in all_of_it if not e.is_dead()]
    if len(found) == 1:
        return found[0]
    if found:
        raise EndpointError(f"job {job} has {len(found)} servers: name one with --endpoint: {_names(found)}")
    if all_of_it:
        raise EndpointError(f"the server of job {job} has ended; {_alternatives(directory)}")
    jobs = active_jobs()
    if jobs is not None and job in jobs.job_ids:
        raise EndpointError(
            f"job {job} has no server yet: it waits in the queue or is starting (squeue --jobs={job}; then its log)"
        )
    raise EndpointError(f"no server of job {job} in {directory}; {_alternatives(directory)}")


def _usual(environ: Mapping[str, str], directory: Path) -> Endpoint:
    named = [e for e in load_all(directory) if not e.is_dead()]
    living = {e.name: e for e in (without_ended_jobs(named) if len(named) > 1 else named)}
    for name in (default_name(environ), DEFAULT_NAME):
        if name in living:
            return living[name]
    if len(living) == 1:
        return next(iter(living.values()))
    if living:
        raise EndpointError(f"{len(living)} servers are running: name one with --endpoint: {', '.join(living)}")
    raise EndpointError(f"no server is running ({directory} has no endpoint): start one with 'fastserve-hpc serve'")


def default_name(environ: Mapping[str, str]) -> str:
    """What a server is called that was given no name."""
    job = environ.get("SLURM_JOB_ID")
    return f"job-{job}" if job else DEFAULT_NAME


def _alive(endpoint: Endpoint, directory: Path) -> Endpoint:
    if not endpoint.is_dead():
        return endpoint
    who = f" (pid {endpoint.process.pid} on {endpoint.process.host})" if endpoint.process else ""
    raise EndpointError(f"the server of endpoint {endpoint.name!r}{who} has ended; {_alternatives(directory)}")


def _alternatives(directory: Path) -> str:
    running = without_ended_jobs([e for e in load_all(directory) if not e.is_dead()])
    if running:
        return f"running are: {_names(running)}"
    return "none is running: start one with 'fastserve-hpc serve'"


def _names(endpoints: list[Endpoint]) -> str:
    return ", ".join(e.name for e in endpoints)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])
