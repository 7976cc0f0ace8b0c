"""Judging facts: each check with ranks as they should be and with one thing wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from fastserve_hpc.config import EngineConfig
from fastserve_hpc.doctor import checks
from fastserve_hpc.doctor.facts import Gpu, Limits, LinkProbe, ModelProbe, RankFacts
from fastserve_hpc.doctor.finding import Finding, at_level
from fastserve_hpc.slurm.sizing import GIB, RankNeed

NEED = RankNeed(weight_bytes=4 * GIB, kv_token_bytes=2**20, kv_tokens=2**10)


def ranks(count: int, per_host: int = 2, **changes: Any) -> list[RankFacts]:
    """Healthy ranks on hosts a, b, ...; `changes` apply to all."""
    usual: dict[str, Any] = {
        "world_size": count,
        "announced": count,
        "versions": {"fastserve-hpc": "1.0", "torch": "2.9"},
        "model": ModelProbe("/models/m", "f00d"),
        "host_cores": 8,
        "free_bytes": 64 * GIB,
        "shm_bytes": GIB,
    }
    return [
        RankFacts(
            rank=rank,
            host="abcdef"[rank // per_host],
            host_key="abcdef"[rank // per_host],
            **{"cores": [4 * (rank % per_host) + i for i in range(4)]} | usual | changes,
        )
        for rank in range(count)
    ]


def changed(facts: Sequence[RankFacts], rank: int, **changes: Any) -> list[RankFacts]:
    return [msgspec.structs.replace(one, **changes) if one.rank == rank else one for one in facts]


def problems(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def only(findings: Any) -> Finding:
    [finding] = problems(findings)
    return finding


ENGINE = EngineConfig(tp=2, pp=2)


def test_other_settings_on_a_rank_are_named() -> None:
    settings = {"--model": "/models/m", "--pp": "2", "--dtype": "auto"}
    facts = ranks(4, settings=settings)
    assert problems(checks.check_settings(facts)) == []
    elsewhere = changed(facts, 2, settings={**settings, "--model": "/local/m"})
    assert problems(checks.check_settings(elsewhere)) == []
    finding = only(checks.check_settings(changed(facts, 2, settings={**settings, "--dtype": "float32"})))
    assert (finding.level, finding.rank) == ("error", 2)
    assert finding.value == "--dtype float32 (rank 0: auto)"
    fake = changed(facts, 3, settings={**settings, "--model": "fake"}, model=None)
    assert only(checks.check_settings(fake)).value == "--model fake (rank 0: /models/m)"


def test_healthy_ranks_have_nothing() -> None:
    findings = checks.examine(ranks(4), ENGINE, NEED)
    assert problems(findings) == []
    assert {finding.check for finding in findings} >= {"world", "versions", "model", "memory", "cores"}


def test_a_wrong_number_of_ranks() -> None:
    finding = only(checks.check_world(ranks(4), EngineConfig(tp=2)))
    assert (finding.level, finding.cure) == ("error", "start with -n 2")
    assert "4 ranks, but --tp 2 x --pp 1 = 2" in finding.value


def test_worlds_of_size_one() -> None:
    finding = only(checks.check_world(ranks(1, announced=4), EngineConfig()))
    assert finding.level == "error"
    assert "started 4 ranks, but MPI sees 1" in finding.value
    assert "--mpi=pmi2" in finding.cure


def test_a_launcher_that_does_not_say_is_fine() -> None:
    assert problems(checks.check_world(ranks(4, announced=0), ENGINE)) == []


def test_another_version_on_one_rank() -> None:
    facts = changed(ranks(4), 3, versions={"fastserve-hpc": "1.1", "torch": "2.9"})
    finding = only(checks.check_versions(facts))
    assert (finding.level, finding.rank, finding.host) == ("error", 3, "b")
    assert finding.value == "fastserve-hpc 1.1, but 1.0 on the other ranks"


def test_something_missing_on_one_rank() -> None:
    facts = changed(ranks(3), 1, versions={"fastserve-hpc": "1.0"})
    assert only(checks.check_versions(facts)).value == "torch unknown, but 2.9 on the other ranks"


def test_model_missing_on_one_node() -> None:
    facts = changed(ranks(2, per_host=1), 1, model=ModelProbe("/models/m", error="/models/m: no such file"))
    findings = list(checks.check_model(facts))
    assert [(f.level, f.rank, f.host, f.value) for f in findings] == [("error", 1, "b", "/models/m: no such file")]


def test_a_model_that_no_rank_finds_is_named_once_and_in_its_own_words() -> None:
    """That it should lie on a shared file system would be no cure for a slip of the keyboard."""
    facts = ranks(3, per_host=1, model=ModelProbe("/m", error="/m: no such file; is the name right?"))
    assert list(checks.check_model(facts)) == [Finding("error", "model", "/m: no such file; is the name right?")]


def test_other_files_on_one_node() -> None:
    finding = only(checks.check_model(changed(ranks(3, per_host=1), 2, model=ModelProbe("/models/m", "beef"))))
    assert (finding.level, finding.rank, finding.host) == ("error", 2, "c")


def test_slow_files() -> None:
    finding = only(checks.check_model(changed(ranks(2), 0, model=ModelProbe("/m", "f00d", seconds=3.14))))
    assert (finding.level, finding.value) == ("warning", "3.1 s to open the files in /m")


def test_fake_model_is_not_looked_for() -> None:
    assert list(checks.check_model(ranks(2, model=None))) == []
    assert list(checks.check_memory(ranks(2, model=None), None, ENGINE)) == []


def test_a_stage_over_two_nodes() -> None:
    finding = only(checks.check_places(ranks(4, per_host=3), ENGINE))
    assert (finding.level, finding.rank) == ("warning", 2)
    assert "a, b" in finding.value
    assert "multiple of 2" in finding.cure


def test_a_broken_and_a_slow_link() -> None:
    facts = changed(ranks(4), 1, links=[LinkProbe(3, error="no message got through in 8 s")])
    broken = only(checks.check_links(facts))
    assert (broken.level, broken.rank, broken.host) == ("error", 1, "a")
    assert broken.value == "to rank 3 on b: no message got through in 8 s"
    slow_link = LinkProbe(0, latency_s=0.05, bytes_per_s=1e6)
    slow = only(checks.check_links(changed(ranks(4), 2, links=[slow_link])))
    assert (slow.level, slow.value) == ("warning", "to rank 0 on a: 50.0 ms, 1 MB/s")
    crowded = changed(ranks(4, cores=[0]), 2, links=[slow_link])
    assert problems(checks.check_links(crowded)) == []


def test_links_that_work_are_summed_up() -> None:
    facts = changed(ranks(2), 0, links=[LinkProbe(1, latency_s=3e-5, bytes_per_s=1e9)], all_reduce_s=1e-4)
    assert [f.value for f in checks.check_links(facts)] == [
        "1, at worst 30 us, 1000 MB/s",
        "all-reduce of 4 KiB: at worst 100 us",
    ]


def gpus(*names: str, free: int = 80 * GIB) -> list[Gpu]:
    return [Gpu(f"GPU-{name}", free) for name in names]


def test_a_gpu_for_each_rank() -> None:
    all_see_all = ranks(4, gpus=gpus("x", "y"), torch_has_cuda=True)  # the two nodes' GPUs happen to be called alike
    assert problems(checks.check_gpus(all_see_all)) == []
    bound = [msgspec.structs.replace(one, gpus=gpus(str(one.rank))) for one in all_see_all]
    assert problems(checks.check_gpus(bound)) == []


def test_two_ranks_on_one_gpu() -> None:
    finding = only(checks.check_gpus(changed(ranks(4, gpus=gpus("x", "y"), torch_has_cuda=True), 3, gpus=gpus("x"))))
    assert (finding.level, finding.rank, finding.host) == ("error", 3, "b")
    assert finding.value == "shares GPU-x with rank 2: 2 ranks, 1 visible GPU(s)"
    too_few = problems(checks.check_gpus(ranks(3, per_host=3, gpus=gpus("x", "y"), torch_has_cuda=True)))
    assert [f.rank for f in too_few] == [2]
    assert "--gpus-per-node=3" in too_few[0].cure


def test_a_rank_without_gpu() -> None:
    facts = changed(ranks(2, gpus=gpus("x", "y"), torch_has_cuda=True), 1, gpus=[])
    assert only(checks.check_gpus(facts)).value == "no GPU is visible, but other ranks have one"


def test_gpus_that_torch_cannot_use() -> None:
    finding = only(checks.check_gpus(ranks(2, gpus=gpus("x"))))
    assert (finding.level, finding.check) == ("warning", "gpus")
    assert "built without CUDA" in finding.value


def test_nvml_errors_are_passed_on() -> None:
    assert only(checks.check_gpus(changed(ranks(2), 1, gpu_error="Driver Not Loaded"))).rank == 1


def test_weights_that_do_not_fit_on_a_node() -> None:
    facts = changed(ranks(4), 2, free_bytes=7 * GIB)
    finding = only(checks.check_memory(facts, NEED, ENGINE))
    assert (finding.level, finding.host) == ("error", "b")
    assert finding.value == "7.0 GiB free for 2 rank(s), but weights take 8.0 GiB"


def test_cache_that_does_not_fit() -> None:
    facts = changed(ranks(4), 2, free_bytes=9 * GIB)
    assert only(checks.check_memory(facts, NEED, ENGINE)).level == "warning"  # 8 of weights, 2 of cache
    asked = EngineConfig(tp=2, pp=2, device_kv=GIB)
    assert "weights and --device-kv take 10.0 GiB" in only(checks.check_memory(facts, NEED, asked)).value
    with_host_tier = EngineConfig(tp=2, pp=2, host_kv=28 * GIB)
    assert only(checks.check_memory(ranks(2), NEED, with_host_tier)).level == "warning"


def test_gpu_memory_counts_where_there_are_gpus() -> None:
    facts = ranks(2, gpus=gpus("x", "y", free=3 * GIB), torch_has_cuda=True)
    found = problems(checks.check_memory(facts, NEED, ENGINE))
    assert [(f.level, f.rank) for f in found] == [("error", 0), ("error", 1)]
    assert (
        problems(checks.check_memory(ranks(2, gpus=gpus("x", "y"), free_bytes=0, torch_has_cuda=True), NEED, ENGINE))
        == []
    )


def test_low_limits() -> None:
    files = only(checks.check_limits(ranks(2, limits=Limits(open_files=1024))))
    assert (files.level, files.rank) == ("warning", 0)
    assert "ulimit -n 4096" in files.cure
    locked = Limits(locked_bytes=8 * 2**20)
    assert problems(checks.check_limits(ranks(2, limits=locked))) == []
    assert "ulimit -l" in only(checks.check_limits(ranks(2, limits=locked, has_infiniband=True))).cure
    assert "ulimit -l" in only(checks.check_limits(ranks(2, limits=locked, gpus=gpus("x")))).cure


@pytest.mark.parametrize(("free_mib", "level"), [(100, "warning"), (10, "error")])
def test_little_shared_memory(free_mib: int, level: str) -> None:
    finding = only(checks.check_limits(changed(ranks(4), 2, shm_bytes=free_mib * 2**20)))
    assert (finding.level, finding.host) == (level, "b")
    assert problems(checks.check_limits(ranks(1, shm_bytes=0))) == []


def test_one_core_a_rank() -> None:
    bound = [msgspec.structs.replace(one, cores=[one.rank]) for one in ranks(2)]
    finding = only(checks.check_cores(bound))
    assert finding.level == "warning"
    assert "SRUN_CPUS_PER_TASK" in finding.cure
    assert only(checks.check_cores(ranks(2, cores=[0, 1]))).value == "1 core for each of 2 rank(s), and the node has 8"


def test_one_core_a_rank_on_a_node_without_more() -> None:
    assert problems(checks.check_cores(ranks(2, cores=[0, 1], host_cores=2))) == []
    assert problems(checks.check_cores(ranks(1, cores=[0], host_cores=1))) == []


def test_findings_read_well() -> None:
    finding = Finding("error", "model", "no such file", "copy it", 3, "b")
    assert str(finding) == "model: rank 3 on b: no such file; copy it"
    assert at_level([finding, Finding("ok", "x", "y")], "ok") == [Finding("ok", "x", "y")]
