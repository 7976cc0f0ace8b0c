"""What `openvino_process.py` uses of the real one: a step gives every request a token."""

from types import SimpleNamespace


class SchedulerConfig:
    pass


class GenerationConfig:
    pass


class _Stream:
    def __init__(self, left):
        self.left, self.ready = left, 0

    def can_read(self):
        return self.ready > 0

    def read(self):
        count, self.ready = self.ready, 0
        return {0: SimpleNamespace(generated_ids=[7] * count)}


class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        assert (scheduler.max_num_seqs, device) == (64, "CPU")
        assert properties["INFERENCE_NUM_THREADS"] >= 1
        print(f"loading {model}")  # the real one talks, too
        self._streams = []

    def add_request(self, _request_id, _ids, config):
        assert config.ignore_eos
        assert not config.do_sample
        self._streams.append(_Stream(config.max_new_tokens))
        return self._streams[-1]

    def step(self):
        for stream in self._streams:
            if stream.left:
                stream.left -= 1
                stream.ready += 1
