"""Copies of KV blocks between the tiers, beside the compute."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastserve_hpc.core.plan import BlockCopy

_MOST_AT_ONCE = 16
"""Copies that a thread does before it looks for uploads, which somebody may wait for."""


class Copies(Protocol):
    """Does numbered copies, each direction in order. No two that are in flight share a slot."""

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Begin copies, whose sources are written by compute that has been enqueued before."""

    def wait(self, copy_id: int) -> float:
        """Let compute that is enqueued from now on follow the uploads up to this number; seconds this rank stood."""

    def done(self) -> int:
        """The highest n such that copies 1..n are done. Never waits."""


class ThreadCopies:
    """Copies on a thread of its own. A block is one piece of memory: numpy copies it without the interpreter lock."""

    def __init__(self, device_tier: torch.Tensor, host_tier: torch.Tensor):
        self._tiers = [_raw(host_tier), _raw(device_tier)]
        self._open: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        """Numbers of the offloads and of the uploads that are not done."""
        self._queues: tuple[deque[list[BlockCopy]], deque[list[BlockCopy]]] = (deque(), deque())
        self._last = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, copies: Sequence[BlockCopy]) -> None:
        with self._changed:
            for to_device in (False, True):
                wanted = [copy for copy in copies if copy.to_device == to_device]
                self._open[to_device].update(dict.fromkeys(copy.copy_id for copy in wanted))
                self._queues[to_device].extend(
                    wanted[i : i + _MOST_AT_ONCE] for i in range(0, len(wanted), _MOST_AT_ONCE)
                )
            self._last = copies[-1].copy_id
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv copies", daemon=True)
            self._thread.start()

    def wait(self, copy_id: int) -> float:
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error or next(iter(self._open[True]), copy_id + 1) > copy_id)
            self._raise_error()
        return time.perf_counter() - began

    def done(self) -> int:
        with self._changed:
            self._raise_error()
            return min(next(iter(numbers), self._last + 1) for numbers in self._open) - 1

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: any(self._queues))
                    copies = (self._queues[True] or self._queues[False]).popleft()
                self._copy(copies)
                with self._changed:
                    for copy in copies:
                        del self._open[copy.to_device][copy.copy_id]
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _copy(self, copies: list[BlockCopy]) -> None:
        host, device = self._tiers
        for first, count in runs(copies):
            on_device = device[first.device_slot : first.device_slot + count]
            on_host = host[first.host_slot : first.host_slot + count]
            if first.to_device:
                on_device[:] = on_host
            else:
                on_host[:] = on_device


class StreamCopies:
    """Copies between a GPU and pinned memory, on a stream for each direction."""

    def __init__(self, device_tier: torch.Tensor, host_tier: torch.Tensor):
        self._device_tier, self._host_tier = device_tier, host_tier
        device = device_tier.device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._pending: tuple[deque[tuple[int, int, torch.cuda.Event]], ...] = (deque(), deque())
        """(first number, last number, when they are done) of offloads and of uploads."""
        self._last = 0

    def start(self, copies: Sequence[BlockCopy]) -> None:
        for to_device in (False, True):
            wanted = [copy for copy in copies if copy.to_device == to_device]
            if wanted:
                self._start(wanted, to_device)
        self._last = copies[-1].copy_id

    def _start(self, copies: list[BlockCopy], to_device: bool) -> None:
        stream = self._streams[to_device]
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # who wrote the blocks, or last read the slots
        with torch.cuda.stream(stream):
            for first, count in runs(copies):
                on_device = self._device_tier[first.device_slot : first.device_slot + count]
                on_host = self._host_tier[first.host_slot : first.host_slot + count]
                source, target = (on_host, on_device) if to_device else (on_device, on_host)
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._pending[to_device].append((copies[0].copy_id, copies[-1].copy_id, event))

    def wait(self, copy_id: int) -> float:
        uploads = [event for first, _, event in self._pending[True] if first <= copy_id]
        if uploads:
            torch.cuda.current_stream(self._device_tier.device).wait_event(uploads[-1])
        return 0.0

    def done(self) -> int:
        for pending in self._pending:
            while pending and pending[0][2].query():  # type: ignore[no-untyped-call]
                pending.popleft()
        return min((pending[0][0] for pending in self._pending if pending), default=self._last + 1) - 1


def measure(device_tier: torch.Tensor, host_tier: torch.Tensor) -> tuple[float, float]:
    """Seconds that a block takes to the host and to the device; the first blocks of both tiers must not be in use."""
    count = min(4, len(device_tier), len(host_tier))
    if not count:
        return 0.0, 0.0
    pair = device_tier[:count], host_tier[:count]
    to_host_s, to_device_s = (min(_time(*way) for _ in range(3)) / count for way in (pair, pair[::-1]))
    return to_host_s, to_device_s


def _time(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.perf_counter()
    target.copy_(source)
    if source.is_cuda or target.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[BlockCopy, int]]:
    """Copies of one direction joined into (first copy, count) where both slots go on by one."""
    start = 0
    for i in range(1, len(copies) + 1):
        if i == len(copies) or not _follows(copies[start], copies[i], i - start):
            yield copies[start], i - start
            start = i


def _follows(first: BlockCopy, copy: BlockCopy, distance: int) -> bool:
    return (copy.device_slot, copy.host_slot) == (first.device_slot + distance, first.host_slot + distance)


def _raw(tier: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The tier's memory, a row a block."""
    return tier.view(torch.uint8).flatten(1).numpy()
