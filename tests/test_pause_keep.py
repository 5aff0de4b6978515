"""KEEP: the server freezes turns, they go on under newer weights, and nothing is sent twice."""

from __future__ import annotations

import logging

import anyio
import pytest
from anyio import create_task_group, sleep

from rollnest import (
    AsyncStrategy,
    Batch,
    Capabilities,
    Engine,
    Limits,
    PauseMode,
    Sampling,
    SyncStrategy,
)
from rollnest.abc import Attempt
from rollnest.errors import EngineBroken, InferenceError, PauseFailed
from rollnest.testing import (
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
    expected_logprob,
)

from .helpers import in_turn, one_name, spec

pytestmark = pytest.mark.anyio

KEEP = PauseMode.KEEP


def called(controller: ScriptedController) -> list[str]:
    return [entry[0] for entry in controller.log]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_bug_063_frozen_turns_go_on_with_the_new_weights(stream: bool) -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000, stream=stream)
    task = spec(strategy=AsyncStrategy(max_staleness=1), group_size=16)
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(4.5)
        async with engine.paused(KEEP) as pause:
            assert (pause.quiet_seconds, pause.turns_in_flight) == (0.0, 16)
            assert len(controller.open) == 16
            made = controller.sampled
            await sleep(100)
            assert controller.sampled == made
            await pause.update_weights({})
        batch = await engine.next_batch()
        assert 15.0 <= anyio.current_time() - 104.5 <= 16.5  # what was left of 20 s
    assert "abort" not in called(controller)
    assert len(controller.prompts) == 16
    assert controller.while_paused == 0
    for sample in batch.samples:
        check_sample(sample)
        (segment,) = sample.segments
        assert segment.response.version_runs == ((0, 0, 4), (1, 4, 20))
        assert [round(p, 6) for p in segment.logprobs] == [
            round(expected_logprob(i, v), 6)
            for i, v in zip(segment.ids, segment.versions, strict=True)
        ]
        assert [turn.attempts for turn in sample.turns] == [1]
    assert engine.statistics().total("resumed_turns") == 0
    assert_conserved(engine, committed=controller.committed)


async def test_without_new_weights_nothing_is_seen_of_it() -> None:
    texts: list[list[list[int]]] = []
    for pauses in (0, 3):
        controller = ScriptedController(rate=2.0)
        async with Engine(controller, spec(shuffle=False), batch_size=2) as engine:
            got: list[Batch] = []

            async def take(engine: Engine, got: list[Batch]) -> None:
                got.append(await engine.next_batch(2))

            async with create_task_group() as group:
                group.start_soon(take, engine, got)
                for _ in range(pauses):
                    await sleep(0.7)
                    async with engine.paused(KEEP):
                        await sleep(5)
        texts.append([s.segments[0].ids.tolist() for s in got[0].samples])
    assert texts[0] == texts[1]


async def test_limits_stand_still_while_a_turn_is_frozen() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(limits=Limits(turn=21.0, sample=21.0), group_size=1)
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(10.5)
        async with engine.paused(KEEP):
            await sleep(1000)
    figures = engine.statistics().tasks["task"]
    assert (figures.delivered, figures.dropped) == (1, {})


async def test_an_unconfirmed_keep_fails_and_the_turns_go_on() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000, pause_hangs=True)
    async with Engine(controller, spec(), control_timeout=3.0) as engine:
        async with create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await sleep(4.5)
            before = anyio.current_time()
            with pytest.raises(PauseFailed, match="did not confirm"):
                async with engine.paused(KEEP, grace=0.0):
                    pytest.fail("entered")
            assert anyio.current_time() - before <= 3.0 + 1e-6
        assert anyio.current_time() <= 20 + 3.1
    assert "resume" in called(controller)
    assert "abort" not in called(controller)
    assert len(controller.prompts) == 2
    assert_conserved(engine, committed=controller.committed)


SPANS = Capabilities(
    vocab_size=1000, max_context=4096, stop_token_ids={0}, pause_modes={PauseMode.ABORT, KEEP}
)
NO_KEEP = Capabilities(vocab_size=1000, max_context=4096, stop_token_ids={0}, version_spans=True)


@pytest.mark.parametrize(
    ("capabilities", "named"), [(SPANS, "version_spans"), (NO_KEEP, "pause_modes")], ids=one_name
)
async def test_where_it_can_not_be_kept_it_is_aborted_and_said_once(
    capabilities: Capabilities, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000, capabilities=capabilities)
    task = spec(strategy=SyncStrategy(max_staleness=2))
    got: list[Batch] = []

    async def take(engine: Engine) -> None:
        got.append(await engine.next_batch(1))

    with caplog.at_level(logging.WARNING, "rollnest"):
        async with Engine(controller, task) as engine, create_task_group() as group:
            group.start_soon(take, engine)
            for _ in range(2):
                await sleep(4.5)
                async with engine.paused(KEEP) as pause:
                    assert not controller.open
                    await pause.update_weights({})
    (message,) = [r.getMessage() for r in caplog.records if "keep turns" in r.getMessage()]
    assert named in message
    assert ("pause", PauseMode.ABORT) in controller.log
    assert all(turn.attempts == 3 for s in got[0].samples for turn in s.turns)
    assert_conserved(engine, committed=controller.committed)


