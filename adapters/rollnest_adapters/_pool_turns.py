"""The turns in a pool: which server has each of them, and which wait for one.

A turn gets a server, and loses it, in one synchronous step. Those that wait are served in the order in which they came,
by whichever server has room first.
"""

from __future__ import annotations

from collections.abc import Collection

from anyio import CancelScope

from rollnest.abc import Attempt, FinishReason
from rollnest.errors import InferenceError, UnsupportedSampling

from ._pool_checks import Checks
from ._pool_roster import Roster, said
from ._pool_routing import Sessions, choose
from ._pool_server import Flight, Server

__all__ = ["Turns"]

_PROBE = "probe"
"""The affinity of requests that belong to no rollout."""

_OUTLIER = 3
"""So many rollouts in a row fail at a server, and it is out although it says that it works."""


class Turns:
    """The turns of the servers of a roster."""

    def __init__(self, roster: Roster, checks: Checks, sticky: int) -> None:
        self._roster = roster
        self._checks = checks
        self._sticky = sticky
        self._choices = 0
        self._sessions: Sessions[Server] = Sessions()
        self._flights: dict[str, Flight] = {}
        self._queue: dict[Flight, None] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting(self) -> int:
        """Turns that no server has."""
        return len(self._queue)

    async def run(self, attempt: Attempt) -> None:
        """Has a server continue an attempt; see `ControllerPool.generate`."""
        if attempt.id in self._flights:
            raise InferenceError(f"attempt {attempt.id} is in flight already", maybe_executed=False)
        flight = self._flights[attempt.id] = Flight(attempt)
        try:
            if not self._place(flight):
                await self._wait(flight)
            if flight.server is not None and not flight.aborted:
                await self._serve(flight, flight.server)
            if flight.aborted and attempt.finish_reason is None:
                attempt.finish(FinishReason.ABORT, "it waited in the pool")
        finally:
            del self._flights[attempt.id]
            self._let_go(flight)

    def abort(self, ids: Collection[str] | None) -> dict[Server, list[str]]:
        """Ends those that wait in the pool; returns the others by the server that has them."""
        asked: dict[Server, list[str]] = {}
        for id_ in list(self._flights) if ids is None else ids:
            flight = self._flights.get(id_)
            if flight is None or flight.abort_wait() or flight.server is None:
                continue
            asked.setdefault(flight.server, []).append(id_)
        return asked

    def forget(self, server: Server) -> None:
        """A server has left: nothing holds on to it any more."""
        self._sessions.forget(server)

    def dispatch(self) -> None:
        """Gives those that wait to servers that have room; if no server is left, they have waited in vain."""
        roster = self._roster
        while self._queue and not (roster.open and roster.paused):
            flight = next(iter(self._queue))
            serving = roster.serving() if roster.open else []
            if serving and not self._take(flight, serving):
                return
            del self._queue[flight]
            flight.woken.set()

    def _place(self, flight: Flight) -> bool:
        """Gives a turn to a server; whether there is one with room."""
        if self._roster.paused or self._queue:
            return False
        serving = self._roster.serving()
        if not serving:
            raise self._roster.nobody()
        return self._take(flight, serving)

    def _take(self, flight: Flight, serving: Collection[Server]) -> bool:
        session = flight.attempt.affinity
        server = choose(
            serving,
            home=self._sessions.home(session),
            shunned=self._sessions.shunned(session),
            sticky=self._sticky,
        )
        if server is None:
            return False
        self._choices += 1
        server.take(flight, self._choices)
        return True

    def _let_go(self, flight: Flight) -> None:
        server = flight.server
        if server is not None and flight in server.flights:
            server.let_go(flight)
            self.dispatch()

    async def _wait(self, flight: Flight) -> None:
        """Waits until a server has the turn, or it is aborted."""
        self._queue[flight] = None
        try:
            with CancelScope() as flight.parked:
                await flight.woken.wait()
        finally:
            flight.parked = None
            self._queue.pop(flight, None)
        if flight.server is None and not flight.aborted:
            raise self._roster.nobody() if self._roster.open else closed()

    async def _serve(self, flight: Flight, server: Server) -> None:
        attempt, failure = flight.attempt, None
        try:
            with flight.request:
                await server.controller.generate(attempt)
        except UnsupportedSampling:
            raise
        except Exception as error:
            failure = error
        finally:
            self._let_go(flight)
        cut = flight.request.cancelled_caught and attempt.finish_reason is None
        if failure is None and not cut:
            server.served += 1
            if attempt.received:
                server.went_well()
                self._remember(flight, server, well=True)
            return
        server.failed += 1
        if failure is not None and flight.taken is None:
            await self._blame(flight, server, failure)
            if flight.aborted:
                return
            if flight.taken is None:
                raise failure
        raise self._lost(flight, server, failure) from failure

    async def _blame(self, flight: Flight, server: Server, failure: Exception) -> None:
        """Finds out whether a turn failed because its server is gone; then it was taken from it."""
        if server.serving and may_pass(failure):
            server.suspected = True
            server.failures.add(flight.attempt.affinity)
            self._remember(flight, server, well=False)
        try:
            with CancelScope() as flight.parked:
                await self._checks.verdict(server)
        finally:
            flight.parked = None
        if server.serving and len(server.failures) >= _OUTLIER and self._has_others(server):
            self._roster.put_out(
                server,
                f"turns of {len(server.failures)} rollouts in a row have failed there, the last with: {said(failure)}",
            )
        if not server.serving:
            flight.taken = server.why

    def _has_others(self, server: Server) -> bool:
        return any(s is not server and not s.suspected for s in self._roster.serving())

    def _lost(self, flight: Flight, server: Server, failure: Exception | None) -> InferenceError:
        """The error of a turn whose server is gone."""
        if not self._roster.open:
            return closed()
        how = "" if failure is None else f"; the turn failed with: {said(failure)}"
        return InferenceError(
            f"server {server.name!r} is out: {flight.taken}{how}",
            retryable=True,
            failover=bool(self._roster.serving()),
        )

    def _remember(self, flight: Flight, server: Server, *, well: bool) -> None:
        session = flight.attempt.affinity
        if session and session != _PROBE:
            self._sessions.went(session, server, well=well)


def closed() -> InferenceError:
    """The error where the pool's block is not on."""
    return InferenceError("the pool is not open", maybe_executed=False)


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed when it is sent again."""
    if isinstance(error, InferenceError):
        return error.retryable
    return isinstance(error, ConnectionError)
