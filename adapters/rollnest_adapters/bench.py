"""How long pausing takes with a controller of yours: `rollnest bench pause MODULE:FACTORY`.

The factory is a function without arguments, or a class, that makes a controller. The engine enters it, keeps so many
turns in flight, pauses, confirms, resumes, and does it again. Beside each figure stands the engine's own part: the same
with a controller in this process that answers at once. What is left is the way to your server and the server itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import anyio
from anyio import Event, current_time, fail_after, sleep
from attrs import field, frozen

from rollnest import AsyncStrategy, Capacity, Engine, Prompt, Rollout, Sampling, TaskSpec
from rollnest.abc import (
    Attempt,
    Capabilities,
    Health,
    InferenceController,
    Instrument,
    PauseMode,
    ReleaseTag,
    WeightSource,
)
from rollnest.errors import EngineBroken, PauseFailed, Starved

from ._figures import Row, row

__all__ = ["BenchError", "PauseBench", "load_factory", "measure_pause"]


class BenchError(Exception):
    """Why there are no figures, in a sentence for whoever typed the command."""


def _positive(_: object, attribute: Any, value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name} must be >= 1, got {value}")


@frozen(kw_only=True)
class PauseBench:
    """What is measured.

    Attributes:
        in_flight: Turns in flight when the pause begins.
        mode: What happens to them.
        pauses: How often.
        settle: Seconds between the last turn's start and the pause, so that the server has got to work.
        grace: Seconds that turns have until they are cut.
        patience: Seconds that it may take until all turns are in flight.
        control_timeout: Seconds that the controller has to confirm.
        max_tokens: Tokens of a turn at most; a turn that has ended is followed by another.
        prompt_tokens: Tokens of each prompt; ids from 1 to 30, so that any vocabulary has them.
        version: Weight version that the controller reports when it is entered.
    """

    in_flight: int = field(default=64, validator=_positive)
    mode: PauseMode = PauseMode.ABORT
    pauses: int = field(default=20, validator=_positive)
    settle: float = 0.5
    grace: float = 5.0
    patience: float = 60.0
    control_timeout: float = 30.0
    max_tokens: int = field(default=4096, validator=_positive)
    prompt_tokens: int = field(default=32, validator=_positive)
    version: int = 0


def load_factory(target: str) -> Callable[[], object]:
    """Finds what makes the controller; modules of the working directory are found too.

    Args:
        target: `package.module:name`, or `package.module:Class.method`.

    Raises:
        BenchError: There is no such module, or nothing callable of this name in it.
    """
    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise BenchError(f"give the factory as MODULE:FACTORY, got {target!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise BenchError(f"{module_name} can't be imported: it needs {error.name}") from error
        raise BenchError(f"there is no module {error.name!r} here or on Python's path") from error
    except Exception as error:
        raise BenchError(f"{module_name} can't be imported: {_describe(error)}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise BenchError(f"{module_name} has no {path!r}") from None
    if not callable(found):
        raise BenchError(f"{target} is {found!r}; it must be a function or a class")
    return found


def make_controller(factory: Callable[[], object]) -> InferenceController:
    """Calls the factory.

    Raises:
        BenchError: It raised, or what it returned is no controller.
    """
    try:
        made = factory()
    except Exception as error:
        raise BenchError(f"the factory raised {_describe(error)}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise BenchError("the factory is async; it must be an ordinary function or a class")
    missing = [name for name in _METHODS if not callable(getattr(type(made), name, None))]
    if missing:
        raise BenchError(
            f"the factory returned {type(made).__name__}, which is no controller: it lacks "
            f"{', '.join(missing)}"
        )
    return made  # type: ignore[return-value]  # what an InferenceController has was looked for just now


_METHODS = (
    "__aenter__",
    "__aexit__",
    "generate",
    "abort",
    "pause",
    "resume",
    "update_weights",
    "version",
)


async def measure_pause(factory: Callable[[], object], bench: PauseBench) -> list[Row]:
    """Measures pauses of the factory's controller.

    Args:
        factory: Makes the controller.
        bench: What is measured.

    Returns:
        Rows with the samples of all pauses, in ms and in turns.

    Raises:
        BenchError: The controller can't be made, does not take so many turns, or does not confirm a pause.

    Cancellation: the engine is left, and the controller with it.
    """
    theirs = await _measure(make_controller(factory), bench)
    # The engine's own part. Its turns never end by themselves, so waiting for them would last `grace`.
    mode = PauseMode.ABORT if bench.mode is PauseMode.WAIT else bench.mode
    alone = await _measure(
        _Nothing(), PauseBench(in_flight=bench.in_flight, mode=mode, pauses=bench.pauses, settle=0)
    )
    where = f"{bench.mode.name}, {bench.in_flight:,} turns in flight"
    return [
        row(f"{where}: pause to quiet", "ms", theirs.quiet, baseline=alone.quiet),
        row(f"{where}: resume to first request", "ms", theirs.first, baseline=alone.first),
        row(f"{where}: resume to last request", "ms", theirs.last, baseline=alone.last),
        row("turns in flight when it began", "turns", theirs.in_flight),
        row("turns cut without an answer, each pause", "turns", theirs.unseen),
    ]


@frozen
class _Measured:
    quiet: list[float] = field(factory=list[float])
    first: list[float] = field(factory=list[float])
    last: list[float] = field(factory=list[float])
    in_flight: list[float] = field(factory=list[float])
    unseen: list[float] = field(factory=list[float])


class _Turns(Instrument):
    """Counts the turns in flight."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.now = 0
        self.first: float | None = None
        self.all_here = Event()

    def forget(self) -> None:
        self.first = None
        self.all_here = Event()

    def turn_started(self, attempt: Attempt) -> None:
        self.now += 1
        if self.first is None:
            self.first = current_time()
        if self.now >= self._wanted:
            self.all_here.set()

    def turn_ended(self, attempt: Attempt) -> None:
        self.now -= 1


