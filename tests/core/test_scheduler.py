"""What the scheduler decides, plan by plan. Answers and conservation laws are checked by `scheduling.Ranks`."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from scheduling import POLICIES, Ranks, request

from fastserve_hpc.core.kv_manager import KvManager
from fastserve_hpc.core.plan import IterationPlan, IterationResult, SequenceSlice, TokenDelta
from fastserve_hpc.core.policy.fcfs import Fcfs
from fastserve_hpc.core.request import Request, SamplingParams
from fastserve_hpc.core.scheduler import Scheduler
from fastserve_hpc.core.sequence import Sequence
from fastserve_hpc.errors import RequestError
from fastserve_hpc.worker.fake import EOS


def ids(plan: IterationPlan | None) -> list[int]:
    assert plan is not None
    return [piece.request_id for piece in plan.slices]


def sizes(plan: IterationPlan | None) -> dict[int, int]:
    assert plan is not None
    return {piece.request_id: piece.num_tokens for piece in plan.slices}


def turn(ranks: Ranks) -> IterationPlan:
    """One plan and its result."""
    plan = ranks.schedule()
    assert plan is not None
    ranks.land()
    return plan


class TestPlans:
    def test_a_prompt_then_one_token_at_a_time(self) -> None:
        ranks = Ranks(block_size=4)
        new = request(7, prompt_len=6, max_tokens=4, stop_token_ids=())
        ranks.add(new)
        prefill, first, second = turn(ranks), turn(ranks), turn(ranks)
        token = ranks.outputs[7]
        assert prefill.slices == (SequenceSlice(7, 0, 6, 0, (0, 1), (), True),)
        assert [(n.request_id, n.prompt, n.sampling, n.choice) for n in prefill.new_requests] == [
            (7, new.prompt, new.sampling, 0)
        ]
        assert first.slices == (SequenceSlice(7, 6, 1, 2, (), (token[0],), True),)
        assert second.slices == (SequenceSlice(7, 7, 1, 2, (), (token[1],), True),)
        third = turn(ranks)
        assert third.slices == (SequenceSlice(7, 8, 1, 2, (2,), (token[2],), True),)
        assert first.new_requests == second.new_requests == third.new_requests == ()
        assert ranks.reasons == {7: "length"}

    def test_a_long_prompt_is_cut_and_only_its_last_chunk_samples(self) -> None:
        ranks = Ranks(max_batch_tokens=10)
        ranks.add(request(1, prompt_len=25))
        pieces = [turn(ranks).slices[0] for _ in range(3)]
        assert [(p.start, p.num_tokens, p.samples) for p in pieces] == [(0, 10, False), (10, 10, False), (20, 5, True)]
        assert [len(p.new_slots) for p in pieces] == [7, 0, 0], "a prompt gets its blocks at once"

    def test_chunks_take_what_decodes_leave(self) -> None:
        ranks = Ranks(max_batch_tokens=10)
        ranks.add(request(1, prompt_len=4, min_tokens=9), request(2, prompt_len=5, min_tokens=9), request(3, 30))
        assert sizes(turn(ranks)) == {1: 4, 2: 5, 3: 1}
        assert sizes(turn(ranks)) == {1: 1, 2: 1, 3: 8}

    def test_no_more_than_max_batch_run(self) -> None:
        ranks = Ranks(max_batch=2)
        ranks.add(*(request(i, max_tokens=3, stop_token_ids=()) for i in range(3)))
        assert [ids(turn(ranks)) for _ in range(4)] == [[0, 1], [0, 1], [0, 1], [2]]

    def test_nothing_to_do(self) -> None:
        ranks = Ranks()
        assert ranks.schedule() is None
        assert ranks.scheduler.is_idle


class TestEnds:
    def test_a_stop_id_ends_and_is_delivered(self) -> None:
        ranks = Ranks()
        ranks.add(request(1, max_tokens=200))
        ranks.run()
        assert ranks.reasons == {1: "stop"}
        assert ranks.outputs[1][-1] == EOS

    def test_any_stop_id_counts_but_not_before_min_tokens(self) -> None:
        ranks = Ranks()
        space = (32, EOS)
        ranks.add(request(1, max_tokens=90, stop_token_ids=space))
        patient = replace(request(1).sampling, max_tokens=90, stop_token_ids=space, min_tokens=20)
        ranks.add(Request(2, request(1).prompt, patient))
        ranks.run()
        assert ranks.reasons == {1: "stop", 2: "stop"}
        assert len(ranks.outputs[1]) < 20 < len(ranks.outputs[2])

    def test_a_worker_that_stops_before_min_tokens_is_not_believed(self) -> None:
        scheduler = Scheduler(Fcfs(), KvManager(8, 4), max_batch=1, max_batch_tokens=8)
        scheduler.add(request(1, prompt_len=2, max_tokens=5, min_tokens=2), now=0.0)
        reasons = []
        for plan_id in (1, 2, 3):
            scheduler.schedule(0.0)
            reasons += [d.finish_reason for d in scheduler.update(IterationResult(plan_id, (EOS,)), 0.0)]
        assert reasons == [None, None, "stop"]

    def test_ignored_eos_runs_to_max_tokens(self) -> None:
        ranks = Ranks()
        ranks.add(request(1, max_tokens=99, stop_token_ids=()))
        ranks.run()
        assert (ranks.reasons[1], len(ranks.outputs[1]), EOS in ranks.outputs[1]) == ("length", 99, True)

    def test_the_next_plan_tells_whom_to_forget(self) -> None:
        ranks = Ranks()
        ranks.add(request(1, max_tokens=1), request(2, max_tokens=2, stop_token_ids=()))
        assert turn(ranks).finished == ()
        assert turn(ranks).finished == (1,)
        last = ranks.schedule()
        assert last == IterationPlan(3, finished=(2,)), "an idle engine says it with an empty plan"
        assert ranks.scheduler.is_idle
        assert ranks.schedule() is None

    def test_the_result_of_an_empty_plan_is_ignored(self) -> None:
        ranks = Ranks()
        ranks.add(request(1, max_tokens=1))
        turn(ranks)
        assert ranks.schedule() == IterationPlan(2, finished=(1,))
        assert ranks.scheduler.update(IterationResult(2), now=1.0) == []

    def test_shutdown_is_the_last_plan(self) -> None:
        ranks = Ranks()
        ranks.add(request(1, max_tokens=1))
        turn(ranks)
        assert ranks.scheduler.shutdown() == IterationPlan(2, finished=(1,), shutdown=True)

    def test_a_request_that_the_worker_gives_up_ends_with_its_error(self) -> None:
        ranks = Ranks()
        ranks.add(request(1), request(2))
        ranks.schedule()
        deltas = ranks.land(
            lambda r: replace(r, token_ids=(-1, r.token_ids[1]), errors=((1, "not a number"), (9, "?")))
        )
        assert deltas[0] == TokenDelta(1, finish_reason="error", error="not a number")
        assert [d.request_id for d in deltas] == [1, 2]
        ranks.run()
        assert ranks.outputs[1] == []

    def test_logprobs_go_with_their_tokens(self) -> None:
        ranks = Ranks(max_batch_tokens=8)
        ranks.add(request(1, prompt_len=2), request(2, prompt_len=2, logprobs=1), request(3, 9, prompt_logprobs=0))
        ranks.schedule()
        one, two, three = ranks.land()
        assert one.logprobs == ()
        assert [scored.token_id for scored in two.logprobs] == list(two.token_ids)
        assert three.token_ids == ()
        assert [scored and scored.token_id for scored in three.prompt_logprobs] == [
            None,
            *ranks.requests[3].prompt[1:4],
        ]
        ranks.schedule()
        last = ranks.land()[-1]
        assert [s and s.token_id for s in last.prompt_logprobs] == list(ranks.requests[3].prompt[4:])
        assert len(last.token_ids) == 1


class TestAborts:
    def test_a_waiting_request_leaves_without_a_trace(self) -> None:
        ranks = Ranks(max_batch=1)
        ranks.add(request(1), request(2))
        turn(ranks)
        ranks.abort(2)
        ranks.run()
        assert all(2 not in plan.finished for plan in ranks.plans), "the workers never heard of it"

    @pytest.mark.parametrize("num_turns", [1, 2, 5])
    def test_a_running_request_gives_its_blocks_back(self, num_turns: int) -> None:
        ranks = Ranks(max_batch_tokens=6)
        ranks.add(request(1, prompt_len=10, stop_token_ids=()))
        for _ in range(num_turns):
            turn(ranks)
        ranks.abort(1)
        assert ranks.scheduler.kv.num_used == 0
        assert ranks.schedule() == IterationPlan(num_turns + 1, finished=(1,))

    def test_a_token_in_flight_is_dropped_and_its_slots_wait(self) -> None:
        ranks = Ranks(num_blocks=3, block_size=4)
        ranks.add(request(1, prompt_len=8, max_tokens=4))
        ranks.schedule()
        ranks.abort(1)
        ranks.add(request(2, prompt_len=8, max_tokens=4))
        assert ranks.scheduler.kv.num_retiring == 2
        assert ranks.land() == []
        assert ranks.scheduler.kv.num_retiring == 0
        ranks.run()

    def test_unknown_and_finished_ids_are_ignored(self) -> None:
        ranks = Ranks()
        ranks.add(request(1, max_tokens=1))
        turn(ranks)
        ranks.add(request(2, max_tokens=2, stop_token_ids=()))
        for request_id in (1, 99):
            ranks.scheduler.abort(request_id, 0.0)
        ranks.run()
        assert ranks.reasons == {1: "length", 2: "length"}


class TestMemory:
    def test_the_last_comer_is_preempted_and_computed_again(self) -> None:
        ranks = Ranks(num_blocks=8, block_size=4)
        ranks.add(request(1, prompt_len=8, max_tokens=20, stop_token_ids=()))
        turn(ranks)
        ranks.add(request(2, prompt_len=8, max_tokens=20, stop_token_ids=()))
        ranks.run()
        assert ranks.scheduler.counters.preemptions == 1
        again = [p for plan in ranks.plans for p in plan.slices if p.request_id == 2 and p.start == 0]
        assert len(again) == 2
        assert (again[1].num_kept_blocks, len(again[1].token_ids)) == (0, 1), "the workers hold the other tokens"
        assert again[1].num_tokens > 8
        assert again[1].samples
        assert sum(len(plan.new_requests) for plan in ranks.plans) == 2

    def test_nobody_overtakes_a_request_that_waits_for_blocks(self) -> None:
        ranks = Ranks(num_blocks=8, block_size=4)
        ranks.add(request(1, prompt_len=16, max_tokens=8), request(2, prompt_len=24, max_tokens=2), request(3, 1, 1))
        assert ids(turn(ranks)) == [1]
        assert ids(turn(ranks)) == [1]
        ranks.run()
        first = {p.request_id: plan.plan_id for plan in reversed(ranks.plans) for p in plan.slices}
        assert first[1] < first[2] <= first[3]

    def test_a_better_request_takes_blocks_of_the_worst_only_as_needed(self) -> None:
        ranks = Ranks(num_blocks=12, block_size=4, policy="last come")
        for request_id in range(3):
            ranks.add(request(request_id, prompt_len=10, max_tokens=30, stop_token_ids=()))
            turn(ranks)
        ranks.add(request(3, prompt_len=16, max_tokens=10, stop_token_ids=()))
        assert ids(turn(ranks)) == [3, 2, 1]
        assert ranks.scheduler.counters.preemptions == 1
        ranks.run()

    def test_blocks_under_way_are_waited_for_not_taken_from_others(self) -> None:
        ranks = Ranks(num_blocks=10, block_size=4, num_stages=2, policy="last come")
        for request_id in range(2):
            ranks.add(request(request_id, prompt_len=14, max_tokens=20, stop_token_ids=()))
        ranks.schedule()
        ranks.schedule()
        ranks.add(request(2, prompt_len=12, max_tokens=4))
        ranks.land()
        assert ids(ranks.schedule()) == [1], "the blocks of 0 are in use by the plan in flight"
        assert (ranks.scheduler.counters.preemptions, ranks.scheduler.kv.num_retiring) == (1, 4)
        ranks.land()
        assert ids(ranks.schedule()) == [2]
        assert ranks.scheduler.counters.preemptions == 1
        ranks.run()

    def test_one_that_is_parked_in_flight_has_left_its_place(self) -> None:
        """The batch takes one: 2 has the place until it is parked for 3, which must wait for 2's blocks."""
        limits = {"num_blocks": 6, "num_host_blocks": 6, "max_batch": 1, "num_stages": 2}
        ranks = Ranks(**limits, kv_policy="proactive", policy="second leaves")
        ranks.add(request(1, prompt_len=5, max_tokens=4, stop_token_ids=()))
        turn(ranks)
        ranks.add(request(2, prompt_len=5, max_tokens=4, stop_token_ids=()))
        assert ids(ranks.schedule()) == [2]
        ranks.add(request(3, prompt_len=13, max_tokens=2, stop_token_ids=()))
        assert ids(ranks.schedule()) == [1]
        assert ranks.scheduler.kv.parked() == [2]
        ranks.run()
        assert ranks.reasons == {1: "length", 2: "length", 3: "length"}

    def test_a_request_that_just_fits_runs(self) -> None:
        ranks = Ranks(num_blocks=4, block_size=4)
        ranks.add(request(1, prompt_len=10, max_tokens=7, stop_token_ids=()))
        ranks.run()
        assert ranks.reasons == {1: "length"}

    def test_one_that_can_never_fit_is_refused_with_the_numbers(self) -> None:
        ranks = Ranks(num_blocks=4, block_size=4)
        numbers = r"10 tokens.*max_tokens \(8\) need 5 KV blocks of 4.*has 4 \(16 tokens\).*--device-kv"
        with pytest.raises(RequestError, match=numbers) as refusal:
            ranks.add(request(1, prompt_len=10, max_tokens=8))
        assert refusal.value.code == "context_length_exceeded"
        assert ranks.scheduler.is_idle

    def test_admission_leaves_a_block_for_each_that_runs(self) -> None:
        ranks = Ranks(num_blocks=6, block_size=4)
        ranks.add(request(1, prompt_len=8, max_tokens=16, stop_token_ids=()), request(2, prompt_len=16, max_tokens=8))
        assert ids(turn(ranks)) == [1], "2 would fit, but not for long"
        ranks.run()
        assert ranks.scheduler.counters.preemptions == 0


