"""The engine for synchronous code, with real threads, real signals and the real clock; nothing here waits for time."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

import pytest
from anyio.lowlevel import checkpoint

from rollnest import AsyncStrategy, Batch, BlockingEngine, Engine, PauseMode, Rollout, Sample
from rollnest.abc import Attempt, Instrument
from rollnest.errors import (
    EndOfPrompts,
    EngineBroken,
    EngineBusy,
    EngineClosed,
    Starved,
    WeightsState,
    WeightUpdateFailed,
)
from rollnest.testing import Reply, ScriptedController, assert_conserved

from .helpers import in_turn, prompts, spec

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


async def until_main_waits() -> None:
    """Returns once the main thread is blocked, so that a signal interrupts exactly that."""
    main = threading.main_thread().ident or 0
    while sys._current_frames()[main].f_code.co_name != "wait":
        await checkpoint()


def visits(*batches: Batch) -> list[int]:
    return [group.visit for batch in batches for group in batch.groups]


def no_thread_left() -> bool:
    return not [t for t in threading.enumerate() if "portal" in t.name.lower()]


@BACKENDS
def test_batches_until_the_end(backend: str) -> None:
    controller = ScriptedController()
    engine = Engine(controller, spec(prompts=prompts(5), epochs=1), batch_size=2)
    with engine.blocking(backend) as blocking:
        assert [len(batch) for batch in blocking.batches()] == [2, 2, 1]
        with pytest.raises(EndOfPrompts):
            blocking.next_batch()
        assert blocking.statistics().batches == 3
        assert blocking.tree().state == "open"
    assert controller.log[-1] == ("exit", 0)
    assert_conserved(engine, committed=controller.committed)
    assert no_thread_left()


@BACKENDS
def test_a_pause_with_new_weights(backend: str) -> None:
    controller = ScriptedController()
    engine = Engine(controller, spec(strategy=AsyncStrategy()), batch_size=2)
    with engine.blocking(backend) as blocking:
        batch = blocking.next_batch()
        with blocking.paused(PauseMode.ABORT, grace=1.0) as pause:
            assert pause.quiet_seconds >= 0
            assert pause.turns_in_flight >= 0
            pause.update_weights({"w": 1})
            pause.published(5)
            with pytest.raises(EngineBusy, match="only one at a time"), blocking.paused():
                pytest.fail("entered twice")
        assert blocking.version == 5
        blocking.commit(batch)
        batch = blocking.next_batch()
        assert batch.version == 5
        with pytest.raises(EngineBusy, match="inside the paused"):
            pause.published(6)
    assert controller.while_paused == 0


@BACKENDS
def test_turns_in_flight_are_resumed(backend: str) -> None:
    controller = ScriptedController(
        in_turn(Reply([5, 6, 7], finish="abort"), Reply([8, 0], delay=1000.0), Reply([9, 0]))
    )
    engine = Engine(controller, spec(group_size=1, strategy=AsyncStrategy(lead=0)), batch_size=1)
    with engine.blocking(backend) as blocking:
        while not any(len(ids) > 2 for ids in controller.prompts):
            blocking.statistics()
        with blocking.paused() as pause:
            assert pause.turns_in_flight == 1
        (sample,) = blocking.next_batch().samples
    assert sample.segments[0].ids.tolist() == [5, 6, 7, 9, 0]


@BACKENDS
def test_errors_arrive_as_they_are(backend: str) -> None:
    async def loop(rollout: Rollout) -> None:
        raise ValueError("mine")

    engine = Engine(ScriptedController(), spec(loop=loop, starve_after=1))
    with pytest.raises(KeyError, match="the body's"), engine.blocking(backend) as blocking:
        with pytest.raises(ValueError, match="n must be given"):
            blocking.next_batch()
        with pytest.raises(Starved, match="mine"):
            blocking.next_batch(1)
        raise KeyError("the body's")
    with pytest.raises(EngineClosed):
        blocking.next_batch(1)
    assert no_thread_left()


@BACKENDS
def test_a_controller_that_does_not_open(backend: str) -> None:
    class Shut(ScriptedController):
        async def __aenter__(self) -> ScriptedController:
            raise OSError("no such server")

    with (
        pytest.raises(OSError, match="no such server"),
        Engine(Shut(), spec()).blocking(backend),
    ):
        pytest.fail("entered")
    assert no_thread_left()


@BACKENDS
def test_a_crash_of_the_engine_reaches_the_next_call(backend: str) -> None:
    class Strategy:
        max_staleness = 0
        needs_batch_size = False
        expired = "retry"

        def room(self, production: object) -> int:
            raise ZeroDivisionError("a bug of ours")

    engine = Engine(ScriptedController(), spec(strategy=Strategy()))
    with (
        pytest.raises(EngineBroken, match="a bug of ours"),
        engine.blocking(backend) as blocking,
    ):
        blocking.next_batch(1)


@BACKENDS
def test_a_failed_update(backend: str) -> None:
    error = WeightUpdateFailed("disk", weights=WeightsState.UNKNOWN)
    controller = ScriptedController(update_error=error)
    with Engine(controller, spec()).blocking(backend) as blocking:
        with pytest.raises(WeightUpdateFailed, match="disk"), blocking.paused() as pause:
            pause.update_weights({})
        with pytest.raises(EngineBroken, match="disk"):
            blocking.next_batch(1)


def test_calls_outside_the_block() -> None:
    blocking = Engine(ScriptedController(), spec()).blocking()
    with pytest.raises(EngineClosed, match="not entered"):
        blocking.next_batch(1)
    with pytest.raises(EngineClosed, match="not entered"), blocking.paused():
        pytest.fail("entered")
    assert isinstance(blocking, BlockingEngine)


@BACKENDS
def test_ctrl_c_while_waiting_loses_no_group(backend: str) -> None:
    pressed: list[bool] = []

    class Interrupting(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            if not pressed:
                pressed.append(True)
                await until_main_waits()
                press_ctrl_c()
            await super().generate(attempt)

    controller = Interrupting()
    engine = Engine(controller, spec(prompts=prompts(4), epochs=1))
    with engine.blocking(backend) as blocking:
        with pytest.raises(KeyboardInterrupt):
            blocking.next_batch(2)
        got = [*blocking.batches(2)]
    assert sorted(visits(*got)) == [0, 1, 2, 3]
    assert_conserved(engine, committed=controller.committed)


@BACKENDS
def test_ctrl_c_right_after_a_batch_was_taken_hands_it_over_first(backend: str) -> None:
    class Interrupting(Instrument):
        def batch_delivered(self, batch: Batch) -> None:
            if batch.index == 1:
                press_ctrl_c()

    class Waiting(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            await until_main_waits()
            await super().generate(attempt)

    engine = Engine(Waiting(), spec(prompts=prompts(4), epochs=1), instruments=[Interrupting()])
    with engine.blocking(backend) as blocking:
        with pytest.raises(KeyboardInterrupt):
            blocking.next_batch(2)
        first = blocking.next_batch(2)
        second = blocking.next_batch(2)
        assert (first.index, second.index) == (1, 2)
    assert sorted(visits(first, second)) == [0, 1, 2, 3]


@BACKENDS
def test_ctrl_c_leaves_the_block_and_ends_everything(backend: str) -> None:
    class Interrupting(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            await until_main_waits()
            press_ctrl_c()
            await super().generate(attempt)

    controller = Interrupting(in_turn(Reply([5, 0], delay=1000.0)))
    engine = Engine(controller, spec(group_size=1))
    with pytest.raises(KeyboardInterrupt), engine.blocking(backend) as blocking:
        blocking.next_batch(1)
    assert controller.log[-1] == ("exit", 0)
    assert_conserved(engine, committed=controller.committed)
    assert no_thread_left()


def in_time(function: Callable[[], None], seconds: float = 20.0) -> None:
    """Fails instead of hanging: `function` runs in the main thread, and a timer interrupts it."""
    stop = threading.Timer(seconds, press_ctrl_c)
    stop.daemon = True
    stop.start()
    try:
        function()
    finally:
        stop.cancel()


@BACKENDS
def test_ctrl_c_while_the_pause_begins_lets_production_go_on(backend: str) -> None:
    class Interrupting(ScriptedController):
        interrupted = False

        async def pause(self, mode: PauseMode) -> None:
            if not self.interrupted:
                self.interrupted = True
                await until_main_waits()
                press_ctrl_c()
                await until_gone()
            await super().pause(mode)

    async def until_gone() -> None:
        main = threading.main_thread().ident or 0
        while sys._current_frames()[main].f_code.co_name == "wait":
            await checkpoint()

    def run() -> None:
        with Engine(Interrupting(), spec()).blocking(backend) as blocking:
            with pytest.raises(KeyboardInterrupt), blocking.paused():
                pytest.fail("entered")
            assert len(blocking.next_batch(1)) == 1
            with blocking.paused():
                pass

    in_time(run)


@BACKENDS
def test_a_judger_in_a_thread(backend: str) -> None:
    def judge(sample: Sample) -> float:
        return 0.5

    engine = Engine(ScriptedController(), spec(judger=judge))
    with engine.blocking(backend) as blocking:
        batch = blocking.next_batch(2)
    assert {s.reward for s in batch.samples} == {0.5}
