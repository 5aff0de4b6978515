"""Agent loops in Ray's actors: how many, where, and what happens when one dies.

`RayLoops` owns the actors. One task for each place among them keeps an actor there: starts it, carries messages both
ways, and puts another one in its place when it is lost. An actor that was lost in any way is killed, so that nothing of
it can go on where nobody sees it.

Messages go in bundles: while one call is on its way, what is to be sent next is gathered.
"""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

import anyio
import ray
from anyio import CancelScope, Event, create_task_group
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from ray.exceptions import RayError

from rollnest import AgentLoop, Prompt, Rollout
from rollnest.errors import DataError, EngineBusy, leaves
from rollnest.hosting import (
    Begin,
    BeginGroup,
    FromHost,
    Host,
    HostedLoop,
    ToHost,
    holds_users_objects,
)
from rollnest_adapters._checks import check_positive, check_whole

from ._bridge import call, check_initialized
from ._failures import RayCallFailed
from ._loop_actor import LoopActor, RayLoopState
from ._options import RayOptions

__all__ = ["RayLoops", "pack"]

_cloudpickle: Any = cast("Any", ray).cloudpickle

_STARTS = 5  # in a row, that fail
_FIRST_WAIT = 0.5  # seconds until another actor is started in the place of one that did not start; doubled each time