class TestPipeline:
    def test_the_stages_share_the_requests_evenly(self) -> None:
        ranks = Ranks(num_stages=2)
        ranks.add(*(request(i, prompt_len=2, max_tokens=9, stop_token_ids=()) for i in range(5)))
        assert ids(ranks.schedule()) == [0, 1, 2]
        assert ids(ranks.schedule()) == [3, 4]
        assert ranks.schedule() is None, "two plans are in flight"
        for expected in ([0, 1, 2], [3, 4], [0, 1, 2]):
            ranks.land()
            assert ids(ranks.schedule()) == expected
        ranks.land()
        ranks.run()

    def test_a_request_waits_for_its_sample(self) -> None:
        ranks = Ranks(num_stages=3)
        ranks.add(request(1))
        ranks.schedule()
        assert ranks.schedule() is None
        ranks.land()
        assert ids(ranks.schedule()) == [1]
        ranks.run()

    def test_chunks_follow_each_other_through_the_stages(self) -> None:
        ranks = Ranks(num_stages=3, max_batch_tokens=4)
        ranks.add(request(1, prompt_len=11))
        plans = [ranks.schedule() for _ in range(3)]
        assert [(p.slices[0].start, p.slices[0].num_tokens, p.slices[0].samples) for p in plans if p] == [
            (0, 4, False),
            (4, 4, False),
            (8, 3, True),
        ]
        ranks.run()

    def test_a_chunk_that_goes_on_takes_no_other_request_s_place(self) -> None:
        ranks = Ranks(num_stages=2, max_batch_tokens=16)
        ranks.add(request(1, prompt_len=40, max_tokens=2), request(2, prompt_len=2, max_tokens=9, stop_token_ids=()))
        assert sizes(ranks.schedule()) == {1: 16}
        assert sizes(ranks.schedule()) == {1: 16}
        ranks.land()
        assert sizes(ranks.schedule()) == {1: 8, 2: 2}
        ranks.run()

    def test_fewer_that_fit_in_memory_are_shared_too(self) -> None:
        ranks = Ranks(num_stages=2, num_blocks=24, block_size=4)
        ranks.add(*(request(i, prompt_len=12, max_tokens=20, stop_token_ids=()) for i in range(8)))
        for _ in range(8):
            while ranks.schedule() is not None:
                pass
            ranks.land()
        sizes_in_flight = [len(plan.slices) for plan in ranks.plans[-2:]]
        assert max(sizes_in_flight) - min(sizes_in_flight) <= 1
        ranks.run()

    def test_a_token_of_a_preempted_request_still_counts(self) -> None:
        ranks = Ranks(num_blocks=6, block_size=4, num_stages=2)
        ranks.add(*(request(i, prompt_len=6, max_tokens=12, stop_token_ids=()) for i in range(2)))
        ranks.run()
        assert ranks.preempted_in_flight
        assert ranks.scheduler.counters.output_tokens == 24

    def test_results_come_in_the_order_of_plans(self) -> None:
        ranks = Ranks(num_stages=2)
        ranks.add(request(1), request(2))
        ranks.schedule()
        ranks.schedule()
        with pytest.raises(ValueError, match="result of plan 2, but plan 1 comes first"):
            ranks.scheduler.update(IterationResult(2, (5,)), now=0.0)
        with pytest.raises(ValueError, match="result of plan 0, which is not in flight"):
            ranks.scheduler.update(IterationResult(0), now=0.0)
        ranks.run()

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (IterationResult(1, ()), "1 slices that sample, its result 0 tokens"),
            (IterationResult(1, (5, 6)), "1 slices that sample, its result 2 tokens"),
            (IterationResult(1, (5,), (None, None)), "1 slices that sample, its result 2 logprobs"),
        ],
    )
    def test_a_result_of_the_wrong_size_is_a_bug(self, result: IterationResult, message: str) -> None:
        ranks = Ranks()
        ranks.add(request(1))
        ranks.schedule()
        with pytest.raises(ValueError, match=message):
            ranks.scheduler.update(result, now=0.0)


