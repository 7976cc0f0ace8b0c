"""The open requests of all clients: whose they are, and how the engine's tokens become their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastserve_hpc.core.plan import TokenDelta
from fastserve_hpc.core.request import FinishReason, Request
from fastserve_hpc.errors import RequestError
from fastserve_hpc.models.tokenizer import Tokenizer
from fastserve_hpc.protocol import Delta, Failed, Submit, Usage
from fastserve_hpc.server.detokenizer import Detokenizer
from fastserve_hpc.server.doors import Peer
from fastserve_hpc.server.outbox import DeltaSum


@dataclass(slots=True)
class Submission:
    """One `Submit`; it has a request in the engine for each choice that is not finished."""

    peer: Peer
    id: int
    stream: bool
    request_ids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Choice:
    """One sequence that is being generated."""

    submission: Submission
    index: int
    num_prompt_tokens: int
    num_cut: int
    detokenizer: Detokenizer
    num_tokens: int = 0
    kept: DeltaSum | None = None
    """For a client that does not stream: all of its output so far."""

    def take(self, tokens: TokenDelta) -> Delta:
        """The engine's new tokens as the client is to see them; without those after a stop string."""
        text, used = self._text_of(tokens.token_ids)
        reason = tokens.finish_reason
        if reason is not None:
            text += self.detokenizer.finish()
        if self.detokenizer.stopped:
            reason = "stop"
        self.num_tokens += used
        return Delta(
            id=self.submission.id,
            choice=self.index,
            text=text,
            token_ids=list(tokens.token_ids[:used]),
            finish_reason=reason,
            logprobs=list(tokens.logprobs[:used]),
            prompt_logprobs=list(tokens.prompt_logprobs),
            usage=self._usage(reason),
        )

    def _text_of(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text, and the number of tokens up to the one that completed a stop string."""
        texts = []
        for used, token_id in enumerate(token_ids, 1):
            texts.append(self.detokenizer.feed(token_id))
            if self.detokenizer.stopped:
                return "".join(texts), used
        return "".join(texts), len(token_ids)

    def _usage(self, reason: FinishReason | None) -> Usage | None:
        return None if reason is None else Usage(self.num_prompt_tokens, self.num_tokens, self.num_cut)


@dataclass(slots=True)
class Outcome:
    """What a client is to be told, and what the engine need not finish."""

    peer: Peer
    message: Delta | Failed | None
    cancelled: list[int] = field(default_factory=list)


class Sessions:
    """All submissions and choices that are open."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[int, Choice] = {}
        self._submissions: dict[Peer, dict[int, Submission]] = {}

    def __len__(self) -> int:
        """Requests in the engine."""
        return len(self._choices)

    @property
    def peers(self) -> list[Peer]:
        """Clients with open requests."""
        return list(self._submissions)

    def check_new(self, peer: Peer, id: int) -> None:
        """Raise `RequestError` if the client has an open submission of that id."""
        if id in self._submissions.get(peer, {}):
            raise RequestError(f"id {id} is still in use on this connection: choose another")

    def open(self, peer: Peer, submit: Submit, requests: Sequence[Request]) -> None:
        submission = Submission(peer, submit.id, submit.stream, {r.request_id for r in requests})
        self._submissions.setdefault(peer, {})[submit.id] = submission
        for request in requests:
            sampling = request.sampling
            detokenizer = Detokenizer(self._tokenizer.text_decoder(), sampling.stop, sampling.min_tokens)
            choice = Choice(submission, request.choice, len(request.prompt), request.num_cut, detokenizer)
            self._choices[request.request_id] = choice

    def requests_of(self, peer: Peer) -> list[int]:
        """Those of a client that are in the engine."""
        return [i for submission in self._submissions.get(peer, {}).values() for i in submission.request_ids]

    def cancel(self, peer: Peer, id: int) -> list[int]:
        """Forget a submission; the requests that the engine is to cancel."""
        submission = self._submissions.get(peer, {}).get(id)
        return [] if submission is None else self._close(submission)

    def drop(self, peer: Peer) -> list[int]:
        """Forget a client; the requests that the engine is to cancel."""
        cancelled = []
        for submission in list(self._submissions.get(peer, {}).values()):
            cancelled += self._close(submission)
        return cancelled

    def take(self, tokens: TokenDelta) -> Outcome | None:
        """Turn the engine's tokens into the client's; None for a request that is open no more."""
        choice = self._choices.get(tokens.request_id)
        if choice is None:
            return None
        submission = choice.submission
        if tokens.finish_reason == "error":
            failed = Failed(submission.id, tokens.error_code, tokens.error or "the engine failed this request")
            self._finish(tokens.request_id, submission)
            return Outcome(submission.peer, failed, self._close(submission))
        delta = choice.take(tokens)
        if delta.finish_reason is None:
            return Outcome(submission.peer, _passed_on(choice, delta))
        self._finish(tokens.request_id, submission)
        ended_here = tokens.finish_reason is None
        return Outcome(submission.peer, _passed_on(choice, delta), [tokens.request_id] if ended_here else [])

    def fail_all(self, code: str, message: str) -> list[Outcome]:
        """Close every submission with the same answer."""
        submissions = [s for of_peer in self._submissions.values() for s in of_peer.values()]
        return [Outcome(s.peer, Failed(s.id, code, message), self._close(s)) for s in submissions]

    def _finish(self, request_id: int, submission: Submission) -> None:
        del self._choices[request_id]
        submission.request_ids.discard(request_id)
        if not submission.request_ids:
            self._forget(submission)

    def _close(self, submission: Submission) -> list[int]:
        request_ids = sorted(submission.request_ids)
        for request_id in request_ids:
            del self._choices[request_id]
        submission.request_ids.clear()
        self._forget(submission)
        return request_ids

    def _forget(self, submission: Submission) -> None:
        of_peer = self._submissions.get(submission.peer, {})
        of_peer.pop(submission.id, None)
        if not of_peer:
            self._submissions.pop(submission.peer, None)


def _passed_on(choice: Choice, delta: Delta) -> Delta | None:
    """The delta to send now: each one to a client that streams, all of them at the end to one that does not."""
    if choice.submission.stream:
        return delta
    if choice.kept is None:
        choice.kept = DeltaSum(delta)
    else:
        choice.kept.add(delta)
    return choice.kept.merged() if delta.finish_reason is not None else None
