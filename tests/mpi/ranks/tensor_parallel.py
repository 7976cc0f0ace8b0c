"""A model shared by all ranks computes what one rank does: `tensor_parallel.py MODEL_DIRECTORY`.

Through the kernels of whole layers, which sum in shared memory, and where there is none, operation by operation.
"""

import itertools
import sys
from pathlib import Path

import torch
from models.harness import TinyBatch, TinyCache

from fastserve_hpc.models.loader import load_model
from fastserve_hpc.models.locate import ModelFiles
from fastserve_hpc.models.spec import load_spec
from fastserve_hpc.ops import Ops, find_kernels, for_device, reference
from fastserve_hpc.parallel.comm import TensorComm
from fastserve_hpc.parallel.mpi_comm import MpiTensorComm
from fastserve_hpc.parallel.mpi_init import exchange, finalize_mpi, init_mpi
from fastserve_hpc.parallel.shared_group import collectives_with
from fastserve_hpc.parallel.single import SingleComm
from fastserve_hpc.parallel.topology import Topology

NUM_TOKENS = 45


def batch(start: int, end: int, takes_most_likely: bool = False) -> TinyBatch:
    """One sequence in blocks 2, 0, 1."""
    positions = torch.arange(start, end)
    blocks = torch.tensor([2, 0, 1])
    return TinyBatch(
        token_ids=positions * 7 % spec.vocab_size,
        positions=positions,
        slot_ids=blocks[positions // 16] * 16 + positions % 16,
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        query_lens=torch.tensor([end - start], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=blocks[None].int(),
        sample_rows=torch.arange(end - start),
        num_tokens=end - start,
        takes_most_likely=takes_most_likely,
    )


def outputs(
    place: Topology, comm: TensorComm, ops: Ops, dtype: torch.dtype, takes_most_likely: bool = False
) -> torch.Tensor:
    """Logits [NUM_TOKENS, vocab] or tokens [NUM_TOKENS], in two chunks and one decode."""
    model = load_model(ModelFiles(path, "tiny"), spec, place, comm, dtype, ops=ops)
    cache = TinyCache(3, spec, place, 16, dtype)
    ends = (0, 7, NUM_TOKENS - 1, NUM_TOKENS)
    pieces = [batch(start, end, takes_most_likely) for start, end in itertools.pairwise(ends)]
    return torch.cat([model.forward(piece, cache) for piece in pieces])


path = Path(sys.argv[1])
spec = load_spec(path)
world = init_mpi()
torch.set_num_threads(1)
topology = Topology(world.rank, tp_size=world.size)
kernels = find_kernels(16, spec.head_dim, 1)
assert not isinstance(kernels, str), kernels
chosen = for_device(torch.device("cpu"), "bfloat16", kernels)
expected = outputs(Topology(), SingleComm(), reference, torch.float32)
shared = MpiTensorComm(world, topology, 2**20, make_collectives=collectives_with(kernels))
over_mpi = MpiTensorComm(world, topology, 2**20)
assert shared.shared is not None
for comm in (shared, over_mpi):
    found = outputs(topology, comm, chosen.ops, chosen.dtype)
    tokens = outputs(topology, comm, chosen.ops, chosen.dtype, takes_most_likely=True)
    assert len(set(exchange(world, tokens.numpy().tobytes()))) == 1, "ranks choose differently"
    assert torch.equal(found, outputs(topology, comm, chosen.ops, chosen.dtype)), "another run gives other bits"
    if world.rank == 0:  # the others have parts of the logits
        assert (found - expected).abs().max() <= 0.04 * expected.abs().max(), (found - expected).abs().max()
        assert torch.equal(tokens, found.argmax(dim=-1)), "not the most likely tokens"
    comm.close()
if world.rank == 0:
    print("ranks agree")
finalize_mpi(world)
