"""What blocks the event loop is named while it blocks; without virtual time, because that is what real time does."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import anyio
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from rollnest import Engine, _lag
from rollnest._lag import LagWatch
from rollnest.testing import RecordingInstrument, Reply, ScriptedController

from .helpers import in_turn, spec

where = _lag._where  # pyright: ignore[reportPrivateUsage]
BACKENDS = ["asyncio", "trio"]


def watching() -> bool:
    """Whether a thread watches an event loop."""
    return any("event-loop watch" in thread.name for thread in threading.enumerate())


class Waiting(logging.Handler):
    """Lets the training go on once it has been named."""

    def __init__(self) -> None:
        super().__init__()
        self.named = threading.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.named.set()


@contextmanager
def listening() -> Generator[Waiting]:
    handler = Waiting()
    logger = logging.getLogger("rollnest")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def noticed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event for the moment in which the silence has become too long."""
    event = threading.Event()

    def look(frame: FrameType | None) -> str | None:
        event.set()
        return where(frame)

    monkeypatch.setattr(_lag, "_where", look)
    return event


def train(until: threading.Event) -> None:
    """Training code, on the loop."""
    assert until.wait(60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_the_loop_is_named_while_it_blocks(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        recording = RecordingInstrument()
        controller = ScriptedController(in_turn(Reply([5, 0], delay=1000.0)))
        async with (
            Engine(controller, spec(), instruments=[recording]) as engine,
            create_task_group() as group,
        ):
            group.start_soon(engine.next_batch, 1)
            while engine.statistics().turns_in_flight < 2:
                await checkpoint()
            with listening() as heard:
                train(heard.named)
            (message,) = heard.messages
            assert "the event loop has not run for 0.25 s, with 2 turns in flight" in message
            assert f"it is in train ({__file__}, line " in message
            while not recording.named("loop_lagged"):
                await checkpoint()
            ((seconds, line),) = recording.named("loop_lagged")
            assert seconds == engine.statistics().loop_lag_max
            assert str(line).startswith("train (")
            assert engine.statistics().loop_lag_max >= 0.25

            # Once; the figure goes on.
            again = noticed(monkeypatch)
            with listening() as heard:
                train(again)
                while len(recording.named("loop_lagged")) < 2:
                    await checkpoint()
            assert not heard.messages
            group.cancel_scope.cancel()
        assert not watching()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_turns_in_flight_nothing_is_wrong(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        lags: list[float] = []
        watch = LagWatch(lambda: 0, lambda: True, lambda seconds, where: lags.append(seconds))
        end = noticed(monkeypatch)
        with listening() as heard:
            watch.group_started("task", 0)
            train(end)
            while not lags:
                await checkpoint()
            watch.stop()
        assert not heard.messages

    anyio.run(main, backend=backend)


@pytest.mark.anyio
async def test_under_virtual_time_it_is_off() -> None:
    async with Engine(ScriptedController(), spec()) as engine:
        await engine.next_batch(1)
        assert not watching()
        assert engine.statistics().loop_lag_max == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_rest_its_thread_sleeps(backend: str) -> None:
    async def main() -> None:
        busy, asked = [True], threading.Semaphore(0)

        def is_busy() -> bool:
            asked.release()
            return busy[0]

        watch = LagWatch(lambda: 0, is_busy, lambda seconds, where: None)
        watch.group_started("task", 0)
        while not asked.acquire(blocking=False):
            await checkpoint()
        busy[0] = False
        while watch.is_asking:
            await checkpoint()
        busy[0] = True
        watch.group_started("task", 1)
        assert watch.is_asking
        watch.stop()
        assert not watching()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_stopped_in_the_moment_in_which_its_thread_goes_to_sleep(backend: str) -> None:
    async def main() -> None:
        looking = threading.Event()

        def is_busy() -> bool:
            if not looking.is_set():
                watch._answered.clear()  # pyright: ignore[reportPrivateUsage]
                looking.set()
                assert watch._answered.wait(60)  # pyright: ignore[reportPrivateUsage]
            return False  # so it clears what `stop` has just set

        watch = LagWatch(lambda: 0, is_busy, lambda seconds, where: None)
        watch.group_started("task", 0)
        while not looking.is_set():
            await checkpoint()
        watch.stop()
        assert not watching()

    anyio.run(main, backend=backend)


def test_a_loop_that_waits_is_not_blocked() -> None:
    assert where(None) is None
    assert "test_a_loop_that_waits_is_not_blocked" in str(where(inspect.currentframe()))
