"""A policy server that is down, one that a single prompt can't be asked, and everything that happens meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import anyio
import pytest
from anyio import create_task_group, current_time, fail_after, move_on_after
from anyio.lowlevel import checkpoint

from rollnest import (
    AsyncStrategy,
    Batch,
    Capacity,
    Engine,
    Limits,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
)
from rollnest._gate import Gate
from rollnest._instruments import Instruments
from rollnest._outage import Outage
from rollnest._slots import Slots
from rollnest.abc import Attempt
from rollnest.errors import EndOfPrompts, EngineBroken, InferenceError, PauseFailed, Starved
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    Script,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import cancelled_at_every_step, each_way, in_turn, one_batch, prompts, spec

anyio_only = pytest.mark.anyio


def down(attempt: Attempt | None = None) -> Reply:
    """An error of its own each time: one object would collect the traceback of every raise."""
    return Reply([], error=InferenceError("503: down", retryable=True))


def down_until(seconds: float, then: Reply = Reply([5, 0])) -> Script:  # noqa: B008  (frozen)
    """Nothing works before then."""
    return lambda attempt: down() if current_time() < seconds else then


def poison(first_id: int, *, delay: float = 0.0) -> Script:
    """The server can't take prompts that begin with this id."""
    return lambda a: down() if a.prompt_ids[0] == first_id else Reply([5, 0], delay=delay)


