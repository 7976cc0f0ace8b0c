"""Judging what the ranks say about themselves: one pure function a check, from the facts of all ranks to findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from fastserve_hpc.config import EngineConfig
from fastserve_hpc.doctor.facts import UNLIMITED, Gpu, RankFacts
from fastserve_hpc.doctor.finding import Finding, ok
from fastserve_hpc.slurm.sizing import GIB, RankNeed, gib

Facts = Sequence[RankFacts]

SLOW_MODEL_S = 2.0
SLOW_LINK_S = 0.02
SLOW_LINK_BYTES_PER_S = 10e6
FEWEST_OPEN_FILES = 4096
LEAST_LOCKED_BYTES = GIB
LEAST_SHM_BYTES = 64 * 2**20
"""A rank's MPI and all-reduce buffers."""

_MPI_CURE = (
    "start with `srun --mpi=pmi2` for MPICH, `srun --mpi=pmix` for Open MPI, or the mpiexec of the installed MPI"
)


def examine(facts: Facts, engine: EngineConfig, need: RankNeed | None) -> list[Finding]:
    """All checks. `facts` are those of the ranks that were heard; `need` None is a model without weights."""
    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: check_world(facts, engine),
        lambda: check_settings(facts),
        lambda: check_versions(facts),
        lambda: check_model(facts),
        lambda: check_places(facts, engine),
        lambda: check_links(facts),
        lambda: check_gpus(facts),
        lambda: check_memory(facts, need, engine),
        lambda: check_limits(facts),
        lambda: check_cores(facts),
    ]
    return [finding for check in checks for finding in check()]


def check_world(facts: Facts, engine: EngineConfig) -> Iterable[Finding]:
    """Do launcher, MPI and settings agree on the number of ranks?"""
    first, size = facts[0], facts[0].world_size
    if first.announced > size:
        value = f"the launcher started {first.announced} ranks, but MPI sees {size}: each is a world of its own"
        yield _at(first, "error", "world", value, _MPI_CURE)
    elif size != engine.world_size:
        value = f"{size} rank{'s' if size > 1 else ''}, but --tp {engine.tp} x --pp {engine.pp} = {engine.world_size}"
        yield _at(first, "error", "world", value, f"start with -n {engine.world_size}")
    else:
        yield ok("world", f"{size} rank{'s' if size > 1 else ''}, --tp {engine.tp} x --pp {engine.pp}")


def check_settings(facts: Facts) -> Iterable[Finding]:
    """Were all ranks started with the same options? Otherwise they would wait for each other."""
    first = facts[0]
    for rank in facts:
        wrong = [name for name in {**first.settings, **rank.settings} if _differs(name, rank, first)]
        if wrong:
            told = (f"{name} {rank.settings.get(name)} (rank 0: {first.settings.get(name)})" for name in wrong)
            cure = "start all ranks with the same options and the same FASTSERVE_HPC_ variables"
            yield _at(rank, "error", "settings", ", ".join(told), cure)


def _differs(name: str, rank: RankFacts, first: RankFacts) -> bool:
    if name == "--model" and rank.model is not None and first.model is not None:
        return False  # it may lie elsewhere on each node; `check_model` compares the files
    return rank.settings.get(name) != first.settings.get(name)


def check_versions(facts: Facts) -> Iterable[Finding]:
    """Is the same software everywhere? The fewest ranks are taken to be wrong."""
    names = dict.fromkeys(name for rank in facts for name in rank.versions)
    for name in names:
        found = Counter(rank.versions.get(name, "unknown") for rank in facts)
        usual = found.most_common(1)[0][0]
        for rank in facts:
            if (version := rank.versions.get(name, "unknown")) != usual:
                value = f"{name} {version}, but {usual} on the other ranks"
                yield _at(rank, "error", "versions", value, "use one installation that all nodes share, or equal ones")
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in facts[0].versions.items()))


def check_model(facts: Facts) -> Iterable[Finding]:
    """Can every rank read the model, and is it the same one?"""
    probes = [(rank, rank.model) for rank in facts if rank.model is not None]
    readable = Counter(model.fingerprint for _, model in probes if not model.error)
    if not readable:  # their words hold the cure
        yield from (Finding("error", "model", text) for text in dict.fromkeys(model.error for _, model in probes))
        return
    usual = readable.most_common(1)[0][0]
    for rank, model in probes:
        if model.error:
            yield _at(rank, "error", "model", model.error, "put the model on a file system that all nodes share")
        elif model.fingerprint != usual:
            value = f"the files in {model.path} are not those that other ranks see"
            yield _at(rank, "error", "model", value, "copy the model again, or use a shared file system")
        elif model.seconds > SLOW_MODEL_S:
            value = f"{model.seconds:.1f} s to open the files in {model.path}"
            yield _at(rank, "warning", "model", value, "the file system is slow or busy: loading will be, too")
    if not any(model.error for _, model in probes):
        yield ok("model", f"{probes[0][1].path}, read by {len(probes)} rank(s)")


