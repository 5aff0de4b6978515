"""The gate: lets turns through while the policy may be used, and knows which are through.

It closes and opens synchronously. A turn registers in the same step in which it sees the gate open, so no
pause can miss one; after waking, and after waiting for a slot, it looks at the gate again, because the next
pause may already be on. What a turn brought is what stands in its attempt, never what a scope says.

A second barrier is shut while the policy's server is down (`_outage`): turns wait there as at the closed gate, and a
pause is something else. Only probes pass it.

Limits count only while turns may pass: they stop when the gate closes or is barred, and go on when it is neither.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

from anyio import CancelScope, Event, current_time

from ._attempt import Attempt
from ._slots import Slots
from ._tree import Wait

__all__ = ["Gate", "Limit", "OverLimit"]


_NO_LIMIT = nullcontext()


class OverLimit(Exception):
    """A limit of ours is over; apart from any `TimeoutError` that user code raises itself.

    Attributes:
        limit: Which.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit


class Gate:
    """Lets turns through while the policy may be used.

    Attributes:
        version: The policy's weight version.
        awaits_weights: Whether the policy has not got its first weights yet; it stays closed until then.
        epoch: How often the gate was closed so far.
        closed: Whether a pause is on.
        barred: Whether the server is down, or may be.
        shut: Whether turns have to wait: it is closed or barred.
        closed_since: When it was closed last.
        closed_seconds: Time it was closed, pauses that are over.
        clock: The event loop's time.
        new_scope: Makes a cancel scope in the event loop.
        slots: What bounds the turns in flight.
        last_end: When something last ended: a turn, a tool, a judger, a group. Time with the gate closed is left out.
        on_end: Called once when something ends next.
    """

    def __init__(
        self,
        *,
        version: int,
        slots: Slots,
        clock: Callable[[], float] = current_time,
        new_scope: Callable[[], CancelScope] = CancelScope,
        awaits_weights: bool = False,
    ) -> None:
        self.version: int = version
        self.awaits_weights: bool = awaits_weights
        self.clock = clock
        self.epoch: int = 0
        self.closed: bool = awaits_weights
        self.barred: bool = False
        self.shut: bool = awaits_weights
        self.closed_seconds: float = 0.0
        self.closed_since: float = clock() if awaits_weights else 0.0
        self.slots = slots
        self.last_end: float = clock()
        self.on_end: Callable[[], None] | None = None
        self.new_scope = new_scope
        self._opened = Event()
        self._in_flight: dict[Attempt, CancelScope] = {}
        self._until_quiet: CancelScope | None = None
        self._limits: set[Limit] = set()

    def ended(self) -> float:
        """Something has ended; returns the time."""
        self.last_end = now = self.clock()
        if self.on_end is not None:
            told, self.on_end = self.on_end, None
            told()
        return now

    def newest_version(self) -> int:
        """The policy's weight version, to be asked for later."""
        return self.version

    @property
    def turns(self) -> int:
        """How many attempts are through and not back."""
        return len(self._in_flight)

    @property
    def in_flight(self) -> list[Attempt]:
        """Attempts that are through and not back."""
        return list(self._in_flight)

    @property
    def open_seconds(self) -> float:
        """A clock that stands still in pauses."""
        now = self.closed_since if self.closed else self.clock()
        return now - self.closed_seconds

    def close(self) -> None:
        """From now on no turn starts, and limits stand still."""
        if not self.closed:
            self.closed_since = self.clock()
        self.closed = True
        self.epoch += 1
        self._shut()

    def open(self) -> None:
        """Lets every waiting turn through, unless it is barred too; stays closed without weights."""
        if self.awaits_weights:
            return
        self.closed = False
        now = self.clock()
        self.closed_seconds += now - self.closed_since
        self.last_end = now - max(0.0, self.closed_since - self.last_end)
        self._unshut()

    def adopt(self, version: int) -> None:
        """The policy has weights of a version."""
        self.version = version
        self.awaits_weights = False

    def bar(self) -> None:
        """As `close`, but it is no pause, and probes pass."""
        self.barred = True
        self._shut()

    def unbar(self) -> None:
        """Lets every waiting turn through, unless a pause is on."""
        self.barred = False
        self._unshut()

    def _shut(self) -> None:
        if not self.shut:
            self.shut = True
            for limit in self._limits:
                limit.stop()

    def _unshut(self) -> None:
        if not self.closed and not self.barred:
            self.shut = False
            for limit in self._limits:
                limit.go()
        # A probe waits for the end of a pause only, so all look again.
        opened, self._opened = self._opened, Event()
        opened.set()

    def wait(self, seconds: float) -> Wait:
        """What it is to wait for being let through, for so long."""
        if self.closed:
            return Wait(
                "gate", seconds, f"the gate (closed for {self.clock() - self.closed_since:.1f} s)"
            )
        if self.barred:
            return Wait("server", seconds, "the server to answer a probe")
        return self.slots.wait(seconds)

    async def wait_open(self) -> None:
        """Waits until turns may pass; look at it again after any other await."""
        while self.shut:
            await self._opened.wait()

    async def wait_unpaused(self) -> None:
        """Waits until no pause is on, whether it is barred or not."""
        while self.closed:
            await self._opened.wait()

    async def probe(
        self, build: Callable[[], Attempt], generate: Callable[[Attempt], Awaitable[None]]
    ) -> Attempt:
        """Runs one attempt past the barrier, but not in a pause.

        It waits for no slot: all of them may be held by turns that hang.

        Cancellation: while waiting nothing happened; later the attempt keeps what it received, and is closed.
        """
        await self.wait_unpaused()
        has_slot = self.slots.take()
        try:
            attempt = build()
            try:
                with self.begin(attempt):
                    await generate(attempt)
            finally:
                self._end(attempt)
            return attempt
        finally:
            if has_slot:
                self.slots.release()

    async def enter(self, *, goes_on: bool = False) -> None:
        """Waits until the policy may be used, and takes a slot, which `end` gives back.

        Args:
            goes_on: Whether its turn has begun: it waits for a slot before those that have not. Else whatever began
                while it was cut would be ahead of it, and it would get old.

        Cancellation: nothing happened.
        """
        slots = self.slots
        while True:
            if self.shut:
                await self.wait_open()
            if not slots.take():
                await (slots.acquire_first() if goes_on else slots.acquire())
            if not self.shut:
                return
            slots.release()  # a pause or an outage began while this turn waited for its slot

    def begin(self, attempt: Attempt) -> CancelScope:
        """Lets an attempt through, with the slot that was taken; in the scope that is returned, `cut` ends it."""
        self._in_flight[attempt] = scope = self.new_scope()
        return scope

    def end(self, attempt: Attempt | None) -> None:
        """Closes an attempt and gives its slot back; `None` if there was none to begin."""
        if attempt is not None:
            self._end(attempt)
        self.slots.release()

    def _end(self, attempt: Attempt) -> None:
        attempt.close()
        del self._in_flight[attempt]
        if not self._in_flight and self._until_quiet is not None:
            self._until_quiet.cancel()

    @contextmanager
    def until_quiet(self) -> Generator[None]:
        """A scope that ends as soon as no turn is in flight."""
        with CancelScope() as scope:
            self._until_quiet = scope
            if not self._in_flight:
                scope.cancel()
            try:
                yield
            finally:
                self._until_quiet = None

    def cut(self) -> None:
        """Ends every turn in flight at once; each keeps what it received."""
        for scope in self._in_flight.values():
            scope.cancel()

    def limit(self, seconds: float | None) -> AbstractContextManager[None]:
        """A limit in seconds with the gate open; may be entered again to go on where it stopped."""
        return _NO_LIMIT if seconds is None else Limit(self, seconds)

    def enter_limit(self, limit: Limit) -> None:
        """Registers a running limit, so that shutting the gate stops it."""
        self._limits.add(limit)
        if not self.shut:
            limit.go()

    def leave_limit(self, limit: Limit) -> None:
        """Takes a limit out."""
        if not self.shut:
            limit.stop()
        self._limits.discard(limit)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "barred" if self.barred else "open"
        return f"<Gate {state}, v{self.version}, {len(self._in_flight)} turns in flight>"


class Limit:
    """Raises `OverLimit` in its block after so many seconds with the gate open."""

    def __init__(self, gate: Gate, seconds: float) -> None:
        self._gate = gate
        self._left = seconds
        self._scope = CancelScope()

    @property
    def is_over(self) -> bool:
        """Whether no time is left; not to be asked while it runs."""
        return self._left <= 0

    def go(self) -> None:
        """Lets the time run."""
        self._scope.deadline = self._gate.clock() + self._left

    def stop(self) -> None:
        """Lets the time stand still."""
        self._left = self._scope.deadline - self._gate.clock()
        self._scope.deadline = math.inf

    def __enter__(self) -> None:
        self._scope = CancelScope()
        self._gate.enter_limit(self)
        self._scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._gate.leave_limit(self)
        swallowed = self._scope.__exit__(exc_type, exc, traceback)
        if self._scope.cancelled_caught:
            self._left = 0.0
            raise OverLimit(self)
        return swallowed
