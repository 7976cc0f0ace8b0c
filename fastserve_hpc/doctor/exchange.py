"""Facts to rank 0, its findings back: over MPI, point to point, because a collective would hang with its worst rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fastserve_hpc.doctor.facts import RankFacts
from fastserve_hpc.doctor.finding import Finding
from fastserve_hpc.doctor.links import Deadline, every

if TYPE_CHECKING:
    from fastserve_hpc.parallel.mpi_api import MPI

FACTS_TAG, FINDINGS_TAG = 9004, 9005
UNKNOWN_HOST = "an unknown host"

_encode = msgspec.json.Encoder().encode
_decode_findings = msgspec.json.Decoder(list[Finding]).decode


def decode_facts(rank: int, message: bytes) -> RankFacts | Finding:
    """A rank's facts, or that it speaks another language."""
    try:
        return msgspec.json.decode(message, type=RankFacts)
    except msgspec.MsgspecError as error:
        return _other_version(rank, UNKNOWN_HOST, f"its report cannot be read ({error})")


def _other_version(rank: int, host: str, value: str) -> Finding:
    return Finding("error", "versions", value, "install the same version of fastserve-hpc on all nodes", rank, host)


def send_facts(world: MPI.Intracomm, facts: RankFacts, deadline: Deadline) -> list[Finding]:
    """Tell rank 0 and hear what it finds; if it says nothing in time, that is the finding."""
    message = _encode(facts)
    sent = world.Isend(message, 0, FACTS_TAG)
    if not deadline.wait(sent.Test) or (answer := _receive(world, 0, FINDINGS_TAG, deadline)) is None:
        cure = "see what rank 0 says; is its node up, and may the nodes talk to each other over TCP?"
        silence = f"no word from rank 0 in {deadline.seconds:g} s"
        return [Finding("error", "links", silence, cure, facts.rank, facts.host, is_own=True)]
    try:
        return _decode_findings(answer)
    except msgspec.MsgspecError:
        garbled = _other_version(facts.rank, facts.host, "what rank 0 says cannot be read here")
        return [msgspec.structs.replace(garbled, is_own=True)]


def collect_facts(world: MPI.Intracomm, own: RankFacts, deadline: Deadline) -> list[RankFacts | Finding]:
    """On rank 0: what every rank says, in rank order. A rank without a word is a finding."""
    heard: dict[int, RankFacts | Finding] = {0: own}

    def hear() -> bool:
        while (arrived := _probe(world)) is not None:
            message = _receive(world, arrived, FACTS_TAG, deadline)
            if message is not None:
                heard[arrived] = decode_facts(arrived, message)
        return len(heard) == world.size

    deadline.wait(hear)
    cure = "is its node up, and may it reach rank 0's over TCP?"
    silence = f"no word from it in {deadline.seconds:g} s"
    missing = {rank: Finding("error", "links", silence, cure, rank, UNKNOWN_HOST) for rank in range(world.size)}
    return [missing[rank] if rank not in heard else heard[rank] for rank in range(world.size)]


def send_findings(world: MPI.Intracomm, findings: list[Finding], ranks: list[int], deadline: Deadline) -> None:
    """From rank 0 to those ranks that were heard."""
    message = _encode(findings)
    requests = [world.Isend(message, rank, FINDINGS_TAG) for rank in ranks]
    deadline.wait(lambda: every(request.Test() for request in requests))


def _probe(world: MPI.Intracomm) -> int | None:
    """A rank whose facts have arrived."""
    from fastserve_hpc.parallel.mpi_api import MPI

    status = MPI.Status()
    return int(status.source) if world.Iprobe(MPI.ANY_SOURCE, FACTS_TAG, status) else None


def _receive(world: MPI.Intracomm, source: int, tag: int, deadline: Deadline) -> bytes | None:
    """The next message of a rank; None after the deadline."""
    from fastserve_hpc.parallel.mpi_api import MPI

    status = MPI.Status()
    if not deadline.wait(lambda: bool(world.Iprobe(source, tag, status))):
        return None
    buffer = bytearray(status.Get_count(MPI.BYTE))
    request = world.Irecv(buffer, source, tag)
    return bytes(buffer) if deadline.wait(request.Test) else None
