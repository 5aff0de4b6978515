"""The engine's block is left while another task is in a pause; and batches that are taken during an update."""

from __future__ import annotations

import anyio
import pytest
from anyio import Event, create_task_group, sleep

from rollnest import AsyncStrategy, Batch, Engine, PauseMode, Sample
from rollnest.errors import EngineBroken, EngineClosed
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import spec

pytestmark = pytest.mark.anyio

AHEAD = AsyncStrategy(max_staleness=1)


def after_the_exit(controller: ScriptedController) -> list[str]:
    names = [entry[0] for entry in controller.log]
    return names[names.index("exit") + 1 :]


class Pauser:
    """A pause in a task of its own."""

    def __init__(self) -> None:
        self.inside = Event()
        self.go = Event()
        self.error: BaseException | None = None

    async def run(self, engine: Engine, mode: PauseMode, *, update: bool) -> None:
        try:
            async with engine.paused(mode, grace=50.0) as pause:
                self.inside.set()
                await self.go.wait()
                if update:
                    await pause.update_weights({})
        except (EngineClosed, EngineBroken) as error:
            self.error = error


@pytest.mark.parametrize("mode", list(PauseMode))
@pytest.mark.parametrize("update", [False, True])
async def test_a_pause_that_outlives_the_engine_calls_a_closed_controller_no_more(
    mode: PauseMode, update: bool
) -> None:
    controller, pauser = ScriptedController(rate=10.0), Pauser()
    async with create_task_group() as group:
        async with Engine(controller, spec(strategy=AHEAD), batch_size=1) as engine:
            await sleep(0.5)
            group.start_soon(lambda: pauser.run(engine, mode, update=update))
            await pauser.inside.wait()
        pauser.go.set()
    assert isinstance(pauser.error, EngineClosed)
    assert after_the_exit(controller) == []
    assert engine.version == 0
    assert_conserved(engine, committed=controller.committed)


class Slow(ScriptedController):
    """One call that takes long; the controller may not be closed under it."""

    def __init__(self, slow: str) -> None:
        super().__init__(rate=10.0, stop_every=10_000)
        self.slow = slow
        self.at_work = 0
        self.entered = Event()

    async def _linger(self, call: str) -> None:
        if call == self.slow:
            self.at_work += 1
            self.entered.set()
            try:
                await sleep(1000)
            finally:
                self.at_work -= 1

    async def pause(self, mode: PauseMode) -> None:
        await self._linger("pause")
        await super().pause(mode)

    async def resume(self) -> None:
        await self._linger("resume")
        await super().resume()

    async def version(self) -> int | None:
        await self._linger("version")
        return await super().version()

    async def __aexit__(self, *args: object) -> None:
        assert not self.at_work, f"closed in the middle of {self.slow}()"
        await super().__aexit__(None, None, None)


@pytest.mark.parametrize("slow", ["pause", "resume"])
async def test_a_call_that_is_running_ends_before_the_controller_is_closed(slow: str) -> None:
    controller, pauser = Slow(slow), Pauser()
    pauser.go.set()
    async with create_task_group() as group:
        async with Engine(controller, spec(strategy=AHEAD), batch_size=1) as engine:
            await sleep(0.5)
            group.start_soon(lambda: pauser.run(engine, PauseMode.ABORT, update=False))
            await controller.entered.wait()
            before = anyio.current_time()
        assert anyio.current_time() - before < 1.0
    assert isinstance(pauser.error, EngineClosed)
    assert after_the_exit(controller) == []
    assert_conserved(engine, committed=controller.committed)


async def test_an_engine_that_breaks_in_a_pause_says_so_when_it_is_left() -> None:
    """Production is over then, so the controller is closed already."""
    ask = Event()

    class Halt(BaseException):
        """A fault that no sample can hold."""

    async def judge(sample: Sample) -> float:
        await ask.wait()
        raise Halt

    controller = ScriptedController()
    with pytest.raises(Halt):
        async with Engine(controller, spec(judger=judge, strategy=AHEAD), batch_size=1) as engine:
            await sleep(1)
            with pytest.raises(EngineBroken):
                async with engine.paused():
                    ask.set()
                    await sleep(1)
    assert after_the_exit(controller) == []


async def test_a_batch_taken_during_an_update_is_of_the_old_version() -> None:
    """Until the update is over, the old version counts: for the batch's label, its lags and its bound."""
    judged, moving, moved = Event(), Event(), Event()

    async def judge(sample: Sample) -> float:
        await judged.wait()
        return 1.0

    async def move() -> None:
        moving.set()
        await moved.wait()

    got: list[Batch] = []

    async def consume(engine: Engine) -> None:
        got.append(await engine.next_batch())
        got.append(await engine.next_batch(wait_in_pause=True))

    async with create_task_group() as group:
        task = spec(judger=judge, strategy=AsyncStrategy(max_staleness=0, lead=0))
        async with Engine(ScriptedController(), task, batch_size=1) as engine:
            group.start_soon(consume, engine)
            await sleep(1)
            async with engine.paused() as pause, create_task_group() as updating:
                updating.start_soon(pause.update_weights, move)
                await moving.wait()
                judged.set()
                await sleep(1)
                assert len(got) == 1
                assert (got[0].version, engine.version) == (0, 0)
                assert {s.lag(got[0].version) for s in got[0].samples} == {0}
                moved.set()
            await sleep(1)
    assert got[1].version == 1
    assert {s.oldest_version for s in got[1].samples} == {1}