async def _measure(controller: InferenceController, bench: PauseBench) -> _Measured:
    turns, measured = _Turns(bench.in_flight), _Measured()
    task = TaskSpec(
        "bench",
        [Prompt(f"prompt {n}", token_ids=_ids(n, bench.prompt_tokens)) for n in range(997)],
        judger=None,
        loop=_turn_after_turn,
        group_size=1,
        sampling=Sampling(bench.max_tokens),
        strategy=AsyncStrategy(max_staleness=0, lead=0),
        starve_after=1,
    )
    engine = Engine(
        controller,
        task,
        batch_size=bench.in_flight,
        capacity=Capacity(turns=None),
        control_timeout=bench.control_timeout,
        version=bench.version,
        instruments=[turns],
    )
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(engine)
        except Exception as error:
            hint = " (--version says which it starts with)" if isinstance(error, ValueError) else ""
            raise BenchError(
                f"the controller can't be entered: {_describe(error)}{hint}"
            ) from error
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_consume, engine)
                for _ in range(bench.pauses):
                    await _pause_once(engine, turns, bench, measured)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise _reason(_first(group)) from group
    return measured


async def _pause_once(
    engine: Engine, turns: _Turns, bench: PauseBench, measured: _Measured
) -> None:
    try:
        with fail_after(bench.patience):
            await turns.all_here.wait()
    except TimeoutError:
        raise BenchError(
            f"only {turns.now} of {bench.in_flight} turns were in flight after {bench.patience:g} s"
        ) from None
    await sleep(bench.settle)
    before = engine.statistics().total("unseen_turns")
    async with engine.paused(bench.mode, grace=bench.grace) as pause:
        measured.quiet.append(pause.quiet_seconds * 1e3)
        measured.in_flight.append(pause.turns_in_flight)
        measured.unseen.append(engine.statistics().total("unseen_turns") - before)
        turns.forget()
        resumed = current_time()
    try:
        with fail_after(bench.patience):
            await turns.all_here.wait()
    except TimeoutError:
        raise BenchError(
            f"only {turns.now} of {bench.in_flight} turns came back within {bench.patience:g} s after a pause"
        ) from None
    measured.first.append(((turns.first or resumed) - resumed) * 1e3)
    measured.last.append((current_time() - resumed) * 1e3)


async def _turn_after_turn(rollout: Rollout) -> None:
    while rollout.remaining:
        await rollout.generate()


async def _consume(engine: Engine) -> None:
    """Makes room for new groups where a context is full."""
    while True:
        await engine.next_batch(1, wait_in_pause=True)


def _ids(number: int, count: int) -> list[int]:
    """Prompts that differ from their first id on, so that no prefix cache helps."""
    return [1 + (number // 30**place + place) % 30 for place in range(count)]


class _Nothing:
    """A controller without a server: turns wait until they are aborted, then return 16 tokens at once."""

    capabilities = Capabilities(vocab_size=31, max_context=1_000_000)

    def __init__(self) -> None:
        self._open: dict[str, Event] = {}

    async def __aenter__(self) -> _Nothing:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, attempt: Attempt) -> None:
        self._open[attempt.id] = aborted = Event()
        try:
            await aborted.wait()
        finally:
            del self._open[attempt.id]
        attempt.commit([5] * 16, [-1.0] * 16)
        attempt.finish("abort")

    async def abort(self, ids: Collection[str] | None) -> None:
        for aborted in self._open.values():
            aborted.set()

    async def pause(self, mode: PauseMode) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def update_weights(self, source: WeightSource, version: int) -> None:
        pass

    async def version(self) -> int | None:
        return None

    async def health(self) -> Health:
        return Health()

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        pass

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        pass


def _reason(error: BaseException) -> BaseException:
    """The error in the words of the command; what is no fault of the controller stays as it is."""
    match error:
        case BenchError():
            return error
        case PauseFailed():
            return BenchError(f"the pause failed: {error}")
        case Starved():
            return BenchError(f"the controller answers no turn: {error}")
        case EngineBroken():
            return BenchError(str(error))
        case _:
            return error


def _first(error: BaseException) -> BaseException:
    """The first error in a group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