class RayLoops(HostedLoop):
    """Runs an agent loop in Ray's actors.

        TaskSpec("code", prompts, judger=judge, loop=RayLoops(solve, workers=8))

    Nothing else changes: the same loop runs beside the engine without it. The loop's code and its tools run in the
    actors; turns, verdicts and what is recorded go through the engine, so pauses, limits, capacity and checkpoints are
    as they are without actors. A rollout goes to the actor that has the fewest, and one that runs again, to where it
    ran before.

    An actor that dies is replaced, and its rollouts go on in another one, each from its journal: turns and results of
    tools are not asked for again. A rollout that loses its actor four times fails. So it is with the group of a loop
    that overrides `generate_group` and is replayable; one that is not begins anew in another actor.

    The engine enters it, and with it the actors start; when the engine is left, they end. Several tasks may share one.

    Args:
        loop: The agent loop; it is pickled here, and sent to each actor when that starts. One that overrides
            `generate_group` has each of its groups in one actor.
        workers: How many actors.
        options: Where they run, and with what; one CPU each if nothing is said.
        grace: Seconds for which an actor may take to end a loop that was cut. Then it is killed, and replaced.
        start_timeout: Seconds for which the actors may take to start.

    Raises:
        TypeError: The loop can't be pickled; says what of it.
        ValueError: An option has a value that can't be.
    """

    def __init__(
        self,
        loop: AgentLoop | Callable[[Rollout], Awaitable[None]],
        workers: int = 1,
        *,
        options: RayOptions | None = None,
        grace: float = 5.0,
        start_timeout: float = 120.0,
    ) -> None:
        super().__init__(loop, grace=grace)
        check_whole("workers", workers, 1)
        check_positive("start_timeout", start_timeout)
        self._options = options or RayOptions()
        if self._options.max_restarts:
            raise ValueError(
                "options.max_restarts must be 0 or None, since RayLoops replaces an actor itself, "
                f"got {self._options.max_restarts}"
            )
        if self._options.lifetime == "detached":
            raise ValueError(
                "options.lifetime must not be 'detached': the actors end with the engine"
            )
        self._workers = workers
        self._start_timeout = start_timeout
        self._packed = pack("loop", self.loop)
        self._tasks: TaskGroup | None = None
        self._links: list[_Link] = []
        self._started = 0

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises `TypeError` if a prompt can't be pickled."""
        pack("prompts[0]", prompt)
        self.loop.check_prompt(prompt)

    @property
    def workers(self) -> int:
        """How many actors there are to be."""
        return self._workers

    async def states(self) -> list[RayLoopState]:
        """Asks each actor what it is at; those that are lost meanwhile are left out.

        Cancellation: has no effect on them.
        """
        states: list[RayLoopState] = []
        for link in list(self._links):
            try:
                states.append(await call(link.actor.state))
            except RayCallFailed:
                continue
        return states

    async def __aenter__(self) -> RayLoops:
        """Starts the actors.

        Raises:
            RuntimeError: Ray is not initialized, or an actor did not start; says why.
            TimeoutError: They took too long; the cluster may lack what they need.

        Cancellation: those that were started are killed.
        """
        check_initialized()
        if self._tasks is not None:
            raise EngineBusy(f"{self!r} is used by an engine already")
        self._tasks = tasks = create_task_group()
        await tasks.__aenter__()
        up = [Event() for _ in range(self._workers)]
        try:
            with anyio.move_on_after(self._start_timeout) as limit:
                for number, event in enumerate(up):
                    tasks.start_soon(self._keep, number, event, name=f"actor {number} of RayLoops")
                for event in up:
                    await event.wait()
            if limit.cancelled_caught:
                count = sum(event.is_set() for event in up)
                free = cast("Any", ray).available_resources()
                raise TimeoutError(
                    f"{count} of {self._workers} actors of {self!r} started within {self._start_timeout} s; they need "
                    f"{self._options.given(num_cpus=1)} each, the cluster has {free} free"
                )
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the actors: each ends what runs there, for a `grace` at most, and is killed."""
        tasks = self._tasks
        if tasks is None:
            return
        try:
            tasks.cancel_scope.cancel()
            try:
                await tasks.__aexit__(exc_type, exc, traceback)
            except BaseExceptionGroup as group:
                raise _first(group) from None
        finally:
            self._tasks = None

    def give_up(self, host: Host, why: str) -> None:
        """See `HostedLoop.give_up`: the actor is killed."""
        for link in self._links:
            if link.host is host:
                link.lose(why)
        self.lose(host, why)

    async def _keep(self, place: int, up: Event) -> None:
        """Keeps an actor in one place, for good."""
        failed = 0
        while True:
            link = self._start(place)
            self._links.append(link)
            try:
                await link.work(lambda: self._is_up(link, up))  # noqa: B023  (called in it)
            finally:
                self._links.remove(link)
                link.lose("it was ended")
                self.lose(link.host, link.why or "")
            if link.was_up:
                failed = 0
                continue
            failed += 1
            if not up.is_set() or failed == _STARTS:
                raise RuntimeError(f"an actor of {self!r} can't start: {link.why}")
            await anyio.sleep(_FIRST_WAIT * 2 ** (failed - 1))

    def _is_up(self, link: _Link, up: Event) -> None:
        up.set()
        self.join(link.host)

    def _start(self, place: int) -> _Link:
        self._started += 1
        name = f"loops-{place}" + (f".{self._started}" if self._started > self._workers else "")
        options = self._options.given(number=self._started, num_cpus=1, max_restarts=0)
        make: Any = ray.remote
        actor = make(LoopActor).options(**options).remote(name, self._packed, self._grace)
        return _Link(name, actor, self._grace)

    def __repr__(self) -> str:
        return f"RayLoops({self.loop!r}, workers={self._workers})"


class _Link:
    """One actor, and the way to it.

    Attributes:
        host: What the engine sees of it.
        actor: Its handle.
        was_up: Whether it has ever been ready.
        why: Why it is lost.
    """

    def __init__(self, name: str, actor: Any, grace: float) -> None:
        self.host = Host(name, self._send)
        self.actor = actor
        self.was_up = False
        self.why: str | None = None
        self._grace = grace
        self._outbox: list[tuple[int, bytes]] = []
        self._told = Event()
        self._scope = CancelScope()

    def lose(self, why: str) -> None:
        """Gives it up, and kills it: nothing of it may go on."""
        if self.why is None:
            self.why = why
            _kill(self.actor)
            self._scope.cancel()

    async def work(self, on_up: Callable[[], None]) -> None:
        """Carries messages, until the actor is lost.

        Cancellation: what runs there is ended.
        """
        with self._scope:
            async with create_task_group() as tasks:
                tasks.start_soon(self._watch, self._run)
                await self._watch(self._ready, on_up)
                tasks.start_soon(self._watch, self._push)
                await self._watch(self._pull)

    async def _watch(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        try:
            await function(*args)
        except (
            Exception
        ) as error:  # the actor's own, or Ray's: whatever it is, the actor is of no use
            self.lose(f"{type(error).__name__}: {error}")
            await checkpoint()

    async def _ready(self, on_up: Callable[[], None]) -> None:
        await call(self.actor.ready)
        self.was_up = True
        on_up()

    async def _run(self) -> None:
        """The actor's owner of what runs there. To cancel it ends that, and waits for it."""
        await call(self.actor.run, grace=self._grace)
        raise RuntimeError("the actor ended by itself")

    async def _push(self) -> None:
        while True:
            while not self._outbox:
                self._told = Event()
                await self._told.wait()
            bundle, self._outbox = self._outbox, []
            await call(self.actor.push, bundle)

    async def _pull(self) -> None:
        while True:
            messages: list[FromHost] = pickle.loads(await call(self.actor.pull))
            for message in messages:
                self.host.receive(message)

    def _send(self, message: ToHost) -> None:
        self._outbox.append((getattr(message, "session", 0), _packed(message)))
        self._told.set()


def pack(what: str, value: object) -> bytes:
    """Pickles something of the user's, what is defined in the main script too."""
    try:
        return bytes(_cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"{what} must be picklable, to be sent to an actor: {type(error).__name__}: {error}, got {value!r}"
        ) from error


def _packed(message: ToHost) -> bytes:
    if not holds_users_objects(message):
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    try:
        return bytes(_cloudpickle.dumps(message))
    except Exception as error:
        what = "the engine's tokenizer, or a verdict,"
        if isinstance(message, Begin | BeginGroup):
            what = f"prompt {message.prompt.uid!r}"
        raise DataError(
            f"{what} can't be pickled, to be sent to an actor: {type(error).__name__}: {error}"
        ) from error


def _kill(actor: Any) -> None:
    with suppress(RayError):  # this process may have left Ray
        cast("Any", ray).kill(actor)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    return next(leaves(group))
