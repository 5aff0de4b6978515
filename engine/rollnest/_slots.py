"""Bounded concurrency: so many at once, first come first served; who goes on with something comes before all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from anyio import CancelScope, Event, Semaphore, current_time

from ._instruments import Instruments
from ._tree import HolderTree, SlotsTree, Wait, WaitKind

__all__ = ["Call", "Named", "Slots", "SlotsLost"]


class SlotsLost(Exception):
    """Every slot is held by a thread that nobody can stop, and none came free in time."""

    def __init__(self, slots: Slots, patience: float) -> None:
        names = ", ".join(sorted(call.name for call in slots.calls if call.abandoned is not None))
        super().__init__(
            f"no slot within {patience} s: all {slots.size} are held by threads that do not end: {names}"
        )


class Slots:
    """A bound on how many bodies run at once; `None` is no bound.

    A slot is bound to the block, so no cancellation can lose it:

        async with slots:
            ...

    Cancellation: waiting is atomic.

    Attributes:
        size: The bound.
        used: Slots that are taken.
        lost: Of those, held by threads whose caller has gone.
        calls: Calls that wait for a slot, or hold one, in the order in which they came.
        name: What one is called.
        instruments: They hear of the calls.
        started: The hook of a call that got its slot, if there is one.
        ended: The hook of a call that gave its slot back.
        policy: Whether they are taken only while the gate is open.
    """

    policy: bool = False

    def __init__(
        self,
        size: int | None,
        clock: Callable[[], float] = current_time,
        *,
        name: WaitKind = "turn slot",
        instruments: Instruments | None = None,
    ) -> None:
        self.instruments = instruments
        judging = name == "judge slot"  # of tools, the rollout tells more than is known here
        self.started = "judge_started" if judging else None
        self.ended = "judge_ended" if judging else None
        self.size = size
        self.name: WaitKind = name
        self.clock = clock
        self.calls: dict[Call, None] = {}
        self.used: int = 0
        self.lost: int = 0
        self._semaphore = None if size is None else Semaphore(size, fast_acquire=True)
        self._waiting: dict[CancelScope, float] = {}
        self._first: deque[Event] = deque()  # who waits before all others

    def take(self) -> bool:
        """Takes a slot if one is free and nobody waits for it; whether it did. `release` gives it back."""
        semaphore = self._semaphore
        if semaphore is not None:
            if semaphore.value <= 0:
                return False
            semaphore.acquire_nowait()
        self.used += 1
        return True

    async def acquire(self, patience: float | None = None) -> None:
        """Takes a slot that `release` gives back, where a block can't: an abandoned thread keeps its own.

        Args:
            patience: Seconds to wait for while every slot is lost; `None` is for ever.

        Raises:
            SlotsLost: Every slot was lost for that long.
        """
        if self.take():
            return
        assert self._semaphore is not None
        if patience is None:
            await self._semaphore.acquire()
        else:
            await self._wait(self._semaphore, patience)
        self.used += 1

    async def acquire_first(self) -> None:
        """As `acquire`, before everybody who waits there: for who goes on with what it had a slot for."""
        if self.take():
            return
        handed = Event()
        self._first.append(handed)
        try:
            await handed.wait()
        except BaseException:
            if handed.is_set():
                self._hand_on()  # it was its own already
            else:
                self._first.remove(handed)
            raise
        self.used += 1

    def release(self) -> None:
        """Gives a slot back."""
        self.used -= 1
        self._hand_on()

    def _hand_on(self) -> None:
        if self._first:
            self._first.popleft().set()
        elif self._semaphore is not None:
            self._semaphore.release()

    def lose(self) -> None:
        """A slot stays with a thread that was abandoned."""
        self.lost += 1
        if self.lost == self.size:
            for scope, patience in self._waiting.items():
                scope.deadline = current_time() + patience

    def regain(self) -> None:
        """Such a thread has ended."""
        self.lost -= 1
        for scope in self._waiting:
            scope.deadline = math.inf
        self.release()

    def tree(self, now: float) -> SlotsTree:
        """Who uses them."""
        return SlotsTree(
            size=self.size,
            used=self.used,
            waiting=self.waiting,
            holders=tuple(
                HolderTree(
                    name=call.name,
                    seconds=now - (call.since if call.abandoned is None else call.abandoned),
                    abandoned=call.abandoned is not None,
                )
                for call in self.calls
                if call.running
            ),
        )

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        behind = 0 if self._semaphore is None else self._semaphore.statistics().tasks_waiting
        return len(self._first) + behind

    def wait(self, seconds: float) -> Wait:
        """What it is to wait for one."""
        size = "" if self.size is None else f" ({self.used} of {self.size} used)"
        return Wait(self.name, seconds, f"a {self.name}{size}")

    async def _wait(self, semaphore: Semaphore, patience: float) -> None:
        with CancelScope() as scope:
            if self.lost == self.size:
                scope.deadline = current_time() + patience
            self._waiting[scope] = patience
            try:
                await semaphore.acquire()
            finally:
                del self._waiting[scope]
        if scope.cancelled_caught:
            raise SlotsLost(self, patience)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Slots {self.used} of {'unbounded' if self.size is None else self.size} used>"


class Named(Protocol):
    """Whatever has a name of its own: a rollout, a sample."""

    @property
    def uid(self) -> str:
        """The name."""
        ...


class Call:
    """One call of a judger or a tool, from waiting for its slot to giving it back.

        async with Call(slots, "tool add", rollout, rollout):
            ...

    Attributes:
        slots: Where it takes its slot.
        what: What is called.
        of: Whom it is for.
        by: Who waits for it.
        running: Whether it has its slot.
        abandoned: Since when nobody waits for it any more, and a thread keeps its slot; `None` if that is not so.
        since: When it began to wait, or to run.
    """

    __slots__ = ("abandoned", "by", "of", "running", "since", "slots", "what")

    def __init__(self, slots: Slots, what: str, of: Named, by: object) -> None:
        self.slots: Slots = slots
        self.what: str = what
        self.of: Named = of
        self.by: object = by
        self.running: bool = False
        self.abandoned: float | None = None
        self.since: float = slots.clock()

    @property
    def name(self) -> str:
        """What is called, and for whom."""
        return f"{self.what} of {self.of.uid}"

    def wait(self, now: float) -> Wait:
        """What whoever called waits for."""
        seconds = now - self.since
        if not self.running:
            return self.slots.wait(seconds)
        kind: WaitKind = "tool" if self.slots.name == "tool slot" else "judger"
        return Wait(kind, seconds, f"its {self.what}")

    async def begin(self, patience: float | None = None) -> None:
        """Takes the slot; see `Slots.acquire`."""
        calls = self.slots.calls
        calls[self] = None
        try:
            await self.slots.acquire(patience)
        except BaseException:
            del calls[self]
            raise
        self.running = True
        self.since = self.slots.clock()
        self._tell(self.slots.started)

    def end(self) -> None:
        """Gives the slot back."""
        del self.slots.calls[self]
        self.slots.release()
        self._tell(self.slots.ended, self.slots.clock() - self.since)

    def _tell(self, hook: str | None, *args: object) -> None:
        instruments = self.slots.instruments
        if hook is not None and instruments is not None and instruments.hears(hook):
            instruments.tell(hook, self.name, *args)  # no name is put together where nobody hears

    def abandon(self) -> None:
        """Nobody waits any more, but a thread runs on: the slot stays with it."""
        self.abandoned = self.slots.clock()
        self.slots.lose()
        self._tell("slot_lost")

    def over(self) -> None:
        """The thread of an abandoned call has ended."""
        del self.slots.calls[self]
        self.slots.regain()
        self._tell(self.slots.ended, self.slots.clock() - self.since)

    async def __aenter__(self) -> None:
        await self.begin()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def __repr__(self) -> str:
        state = (
            "abandoned" if self.abandoned is not None else "running" if self.running else "waiting"
        )
        return f"<Call {self.name}: {state}>"
