"""One server of a pool: what is known of it, and the turns that it has. Synchronous; the pool acts on it.

A server serves, or says why it does not. It begins to serve in one place (`admit`) and stops in one place (`put_out`),
each in one step, so no turn can go to a server that is on its way out.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from anyio import CancelScope, Event, Lock
from attrs import frozen

from rollnest.abc import Attempt, Health, InferenceController

__all__ = ["Flight", "Server", "ServerState"]

_State: TypeAlias = Literal["serving", "suspected", "stale", "out", "leaving"]


@frozen(kw_only=True)
class ServerState:
    """What is known of one server of a pool.

    Attributes:
        name: Its name.
        state: `"serving"`; `"suspected"` if a turn has failed there and it is being checked; `"stale"` if it works, but
            holds other weights than the pool's; `"out"` if it does not work; `"leaving"`.
        why: Why it does not serve; empty if it does.
        turns: Turns that it has in flight.
        limit: How many it may have; `None` is no limit.
        version: Weight version that it holds; `None` if nobody knows.
        load: What it last said of its load; `None` if it has said nothing.
        served: Turns that ended there.
        failed: Turns that failed there, or were taken from it.
    """

    name: str
    state: _State
    why: str
    turns: int
    limit: int | None
    version: int | None
    load: Health | None
    served: int
    failed: int


class Flight:
    """One turn in the pool.

    Attributes:
        attempt: What is asked.
        server: Who has it, or had it last; `None` while it waits for the first.
        request: The scope of the server's `generate`; cancelled if the turn is taken from it.
        parked: The scope of a wait of the pool's own, where no server can abort the turn.
        aborted: Whether it was aborted in such a wait.
        woken: Set once it waits no longer.
        taken: Why it was taken from its server.
    """

    __slots__ = ("aborted", "attempt", "parked", "request", "server", "taken", "woken")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.server: Server | None = None
        self.request = CancelScope()
        self.parked: CancelScope | None = None
        self.aborted = False
        self.woken = Event()
        self.taken: str | None = None

    def abort_wait(self) -> bool:
        """Ends a wait of the pool's own; whether there was one."""
        if self.parked is None:
            return False
        self.aborted = True
        self.parked.cancel()
        return True


class Server:
    """A member of a pool.

    Attributes:
        name: Its name.
        controller: The server.
        lock: Held by every control call, so that there is one at a time.
        up: Whether it answered the last check.
        serving: Whether it gets turns.
        leaving: Whether it is to go.
        paused: Whether it was asked to pause, and has not confirmed since that it goes on.
        released: Whether it was asked to give memory back, and has not confirmed since that it has it again.
        suspected: Whether a turn has failed there since the last check.
        stale: Whether it works, but holds other weights than the pool's.
        doubtful: Whether nobody knows which weights it holds, whatever it says.
        labels: Whether it says itself which version it holds.
        holds: Weight version that it holds, unless that is in doubt.
        load: What it last said.
        limit: How many turns it may have.
        peak: Most turns in flight since the limit was set.
        chosen_at: Number of the choice that fell on it last.
        why: Why it does not serve.
        flights: Its turns.
        failures: Rollouts whose turns have failed there since one went well.
        times_out: How often it was out since a turn went well there.
        missed: Whether it left the last check without an answer.
        wanted: Whether it is to be checked now.
        checks_begun: Checks so far.
        checks_ended: Those that are over.
        leave_by: When the turns of a server that leaves are taken from it.
        gone: Set once it has left, and its controller is closed.
        checking: The scope of the check that runs.
        readmission: The scope in which it is being brought back; cancelled by a pause.
        draining: The scope in which a server that leaves waits for its turns.
        served: Turns that ended there.
        failed: Turns that failed there, or were taken from it.
    """

    def __init__(
        self, name: str, controller: InferenceController, limit: int | None, number: int
    ) -> None:
        self.name = name
        self.controller = controller
        self.lock = Lock()
        self.up = False
        self.serving = False
        self.leaving = False
        self.paused = False
        self.released = False
        self.suspected = False
        self.stale = False
        self.doubtful = False
        self.labels = False
        self.holds: int | None = None
        self.load: Health | None = None
        self.limit = limit
        self.peak = 0
        self.chosen_at = number
        self.why = "it is not open yet"
        self.flights: dict[Flight, None] = {}
        self.failures: set[str] = set()
        self.times_out = 0
        self.missed = False
        self.wanted = False
        self.checks_begun = 0
        self.checks_ended = 0
        self.leave_by = math.inf
        self.gone = Event()
        self.checking: CancelScope | None = None
        self.readmission: CancelScope | None = None
        self.draining: CancelScope | None = None
        self.served = 0
        self.failed = 0
        self._changed = Event()

    @property
    def turns(self) -> int:
        """Turns in flight."""
        return len(self.flights)

    def admit(self) -> None:
        """It gets turns from now on."""
        self.serving = self.up = True
        self.suspected = self.stale = False
        self.failures.clear()
        self.why = ""
        self.tell()

    def put_out(self, why: str) -> bool:
        """It gets no turn any more, and those that it has are taken from it; whether it served until now."""
        served, self.serving = self.serving, False
        self.suspected = False
        self.why = why
        for flight in self.flights:
            flight.taken = why
            flight.request.cancel()
        self.tell()
        return served

    def leave(self, by: float) -> None:
        """It gets no turn any more, and is to go once it has none, or by then."""
        self.leaving = True
        self.serving = False
        self.why = "it leaves"
        self.leave_by = min(self.leave_by, by)
        if self.draining is not None:
            self.draining.deadline = self.leave_by
        for scope in (self.checking, self.readmission):
            if scope is not None:
                scope.cancel()
        self.tell()

    async def drain(self) -> None:
        """Returns once it has no turn; takes them from it when its time is over.

        Cancellation: they stay.
        """
        with CancelScope(deadline=self.leave_by) as self.draining:
            while self.flights:
                await self.change()
        self.put_out("it leaves")
        while self.flights:
            await self.change()

    def take(self, flight: Flight, number: int) -> None:
        """It has a turn."""
        flight.server = self
        self.flights[flight] = None
        self.chosen_at = number
        self.peak = max(self.peak, len(self.flights))

    def let_go(self, flight: Flight) -> None:
        """It does not have it any more."""
        del self.flights[flight]
        if not self.flights:
            self.tell()

    def went_well(self) -> None:
        """A turn has ended there, and brought something."""
        self.times_out = 0
        self.failures.clear()

    def want_check(self) -> None:
        """It is to be checked now."""
        self.wanted = True
        self.tell()

    def tell(self) -> None:
        """Wakes everyone who waits for a change."""
        changed, self._changed = self._changed, Event()
        changed.set()

    async def change(self) -> None:
        """Returns after the next change; look at what you wait for again."""
        await self._changed.wait()

    @property
    def state(self) -> ServerState:
        """What is known of it."""
        state: _State = "stale" if self.stale else "out"
        if self.leaving:
            state = "leaving"
        elif self.serving:
            state = "suspected" if self.suspected else "serving"
        return ServerState(
            name=self.name,
            state=state,
            why=self.why,
            turns=self.turns,
            limit=self.limit,
            version=None if self.doubtful else self.holds,
            load=self.load,
            served=self.served,
            failed=self.failed,
        )

    def __repr__(self) -> str:
        state = self.state
        return f"<Server {self.name!r} {state.state}, {self.turns} turns{': ' if self.why else ''}{self.why}>"
