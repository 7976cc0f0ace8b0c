"""Settings to scripts: golden files, options, and what the shipped scripts say."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from model_specs import LLAMA_8B, LLAMA_70B, SMALL
from slurm_support import REPOSITORY, Cluster

from fastserve_hpc.config import EngineConfig, ServerConfig, parse_size
from fastserve_hpc.errors import ConfigError, ModelError
from fastserve_hpc.models.spec import ModelSpec
from fastserve_hpc.slurm.jobs import (
    JobConfig,
    batch_script,
    format_size,
    serve_script,
    settings_options,
    shards_of,
    split_option,
)
from fastserve_hpc.slurm.options import SbatchConfig
from fastserve_hpc.slurm.script import Script, Shard, render

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = REPOSITORY / "slurm"


Settings = Mapping[str, Any]
NONE: Settings = {}


def job(spec: ModelSpec = SMALL, *, engine: Settings = NONE, slurm: Settings = NONE, **more: Any) -> JobConfig:
    return JobConfig(
        engine=EngineConfig(**{"model": f"/models/{spec.name}"} | dict(engine)),
        server=more.pop("server", ServerConfig()),
        slurm=SbatchConfig(**slurm),
        model_name=more.pop("model_name", spec.name),
        spec=spec,
        **more,
    )


ONE_FILE = (Shard("in.jsonl", "out.jsonl"),)
SCRIPTS: dict[str, Script] = {
    "serve-cpu": serve_script(job()),
    "serve-two-nodes": serve_script(
        job(engine={"pp": 2, "dtype": "bfloat16"}, slurm={"nodes": 2, "cpus_per_task": 16})
    ),
    "serve-gpus": serve_script(
        job(
            LLAMA_70B,
            engine={"max_model_len": 8192, "device_kv": 2**34},
            slurm={
                "gpus_per_node": 4,
                "gpu_memory": parse_size("40G"),
                "gpu_type": "a100",
                "time": "1-00:00:00",
                "partition": "gpu",
                "account": "group one",
                "qos": "normal",
                "env": "slurm/env.sh",
                "log": "logs/%x-%j.log",
            },
            server=ServerConfig(endpoint="shared", drain_s=60.0),
            layout_is_free=True,
            sbatch_options=("exclusive", '--comment=it\'s "ours"; $(rm -rf /) `x` # not a comment \\'),
            srun_options=("cpu-bind=cores",),
        )
    ),
    "serve-gres": serve_script(
        job(
            LLAMA_8B,
            engine={"tp": 2},
            slurm={"gpus_per_node": 8, "gpu_type": "h100", "gpu_request": "gres", "mpi": "site", "mem": "200G"},
            mpi=None,
        )
    ),
    "batch": batch_script(job(slurm={"time": "30", "constraint": "amd&ib"}), ONE_FILE),
    "batch-array": batch_script(
        job(engine={"max_batch": 256}, slurm={"gpus_per_node": 1, "gpu_memory": 2**34}),
        shards_of(["shards/a.jsonl", "shards/it's b.jsonl", "c.jsonl"], "re sults"),
        array_limit=2,
    ),
}


def shipped(engine: Settings, slurm: Settings) -> JobConfig:
    slurm = {"cpus_per_task": 4, "env": "slurm/env.sh", **slurm}
    return job(SMALL, engine={"model": "smollm2-135m", **engine}, slurm=slurm, model_name="smollm2-135m")


SHIPPED_SCRIPTS = {
    "serve.sbatch": serve_script(shipped({"pp": 2}, {"nodes": 2})),
    "batch.sbatch": batch_script(shipped({}, {}), ONE_FILE),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_golden_files(name: str) -> None:
    """After a wanted change: REWRITE_GOLDEN=1 pytest tests/slurm/test_jobs.py, and read the diff."""
    check_file(GOLDEN / f"{name}.sbatch", render(SCRIPTS[name]))


@pytest.mark.parametrize("name", SHIPPED_SCRIPTS)
def test_shipped_scripts_are_what_the_generator_prints(name: str) -> None:
    check_file(SHIPPED / name, render(SHIPPED_SCRIPTS[name]))


def check_file(path: Path, text: str) -> None:
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_every_golden_file_has_its_script() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(SCRIPTS)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_show_9_shellcheck_is_clean() -> None:
    others = [REPOSITORY / ".ci" / "run", *(REPOSITORY / "launch").glob("*.sh")]
    paths = [*GOLDEN.iterdir(), *SHIPPED.glob("*.sbatch"), SHIPPED / "env.sh", *others]
    done = subprocess.run(["shellcheck", "-x", *map(str, paths)], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.slurm
def test_show_9_sbatch_takes_every_script(cluster: Cluster) -> None:
    """But for what the test cluster does not have: another partition, node features, kinds of GPU."""
    missing = {
        "--partition=gpu": "--partition=main",
        "--constraint=": "--comment=",
        ":a100:": ":",
        "a100:": "",
        "h100:": "",
    }
    script = cluster.run_dir / "script"
    for path in [*GOLDEN.iterdir(), *SHIPPED.glob("*.sbatch")]:
        text = path.read_text()
        for theirs, ours in missing.items():
            text = text.replace(theirs, ours)
        script.write_text(text)
        done = cluster.run("sbatch", "--test-only", str(script))
        assert done.returncode == 0, f"{path.name}: {done.stderr}"
        assert "to start at" in done.stderr


def test_options_are_those_that_differ_from_the_defaults() -> None:
    assert settings_options(EngineConfig(), ServerConfig()) == [("model", "smollm2-135m")]
    engine = EngineConfig(model="m", pp=3, host_kv=3 * 2**29, dtype="float32")
    server = ServerConfig(endpoint="x", tcp=True, lease_s=2.5)
    assert settings_options(engine, server) == [
        ("model", "m"),
        ("pp", "3"),
        ("dtype", "float32"),
        ("host-kv", "1536M"),
        ("endpoint", "x"),
        ("tcp", None),
        ("lease-s", "2.5"),
    ]
    assert settings_options(server, without=("tcp", "endpoint")) == [("lease-s", "2.5")]


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 3 * 2**19, 2**30, 5 * 2**40, 2**40 + 1])
def test_sizes_are_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_layout_follows_the_gpus_only_where_nobody_chose_it() -> None:
    gpus = {"gpus_per_node": 4, "gpu_memory": parse_size("24G")}
    free = serve_script(job(LLAMA_8B, slurm=gpus, layout_is_free=True))
    assert ("tp", "2") not in serve_script(job(LLAMA_8B, slurm=gpus)).options
    assert ("tp", "2") in free.options
    assert ("gpus-per-node", "2") in free.directives
    assert ("ntasks-per-node", "2") in free.directives


def test_too_small_a_layout_is_said_in_the_script() -> None:
    slurm = {"gpus_per_node": 1, "gpu_memory": 2**34}
    assert "less than the longest request" in serve_script(job(LLAMA_8B, slurm=slurm)).notes[-1]
    assert "room for about" in serve_script(job(SMALL, slurm=slurm)).notes[-1]


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(ModelError, match="use one of 1, 3, 9"):
        serve_script(job(SMALL, engine={"tp": 2}))
    with pytest.raises(ConfigError, match="use --nodes 1, 2"):
        serve_script(job(SMALL, engine={"pp": 2}, slurm={"nodes": 3}))


def test_a_model_without_weights_is_not_sized() -> None:
    fake = dataclasses.replace(job(engine={"model": "fake", "tp": 2}), model_name="fake", spec=None)
    text = render(serve_script(fake))
    assert "--job-name=fastserve-fake" in text
    assert "--ntasks-per-node=2" in text
    assert "--mem" not in text
    assert "weights" not in text


def test_two_results_in_one_file_are_refused() -> None:
    shards = shards_of(["a/x.jsonl", "b/x.jsonl"], "out")
    with pytest.raises(ConfigError, match=r"a/x\.jsonl and b/x\.jsonl would both write out/x\.results\.jsonl"):
        batch_script(job(), shards)


@pytest.mark.parametrize(
    ("text", "option"),
    [("exclusive", ("exclusive", None)), ("--a-b=c=d", ("a-b", "c=d")), ("mail-user=me@x", ("mail-user", "me@x"))],
)
def test_further_options(text: str, option: tuple[str, str | None]) -> None:
    assert split_option(text) == option


@pytest.mark.parametrize("text", ["", "a b=c", "x=", "=x", "a\n#SBATCH --b", "A=b"])
def test_further_options_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is no option"):
        split_option(text)


@pytest.mark.parametrize(
    ("time", "limit_s", "signal_s"),
    [
        ("90", 5400, 120),
        ("1", 60, 15),
        ("01:30", 90, 22),
        ("04:00:00", 14400, 120),
        ("2-12", 216000, 120),
        ("1-00:30", 88200, 120),
    ],
)
def test_time_limits(time: str, limit_s: int, signal_s: int) -> None:
    config = SbatchConfig(time=time)
    assert (config.limit_s, config.signal_s(drain_s=25.0)) == (limit_s, signal_s)


def test_the_warning_leaves_time_to_drain() -> None:
    assert SbatchConfig().signal_s(drain_s=299.5) == 360
    assert SbatchConfig(time="10").signal_s(drain_s=299.5) == 150
    assert SbatchConfig(time="9-0", warn_s=100000).signal_s(drain_s=25.0) == 65535


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": "soon"}, "--time soon"),
        ({"time": "1:2:3"}, "--time 1:2:3"),
        ({"nodes": 0}, "--nodes 0: it must be at least 1"),
        ({"cpus_per_task": 0}, "--cpus-per-task 0"),
        ({"time": "2", "warn_s": 120}, "--warn-s 120 leaves nothing of --time 2"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SbatchConfig(**settings)
