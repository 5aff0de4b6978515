"""Judgers in actors.

Invariants:

- A call goes to the actor with the fewest calls, and never to more than the actor runs; the others wait here.
- A call that is cancelled has ended when its caller goes on, or its actor has been killed.
- An actor that died is made anew by whoever noticed; what it was asked is asked again, so often and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import anyio

from rollnest import ProcessJudger, Sample
from rollnest.abc import BatchJudger, CompositeJudger, Judger, JudgerLike, VerdictLike
from rollnest.errors import JudgeError
from rollnest_adapters._checks import check_positive, check_whole

from ._bridge import RAY, call, check_initialized, send
from ._failures import RayCallFailed
from ._judge_host import CONTROL, JudgeHost
from ._options import RayOptions
from ._packing import check_picklable, naming_culprit

__all__ = ["RayJudgers"]

_LEAVE = 5.0  # seconds for actors to end


class RayJudgers:
    """Has a judger judge in actors, so that it may use the CPUs of a whole cluster, and may crash or hang.

        judger = RayJudgers(run_the_tests, 16, options=RayOptions(num_cpus=1))
        task = TaskSpec("code", prompts, judger=judger)
        async with judger, Engine(controller, task, batch_size=64) as engine: ...

    It has to be entered, which makes the actors; leaving it kills them. The judger is pickled and sent to each: what it
    loads there stays. A synchronous one runs in a thread of its actor. One that is cancelled, by `Limits(judge=)` or
    with its group, has `grace` seconds to end; else its actor is killed and made anew.

    Each call also holds one of the engine's judge slots: let `Capacity(judges=)` be `actors` times `concurrency`.
    `Limits(judge=)` counts from there on. So with more slots than that it counts the waiting for an actor, too; and in
    any case the few seconds in which the last actor is made anew.

    Args:
        judger: A function of a sample, or an object with `judge` or `batch_judge`; sync or async. No composite: wrap
            its parts instead. It can't ask the policy that is trained.
        actors: How many.
        concurrency: Most calls at once in each.
        options: Where they are to run, and with what. Without `num_cpus` each holds one CPU. Ray restarts none of them:
            one that died is made anew.
        retries: How often a verdict is asked again if its actor dies; then the sample fails.
        grace: Seconds that a call may take to end when it is cancelled.
        start_timeout: Seconds until all actors have to be there; `None` is no limit.

    Attributes:
        replaced: How many actors were made anew because they died or were killed.

    Raises:
        TypeError: The judger can't be used, or not be pickled.
    """

    uses_policy = False

    def __init__(
        self,
        judger: JudgerLike,
        actors: int,
        *,
        concurrency: int = 1,
        options: RayOptions | None = None,
        retries: int = 2,
        grace: float = 1.0,
        start_timeout: float | None = 300.0,
    ) -> None:
        check_whole("actors", actors, 1)
        check_whole("concurrency", concurrency, 1)
        check_whole("retries", retries, 0)
        check_positive("grace", grace)
        if start_timeout is not None:
            check_positive("start_timeout", start_timeout)
        self.judges_groups: bool = _judges_groups(judger)
        self._function = _function(judger, by_group=self.judges_groups)
        check_picklable("judger", self._function)
        self._judger = judger
        self._count = actors
        self._concurrency = concurrency
        self._options = options or RayOptions()
        self._retries = retries
        self._grace = grace
        self._start_timeout = start_timeout
        self._actors: list[_Actor] = []
        self._slots: anyio.Semaphore | None = None
        self._turn = self._made = 0
        self.replaced: int = 0

    def __repr__(self) -> str:
        state = "closed" if self._slots is None else f"{sum(self.loads)} calls"
        return f"<RayJudgers of {self._judger!r}: {self._count} actors, {state}>"

    @property
    def loads(self) -> tuple[int, ...]:
        """How many calls each actor has."""
        return tuple(actor.calls for actor in self._actors)

    @property
    def handles(self) -> tuple[Any, ...]:
        """The actors' handles, as long as they live."""
        return tuple(actor.handle for actor in self._actors)

    async def __aenter__(self) -> RayJudgers:
        """Makes the actors, and waits until they are there.

        Raises:
            RuntimeError: Ray is not initialized, or it is open already.
            JudgeError: An actor can't be made, or not in time.
        """
        check_initialized()
        if self._slots is not None:
            raise RuntimeError("the judgers are open already")
        self._slots = anyio.Semaphore(self._count * self._concurrency)
        try:
            self._actors = [self._make() for _ in range(self._count)]
            with anyio.fail_after(self._start_timeout):
                for actor in self._actors:
                    await actor.began.outcome(_LEAVE)
        except BaseException as error:
            await self._close()
            if isinstance(error, TimeoutError):
                raise JudgeError(
                    f"{self!r}: the actors were not there within {self._start_timeout} s; Ray may have no place for "
                    "them"
                ) from None
            if isinstance(error, RayCallFailed):
                raise JudgeError(f"an actor of {self!r} can't be made: {error}") from error
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Kills the actors, and waits until they are gone."""
        await self._close()

    async def judge(self, sample: Sample) -> VerdictLike:
        """Asks an actor about one sample.

        Cancellation: the call is cancelled in its actor; an actor in which it goes on is killed.

        Raises:
            JudgeError: There is no answer, after `retries` more tries.
            Exception: What the judger raised.
        """
        return cast("VerdictLike", await self._ask("the sample", sample))

    async def batch_judge(self, samples: Sequence[Sample]) -> Sequence[VerdictLike]:
        """Asks an actor about a group; see `judge`."""
        return cast("Sequence[VerdictLike]", await self._ask("the samples", list(samples)))

    async def _ask(self, what: str, given: object) -> Any:
        if self._slots is None:
            raise JudgeError(f"{self!r} is not open: enter it before the engine")
        tries = 0
        async with self._slots:
            while True:
                actor = self._least_loaded()
                actor.calls += 1
                try:
                    return await self._ask_at(actor, what, given)
                except RayCallFailed as error:
                    if error.retryable:
                        self._replace(actor)
                    tries += not actor.condemned
                    if not error.retryable or tries > self._retries:
                        raise JudgeError(
                            f"the judger's actor gave no verdict, asked {_times(tries)}: {error}"
                        ) from error
                finally:
                    actor.calls -= 1

    async def _ask_at(self, actor: _Actor, what: str, given: object) -> Any:
        try:
            with naming_culprit(what, given):
                arrival = send(actor.handle.judge, given)
        except TypeError as error:
            raise JudgeError(str(error)) from error
        try:
            await arrival.wait()
        except BaseException:
            if not await arrival.end(self._grace):
                actor.condemned = True
                self._replace(actor)
            raise
        return arrival.value()

    def _least_loaded(self) -> _Actor:
        """The actor for the next call: one with room, rather one that is there already; ties go round."""
        self._turn += 1
        count = len(self._actors)
        order = [self._actors[(self._turn + step) % count] for step in range(count)]
        most = self._concurrency
        return min(order, key=lambda a: (a.calls >= most, not a.began.is_there, a.calls))

    def _replace(self, actor: _Actor) -> None:
        """Has another in its place, unless somebody has seen to that."""
        if actor not in self._actors:
            return
        RAY.kill(actor.handle)
        self.replaced += 1
        self._actors[self._actors.index(actor)] = self._make()

    def _make(self) -> _Actor:
        make: Any = RAY.remote(concurrency_groups={CONTROL: 2})(JudgeHost)
        number, self._made = (
            self._made,
            self._made + 1,
        )  # a killed one may have its name for a while
        given = self._options.given(number=number, num_cpus=1)
        given |= {"max_restarts": 0, "max_concurrency": self._concurrency}
        return _Actor(make.options(**given).remote(self._function, self._concurrency))

    async def _close(self) -> None:
        actors, self._actors, self._slots = self._actors, [], None
        for actor in actors:
            RAY.kill(actor.handle)
        with anyio.move_on_after(_LEAVE, shield=True):
            for actor in actors:
                try:
                    await call(actor.handle.ready)
                except RayCallFailed:
                    pass  # it is gone


class _Actor:
    """One actor.

    Attributes:
        handle: Its handle.
        began: Arrives when it is there.
        calls: How many calls it has.
        condemned: Whether it was killed because a call in it would not end.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.began = send(handle.ready)
        self.calls = 0
        self.condemned = False


def _judges_groups(judger: object) -> bool:
    return isinstance(judger, BatchJudger) and (
        not isinstance(judger, Judger) or bool(getattr(judger, "judges_groups", False))
    )


def _function(judger: JudgerLike, *, by_group: bool) -> Callable[[Any], Any]:
    """What is called in the actors."""
    if isinstance(judger, ProcessJudger | RayJudgers):
        raise TypeError(f"judger of RayJudgers has processes of its own already, got {judger!r}")
    if bool(getattr(judger, "uses_policy", False)):
        raise TypeError(
            f"judger of RayJudgers asks the policy that is trained, which is not in its actors, got {judger!r}"
        )
    function: Any = judger
    if by_group:
        function = cast("BatchJudger", judger).batch_judge
    elif isinstance(judger, Judger):
        function = judger.judge
    elif isinstance(judger, CompositeJudger):
        raise TypeError(
            f"judger of RayJudgers must be no composite, got {judger!r}; wrap its parts instead"
        )
    if not callable(function):
        raise TypeError(
            f"judger of RayJudgers must be a function of a sample, or have judge or batch_judge, got {judger!r}"
        )
    return cast("Callable[[Any], Any]", function)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
