"""What ranks read of the weights of smollm2-135m, by strace, and what they need of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fastserve_hpc.models.gguf import read_header
from fastserve_hpc.models.locate import locate

# Under umask 000, and each rank watched by strace: what it reads, of which file.
_WATCHED = """
umask 000
exec strace -D -f -ff -y --seccomp-bpf -qq -e trace=read,pread64,readv,preadv,preadv2 -o "$TRACES/$SLURMD_NODENAME" "$@"
"""
_READ = re.compile(r"^(?:read|pread64|readv|preadv|preadv2)\(\d+<[^>]*\.gguf>.* = (\d+)$", re.MULTILINE)


def watched() -> tuple[str, ...]:
    """What srun is to start in front of the program; $TRACES is the directory of the traces. Skips without strace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    return ("sh", "-c", _WATCHED, "sh")


def bytes_read(traces: Path, node: str) -> int:
    """From files of the model, by all processes of a node."""
    texts = (trace.read_text(errors="replace") for trace in traces.glob(f"{node}.*"))
    return sum(int(number) for text in texts for number in _READ.findall(text))


def bytes_needed_by_stage(num_stages: int) -> list[int]:
    """Of the model's file, by the names in it: layers, embedding, and on the last stage norm and the (tied) head."""
    tensors = read_header(locate("smollm2-135m").path).tensors
    num_layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))

    def stages_of(name: str) -> set[int]:
        if name.startswith("blk."):
            return {int(name.split(".")[1]) * num_stages // num_layers}
        return {0, num_stages - 1} if name == "token_embd.weight" else {num_stages - 1}

    return [sum(t.nbytes for name, t in tensors.items() if stage in stages_of(name)) for stage in range(num_stages)]
