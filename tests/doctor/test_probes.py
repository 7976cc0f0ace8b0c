"""What a rank finds out about itself, and that nothing keeps it waiting."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve_hpc.config import EngineConfig
from fastserve_hpc.doctor import preflight, probes, raise_errors, run
from fastserve_hpc.doctor.exchange import decode_facts
from fastserve_hpc.doctor.facts import Gpu, ModelProbe
from fastserve_hpc.doctor.finding import Finding
from fastserve_hpc.doctor.preflight import unreachable
from fastserve_hpc.errors import ConfigError
from fastserve_hpc.models import libraries


def write_model(path: Path, weights: bytes = b"w" * 10000) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    usual = probes.fingerprint_of(write_model(tmp_path / "a"))
    assert probes.fingerprint_of(write_model(tmp_path / "b")) == usual
    assert probes.fingerprint_of(write_model(tmp_path / "c", b"v" * 10000)) != usual
    assert probes.fingerprint_of(write_model(tmp_path / "d", b"w" * 9999)) != usual
    (tmp_path / "b" / "tokenizer.json").touch()
    assert probes.fingerprint_of(tmp_path / "b") != usual


def test_model_that_is_there(tmp_path: Path) -> None:
    probe = probes.probe_model(str(write_model(tmp_path / "m")), timeout_s=5)
    assert (probe.path, probe.error) == (str(tmp_path / "m"), "")
    assert len(probe.fingerprint) == 16


def test_model_that_is_not_there(tmp_path: Path) -> None:
    probe = probes.probe_model(str(tmp_path / "m"), timeout_s=5)
    assert "no such file or directory" in probe.error
    assert probe.fingerprint == ""


def test_model_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m")

    def refuse(self: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    assert probes.probe_model(str(path), timeout_s=5).error == f"{path}/config.json: Permission denied"


def test_dead_file_system(tmp_path: Path) -> None:
    """Opening a FIFO that nobody writes to blocks as a dead mount does."""
    path = write_model(tmp_path / "m")
    os.mkfifo(path / "fifo")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.2 s"):
        probes.within(0.2, (path / "fifo").read_bytes)
    assert time.monotonic() - began < 1
    os.close(os.open(path / "fifo", os.O_WRONLY))  # lets the thread go


def test_errors_come_out_of_the_thread() -> None:
    with pytest.raises(ZeroDivisionError):
        probes.within(5, lambda: 1 // 0)


GPUS = [Gpu(f"GPU-{name}", 0) for name in ("aa1", "ab2", "bb3")]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("NoDevFiles", []),
        ("2, 0", [2, 0]),
        ("1,9,0", [1]),
        ("-1,0", []),
        ("GPU-b", [2]),
        ("GPU-a", []),  # fits two
        ("GPU-ab2,0", [1, 0]),
    ],
)
def test_visible_gpus(visible: str | None, indices: list[int]) -> None:
    assert probes.visible_gpus(GPUS, visible) == [GPUS[i] for i in indices]


class FakeNvml(SimpleNamespace):
    """As much of pynvml as the probe calls; a handle is a UUID."""

    NVMLError = OSError

    def __init__(self) -> None:
        super().__init__(nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2)
        self.nvmlDeviceGetHandleByIndex = lambda i: f"GPU-{i}"
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetUUID = lambda handle: handle
        self.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(free=1000 + len(handle))


def test_gpus_and_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert probes.probe_gpus({}) == ([Gpu("GPU-0", 1005), Gpu("GPU-1", 1005)], "")
    assert probes.probe_gpus({"CUDA_VISIBLE_DEVICES": "MIG-77"}) == ([Gpu("MIG-77", 1006)], "")


def test_nvml_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError("GPU is lost")

    nvml = FakeNvml()
    nvml.nvmlDeviceGetCount = fail
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert probes.probe_gpus({}) == ([], "GPU is lost")
    nvml.nvmlInit = fail  # no driver: a machine without GPUs
    assert probes.probe_gpus({}) == ([], "")


def test_facts_of_another_version() -> None:
    finding = decode_facts(3, b'{"rank": "three"}')
    assert isinstance(finding, Finding)
    assert (finding.level, finding.check, finding.rank) == ("error", "versions", 3)
    facts = decode_facts(3, b'{"rank": 3, "a_new_field": 1}')
    assert not isinstance(facts, Finding)
    assert facts.model is None


def test_one_rank_is_quick_and_well() -> None:
    began = time.monotonic()
    findings = run(None, EngineConfig(model="fake"), {})
    assert time.monotonic() - began < 0.3
    assert not [finding for finding in findings if finding.level == "error"]
    raise_errors(findings, None)


def test_one_rank_with_a_missing_model(tmp_path: Path) -> None:
    findings = run(None, EngineConfig(model=str(tmp_path / "gone")), {})
    with pytest.raises(ConfigError, match=r"cannot start:\n  model: --model .*gone: no such file"):
        raise_errors(findings, None)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (EngineConfig(tp=2), r"--tp 2 cannot share out the 9 heads and 3 KV heads of .*: use one of 1, 3, 9"),
        (EngineConfig(pp=31), r"--pp 31, but the model has 30 layers"),
        (EngineConfig(max_model_len=9000), r"--max-model-len 9000: .* was trained for 8192 positions"),
    ],
)
def test_settings_that_the_model_cannot_be_served_with(engine: EngineConfig, message: str) -> None:
    values = [
        finding.value for finding in run(None, engine, {}) if finding.check == "model" and finding.level == "error"
    ]
    assert len(values) == 1
    assert re.match(message, values[0])


def test_broken_config(tmp_path: Path) -> None:
    findings = run(None, EngineConfig(model=str(write_model(tmp_path / "m"))), {})
    [error] = [finding for finding in findings if finding.level == "error"]
    assert "config.json" in error.value


def test_an_installation_of_the_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "NEEDED", ("json", "no_torch", "no_tokenizers"))
    [error] = [finding for finding in run(None, EngineConfig(), {}) if finding.level == "error"]
    assert error.value.startswith("a server needs no_torch, no_tokenizers, which this installation lacks")


def test_a_refusal_is_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = server.getsockname()[1]
        assert unreachable(["127.0.0.1", "localhost"], 2, open_port) == {}
    assert unreachable(["127.0.0.1"], 2, open_port) == {}
    assert unreachable(["no-such-host.invalid"], 2) == {}


def test_no_route_is_named() -> None:
    assert unreachable(["255.255.255.255"], 2) == {"255.255.255.255": "ENETUNREACH"}


def test_preflight_is_for_slurm_steps_of_several_nodes() -> None:
    assert preflight({}) == []
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURMD_NODENAME": "localhost"}
    assert preflight({**step, "SLURM_STEP_NODELIST": "localhost"}) == []
    silent = preflight({**step, "SLURM_STEP_NODELIST": "localhost,255.255.255.255"}, timeout_s=2)
    [finding] = silent
    assert str(finding).startswith("links: rank 0 on localhost: 255.255.255.255 does not answer (ENETUNREACH); MPI")
    assert preflight({**step, "SLURM_STEP_NODELIST": "localhost,255.255.255.255", "SLURM_LOCALID": "1"}) == []


def test_a_model_probe_has_defaults() -> None:
    assert ModelProbe() == ModelProbe(path="", fingerprint="", error="", seconds=0.0)