def check_places(facts: Facts, engine: EngineConfig) -> Iterable[Finding]:
    """Is each stage on one node? Its ranks talk in every layer."""
    for stage in range(engine.pp):
        ranks = [rank for rank in facts if rank.rank // engine.tp == stage]
        hosts = dict.fromkeys(rank.host for rank in ranks)
        if len(hosts) > 1:
            value = f"the {engine.tp} ranks of its stage are spread over {', '.join(hosts)}"
            cure = f"srun --distribution=block --ntasks-per-node=K with K a multiple of {engine.tp}"
            yield _at(ranks[0], "warning", "places", value, cure)


def check_links(facts: Facts) -> Iterable[Finding]:
    """Do messages get through between ranks that will need each other, and how fast?"""
    hosts = {rank.rank: rank.host for rank in facts}
    probes = [(rank, probe) for rank in facts for probe in rank.links]
    crowded = any(len(_cores_of_host(rank, facts)) < len(_neighbours(rank, facts)) for rank in facts)
    for rank, probe in probes:
        to = f"rank {probe.peer} on {hosts.get(probe.peer, 'an unknown host')}"
        if probe.error:
            cure = "the nodes must reach each other over TCP on any port: ask the site about firewalls and interfaces"
            yield _at(rank, "error", "links", f"to {to}: {probe.error}", cure)
        elif not crowded and (probe.latency_s > SLOW_LINK_S or probe.bytes_per_s < SLOW_LINK_BYTES_PER_S):
            value = f"to {to}: {probe.latency_s * 1e3:.1f} ms, {probe.bytes_per_s / 1e6:.0f} MB/s"
            yield _at(rank, "warning", "links", value, "are the nodes busy, or is there a faster network?")
    good = [probe for _, probe in probes if not probe.error]
    if good:
        slowest = max(probe.latency_s for probe in good) * 1e6
        yield ok("links", f"{len(good)}, at worst {slowest:.0f} us, {min(p.bytes_per_s for p in good) / 1e6:.0f} MB/s")
    reduces = [rank.all_reduce_s for rank in facts if rank.all_reduce_s is not None]
    if reduces:
        yield ok("links", f"all-reduce of 4 KiB: at worst {max(reduces) * 1e6:.0f} us")


def check_gpus(facts: Facts) -> Iterable[Finding]:
    """Where there are GPUs: one for each rank, no two ranks on one."""
    for rank in facts:
        if rank.gpu_error:
            cure = "run nvidia-smi on that node; tell the site if it fails too"
            yield _at(rank, "error", "gpus", f"NVML says {rank.gpu_error}", cure)
    seen = [rank for rank in facts if rank.gpus]
    without_cuda = [rank for rank in seen if not rank.torch_has_cuda]
    if without_cuda:
        value = f"{len(without_cuda[0].gpus)} GPU(s), but the installed torch is built without CUDA: they stay idle"
        yield _at(without_cuda[0], "warning", "gpus", value, "install a CUDA build of torch")
    elif seen:
        yield from _check_each_gpu(facts)


def _check_each_gpu(facts: Facts) -> Iterable[Finding]:
    users: dict[tuple[str, str], RankFacts] = {}
    for rank in facts:
        gpu = own_gpu(rank, facts)
        if gpu is None:
            cure = "ask for them: sbatch --gpus-per-node=N; is CUDA_VISIBLE_DEVICES set to nothing?"
            yield _at(rank, "error", "gpus", "no GPU is visible, but other ranks have one", cure)
            continue
        other = users.setdefault((rank.host_key, gpu.uuid), rank)
        if other is not rank:
            count = len(_neighbours(rank, facts))
            value = f"shares {gpu.uuid} with rank {other.rank}: {count} ranks, {len(rank.gpus)} visible GPU(s)"
            yield _at(rank, "error", "gpus", value, f"ask for --gpus-per-node={count}, or start fewer ranks a node")
    if users:
        yield ok("gpus", f"{len(users)}, at least {gib(min(_gpu_room(facts)))} free")


def _gpu_room(facts: Facts) -> list[int]:
    return [gpu.free_bytes for rank in facts if (gpu := own_gpu(rank, facts)) is not None]


def own_gpu(rank: RankFacts, facts: Facts) -> Gpu | None:
    """The GPU that this rank will take: the one with its number among the ranks of its node."""
    place = [other.rank for other in _neighbours(rank, facts)].index(rank.rank)
    return rank.gpus[place % len(rank.gpus)] if rank.gpus else None


def _neighbours(rank: RankFacts, facts: Facts) -> list[RankFacts]:
    """The ranks of the same machine, itself included."""
    return [other for other in facts if other.host_key == rank.host_key]


def check_memory(facts: Facts, need: RankNeed | None, engine: EngineConfig) -> Iterable[Finding]:
    """Will weights and KV cache fit? On CPUs the ranks of a node share its memory."""
    if need is None:
        return
    least = need.weight_bytes + (engine.device_kv or 0)
    wanted = need.weight_bytes + (engine.device_kv or need.kv_bytes)
    on_gpus = any(rank.gpus and rank.torch_has_cuda for rank in facts)
    rooms = _gpu_memory(facts) if on_gpus else _host_memory(facts, engine.host_kv or 0)
    for rank, free, ranks in rooms:
        what = f"{gib(free)} free for {ranks} rank(s)"
        if free < ranks * least:
            value = f"{what}, but weights{' and --device-kv' if engine.device_kv else ''} take {gib(ranks * least)}"
            yield _at(rank, "error", "memory", value, "use more ranks (--tp, --pp), or ask for more memory (--mem)")
        elif free < ranks * wanted:
            value = f"{what}; weights and the KV cache of a usual batch take {gib(ranks * wanted)}"
            cure = "requests will wait for each other: lower --max-model-len or use more ranks"
            yield _at(rank, "warning", "memory", value, cure)
    if rooms:
        yield ok("memory", f"at least {gib(min(free // ranks for _, free, ranks in rooms))} free a rank")


def _gpu_memory(facts: Facts) -> list[tuple[RankFacts, int, int]]:
    """(rank, free bytes, ranks that share them)"""
    own = [(rank, own_gpu(rank, facts)) for rank in facts]
    return [(rank, gpu.free_bytes, 1) for rank, gpu in own if gpu is not None]


def _host_memory(facts: Facts, taken_a_rank: int) -> list[tuple[RankFacts, int, int]]:
    by_host: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in facts:
        by_host[rank.host_key].append(rank)
    return [
        (ranks[0], min(rank.free_bytes for rank in ranks) - len(ranks) * taken_a_rank, len(ranks))
        for ranks in by_host.values()
    ]


def check_limits(facts: Facts) -> Iterable[Finding]:
    """Resource limits that bite only under load."""
    for rank in _one_a_host(facts):
        files, locked = rank.limits.open_files, rank.limits.locked_bytes
        if files != UNLIMITED and files < FEWEST_OPEN_FILES:
            cure = f"`ulimit -n {FEWEST_OPEN_FILES}` before the start; many clients need a socket each"
            yield _at(rank, "warning", "limits", f"at most {files} open files", cure)
        needs_locked = rank.gpus or rank.has_infiniband
        if needs_locked and locked != UNLIMITED and locked < LEAST_LOCKED_BYTES:
            cure = "`ulimit -l unlimited`; under Slurm ask the site for PropagateResourceLimitsExcept=MEMLOCK"
            yield _at(rank, "warning", "limits", f"at most {gib(locked)} of locked memory", cure)
        wanted_shm = LEAST_SHM_BYTES * len(_neighbours(rank, facts))
        if len(facts) > 1 and rank.shm_bytes < wanted_shm:
            value = f"{rank.shm_bytes / 2**20:.0f} MiB free in /dev/shm"
            cure = f"ranks of a node talk through it: free it, or enlarge it to {wanted_shm // 2**20} MiB (--shm-size)"
            yield _at(rank, "error" if rank.shm_bytes < wanted_shm // 8 else "warning", "limits", value, cure)


def check_cores(facts: Facts) -> Iterable[Finding]:
    """Has each rank more than one core, where the node has more to give?"""
    for rank in _one_a_host(facts):
        ranks = _neighbours(rank, facts)
        used = len(_cores_of_host(rank, facts))
        share = min(used // len(ranks), min(len(other.cores) for other in ranks))
        if share <= 1 and rank.host_cores >= 2 * len(ranks) and used < rank.host_cores:
            value = f"1 core for each of {len(ranks)} rank(s), and the node has {rank.host_cores}"
            cure = (
                "srun --cpus-per-task=N; in a batch script since Slurm 22.05: "
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; with mpiexec: -bind-to none"
            )
            yield _at(rank, "warning", "cores", value, cure)
        else:
            yield ok("cores", f"{used} for {len(ranks)} rank(s) on {rank.host}")


def _cores_of_host(rank: RankFacts, facts: Facts) -> set[int]:
    """Those that any rank of its machine may run on."""
    return {core for other in _neighbours(rank, facts) for core in other.cores}


def _one_a_host(facts: Facts) -> list[RankFacts]:
    first = {rank.host_key: rank for rank in reversed(facts)}
    return [rank for rank in facts if first[rank.host_key] is rank]


def _at(rank: RankFacts, level: str, check: str, value: str, cure: str) -> Finding:
    return Finding("error" if level == "error" else "warning", check, value, cure, rank.rank, rank.host)
