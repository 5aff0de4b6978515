"""How long a pause may take with the worst of servers and judgers, and that nothing is lost on the way."""

from __future__ import annotations

import anyio
import pytest
from anyio import sleep

from rollnest import AsyncStrategy, Engine, PauseMode, Sample, Sampling
from rollnest.abc import Attempt
from rollnest.errors import PauseFailed
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio

AHEAD = AsyncStrategy(max_staleness=1, lead=0)
CUTTING = [PauseMode.ABORT, PauseMode.EVICT]


class Deaf(ScriptedController):
    """Never answers an abort, and sends on even when its connection was closed."""

    def __init__(self, *, stream: bool, pause_hangs: bool = False) -> None:
        super().__init__(
            lambda _: Reply([5] * 100, finish="length", delay=100.0, deaf=-1),
            stream=stream,
            pause_hangs=pause_hangs,
        )
        self.attempts: list[Attempt] = []

    async def generate(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        await super().generate(attempt)


@pytest.mark.parametrize("mode", CUTTING)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_deaf_server_whose_pause_confirms(mode: PauseMode, stream: bool) -> None:
    controller = Deaf(stream=stream)
    recording = RecordingInstrument()
    task = spec(strategy=AHEAD, sampling=Sampling(100))
    async with Engine(controller, task, batch_size=1, instruments=[recording]) as engine:
        await sleep(10.5)
        async with engine.paused(mode, grace=3.0) as pause:
            assert 3.0 <= pause.quiet_seconds <= 3.05
            old = list(controller.attempts)
            figures = engine.statistics().tasks["task"]
            assert figures.unseen_turns == (0 if stream else 2)
            assert figures.tokens_committed == (26 if stream else 0)  # up to the cut
            assert figures.tokens_in_records == figures.tokens_committed
            for attempt in old:
                assert attempt.commit([9], [-1.0]) == 0
                attempt.finish("stop")
                assert attempt.finish_reason is None
            assert engine.statistics().total("tokens_late") == 2
            await pause.update_weights({})
        await sleep(150)
        batch = await engine.next_batch()
    for sample in batch.samples:
        check_sample(sample)
        assert 9 not in sample.segments[0].ids.tolist()
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("mode", CUTTING)
async def test_a_deaf_server_whose_pause_does_not_confirm(mode: PauseMode) -> None:
    controller = Deaf(stream=True, pause_hangs=True)
    task = spec(strategy=AHEAD, sampling=Sampling(100))
    async with Engine(controller, task, batch_size=1, control_timeout=4.0) as engine:
        await sleep(10.5)
        before = anyio.current_time()
        with pytest.raises(PauseFailed):
            async with engine.paused(mode, grace=3.0):
                pytest.fail("entered")
        assert anyio.current_time() - before <= 7.0 + 1e-6
        assert engine.statistics().total("redrawn") == 0  # nothing was evicted
        await sleep(1)
        assert len(controller.open) == 2  # production goes on, from what was received
        assert [len(prompt) for prompt in controller.prompts] == [2, 2, 15, 15]
        batch = await engine.next_batch()
        assert batch.version == 0
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("mode", CUTTING)
async def test_bug_031_a_request_that_is_admitted_after_the_abort(mode: PauseMode) -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000, admission=0.2)
    async with Engine(controller, spec(strategy=AHEAD), batch_size=1) as engine:
        await sleep(0.001)  # just sent
        async with engine.paused(mode) as pause:
            assert pause.quiet_seconds < 0.5
            assert not controller.open
            figures = engine.statistics().tasks["task"]
            assert (figures.unseen_turns, figures.tokens_late) == (0, 0)
            await pause.update_weights({})
        batch = await engine.next_batch()
    assert {turn.finish_reason for s in batch.samples for turn in s.turns} == {"length"}
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_judger_that_blocks_keeps_no_batch_and_bounds_no_pause(mode: PauseMode) -> None:
    async def judge(sample: Sample) -> float:
        if sample.prompt.uid == "p1":
            await sleep(60)
        return 1.0

    task = spec(judger=judge, strategy=AsyncStrategy(max_staleness=1, lead=1), shuffle=False)
    async with Engine(ScriptedController(), task, batch_size=1) as engine:
        await sleep(1)
        before = anyio.current_time()
        batch = await engine.next_batch()
        assert anyio.current_time() == before
        assert {s.prompt.uid for s in batch.samples} == {"p0"}
        async with engine.paused(mode, grace=2.0) as pause:
            limit = 2.0 if mode is PauseMode.EVICT else 0.0
            assert limit <= pause.quiet_seconds <= limit + 0.05
        if mode is not PauseMode.EVICT:
            await sleep(60)
            assert engine.statistics().total("redrawn") == 0  # judging went on


async def test_bug_066_all_turns_go_on_at_once() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(strategy=AHEAD, group_size=8)
    async with Engine(controller, task, batch_size=1) as engine:
        for mode in PauseMode:
            await sleep(2.5)
            async with engine.paused(mode, grace=0.1):
                pass
            await sleep(0.001)
            assert len(controller.open) == 8, mode


async def test_prompts_that_do_not_end_in_a_pause_stay_in_their_order() -> None:
    """What was evicted comes before fresh prompts, in the order in which it was drawn."""
    started: list[str] = []

    class Starts(RecordingInstrument):
        def group_started(self, task: str, visit: int) -> None:
            started.append(f"{visit}")

    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(strategy=AHEAD, shuffle=False, prompts=prompts(9))
    async with Engine(controller, task, batch_size=3, instruments=[Starts()]) as engine:
        await sleep(1.5)
        async with engine.paused(PauseMode.EVICT):
            pass
        await engine.next_batch()
    first, again = sorted(started[:3]), sorted(started[3:6])
    assert first == again == ["0", "1", "2"]
