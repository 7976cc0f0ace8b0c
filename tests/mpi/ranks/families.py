"""Models on 4 ranks in every layout that tests/acceptance asks for: `families.py DIRECTORY...`.

Each directory holds a model and `questions.json`, which says whether ranks share it. Its answers go to
`answers-TPxPP.json`, its logits of the first prompt to `logits-TPxPP.safetensors`.
"""

import json
import sys
from pathlib import Path

import torch
from models.harness import Pieces, SequenceTables, TinyCache, generate, run_stage
from safetensors.torch import save_file

from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.parallel.mpi_api import MPI
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_init import exchange, finalize_mpi, init_mpi
from fastserve_hpc.parallel.topology import Topology

MAX_LEN = 128


class Layout:
    """Some of the ranks, which share models among them."""

    def __init__(self, members: MPI.Intracomm, tp_size: int) -> None:
        self.members = members
        self.topology = Topology(members.rank, tp_size, members.size // tp_size)
        self.comm = MpiTensorComm(members, self.topology, max_link_bytes=2**20)

    def run(self, directory: Path) -> None:
        spec, questions = load_spec(directory), json.loads((directory / "questions.json").read_text())
        if self.topology.world_size > 1 and not questions["shared"]:
            return
        model = load_model(ModelFiles(directory, "tiny"), spec, self.topology, self.comm, torch.float32)
        tables = SequenceTables(len(questions["prompts"]), MAX_LEN, 16)
        cache = TinyCache(tables.num_blocks, spec, self.topology, 16, torch.float32)

        def forward(pieces: Pieces) -> torch.Tensor:
            return run_stage(model, self.topology, self.comm, cache, tables.batch(pieces))

        def choose(pieces: Pieces) -> list[int]:
            out = forward(pieces)
            own = out.argmax(dim=-1).tolist() if self.topology.is_last_stage else None
            said = [json.loads(one) for one in exchange(self.members, json.dumps(own).encode())]
            return said[self.topology.result_rank]

        answers = generate(choose, questions["prompts"], questions["num_tokens"])
        logits = forward([(0, 0, questions["prompts"][0])])
        if self.topology.reports_results:
            name = f"{self.topology.tp_size}x{self.topology.num_stages}"
            (directory / f"answers-{name}.json").write_text(json.dumps(answers))
            save_file({"logits": logits.contiguous()}, directory / f"logits-{name}.safetensors")


def split(world: MPI.Intracomm, size: int) -> MPI.Intracomm:
    """Neighbours, `size` each."""
    return MPI.Intracomm(world.Split(world.rank // size, world.rank))


directories = [Path(argument) for argument in sys.argv[1:]]
world = init_mpi()
torch.set_num_threads(1)
pairs = Layout(split(world, 2), 2 if world.rank < 2 else 1)
alone = Layout(split(world, 1), 1)
together = Layout(world, 2)
for number, directory in enumerate(directories):
    if number % world.size == world.rank:
        alone.run(directory)
for directory in directories:
    pairs.run(directory)
for directory in directories:
    together.run(directory)
for layout in (pairs, alone, together):
    layout.comm.close()
finalize_mpi(world)
