"""Wire messages between clients and the ingress (ZeroMQ DEALER <-> ROUTER).

A message is two frames: `MAGIC` (which carries the version) and one msgpack map with the
message's type in "type". Nothing is ever unpickled. Strings are UTF-8; times are seconds.
"""

from __future__ import annotations

import msgspec

from fastserve_hpc.core.engine import EngineStatus
from fastserve_hpc.core.plan import TokenLogprobs
from fastserve_hpc.core.request import FinishReason, SamplingParams, ServiceClass
from fastserve_hpc.errors import FastServeError

VERSION = 1
MAGIC = b"FSHPC" + bytes([VERSION])
MAX_MESSAGE_BYTES = 16 * 2**20
"""A longer frame drops the connection (ZMQ_MAXMSGSIZE)."""
NO_ID = -1
"""In `Failed`: about bytes from which no id could be read."""


class ProtocolError(FastServeError):
    """Bytes that are no message of this version; `id` is the message's where that much could be read."""

    def __init__(self, message: str, id: int = NO_ID):
        super().__init__(message)
        self.id = id


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class Submit(msgspec.Struct, frozen=True, tag_field="type", tag="submit", omit_defaults=True):
    """Generate. Answered by `Delta`s, one or more a choice, or one `Failed`."""

    id: int
    """Chosen by the client, unique on its connection."""
    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    """A chat, put through the model's template. Exactly one of `prompt` and `messages` is given."""
    sampling: SamplingParams = SamplingParams()
    model: str | None = None
    """If given, must be the name that the server goes by."""
    stream: bool = True
    """False: one `Delta` a choice, at its end."""
    service_class: ServiceClass = "interactive"
    session: str | None = None
    expected_tokens: int | None = None
    slowdown: float | None = None
    """Of class `batch`: interactive requests may take so many times as long because of it."""
    continuation: str | list[int] | None = None
    """Generate nothing, but score this after `prompt`, which is of the same kind: the answer's `prompt_logprobs` are
    None and an entry for each token of the continuation, with the likeliest one."""


class Steer(msgspec.Struct, frozen=True, tag_field="type", tag="steer"):
    """Change `Submit.slowdown` of all that this client has open. Not answered."""

    id: int
    slowdown: float


class Cancel(msgspec.Struct, frozen=True, tag_field="type", tag="cancel"):
    """Stop a submit; its blocks are freed, nothing more is sent for it."""

    id: int


class StatusQuery(msgspec.Struct, frozen=True, tag_field="type", tag="status"):
    id: int


class Drain(msgspec.Struct, frozen=True, tag_field="type", tag="drain"):
    """Take no more requests, finish what runs, end. `now`: do not finish what runs."""

    id: int
    now: bool = False


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """The handshake; answered by `Welcome`."""

    id: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cut_tokens: int = 0
    """Of a context to be scored, those that did not fit and were cut off its beginning."""


class Delta(msgspec.Struct, frozen=True, tag_field="type", tag="delta", omit_defaults=True):
    """New output of one choice. `text` never ends inside a character nor holds part of a stop string."""

    id: int
    choice: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    usage: Usage | None = None
    """With finish_reason."""


class Failed(msgspec.Struct, frozen=True, tag_field="type", tag="failed"):
    """A message was refused, or its request ended in an error."""

    id: int
    code: str
    """Stable for programs: invalid_request, context_length_exceeded, model_not_found, busy, draining,
    ended, internal, protocol."""
    message: str


class StatusReply(msgspec.Struct, frozen=True, tag_field="type", tag="status_reply"):
    id: int
    status: EngineStatus


class Draining(msgspec.Struct, frozen=True, tag_field="type", tag="draining"):
    """A drain was taken."""

    id: int


class Welcome(msgspec.Struct, frozen=True, tag_field="type", tag="welcome"):
    """Who answers. An endpoint file is a hint; the instance id decides."""

    id: int
    instance_id: str
    model: str
    max_model_len: int
    lease_s: float
    """After so long without a sign of life (ZMTP heartbeats give one) the client's requests are cancelled."""


class Alive(msgspec.Struct, frozen=True, tag_field="type", tag="alive"):
    """Sent to a client with open requests when there was nothing else to send for a while.

    It tells the client that the server lives, and the server, if it cannot be sent, that the client is gone.
    """


ToServer = Submit | Steer | Cancel | StatusQuery | Drain | Ping
ToClient = Delta | Failed | StatusReply | Draining | Welcome | Alive


class _Identified(msgspec.Struct):
    id: int


_encoder = msgspec.msgpack.Encoder()
_to_server = msgspec.msgpack.Decoder(ToServer)
_to_client = msgspec.msgpack.Decoder(ToClient)
_identified = msgspec.msgpack.Decoder(_Identified)


def encode(message: ToServer | ToClient) -> list[bytes]:
    """The frames of a message."""
    return [MAGIC, _encoder.encode(message)]


def decode_to_server(frames: list[bytes]) -> ToServer:
    """A client's message. Raises `ProtocolError`."""
    payload = _payload(frames)
    try:
        return _to_server.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message: {error}", _id_in(payload)) from None


def decode_to_client(frames: list[bytes]) -> ToClient:
    """The server's message. Raises `ProtocolError`."""
    try:
        return _to_client.decode(_payload(frames))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message: {error}") from None


def _id_in(payload: bytes) -> int:
    try:
        return _identified.decode(payload).id
    except msgspec.MsgspecError:
        return NO_ID


def _payload(frames: list[bytes]) -> bytes:
    if len(frames) != 2:
        raise ProtocolError(f"{len(frames)} frames: a message has 2")
    magic = frames[0]
    if magic != MAGIC:
        if magic[:-1] == MAGIC[:-1]:
            raise ProtocolError(f"protocol version {magic[-1]}, but this side speaks {VERSION}: use the same release")
        raise ProtocolError("not a FastServe-HPC message")
    return frames[1]