async def test_a_request_in_transit_is_frozen_too() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000, admission=0.2)
    task = spec(strategy=SyncStrategy(max_staleness=1))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(0.1)
        async with engine.paused(KEEP) as pause:
            assert pause.turns_in_flight == 2
            await sleep(5)
            await pause.update_weights({})
            assert controller.sampled == 0
    assert len(controller.prompts) == 2
    assert_conserved(engine, committed=controller.committed)


async def test_tokens_without_a_version_are_refused_after_an_update() -> None:
    class Unversioned(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            await sleep(2)
            attempt.commit([5], [-1.0])
            attempt.finish("stop")

    task = spec(group_size=1)
    async with Engine(Unversioned(), task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(1)
        async with engine.paused(KEEP) as pause:
            await pause.update_weights({})
    assert engine.statistics().total("tokens_rejected") == 1
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}


async def test_a_scripts_own_logprobs_follow_the_weights() -> None:
    reply = Reply([5] * 8, finish="length", logprobs=[expected_logprob(5, 0)] * 8, delay=8.0)
    controller = ScriptedController(in_turn(reply))
    task = spec(group_size=1, strategy=AsyncStrategy(max_staleness=1), sampling=Sampling(8))
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(3.5)
        async with engine.paused(KEEP) as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
    (segment,) = next(batch.samples).segments
    assert segment.versions.tolist() == [0] * 3 + [1] * 5
    assert segment.logprobs.tolist() == [expected_logprob(5, v) for v in segment.versions]


async def test_leaving_while_turns_are_frozen_ends_them() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(strategy=AsyncStrategy(max_staleness=1))
    with pytest.raises(ZeroDivisionError):
        async with Engine(controller, task, batch_size=1) as engine:
            await sleep(4.5)
            async with engine.paused(KEEP):
                raise ZeroDivisionError
    assert not controller.open
    assert engine.statistics().total("flight") == 0
    assert engine.statistics().total("unseen_turns") == 2  # it does not stream
    assert_conserved(engine, committed=controller.committed)


async def test_unknown_weights_end_frozen_turns() -> None:
    controller = ScriptedController(
        rate=1.0, stop_every=10_000, stream=True, update_error=ZeroDivisionError("who knows")
    )
    task = spec(strategy=AsyncStrategy(max_staleness=1))
    with pytest.raises(EngineBroken):
        async with Engine(controller, task, batch_size=1) as engine:
            await sleep(4.5)
            async with engine.paused(KEEP) as pause:
                with pytest.raises(ZeroDivisionError):
                    await pause.update_weights({})
    assert not controller.open
    assert "resume" not in called(controller)
    assert engine.statistics().total("waiting") == 1
    assert_conserved(engine, committed=controller.committed)


async def test_a_server_that_fails_frozen_turns_fails_their_samples() -> None:
    failing = Reply([5, 0], delay=2.0, error=InferenceError("evicted from the cache"))
    controller = ScriptedController(in_turn(failing, failing, Reply([5, 0])))
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(1)
        async with engine.paused(KEEP):
            pass
    assert engine.statistics().tasks["task"].dropped == {"inference": 1}


@pytest.mark.parametrize(
    ("modes", "error"),
    [
        ({KEEP}, ValueError),
        ({PauseMode.ABORT, PauseMode.EVICT}, ValueError),
        ({PauseMode.ABORT, PauseMode.WAIT}, ValueError),
        ((), ValueError),
        ({PauseMode.ABORT, "keep"}, TypeError),
    ],
    ids=one_name,
)
def test_pause_modes_that_no_server_has(modes: set[PauseMode], error: type[Exception]) -> None:
    with pytest.raises(error, match="pause_modes"):
        Capabilities(vocab_size=10, max_context=10, pause_modes=modes)


async def test_a_turn_that_ends_in_the_pause_lets_its_loop_go_on_to_the_gate() -> None:
    """A reply that was on its way when the server froze."""

    class Late(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            await super().generate(attempt)
            await sleep(3)  # in transit

    controller = Late(in_turn(Reply([5, 0])))
    task = spec(group_size=1, sampling=Sampling(4), strategy=SyncStrategy(max_staleness=1))
    got: list[Batch] = []

    async def take(engine: Engine) -> None:
        got.append(await engine.next_batch(1))

    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(take, engine)
        await sleep(1)
        async with engine.paused(KEEP) as pause:
            await pause.update_weights({})
            await sleep(5)
    assert got[0].groups[0].oldest_version == 0
