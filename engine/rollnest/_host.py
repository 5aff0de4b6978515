"""The place that runs agent loops for an engine elsewhere: it owns the loops, and nothing of what they make.

A loop gets a `HostedRollout`, a group loop a `HostedGroup`. The engine's rollout stays the truth: gate, journal, limits
and slots are there, and if this place is lost, nothing is lost but the time that a loop's own code took.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from types import TracebackType

from anyio import CancelScope, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from ._context import RolloutServices
from ._host_messages import (
    Begin,
    BeginGroup,
    Ended,
    FromHost,
    Prepare,
    ToHost,
)
from ._hosted_group import HostedGroup, loop_failure
from ._hosted_rollout import HostedRollout, services_of
from ._loops import AgentLoop, LoopFunction, as_loop
from ._records import Failure
from ._rollout import begin_loop
from ._workers import Workers
from .errors import HostLost, leaves

__all__ = ["LoopHost"]


class LoopHost:
    """Runs agent loops whose engine is elsewhere, while its block is open.

        async with LoopHost(loop, send) as host:
            ...  # host.receive(message) for each message of the engine, in order

    Leaving the block cancels the loops that still run, and waits for them.

    Args:
        loop: The loop. Each of its runs has a rollout of its own.
        send: Takes what is for the engine, in order; must not block.
        exit_grace: Seconds to wait at the end for tools in worker threads, which can't be stopped.
    """

    def __init__(
        self,
        loop: AgentLoop | LoopFunction,
        send: Callable[[FromHost], None],
        *,
        exit_grace: float = 5.0,
    ) -> None:
        self.loop: AgentLoop = as_loop(loop)
        self._send = send
        self._exit_grace = exit_grace
        self._setups: dict[int, RolloutServices] = {}
        self._sessions: dict[int, HostedRollout | HostedGroup] = {}
        self._fresh = count(-1, -1)  # numbers of sessions that are begun here
        self._workers = Workers()
        self._tasks: TaskGroup | None = None

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of the rollouts whose loops run here, and of groups."""
        return tuple(session.uid for session in self._sessions.values())

    @property
    def requests(self) -> int:
        """What these have asked the engine for and not got yet."""
        return sum(session.requests for session in self._sessions.values())

    @property
    def abandoned(self) -> str:
        """Names of tools whose thread can't be stopped, and for which nobody waits any more."""
        return self._workers.names

    async def __aenter__(self) -> LoopHost:
        self._tasks = create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        try:
            await tasks.__aexit__(exc_type, exc, traceback)
        finally:
            with CancelScope(shield=True):  # bounded by its own grace
                await self._workers.drain(self._exit_grace)

    def receive(self, message: ToHost) -> None:
        """Takes a message of the engine's; synchronous."""
        if isinstance(message, Prepare):
            self._setups[message.setup] = services_of(message, self._workers)
        elif isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, BeginGroup):
            self._begin_group(message)
        elif (session := self._sessions.get(message.session)) is not None:
            session.receive(message)

    def _begin(self, begin: Begin) -> None:
        if self._tasks is None:
            return  # it is being left: the engine hears of that
        rollout = HostedRollout(self._setups[begin.setup], begin, self.loop.tools, self._send)
        self._sessions[begin.session] = rollout

        async def run() -> None:
            begin_loop(rollout)
            await self.loop.generate_sample(rollout)

        self._tasks.start_soon(self._run, rollout, run, "agent", name=rollout.uid)

    def _begin_group(self, begin: BeginGroup) -> None:
        if self._tasks is None:
            return
        group = HostedGroup(
            self._setups[begin.setup],
            begin,
            self.loop,
            self._send,
            self._sessions,
            fresh=self._fresh.__next__,
        )
        self._sessions[begin.session] = group

        async def run() -> None:
            group.begin()
            await self.loop.generate_group(group)

        self._tasks.start_soon(self._run, group, run, "group", name=group.uid)

    async def _run(
        self, session: HostedRollout | HostedGroup, run: Callable[[], Awaitable[None]], kind: str
    ) -> None:
        """Runs a loop, and says how it has ended."""
        failure: Failure | HostLost | None = None
        has_ended = False
        try:
            with session.scope:
                failure = await loop_failure(run, session.uid, kind)
            has_ended = True
        except BaseException as error:
            if not all(isinstance(leaf, get_cancelled_exc_class()) for leaf in leaves(error)):
                failure, has_ended = Failure.of("loop", error), True  # an exit, of this process
            raise
        finally:
            # No await from here on. Of a loop that was cut with its host, nobody says that it has ended.
            del self._sessions[session.session]
            edits = session.close()
            if has_ended:
                self._send(Ended(session.session, edits, failure))

    def __repr__(self) -> str:
        return f"<LoopHost of {self.loop!r}: {len(self._sessions)} rollouts and groups>"
