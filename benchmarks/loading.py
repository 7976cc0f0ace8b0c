"""How fast a model is loaded, beside the rate at which the disk can be read from end to end.

python benchmarks/loading.py [--pairs 5] [--shards 1 4] [--ranks 1 2] [--directory DIR] [--mpiexec mpiexec]

Writes a checkpoint of two layers in the shape of Llama 3 8B, with its vocabulary: 2.97 GB of bf16 noise. In pairs that
take turns at beginning, reads the files with plain large reads, and loads them in fresh processes until every rank
has its part in the form that its kernels want. Each time the page cache has nothing of them. Needs the repository on
PYTHONPATH (. and kernels), and room for the files; the rates are of all ranks together.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
}
READ_BYTES = 8 * 2**20
NOISE_BYTES = 8 * 2**20


class Loaded(NamedTuple):
    """What came of loading a model on some ranks."""

    seconds: float
    """From when the first rank began until the last one was ready."""
    bytes_read: list[int]
    """By system calls of each rank."""
    peak_rss: list[int]


@dataclass(frozen=True)
class Pair:
    """The disk and the loader, one after the other."""

    disk_rate: float
    """Bytes per second."""
    load_rate: float
    loaded: Loaded

    @property
    def ratio(self) -> float:
        return self.load_rate / self.disk_rate


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"model.embed_tokens": (128256, 4096), "model.norm": (4096,), "lm_head": (128256, 4096)}
    for layer in ("model.layers.0.", "model.layers.1."):
        found |= {layer + f"self_attn.{name}_proj": (4096, 4096) for name in "qo"}
        found |= {layer + f"self_attn.{name}_proj": (1024, 4096) for name in "kv"}
        found |= {layer + f"mlp.{name}_proj": (14336, 4096) for name in ("gate", "up")}
        found |= {layer + "mlp.down_proj": (4096, 14336)}
        found |= {layer + name: (4096,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": shape for name, shape in found.items()}


def write_checkpoint(directory: Path, num_shards: int = 1) -> None:
    """In so many files, on the disk when this returns."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    names = list(shapes())
    if num_shards == 1:
        _write_noise(directory / "model.safetensors", shapes())
        return
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = names[len(names) * number // num_shards : len(names) * (number + 1) // num_shards]
        _write_noise(directory / file, {name: shapes()[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _write_noise(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    import torch

    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    noise = memoryview(torch.randn(NOISE_BYTES // 2).bfloat16().view(torch.uint8).numpy())
    with path.open("wb") as file:
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        for left in range(end, 0, -len(noise)):
            file.write(noise[: min(left, len(noise))])
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def checkpoint(num_shards: int, parent: Path | None = None) -> Iterator[Path]:
    """A directory with one, removed in the end."""
    directory = Path(tempfile.mkdtemp(prefix="loading-", dir=parent))
    try:
        write_checkpoint(directory, num_shards)
        yield directory
    finally:
        shutil.rmtree(directory)


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(directory))


def forget(directory: Path) -> None:
    """Takes the files, which are on the disk and not mapped, out of the page cache."""
    for path in weight_files(directory):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def take_memory(size: int) -> None:
    """Has the machine find memory and give it back, free for whoever asks next.

    A virtual machine whose host takes back what is free for some seconds gets it again at a fraction of a disk's rate.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 1
    memory.close()


def read_rate(directory: Path) -> float:
    """Bytes per second of plain reads of all files, one after the other, each from its start to its end."""
    forget(directory)
    take_memory(num_bytes(directory))
    buffer = memoryview(bytearray(READ_BYTES))
    began = time.monotonic()
    for path in weight_files(directory):
        file, position = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(file, [buffer], position):
            position += count
        os.close(file)
    return num_bytes(directory) / (time.monotonic() - began)


def load(directory: Path, num_ranks: int, tp_size: int, mpiexec: str | Path = "mpiexec") -> Loaded:
    """Loads the model in fresh processes that find nothing of it in the page cache."""
    forget(directory)
    launcher = [] if num_ranks == 1 else [str(mpiexec), "-n", str(num_ranks)]
    command = [*launcher, sys.executable, __file__, "--as-rank", str(directory), "--tp", str(tp_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True, timeout=300)
    return Loaded(*json.loads(done.stdout.decode().splitlines()[-1]))


def measure_pair(
    directory: Path, num_ranks: int, tp_size: int, disk_first: bool, mpiexec: str | Path = "mpiexec"
) -> Pair:
    before = read_rate(directory) if disk_first else 0.0
    loaded = load(directory, num_ranks, tp_size, mpiexec)
    return Pair(before or read_rate(directory), num_bytes(directory) / loaded.seconds, loaded)


def run_rank(directory: Path, tp_size: int) -> None:
    """What a rank does; the first one prints what came of it."""
    import torch

    from fastserve_hpc.bench.processes import peak_rss_bytes
    from fastserve_hpc.models.loader import load_model
    from fastserve_hpc.models.locate import ModelFiles
    from fastserve_hpc.models.reading import Reading
    from fastserve_hpc.models.spec import load_spec
    from fastserve_hpc.ops import find_kernels, for_device
    from fastserve_hpc.parallel.comm import TensorComm
    from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
    from fastserve_hpc.parallel.mpi_init import exchange, finalize_mpi, init_mpi, world_size_from_env
    from fastserve_hpc.parallel.node_file import open_node_file
    from fastserve_hpc.parallel.single import SingleComm
    from fastserve_hpc.parallel.topology import Topology

    world = init_mpi() if world_size_from_env(os.environ) > 1 else None
    num_ranks = world.size if world else 1
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    torch.set_num_threads(num_threads)
    topology = Topology(world.rank if world else 0, tp_size, num_ranks // tp_size)
    comm: TensorComm = MpiTensorComm(world, topology, 2**20) if world else SingleComm()
    chosen = for_device(torch.device("cpu"), "bfloat16", find_kernels(16, 128, num_threads))
    files, spec = ModelFiles(directory, "wide"), load_spec(directory)

    def all_ranks(own: list[float]) -> list[list[float]]:
        if world is None:
            return [own]
        return [json.loads(text) for text in exchange(world, json.dumps(own).encode())]

    take_memory(2 * num_bytes(directory) // num_ranks)  # for the weights and the page cache
    Path("/proc/self/clear_refs").write_text("5")  # no peak yet
    with open_node_file(world) as board:
        all_ranks([])
        before, began = _bytes_read(), time.monotonic()
        reading = Reading(board if world else None)
        model = load_model(files, spec, topology, comm, chosen.dtype, ops=chosen.ops, reading=reading)
        own = [began, time.monotonic(), _bytes_read() - before, peak_rss_bytes(os.getpid())]
        begins, ends, counts, peaks = zip(*all_ranks(own), strict=True)
    del model
    if world is None or world.rank == 0:
        print(json.dumps([max(ends) - min(begins), counts, peaks]))
    if world is not None:
        comm.close()
        finalize_mpi(world)


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def print_row(name: str, pairs: Sequence[Pair]) -> None:
    rates = [median(getattr(pair, kind) for pair in pairs) / 1e9 for kind in ("disk_rate", "load_rate")]
    peaks = ", ".join(f"{peak / 1e9:.2f}" for peak in pairs[-1].loaded.peak_rss)
    read = ", ".join(f"{count / 1e9:.2f}" for count in pairs[-1].loaded.bytes_read)
    ratios = [pair.ratio for pair in pairs]
    cells = (f"{rates[0]:.2f}", f"{rates[1]:.2f}", f"{median(ratios):.2f}", f"{min(ratios):.2f} - {max(ratios):.2f}")
    print("| " + " | ".join((name, *cells, read, peaks)) + " |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--directory", type=Path, help="where the files are made; default: that of temporary files")
    parser.add_argument("--mpiexec", default="mpiexec")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tp", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.as_rank:
        run_rank(options.as_rank, options.tp)
        return
    columns = (
        "files, ranks",
        "disk, GB/s",
        "loading, GB/s",
        "ratio",
        "of pairs",
        "GB read, each rank",
        "peak GB, each",
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for num_shards in options.shards:
        with checkpoint(num_shards, options.directory) as directory:
            for ranks in options.ranks:
                pairs = [
                    measure_pair(directory, ranks, ranks, number % 2 == 0, options.mpiexec)
                    for number in range(options.pairs)
                ]
                print_row(f"{num_shards}, {ranks}", pairs)
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
