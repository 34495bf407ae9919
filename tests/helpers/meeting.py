"""Where in-process ranks meet: matches the n-th collective of a group on every member and explains every mismatch.

Threads stand in for ranks. A member *posts* and goes on; the operation completes when the last member has posted, and
its result is computed from the contributions in rank order, so results are bitwise repeatable. Instead of hanging, a
run fails: at once when the members of a group call different things, when a rank that is waited for has finished, or
when every living rank waits; and after `timeout_s` in the cases that cannot be told from slow work.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any


class CommunicationError(RuntimeError):
    """Ranks disagree about what to communicate, or one of them never comes."""


class PeerFailed(CommunicationError):
    """Another rank failed first; raised in the others so that they stop at once. Its own error is the one reported."""


class Slot:
    """One operation that a set of ranks takes part in: who has posted, with what, and what came of it."""

    def __init__(self, title: str, members: tuple[int, ...], combine: Callable[[dict[int, Any]], dict[int, Any]]):
        self.title = title
        self.members = members
        self.combine = combine
        self.contributions: dict[int, Any] = {}
        self.signatures: dict[int, str] = {}
        self.results: dict[int, Any] = {}
        self.done = threading.Event()

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.contributions)


class Meeting:
    """The shared state of all in-process ranks of one run.

    Args:
        world_size: number of ranks; each is one thread.
        timeout_s: how long a wait may take before it is reported with the names of the missing ranks.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0):
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: dict[tuple, itertools.count] = {}
        self._slots: dict[tuple, Slot] = {}
        self._waiting: dict[int, Slot] = {}
        self._finished: set[int] = set()
        self._failure: str | None = None

    def post(
        self,
        rank: int,
        key: tuple,
        members: tuple[int, ...],
        title: str,
        signature: str,
        contribution: Any,
        combine: Callable[[dict[int, Any]], dict[int, Any]],
    ) -> Slot:
        """Adds this rank's contribution to its next operation under `key` and returns the slot to wait on.

        Args:
            key: what identifies the stream of operations, the same on all members (a group, or a pair of peers).
            members: global ranks that take part, in the order in which results are combined.
            signature: operation, shape and type; must agree on all members.
            combine: contributions by rank -> results by rank; runs once, on the last member to arrive.
        """
        with self._lock:
            self._raise_if_failed(rank)
            call = next(self._calls.setdefault((key, rank), itertools.count()))
            slot = self._slots.get((key, call))
            if slot is None:
                slot = self._slots[key, call] = Slot(f"{title} #{call}", members, combine)
            slot.signatures[rank] = signature
            slot.contributions[rank] = contribution
            if len(set(slot.signatures.values())) > 1:
                raise CommunicationError(f"ranks disagree in {slot.title}:\n" + _by_rank(slot.signatures))
            is_last = not slot.missing
            if is_last:
                del self._slots[key, call]
        if is_last:
            slot.results = slot.combine(slot.contributions)
            slot.done.set()
        return slot

    def wait(self, rank: int, slot: Slot) -> Any:
        """Blocks until every member has posted to `slot`; returns this rank's result."""
        if not slot.done.is_set():
            with self._lock:
                self._raise_if_failed(rank)
                self._waiting[rank] = slot
                gone = [member for member in slot.missing if member in self._finished]
                if gone:
                    raise CommunicationError(f"{_waits(rank, slot)}; {_ranks(gone)} finished without taking part")
                self._raise_if_deadlocked()
            deadline = time.monotonic() + self.timeout_s
            while not slot.done.wait(timeout=0.02 if self._failure else min(1.0, self.timeout_s)):
                if self._failure:
                    self._raise_if_failed(rank)
                if time.monotonic() > deadline:
                    raise CommunicationError(f"{_waits(rank, slot)}; not there after {self.timeout_s:g} s")
            with self._lock:
                self._waiting.pop(rank, None)
        if slot.results is None or rank not in slot.results:
            self._raise_if_failed(rank)
        return slot.results[rank]

    def finish(self, rank: int) -> None:
        """Says that `rank` has returned; whoever waits for it is told so instead of waiting for the timeout."""
        with self._lock:
            self._finished.add(rank)
            for waiter, slot in self._waiting.items():
                if not slot.done.is_set() and rank in slot.missing:
                    self._fail_locked(f"{_waits(waiter, slot)}; {_ranks([rank])} finished without taking part")
                    return
            if not self._failure:
                try:
                    self._raise_if_deadlocked()
                except CommunicationError as error:
                    self._fail_locked(str(error))

    def fail(self, rank: int, error: BaseException) -> None:
        """Says that `rank` died of `error`; every other rank's next or current operation raises PeerFailed."""
        with self._lock:
            self._finished.add(rank)
            self._fail_locked(f"rank {rank} failed: {type(error).__name__}: {error}")

    @property
    def failure(self) -> str | None:
        return self._failure

    def unfinished(self) -> list[str]:
        """Operations that some members posted and others never did, as sentences; empty after a clean run."""
        with self._lock:
            return [f"{slot.title}: posted by {_ranks(slot.contributions)}, never by {_ranks(slot.missing)}"
                    for slot in self._slots.values()]  # fmt: skip

    def _fail_locked(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
        for slot in [*self._slots.values(), *self._waiting.values()]:
            if not slot.done.is_set():
                slot.results = None
                slot.done.set()

    def _raise_if_failed(self, rank: int) -> None:
        if self._failure is not None:
            raise PeerFailed(f"rank {rank} stopped: {self._failure}")

    def _raise_if_deadlocked(self) -> None:
        stuck = {rank: slot for rank, slot in self._waiting.items() if not slot.done.is_set()}
        if stuck and len(stuck) + len(self._finished) == self.world_size and self._failure is None:
            raise CommunicationError(
                "deadlock, every rank waits:\n"
                + "\n".join(f"  {_waits(*pair)}" for pair in sorted(stuck.items(), key=lambda pair: pair[0]))
            )


def _ranks(ranks) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _waits(rank: int, slot: Slot) -> str:
    return f"rank {rank} waits in {slot.title} for {_ranks(slot.missing)}"


def _by_rank(signatures: dict[int, str]) -> str:
    return "\n".join(f"  rank {rank}: {signature}" for rank, signature in sorted(signatures.items()))
