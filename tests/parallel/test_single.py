"""The data plane of one rank."""

import pytest
import torch

from fastserve_hpc.parallel.single import SingleComm


def test_sums_and_joins_over_one_rank_are_the_tensor_itself():
    x = torch.ones(2, 3)
    comm = SingleComm()
    assert comm.all_reduce(x) is x
    assert comm.all_gather(x) is x
    assert comm.gather(x) is x


def test_there_is_no_other_stage():
    with pytest.raises(RuntimeError, match="no next stage"):
        SingleComm().send_next(torch.ones(1))
    with pytest.raises(RuntimeError, match="no stage before"):
        SingleComm().recv_prev(1, 2, torch.float32)


def test_progress_calls_the_hook_until_the_end():
    calls = []
    comm = SingleComm()
    comm.progress()
    comm.set_progress_hook(lambda: calls.append(1))
    comm.progress()
    comm.close()
    comm.progress()
    assert calls == [1]