class CountingFcfs(Fcfs):
    """Counts the sequences that are looked at."""

    num_seen = 0

    def ranked(self, now: float) -> Iterator[Sequence]:
        for sequence in super().ranked(now):
            self.num_seen += 1
            yield sequence


@pytest.mark.parametrize("num_blocks", [4096, 40])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_long_queue_is_not_looked_at(num_blocks: int, num_stages: int) -> None:
    policy = CountingFcfs()
    scheduler = Scheduler(policy, KvManager(num_blocks, 4), max_batch=16, max_batch_tokens=64, num_stages=num_stages)
    for i in range(5_000):
        scheduler.add(request(i, prompt_len=4, max_tokens=64, stop_token_ids=()), now=0.0)
    plans: deque[IterationPlan] = deque()
    for i in range(50):
        policy.num_seen = 0
        plan = scheduler.schedule(float(i))
        assert policy.num_seen <= 17
        if plan is not None:
            plans.append(plan)
        if scheduler.num_in_flight == num_stages:
            oldest = plans.popleft()
            scheduler.update(IterationResult(oldest.plan_id, (7,) * sum(p.samples for p in oldest.slices)), float(i))


def test_a_request_comes_once_and_resolved() -> None:
    ranks = Ranks()
    ranks.add(request(1))
    with pytest.raises(ValueError, match="request 1 is already here"):
        ranks.scheduler.add(request(1), now=0.0)
    with pytest.raises(ValueError, match="max_tokens is not resolved"):
        ranks.scheduler.add(Request(2, (1,), SamplingParams()), now=0.0)


