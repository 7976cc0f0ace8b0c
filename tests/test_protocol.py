import pickle

import msgspec
import pytest

from fastserve_hpc import protocol
from fastserve_hpc.core.engine import BlockUsage, EngineStatus
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.core.request import SamplingParams

STATUS = EngineStatus("ready", "m", 2048, 2, 1, 2, "fcfs", 1, 0, BlockUsage(10, 3), BlockUsage(0, 0), 0, 1.5)

TO_SERVER = [
    protocol.Submit(1, prompt="hello"),
    protocol.Submit(2, prompt=[1, 2, 3], sampling=SamplingParams(stop=("a", "b"), logit_bias={7: -1.5}, n=4)),
    protocol.Submit(3, messages=[protocol.ChatMessage("user", "hi")], stream=False, service_class="batch"),
    protocol.Cancel(1),
    protocol.StatusQuery(5),
    protocol.Drain(6, now=True),
    protocol.Ping(7),
]
TO_CLIENT = [
    protocol.Delta(1, text="é", token_ids=[5], logprobs=[TokenLogprobs(5, -0.1, ((5, -0.1), (6, -3.0)))]),
    protocol.Delta(1, finish_reason="stop", usage=protocol.Usage(3, 9)),
    protocol.Failed(1, "busy", "later"),
    protocol.StatusReply(2, STATUS),
    protocol.Draining(3),
    protocol.Welcome(4, "abc", "m", 2048, 30.0),
]


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda m: type(m).__name__)
def test_messages_to_the_server_survive_the_wire(message: protocol.ToServer) -> None:
    assert protocol.decode_to_server(protocol.encode(message)) == message


@pytest.mark.parametrize("message", TO_CLIENT, ids=lambda m: type(m).__name__)
def test_messages_to_the_client_survive_the_wire(message: protocol.ToClient) -> None:
    assert protocol.decode_to_client(protocol.encode(message)) == message


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "0 frames"),
        ([protocol.MAGIC], "1 frames"),
        ([b"", b""], "not a FastServe-HPC message"),
        ([b"FSHPC\x63", b""], "protocol version 99"),
        ([protocol.MAGIC, b""], "not a message"),
        ([protocol.MAGIC, b"\xff" * 100], "not a message"),
        ([protocol.MAGIC, pickle.dumps({"type": "submit"})], "not a message"),
        ([protocol.MAGIC, msgspec.msgpack.encode({"type": "nonsense"})], "not a message"),
        ([protocol.MAGIC, msgspec.msgpack.encode({"type": "submit", "id": 1, "prompt": {"a": 1}})], "not a message"),
        (
            [protocol.MAGIC, msgspec.msgpack.encode({"type": "submit", "id": 1, "prompt": [2**70 // 2**7]})[:-1]],
            "not a",
        ),
    ],
)
def test_garbage_is_refused_with_a_reason(frames: list[bytes], text: str) -> None:
    with pytest.raises(protocol.ProtocolError, match=text):
        protocol.decode_to_server(frames)
