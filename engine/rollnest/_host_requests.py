"""What a loop has asked its engine for, on the host where the loop runs: sent in order, answered in any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from anyio import CancelScope, Event, current_time

from ._host_messages import Answer, Ask, Edit, FromHost, GroupAnswer, Request, Withdraw

__all__ = ["Requests", "Waiting"]

_GRACE = 5.0
"""Seconds for which a call that the loop cancelled waits for what it had brought."""


class Waiting:
    """A request that was sent to the engine.

    Attributes:
        number: Its number.
        answer: What it has brought.
        call: What the engine wants called for it now: a tool's key, the session of a member whose loop is to run.
        scope: Around a tool that runs for it.
        stopped: Whether that is to end.
    """

    __slots__ = ("answer", "call", "number", "scope", "stopped", "told")

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: Answer | GroupAnswer | None = None
        self.call: Any = None
        self.scope: CancelScope | None = None
        self.stopped = False
        self.told = Event()

    async def wait(self) -> None:
        """Waits for what comes next."""
        while self.answer is None and self.call is None:
            self.told = Event()
            await self.told.wait()

    async def wait_answer(self) -> None:
        """Waits for the answer."""
        while self.answer is None:
            self.told = Event()
            await self.told.wait()


class Requests:
    """The requests of one session.

    Attributes:
        session: Its number.
        waiting: Those that have no answer yet.
        ending: Whether the engine wants the loop to end, and so answers nothing any more.
    """

    __slots__ = ("_asked", "_send", "ending", "session", "waiting")

    def __init__(self, session: int, send: Callable[[FromHost], None]) -> None:
        self.session = session
        self.waiting: dict[int, Waiting] = {}
        self.ending = False
        self._asked = 0
        self._send = send

    async def ask(
        self,
        request: Request,
        call: Callable[[Waiting, Any], Awaitable[Any]] | None = None,
        *,
        strand: int = 0,
        edits: Sequence[Edit] = (),
    ) -> tuple[Any, Any]:
        """Asks the engine for something.

        Args:
            request: What.
            call: Calls here what the engine wants called, each time that it says so.
            strand: Which of the loop's tasks asks.
            edits: What the loop did since it last asked.

        Returns:
            The answer, and what `call` returned last.

        Cancellation: the engine is told, and what came of it so far is waited for.
        """
        number, self._asked = self._asked, self._asked + 1
        waiting = self.waiting[number] = Waiting(number)
        returned: Any = None
        self._send(Ask(self.session, number, strand, edits, request))
        try:
            await waiting.wait()
            while waiting.answer is None and call is not None:
                wanted, waiting.call = waiting.call, None
                returned = await call(waiting, wanted)
                await waiting.wait()
        except BaseException:
            if waiting.answer is None and not self.ending:
                self._send(Withdraw(self.session, number))
                with CancelScope(deadline=current_time() + _GRACE, shield=True):
                    await waiting.wait_answer()
            raise
        finally:
            del self.waiting[number]
        answer = waiting.answer
        assert answer is not None
        if answer.error is not None:
            raise answer.error
        return answer, returned

    def want(self, number: int, what: Any) -> None:
        """The engine wants something called for a request."""
        waiting = self.waiting.get(number)
        if waiting is not None:
            waiting.call = what
            waiting.told.set()

    def take(self, answer: Answer | GroupAnswer) -> None:
        """A request has brought something; what is called for it is waited for no more."""
        waiting = self.waiting.get(answer.number)
        if waiting is not None:
            waiting.answer = answer
            waiting.told.set()
            if waiting.scope is not None:
                waiting.scope.cancel()

    def stop(self, number: int) -> None:
        """What is called for a request is to end."""
        waiting = self.waiting.get(number)
        if waiting is not None:
            waiting.stopped = True
            if waiting.scope is not None:
                waiting.scope.cancel()

    def __repr__(self) -> str:
        return f"<Requests of session {self.session}: {len(self.waiting)} of {self._asked} wait>"
