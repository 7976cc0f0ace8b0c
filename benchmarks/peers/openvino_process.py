"""OpenVINO GenAI's continuous batching behind pipes; run by `benchmarks/compare.py` with the Python that has it.

openvino_process.py MODEL.gguf NUM_THREADS

Reads a JSON line for each run, {"requests": [{"due_s", "prompt", "output_tokens"}], "one_by_one"}, and answers with
one, {"wall_s", "outcomes": [[output tokens, first_s, last_s]]}: seconds from when a request was due. Imports nothing
of FastServe-HPC, which that Python need not have.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

MAX_SEQS = 64
MAX_BATCH_TOKENS = 2048
CACHE_GB = 2


class Engine:
    def __init__(self, model: str, num_threads: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, MAX_SEQS
        scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
        properties = {"INFERENCE_NUM_THREADS": num_threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._streams: dict[int, Any] = {}

    def submit(self, request_id: int, prompt: list[int], output_tokens: int) -> None:
        import numpy
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_tokens, True, False
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self._streams[request_id] = self._pipeline.add_request(request_id, ids, config)

    def step(self) -> dict[int, int]:
        """How many new tokens each request got."""
        self._pipeline.step()
        return {request_id: count for request_id, stream in self._streams.items() if (count := _read(stream))}

    def forget(self, request_id: int) -> None:
        del self._streams[request_id]


def _read(stream: Any) -> int:
    count = 0
    while stream.can_read():
        count += sum(len(output.generated_ids) for output in stream.read().values())
    return count


def run(engine: Engine, requests: list[dict[str, Any]], one_by_one: bool) -> dict[str, Any]:
    """Every request when it is due, or when the one before has ended."""
    start = time.perf_counter()
    due: list[float] = []
    outcomes: list[list[float]] = [[0, 0.0, 0.0] for _ in requests]
    live: set[int] = set()
    while len(due) < len(requests) or live:
        while len(due) < len(requests):
            next_due = time.perf_counter() if one_by_one else start + requests[len(due)]["due_s"]
            if live if one_by_one else next_due > time.perf_counter():
                break
            request = requests[len(due)]
            live.add(len(due))
            engine.submit(len(due), request["prompt"], request["output_tokens"])
            due.append(next_due)
        if not live:
            time.sleep(max(0.0, start + requests[len(due)]["due_s"] - time.perf_counter()))
            continue
        for request_id, count in engine.step().items():
            outcome, now = outcomes[request_id], time.perf_counter() - due[request_id]
            outcome[:] = [outcome[0] + count, outcome[1] or now, now]
            if outcome[0] >= requests[request_id]["output_tokens"]:
                live.remove(request_id)
                engine.forget(request_id)
    return {"wall_s": time.perf_counter() - start - requests[0]["due_s"], "outcomes": outcomes}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is not an answer
    engine = Engine(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