class Counting(ScriptedController):
    """Keeps the time of every request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.times: list[float] = []
        self.most = 0

    async def generate(self, attempt: Attempt) -> None:
        self.times.append(current_time())
        self.most = max(self.most, len(self.open) + 1)
        await super().generate(attempt)


def settled(engine: Engine, controller: ScriptedController) -> None:
    assert not controller.open
    assert controller.while_paused == 0
    assert engine.statistics().total("flight") == 0
    assert_conserved(engine, committed=controller.committed)


@anyio_only
async def test_bug_085_a_glitch_is_sent_again_and_a_refusal_is_not() -> None:
    controller = Counting(in_turn(down, down, Reply([5, 0])))
    batch, engine = await one_batch(controller, spec(group_size=1))
    (sample,) = batch.samples
    assert sample.status is Status.COMPLETED
    assert sample.turns[0].attempts == 3
    assert len(controller.times) == 3
    figures = engine.statistics()
    assert figures.tasks["task"].retries == figures.failed_requests == 2
    assert figures.outages == 0

    refused = Counting(in_turn(Reply([], error=InferenceError("400: bad request"))))
    task = spec(group_size=1, prompts=prompts(1), epochs=1)
    async with Engine(refused, task) as engine:
        with pytest.raises(EndOfPrompts):
            await engine.next_batch(1)
    assert len(refused.times) == 1
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}


@anyio_only
async def test_bug_086_one_layer_retries_and_its_tries_are_bounded() -> None:
    controller = Counting(poison(1))
    recording = RecordingInstrument()
    task = spec(group_size=1, prompts=prompts(4), epochs=1, shuffle=False)
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(4)
    assert batch.short
    assert [g.prompt.uid for g in batch.groups] == ["p1", "p2", "p3"]
    (failed,) = [s for s in recording.samples if s.status is Status.FAILED]
    assert failed.failure is not None
    assert "503: down; sent 6 times, while other requests worked" in failed.failure.message
    # Six for the prompt, one for each of the others, and one probe that told the two apart.
    assert Counter(ids[0] for ids in controller.prompts) == Counter(
        {1: 6, 2: 1, 3: 1, 4: 1}
    ) + Counter([controller.prompts[-2][0]])
    assert not recording.named("outage_began")
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("group_size", [1, 8])
async def test_a_poisonous_prompt_costs_the_others_nothing(group_size: int) -> None:
    controller = Counting(poison(3, delay=0.5))
    recording = RecordingInstrument()
    task = spec(group_size=group_size, strategy=AsyncStrategy(lead=3), shuffle=False, epochs=1)
    async with Engine(controller, task, batch_size=4, instruments=[recording]) as engine:
        with fail_after(60):
            uids = [g.prompt.uid async for batch in engine.batches() for g in batch.groups]
    assert sorted(uids) == sorted({p.uid for p in prompts(40)} - {"p2"})
    assert not recording.named("outage_began")
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}
    assert Counter(s.status for s in recording.samples)[Status.FAILED] == group_size
    settled(engine, controller)


@anyio_only
async def test_a_poisonous_prompt_of_the_first_batch_waits_for_the_first_answer() -> None:
    # Nothing has worked yet when its tries are used up, and all others take long.
    def script(attempt: Attempt) -> Reply:
        if attempt.prompt_ids[0] == 1:
            return down()
        return Reply([5, 0], delay=100.0 if attempt.max_tokens > 1 else 1.0)

    controller = Counting(script)
    task = spec(group_size=2, prompts=prompts(6), epochs=1)
    async with Engine(controller, task) as engine:
        with fail_after(200):
            batch = await engine.next_batch(6)
    assert len(batch) == 5
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("seconds", [0.1, 3.0, 60.0, 500.0])
async def test_a_server_that_is_down_costs_no_sample(size: int, seconds: float) -> None:
    controller = Counting(down_until(seconds))
    recording = RecordingInstrument()
    async with Engine(controller, spec(group_size=size), instruments=[recording]) as engine:
        batch = await engine.next_batch(size)
        assert current_time() <= seconds + 31
    assert len(batch) == size
    assert engine.statistics().tasks["task"].dropped == {}
    assert all(s.status is Status.COMPLETED for s in recording.samples)
    for sample in batch.samples:
        check_sample(sample)
    began, ended = recording.named("outage_began"), recording.named("outage_ended")
    assert len(began) == len(ended) == engine.statistics().outages
    assert len(began) == 1 or (seconds < 4 and size < 8)
    if began:
        assert began == [("503: down",)]
        assert ended[0][0] == engine.statistics().outage_seconds
        assert seconds - 5 <= engine.statistics().outage_seconds <= seconds + 31
    settled(engine, controller)


@anyio_only
async def test_in_an_outage_one_request_is_sent_at_a_time_further_and_further_apart() -> None:
    controller = Counting(down_until(300))
    task = spec(strategy=AsyncStrategy(lead=3), group_size=8)
    async with Engine(controller, task, batch_size=8) as engine:
        await anyio.sleep(20)
        seen = len(controller.times)
        controller.most = 0
        await anyio.sleep(279)
        waits = [b - a for a, b in pairwise(controller.times[seen:])]
        assert controller.most == 1
        assert sorted(waits) == waits
        assert max(waits) <= 30
        assert len(waits) < 15
        await engine.next_batch()
    settled(engine, controller)


@anyio_only
async def test_what_a_broken_connection_brought_is_kept_and_what_was_rejected_is_not() -> None:
    # Streamed: five of the ten tokens come before the connection breaks.
    class Breaking(Counting):
        async def generate(self, attempt: Attempt) -> None:
            if len(self.times) == 0:
                self.times.append(current_time())
                self.prompts.append(attempt.prompt_ids.tolist())
                self.committed += attempt.commit([5, 6, 7], [-1.0] * 3)
                raise InferenceError("connection reset", retryable=True)
            await super().generate(attempt)

    controller = Breaking(in_turn(Reply([8, 0])))
    batch, engine = await one_batch(controller, spec(group_size=1))
    (sample,) = batch.samples
    check_sample(sample)
    assert sample.segments[0].ids.tolist() == [5, 6, 7, 8, 0]
    first, second = controller.prompts
    assert second == [*first, 5, 6, 7]  # BUG-022's rule: only what was checked is progress
    assert engine.statistics().tasks["task"].tokens_discarded == 0
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("last", [0, 7])
async def test_a_partial_that_ends_in_a_stop_id_or_at_the_cap_is_an_answer(last: int) -> None:
    class Breaking(Counting):
        async def generate(self, attempt: Attempt) -> None:
            self.times.append(current_time())
            self.committed += attempt.commit([5, 6, last], [-1.0] * 3)
            raise InferenceError("connection reset", retryable=True)

    controller = Breaking()
    batch, engine = await one_batch(controller, spec(group_size=1, sampling=Sampling(3)))
    (sample,) = batch.samples
    assert sample.finish_reason == ("length" if last else "stop")
    assert len(controller.times) == 1
    settled(engine, controller)


@anyio_only
async def test_bug_022_a_body_that_was_rejected_leaves_nothing() -> None:
    broken = Reply([5, 6], logprobs=[-1.0, math.nan])
    controller = Counting(in_turn(broken, Reply([5, 0])))
    recording = RecordingInstrument()
    task = spec(group_size=1)
    async with Engine(controller, task, instruments=[recording]) as engine:
        await engine.next_batch(1)
    failed = recording.samples[0]
    assert failed.status is Status.FAILED
    assert failed.policy_tokens == 0
    settled(engine, controller)


@anyio_only
async def test_connections_that_are_refused_without_our_error_are_the_servers_too() -> None:
    class Refusing(Counting):
        async def generate(self, attempt: Attempt) -> None:
            if current_time() < 40:
                self.times.append(current_time())
                raise ConnectionRefusedError("nobody listens")
            await super().generate(attempt)

    controller = Refusing()
    batch, engine = await one_batch(controller, spec(), 3)
    assert len(batch) == 3
    assert engine.statistics().tasks["task"].dropped == {}
    settled(engine, controller)


@anyio_only
async def test_unasked_aborts_without_a_token_are_the_servers() -> None:
    nothing = Reply([], finish="abort")
    script: Script = lambda attempt: nothing if current_time() < 40 else Reply([5, 0])  # noqa: E731
    controller = Counting(script)
    batch, engine = await one_batch(controller, spec(), 2)
    assert len(batch) == 2
    assert engine.statistics().outages == 1
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("hangs", [False, True])
async def test_an_outage_that_does_not_end_breaks_the_engine_with_its_causes(hangs: bool) -> None:
    # The requests fail; the probes too, or they are taken and never answered.
    def script(attempt: Attempt) -> Reply:
        hanging = hangs and attempt.max_tokens == 1
        return Reply([5], delay=1e9) if hanging else down()

    controller = Counting(script)
    engine = Engine(controller, spec(), outage=100.0)
    with pytest.raises(
        EngineBroken, match="no request to the policy's server worked for 100 s"
    ) as caught:
        async with engine:
            await engine.next_batch(4)
    assert 100 <= current_time() <= 105
    assert InferenceError in {type(cause) for cause in caught.value.causes}
    assert any("503: down" in str(cause) for cause in caught.value.causes)
    settled(engine, controller)
    assert engine.statistics().tasks["task"].dropped == {}


@anyio_only
@pytest.mark.parametrize("seconds", [3.3, 7.7, 33.3])
async def test_what_is_left_of_an_outage_may_be_less_than_a_clock_can_tell(seconds: float) -> None:
    await anyio.sleep(1e6 + 0.1)  # its steps are 1e-10 s then
    controller = Counting(down)
    with pytest.raises(EngineBroken, match="no request to the policy's server worked"):
        async with Engine(controller, spec(), outage=seconds) as engine:
            await engine.next_batch(4)
    assert len(controller.times) < 100
    settled(engine, controller)


@anyio_only
async def test_one_prompt_alone_that_nothing_can_witness_for_breaks_the_engine_too() -> None:
    controller = Counting(in_turn(down))
    task = spec(prompts=prompts(1), epochs=1, group_size=1)
    engine = Engine(controller, task, outage=50.0)
    with pytest.raises(EngineBroken, match="503: down"):
        async with engine:
            await engine.next_batch(1)
    assert (
        engine.statistics().tasks["task"].waiting == 1
    )  # it was the server's, so nothing is used up


@anyio_only
async def test_hanging_answers_are_no_outage_while_others_come() -> None:
    # A probe that hangs is given up; one answer of another request and the time counts anew.
    def script(attempt: Attempt) -> Reply:
        if attempt.max_tokens == 1:
            return Reply([5], delay=1e9)
        first = attempt.prompt_ids[0]
        return Reply([5, 0], delay=first * 40.0) if first > 2 else down()

    controller = Counting(script)
    task = spec(group_size=1, prompts=prompts(8), epochs=1, shuffle=False)
    started = current_time()
    engine = Engine(controller, task, outage=200.0)
    with pytest.raises(EngineBroken):
        async with engine:
            await engine.next_batch(8)
    assert 0 <= current_time() - started - (8 * 40 + 200) <= 1
    settled(engine, controller)


@anyio_only
async def test_limits_stand_still_in_an_outage() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.generate()

    script: Script = lambda a: (  # noqa: E731
        down() if 1 < current_time() < 500 else Reply([5, 0], delay=2.0)
    )
    controller = Counting(script)
    limits = Limits(sample=15.0, turn=10.0)
    task = spec(loop=loop, group_size=2, limits=limits)
    batch, engine = await one_batch(controller, task, 2)
    assert len(batch) == 2
    assert engine.statistics().outage_seconds > 400
    assert engine.statistics().tasks["task"].dropped == {}
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_in_an_outage(mode: PauseMode) -> None:
    controller = Counting(down_until(60))
    recording = RecordingInstrument()
    got: list[Batch] = []
    async with (
        Engine(controller, spec(), instruments=[recording], outage=100.0) as engine,
        create_task_group() as group,
    ):
        group.start_soon(_append, got, engine)
        await anyio.sleep(20)
        assert recording.named("outage_began")
        with fail_after(1):
            async with engine.paused(mode) as pause:
                await pause.update_weights({})
                sent = len(controller.times)
                with anyio.move_on_after(1000, shield=True):
                    await anyio.sleep(1000)
                assert len(controller.times) == sent  # no probe in a pause
    # A thousand seconds of pause are no seconds of outage.
    (ended,) = recording.named("outage_ended")
    assert float(str(ended[0])) < 100
    assert {s.oldest_version for s in got[0].samples} == {1}
    assert engine.statistics().pauses == 1
    settled(engine, controller)


async def _append(got: list[Batch], engine: Engine, n: int = 2) -> None:
    got.append(await engine.next_batch(n))


@anyio_only
async def test_a_pause_while_a_probe_hangs() -> None:
    def script(attempt: Attempt) -> Reply:
        return Reply([5], delay=1e9) if attempt.max_tokens == 1 else down()

    controller = Counting(script)
    async with Engine(controller, spec(), outage=100.0) as engine, create_task_group() as group:
        group.start_soon(_swallow, engine)
        await anyio.sleep(20)
        assert len(controller.open) == 1
        async with engine.paused():
            assert not controller.open
            await anyio.sleep(500)
            assert not controller.open
        await anyio.sleep(1)
        assert len(controller.open) == 1
        group.cancel_scope.cancel()
    settled(engine, controller)


async def _swallow(engine: Engine) -> None:
    await engine.next_batch(2)


@anyio_only
async def test_a_server_that_refuses_control_calls_too_does_not_break_a_pause_in_an_outage() -> (
    None
):
    class Dead(Counting):
        async def pause(self, mode: PauseMode) -> None:
            self._check()
            await super().pause(mode)

        async def resume(self) -> None:
            self._check()
            await super().resume()

        def _check(self) -> None:
            if current_time() < 200:
                raise InferenceError("connection refused", retryable=True)

    controller = Dead(down_until(200))
    got: list[Batch] = []
    async with (
        Engine(controller, spec(), control_timeout=10.0) as engine,
        create_task_group() as group,
    ):
        group.start_soon(_append, got, engine)
        await anyio.sleep(20)
        with pytest.raises(PauseFailed, match="connection refused"):
            async with engine.paused():
                pytest.fail("entered")
    assert len(got[0]) == 2
    settled(engine, controller)


@anyio_only
async def test_two_tasks_have_one_server() -> None:
    other = [Prompt(f"q{i}", token_ids=[500 + i]) for i in range(9)]
    tasks = [spec(name="a"), spec(name="b", prompts=other, strategy=AsyncStrategy())]
    controller = Counting(down_until(100))
    async with Engine(controller, tasks, batch_size=4) as engine:
        batch = await engine.next_batch()
        assert engine.statistics().outages == 1
    assert [batch.tasks[name].groups for name in "ab"] == [2, 2]
    settled(engine, controller)


@anyio_only
async def test_leaving_in_an_outage_ends_everything_at_once() -> None:
    controller = Counting(down_until(math.inf))
    async with Engine(controller, spec()) as engine:
        with move_on_after(30):
            await engine.next_batch(2)
    assert current_time() <= 31
    assert engine.statistics().tasks["task"].waiting == 2
    settled(engine, controller)


@anyio_only
async def test_every_request_fails_but_probes_work_so_the_samples_fail() -> None:
    # Such as prompts that are all too much for the server: one token works, an answer does not.
    def script(attempt: Attempt) -> Reply:
        return Reply([5]) if attempt.max_tokens == 1 else down()

    controller = Counting(script)
    async with Engine(controller, spec(starve_after=2)) as engine:
        with fail_after(200), pytest.raises(Starved, match="while other requests worked"):
            await engine.next_batch(2)
    assert engine.statistics().outages == 0
    settled(engine, controller)


@anyio_only
async def test_a_server_that_goes_up_and_down_without_serving_anybody_breaks_the_engine() -> None:
    # Every second probe works and no turn ever does.
    probes = 0

    def script(attempt: Attempt) -> Reply:
        nonlocal probes
        if attempt.max_tokens > 1:
            return down()
        probes += 1
        return down() if probes % 2 else Reply([5])

    controller = Counting(script)
    engine = Engine(controller, spec(), outage=60.0)
    with pytest.raises(EngineBroken, match="worked for 60 s"):
        async with engine:
            await engine.next_batch(2)
    settled(engine, controller)


@anyio_only
async def test_probes_take_no_slot_and_so_pass_turns_that_hang() -> None:
    def script(attempt: Attempt) -> Reply:
        first = attempt.prompt_ids[0]
        if attempt.max_tokens == 1 or first > 9:
            return Reply([5, 0])
        return Reply([5, 0], delay=200.0) if first > 2 else down()

    controller = Counting(script)
    task = spec(group_size=1, prompts=[*prompts(4), Prompt("p9", token_ids=[10])], epochs=1)
    async with Engine(controller, task, capacity=Capacity(turns=3)) as engine:
        with fail_after(450):
            batch = await engine.next_batch(5)
    assert len(batch) == 3
    assert engine.statistics().tasks["task"].dropped == {"inference": 2}
    settled(engine, controller)


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="outage must be finite, > 0, got 0"):
        Engine(ScriptedController(), spec(), outage=0)


@contextmanager
def breaker() -> Generator[tuple[Outage, Gate, Callable[..., None]]]:
    gate = Gate(version=0, slots=Slots(None), clock=lambda: 0.0)
    outage = Outage(gate, Instruments([]), 100.0)

    def fail(*prompts: str) -> None:
        for prompt in prompts:
            attempt = Attempt([1], max_tokens=4, sampling=Sampling(4))
            outage.failed(prompt, InferenceError("503", retryable=True), attempt)

    with outage.bell:
        yield outage, gate, fail


@anyio_only
async def test_only_what_was_sent_later_proves_something() -> None:
    with breaker() as (outage, gate, fail):
        mark = outage.failures
        fail(*"abcd")
        outage.worked(mark)  # sent before all of them
        fail("e")
        assert gate.barred
        outage.answered(outage.failures)
        fail(*"abcd")
        outage.worked(outage.failures)  # sent after
        fail("e")
        assert not gate.barred
        assert "none" in repr(outage)


@anyio_only
async def test_one_prompt_alone_shuts_nobody_out() -> None:
    with breaker() as (outage, gate, fail):
        fail(*["a"] * 100)
        assert not gate.barred
        fail(*(f"p{i}" for i in range(100)))
        assert gate.barred
        assert len(outage._suspects) <= 16  # pyright: ignore[reportPrivateUsage]
        assert len(outage.causes) == 5
        assert "suspected" in repr(outage)


async def judge(sample: Sample) -> float:
    await checkpoint()
    return 1.0


@each_way
@pytest.mark.parametrize("paused", [False, True])
def test_cancelled_at_every_step_of_an_outage(
    backend: Literal["asyncio", "trio"], native: bool, paused: bool
) -> None:
    def make() -> tuple[Engine, ScriptedController]:
        controller = Counting(down_until(3.0, Reply([5, 0], delay=0.3)))
        task = TaskSpec("task", prompts(9), judger=judge, group_size=2, sampling=Sampling(5))
        return Engine(controller, task), controller

    async def body(engine: Engine) -> None:
        if paused:
            with move_on_after(1):
                await engine.next_batch(3)
            async with engine.paused() as pause:
                await pause.update_weights({})
        await engine.next_batch(3)

    def check(engine: Engine, controller: ScriptedController, where: str) -> None:
        assert sum(engine.statistics().tasks["task"].dropped.values()) == 0, where

    cancelled_at_every_step(make, body, backend, native, check=check, at_least=60)