@pytest.mark.parametrize("name", ["max_batch", "max_batch_tokens", "num_stages"])
def test_senseless_limits_are_refused(name: str) -> None:
    limits = {"max_batch": 1, "max_batch_tokens": 1, "num_stages": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Scheduler(Fcfs(), KvManager(4, 4), **limits)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_crowded_runs_give_every_request_its_own_answer(policy: str, num_stages: int) -> None:
    """Far more requests than blocks, results as late as the pipeline allows."""
    for seed in range(6):
        rng = random.Random(seed)
        ranks = Ranks(
            num_blocks=rng.randint(8, 24),
            block_size=rng.choice([1, 2, 4]),
            max_batch=rng.randint(2, 8),
            max_batch_tokens=rng.randint(4, 40),
            num_stages=num_stages,
            policy=policy,
        )
        room = ranks.scheduler.kv.num_total * ranks.scheduler.kv.block_size
        for i in range(12):
            prompt_len = rng.randint(1, room // 2)
            ranks.add(request(i, prompt_len, rng.randint(1, room - prompt_len), prompt_logprobs=rng.choice([None, 0])))
        ranks.run()
        assert ranks.reasons.keys() == set(range(12))


def test_counters() -> None:
    ranks = Ranks()
    ranks.add(request(1, prompt_len=5, max_tokens=3, stop_token_ids=()), request(2, prompt_len=6, max_tokens=2))
    ranks.run()
    counters = ranks.scheduler.counters
    assert (counters.prompt_tokens, counters.output_tokens, counters.iterations) == (11, 5, 3)


def test_the_core_is_pure() -> None:
    """A function of its inputs: nothing that knows time, chance, tensors or ranks is even loaded."""
    code = (
        "import sys; before = set(sys.modules); import fastserve_hpc.core.scheduler, fastserve_hpc.core.policy.fcfs;"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} & "
        "{'torch', 'numpy', 'mpi4py', 'zmq', 'msgspec', 'asyncio', 'random', 'threading'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
