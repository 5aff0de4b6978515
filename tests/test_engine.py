"""The engine's main line: groups, batches, pausing, versions, the end of prompts."""

from __future__ import annotations

import anyio
import pytest
from anyio import create_task_group, current_time, fail_after, move_on_after
from anyio.lowlevel import checkpoint

from rollnest import (
    AsyncStrategy,
    Batch,
    Capabilities,
    Capacity,
    Engine,
    Limits,
    Prompt,
    Rollout,
    Sampling,
    Status,
    SyncStrategy,
)
from rollnest.abc import Attempt
from rollnest.errors import (
    EndOfPrompts,
    EngineBroken,
    EngineBusy,
    EngineClosed,
    InferenceError,
    PauseFailed,
    Starved,
    UnsupportedSampling,
    WeightsState,
    WeightUpdateFailed,
)
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
    expected_logprob,
)

from .helpers import in_turn, one_batch, prompts, spec

pytestmark = pytest.mark.anyio


async def test_a_batch_holds_complete_judged_groups() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec(group_size=4)) as engine:
        batch = await engine.next_batch(3)
    assert batch.index == 1
    assert len(batch.groups) == 3
    assert not batch.short
    for group in batch.groups:
        assert group.status is Status.COMPLETED
        assert [s.index for s in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            check_sample(sample)
            assert sample.reward == len(sample.segments[0]) % 2
    assert batch.statistics.samples == 12
    assert batch.tasks["task"].groups == 3
    assert_conserved(engine, committed=controller.committed)


async def test_sync_strategy_starts_exactly_what_is_lacking() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec()) as engine:
        for _ in range(3):
            await engine.next_batch(2)
            await anyio.sleep(10)
            assert engine.statistics().tasks["task"].ready == 0
    assert engine.statistics().tasks["task"].drawn == 6


async def test_async_strategy_runs_ahead_of_the_trainer_and_no_further() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=2))
    async with Engine(controller, task, batch_size=3) as engine:
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].ready == 6  # (1 + lead) batches
        before = current_time()
        await engine.next_batch()
        assert current_time() == before
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].ready == 6


async def test_bug_064_lag_is_bounded_by_max_staleness_and_old_groups_expire() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=2, lead=4), epochs=1)
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(100)
        lags: list[int] = []
        for _ in range(4):
            for _ in range(2):
                async with engine.paused() as pause:
                    await pause.update_weights({})
            batch = await engine.next_batch()
            lags.extend(s.lag(batch.version) for s in batch.samples)
            assert set(batch.statistics.lag_histogram) <= {0, 1, 2}
        assert max(lags) == 2
        assert engine.statistics().tasks["task"].expired > 0
    assert_conserved(engine, committed=controller.committed)


async def test_an_expired_group_keeps_its_fresh_members() -> None:
    # One member answers at once; the other is aborted twice before its first token.
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=rollout.index + 2)

    def script(attempt: Attempt) -> Reply:
        quick = attempt.max_tokens == 2
        return Reply(
            [5, len(controller.prompts)] if quick else [6, 0], delay=0.0 if quick else 100.0
        )

    controller = ScriptedController(script)
    task = spec(prompts=prompts(1), loop=loop, strategy=AsyncStrategy(max_staleness=1, lead=0))
    recording = RecordingInstrument()
    async with Engine(controller, task, batch_size=1, instruments=[recording]) as engine:
        await anyio.sleep(5)
        for _ in range(2):
            async with engine.paused() as pause:
                await pause.update_weights({})
            await anyio.sleep(1)
        batch = await engine.next_batch()
    outcomes = [outcome for _, outcome in recording.groups]
    assert outcomes[:2] == ["ready", "ready"]
    first, second = batch.groups[0].samples
    assert batch.groups[0].visit == 0
    assert first.segments[0].ids.tolist() == [
        5,
        5,
    ]  # was too old, and made anew by the fifth request
    assert second.segments[0].ids.tolist() == [6, 0]  # still fresh, and kept
    assert second.lag(batch.version) == 0
    assert_conserved(engine, committed=controller.committed)


async def test_pause_keeps_partials_and_versions_per_token() -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000)
    task = spec(group_size=1, strategy=SyncStrategy(max_staleness=1))
    async with Engine(controller, task) as engine, create_task_group() as group:
        got: list[Batch] = []
        group.start_soon(_append, got, engine)
        await anyio.sleep(0.5)
        async with engine.paused() as pause:
            assert pause.turns_in_flight == 1
            assert engine.statistics().turns_in_flight == 0
            await pause.update_weights({})
    sample = next(got[0].samples)
    (segment,) = sample.segments
    assert segment.response.version_runs == ((0, 0, 5), (1, 5, 20))
    for token, logprob, version in zip(
        segment.ids, segment.logprobs, segment.versions, strict=True
    ):
        assert logprob == expected_logprob(token, version)
    # The resumed request continued exactly what had been there.
    first, second = controller.prompts[:2]
    assert second == first + segment.ids.tolist()[:5]
    assert sample.turns[0].attempts == 2


async def _append(got: list[Batch], engine: Engine, n: int = 1) -> None:
    got.append(await engine.next_batch(n))


async def test_interrupted_and_uninterrupted_runs_give_the_same_tokens() -> None:
    async def run(pauses: int) -> list[list[int]]:
        controller = ScriptedController(rate=10.0)
        task = spec(shuffle=False)
        async with Engine(controller, task) as engine, create_task_group() as group:
            got: list[Batch] = []
            group.start_soon(_append, got, engine, 4)
            for _ in range(pauses):
                await anyio.sleep(0.3)
                async with engine.paused():
                    await anyio.sleep(1)
        assert controller.while_paused == 0
        return sorted(s.segments[0].ids.tolist() for s in got[0].samples)

    assert await run(0) == await run(3)


async def test_next_batch_inside_a_pause() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(lead=1))
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(50)
        async with engine.paused():
            assert len(await engine.next_batch(4)) == 4
            with pytest.raises(EngineBusy, match="0 of 2 groups are ready") as caught:
                await engine.next_batch(2)
            assert (caught.value.ready, caught.value.asked) == (0, 2)
            with move_on_after(5) as scope:
                await engine.next_batch(2, wait_in_pause=True)
            assert scope.cancelled_caught
        assert len(await engine.next_batch(2)) == 2


async def test_one_consumer_and_one_pauser_at_a_time() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await checkpoint()
        await checkpoint()
        with pytest.raises(EngineBusy, match="next_batch"):
            await engine.next_batch(1)
        async with engine.paused():
            with pytest.raises(EngineBusy, match="paused"):
                async with engine.paused():
                    pytest.fail("entered twice")


async def test_end_of_prompts_gives_one_short_batch() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec(prompts=prompts(5), epochs=1)) as engine:
        sizes = []
        async for batch in engine.batches(2):
            sizes.append((len(batch), batch.short))
        assert sizes == [(2, False), (2, False), (1, True)]
        with pytest.raises(EndOfPrompts):
            await engine.next_batch(2)
    assert engine.statistics().tasks["task"].delivered == 5


async def test_prompts_are_visited_once_per_epoch_in_a_seeded_order() -> None:
    async def order(seed: int, shuffle: bool = True) -> list[str]:
        controller = ScriptedController()
        task = spec(prompts=prompts(12), epochs=2, shuffle=shuffle)
        async with Engine(controller, task, seed=seed) as engine:
            return [g.prompt.uid async for b in engine.batches(1) for g in b.groups]

    one = await order(1)
    assert sorted(one[:12]) == sorted(one[12:]) == sorted(p.uid for p in prompts(12))
    assert one == await order(1) != await order(2)
    assert one[:12] != one[12:]
    assert await order(1, shuffle=False) == [p.uid for p in prompts(12)] * 2


async def test_bug_032_a_failing_member_stays_alone_and_its_group_is_dropped() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid == "p1" and rollout.index == 1:
            await anyio.sleep(10)
            raise ValueError("x")

    recording = RecordingInstrument()
    controller = ScriptedController(rate=10.0)
    task = spec(loop=loop, group_size=4, shuffle=False)
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(3)
    assert [g.prompt.uid for g in batch.groups] == ["p0", "p2", "p3"]
    (dead,) = [g for g, outcome in recording.groups if outcome == "loop"]
    assert [s.status for s in dead.samples] == [
        Status.COMPLETED,
        Status.FAILED,
        Status.COMPLETED,
        Status.COMPLETED,
    ]
    failure = dead.samples[1].failure
    assert failure is not None
    assert "ValueError: x" in failure.message
    assert "in loop" in failure.traceback
    assert engine.statistics().tasks["task"].dropped == {"loop": 1}
    assert_conserved(engine, committed=controller.committed)


async def test_bug_040_all_failing_raises_starved_with_reasons_and_goes_on_when_asked() -> None:
    broken = True

    def judge(sample: object) -> float:
        if broken:
            raise RuntimeError("no verdict today")
        return 1.0

    controller = ScriptedController()
    async with Engine(controller, spec(judger=judge, starve_after=3)) as engine:
        with pytest.raises(Starved, match="no verdict today") as caught:
            await engine.next_batch(2)
        assert caught.value.task == "task"
        assert set(caught.value.reasons) == {"judge"}
        assert caught.value.reasons["judge"] >= 6
        drawn = engine.statistics().tasks["task"].drawn
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].drawn == drawn  # nothing spins in between
        broken = False
        assert len(await engine.next_batch(2)) == 2
    assert_conserved(engine, committed=controller.committed)


async def test_starvation_also_stops_a_strategy_that_runs_ahead() -> None:
    controller = ScriptedController(in_turn(Reply([5], error=InferenceError("boom"))))
    task = spec(strategy=AsyncStrategy(), starve_after=2)
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(1000)
        assert engine.statistics().tasks["task"].drawn <= 8
        with pytest.raises(Starved, match="boom"):
            await engine.next_batch()


@pytest.mark.parametrize("deaf", [1, 3])
async def test_bug_031_an_abort_that_was_missed_is_sent_again_by_id(deaf: int) -> None:
    controller = ScriptedController(in_turn(Reply(range(1, 101), delay=100.0, deaf=deaf)))
    task = spec(group_size=1, sampling=Sampling(100))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await anyio.sleep(10)
        async with engine.paused() as pause:
            assert 0.04 < pause.quiet_seconds < 0.5
        assert engine.statistics().tasks["task"].tokens_committed == 10
        aborts = [entry[1] for entry in controller.log if entry[0] == "abort"]
        assert aborts[0] is None
        assert all(len(ids) == 1 for ids in aborts[1:])
        assert len(aborts) == deaf + 1
        group.cancel_scope.cancel()


async def test_a_request_that_is_admitted_after_the_abort_is_caught_by_the_next() -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000, admission=0.2)
    async with (
        Engine(controller, spec(sampling=Sampling(100))) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await anyio.sleep(0.0001)
        async with engine.paused() as pause:
            assert pause.turns_in_flight == 2
            assert pause.quiet_seconds < 0.5
        group.cancel_scope.cancel()
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_never_answers_an_abort_is_cut_after_grace(stream: bool) -> None:
    controller = ScriptedController(
        in_turn(Reply(range(1, 101), delay=100.0, deaf=-1)), stream=stream
    )
    task = spec(group_size=1, sampling=Sampling(100))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await anyio.sleep(10.5)
        async with engine.paused(grace=2.0) as pause:
            assert 2.0 <= pause.quiet_seconds <= 2.05
            assert not controller.open
        figures = engine.statistics().tasks["task"]
        assert figures.tokens_committed == (12 if stream else 0)
        assert figures.unseen_turns == (0 if stream else 1)
        group.cancel_scope.cancel()
    assert_conserved(engine, committed=controller.committed)


async def test_a_pause_that_is_not_confirmed_fails_and_production_goes_on() -> None:
    controller = ScriptedController(rate=10.0, pause_hangs=True)
    async with Engine(controller, spec(), control_timeout=3.0) as engine:
        before = current_time()
        with pytest.raises(PauseFailed, match=r"within 3.0 s"):
            async with engine.paused():
                pytest.fail("entered")
        assert current_time() - before <= 3.0
        assert len(await engine.next_batch(2)) == 2
        assert ("resume",) in controller.log


async def test_bug_074_a_failing_resume_is_tried_again() -> None:
    controller = ScriptedController(rate=10.0, resume_failures=1)
    async with Engine(controller, spec()) as engine:
        async with engine.paused():
            pass
        assert len(await engine.next_batch(2)) == 2
        assert controller.log.count(("resume",)) == 2


async def test_a_controller_that_never_resumes_breaks_the_engine() -> None:
    controller = ScriptedController(rate=10.0, resume_failures=100)
    with pytest.raises(EngineBroken, match="503") as caught:
        async with Engine(controller, spec()) as engine, engine.paused():
            pass
    assert isinstance(caught.value.causes[0], InferenceError)
    assert_conserved(engine, committed=controller.committed)


async def test_bug_073_an_error_of_the_body_leaves_the_pause_on_the_old_weights() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec()) as engine:
        with pytest.raises(KeyError, match="mine"):
            async with engine.paused():
                raise KeyError("mine")
        assert engine.version == 0
        assert len(await engine.next_batch(2)) == 2


@pytest.mark.parametrize("weights", list(WeightsState))
async def test_a_failed_update_goes_on_with_known_weights_only(weights: WeightsState) -> None:
    error = WeightUpdateFailed("disk", weights=weights)
    controller = ScriptedController(rate=10.0, version=7, update_error=error)
    async with Engine(controller, spec(), version=7) as engine:
        with pytest.raises(WeightUpdateFailed):
            async with engine.paused() as pause:
                await pause.update_weights({})
        if weights is WeightsState.UNKNOWN:
            with pytest.raises(EngineBroken, match="disk") as caught:
                await engine.next_batch(1)
            assert caught.value.causes == (error,)
            with pytest.raises(EngineBroken):
                async with engine.paused():
                    pass
            return
        assert engine.version == (8 if weights is WeightsState.NEW else 7)
        assert len(await engine.next_batch(2)) == 2


async def test_bug_070_a_server_that_reports_another_version_is_an_unknown_state() -> None:
    class Liar(ScriptedController):
        async def version(self) -> int | None:
            return 41 if ("update_weights", 1) in self.log else 0

    with pytest.raises(WeightUpdateFailed, match="reports version 41"):
        async with Engine(Liar(), spec()) as engine, engine.paused() as pause:
            await pause.update_weights({})
    with pytest.raises(EngineBroken, match="which weights"):
        await engine.next_batch(1)


async def test_a_cancelled_update_breaks_the_engine_and_stays_a_cancellation() -> None:
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec()) as engine:
        with move_on_after(1) as scope:
            async with engine.paused() as pause:
                await pause.update_weights(lambda: anyio.sleep(100))
        assert scope.cancelled_caught
        with pytest.raises(EngineBroken, match="which weights"):
            await engine.next_batch(1)
        assert ("resume",) not in controller.log  # nobody may use what may be anything


async def test_versions_only_rise() -> None:
    controller = ScriptedController(version=5)
    async with Engine(controller, spec(), version=5) as engine:
        async with engine.paused() as pause:
            for version in (5, 4):
                with pytest.raises(ValueError, match=f"version must rise: {version} after 5"):
                    await pause.update_weights({}, version)
            with pytest.raises(TypeError, match="version must be an int"):
                pause.published(True)
            pause.published(9)
            await pause.update_weights({})
        assert engine.version == 10
        with pytest.raises(EngineBusy, match="inside the paused"):
            pause.published(11)


async def test_an_error_of_the_users_block_is_never_in_a_group() -> None:
    controller = ScriptedController(rate=10.0)
    error = EndOfPrompts("mine")
    with pytest.raises(EndOfPrompts) as caught:
        async with Engine(controller, spec(strategy=AsyncStrategy()), batch_size=2) as engine:
            await engine.next_batch()
            raise error
    assert caught.value is error
    assert not controller.open
    assert controller.log[-1] == ("exit", 0)
    assert_conserved(engine, committed=controller.committed)


async def test_bug_088_a_crash_inside_the_engine_reaches_the_next_call() -> None:
    class Faulty(AsyncStrategy):
        pass

    class Strategy:
        max_staleness = 0
        needs_batch_size = False
        expired = "retry"

        def room(self, production: object) -> int:
            raise ZeroDivisionError("a bug of ours")

    with pytest.raises(EngineBroken, match="a bug of ours") as caught:
        async with Engine(ScriptedController(), spec(strategy=Strategy())) as engine:
            await engine.next_batch(1)
    assert [type(cause) for cause in caught.value.causes] == [ZeroDivisionError]


async def test_a_controller_that_does_not_open_raises_its_own_error() -> None:
    class Shut(ScriptedController):
        async def __aenter__(self) -> ScriptedController:
            raise OSError("no such server")

    with pytest.raises(OSError, match="no such server"):
        async with Engine(Shut(), spec()):
            pytest.fail("entered")


async def test_a_controller_with_other_weights_is_refused_at_entry() -> None:
    with pytest.raises(ValueError, match="version is 3, but the controller reports 2"):
        async with Engine(ScriptedController(version=2), spec(), version=3):
            pytest.fail("entered")


async def test_a_controller_that_does_not_close_is_left_after_exit_grace() -> None:
    class Sticky(ScriptedController):
        async def __aexit__(self, *args: object) -> None:
            await anyio.sleep(1000)

    before = current_time()
    async with Engine(Sticky(), spec(), exit_grace=2.0) as engine:
        await engine.next_batch(1)
    assert current_time() - before <= 3.0


async def test_calls_outside_the_block() -> None:
    engine = Engine(ScriptedController(), spec())
    with pytest.raises(EngineClosed, match="not entered"):
        await engine.next_batch(1)
    with pytest.raises(EngineClosed, match="not entered"):
        engine.paused()
    async with engine:
        pass
    with pytest.raises(EngineClosed, match="left"):
        await engine.next_batch(1)
    with pytest.raises(EngineClosed, match="entered once"):
        async with engine:
            pass


async def test_leaving_in_mid_production_ends_everything() -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000)
    task = spec(strategy=AsyncStrategy(lead=1), sampling=Sampling(100))
    async with Engine(controller, task, batch_size=4) as engine:
        await anyio.sleep(0.5)
        assert len(controller.open) == 16
    assert not controller.open
    figures = engine.statistics().tasks["task"]
    assert (figures.flight, figures.waiting) == (0, 8)
    assert_conserved(engine, committed=controller.committed)


async def test_a_loop_that_cancels_itself_fails_its_sample_only() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.prompt.uid == "p0":
            with anyio.CancelScope() as scope:
                scope.cancel()
                await checkpoint()
            return
        await rollout.generate()

    batch, engine = await one_batch(ScriptedController(), spec(loop=loop, shuffle=False))
    assert batch.groups[0].prompt.uid == "p1"
    assert engine.statistics().tasks["task"].dropped == {"loop": 1}


async def test_bug_066_a_resume_fills_up_at_once() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(strategy=AsyncStrategy(lead=0), group_size=8, sampling=Sampling(50))
    async with Engine(controller, task, batch_size=1) as engine:
        await anyio.sleep(5)
        async with engine.paused():
            assert not controller.open
        await anyio.sleep(0.001)
        assert len(controller.open) == 8


async def test_bug_024_the_gate_forgets_a_pause() -> None:
    controller = ScriptedController(in_turn(Reply([5, 0])))
    async with Engine(controller, spec(group_size=1)) as engine:
        async with engine.paused():
            pass
        batch = await engine.next_batch(1)
    assert len(controller.prompts) == 1
    assert next(batch.samples).status is Status.COMPLETED


async def test_several_tasks_share_a_batch_by_weight() -> None:
    tasks = [
        spec(name="a", weight=1),
        spec(name="b", weight=2),
        spec(name="off", weight=0),
    ]
    controller = ScriptedController(rate=10.0)
    async with Engine(controller, tasks) as engine:
        counts = {"a": 0, "b": 0, "off": 0}
        for _ in range(3):
            batch = await engine.next_batch(4)
            for group in batch.groups:
                counts[group.task] += 1
            assert sum(s.groups for s in batch.tasks.values()) == 4
        assert counts == {"a": 4, "b": 8, "off": 0}
    assert_conserved(engine, committed=controller.committed)


async def test_bug_106_a_fast_task_does_not_flood_the_batch() -> None:
    def script(attempt: Attempt) -> Reply:
        ids = attempt.prompt_ids.tolist()
        return Reply([5, 0], delay=50.0 if ids[0] >= 500 else 0.0)

    slow = [Prompt(f"s{i}", token_ids=[500 + i]) for i in range(9)]
    tasks = [spec(name="fast"), spec(name="slow", prompts=slow)]
    async with Engine(ScriptedController(script), tasks) as engine:
        batch = await engine.next_batch(4)
    assert [batch.tasks[name].groups for name in ("fast", "slow")] == [2, 2]


async def test_an_exhausted_task_leaves_its_share_to_the_others() -> None:
    tasks = [spec(name="short", prompts=prompts(3), epochs=1), spec(name="long")]
    async with Engine(ScriptedController(), tasks) as engine:
        sizes = [
            {name: s.groups for name, s in (await engine.next_batch(4)).tasks.items()}
            for _ in range(3)
        ]
    assert sizes == [
        {"short": 2, "long": 2},
        {"short": 1, "long": 2},
        {"short": 0, "long": 4},
    ]


async def test_limits_fail_the_sample_and_stand_still_while_paused() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(group_size=1, sampling=Sampling(8), limits=Limits(turn=10.0, sample=15.0))
    async with Engine(controller, task) as engine, create_task_group() as group:
        got: list[Batch] = []
        group.start_soon(_append, got, engine)
        await anyio.sleep(4)
        async with engine.paused():
            await anyio.sleep(1000)
    assert len(got[0]) == 1

    task = spec(group_size=1, sampling=Sampling(12), limits=Limits(turn=10.0), starve_after=1)
    async with Engine(controller, task) as engine:
        with pytest.raises(Starved, match=r"the turn took over 10.0 s"):
            await engine.next_batch(1)
    assert not controller.open
    assert_conserved(engine)


async def test_capacity_bounds_turns_at_the_server() -> None:
    seen = []

    class Counting(ScriptedController):
        async def generate(self, attempt):  # type: ignore[no-untyped-def]
            seen.append(len(self.open) + 1)
            await super().generate(attempt)

    controller = Counting(rate=10.0)
    async with Engine(controller, spec(group_size=8), capacity=Capacity(turns=3)) as engine:
        await engine.next_batch(4)
    assert max(seen) == 3


async def test_bug_096_slots_survive_cancellation() -> None:
    controller = ScriptedController(rate=10.0, stop_every=10_000)
    task = spec(group_size=4, sampling=Sampling(50))
    async with Engine(controller, task, capacity=Capacity(turns=2)) as engine:
        with move_on_after(0.5):
            await engine.next_batch(2)
        for _ in range(3):
            async with engine.paused():
                pass
        await anyio.sleep(0.001)
        assert len(controller.open) == 2
        assert len(await engine.next_batch(2)) == 2


async def test_commit_knows_what_was_handed_over() -> None:
    async with Engine(ScriptedController(), spec()) as engine:
        batch = await engine.next_batch(1)
        engine.commit(batch)
        engine.commit(batch)
        from attrs import evolve

        with pytest.raises(ValueError, match="batch 2 was not handed over"):
            engine.commit(evolve(batch, index=2))


async def test_instruments_hear_everything_and_a_bad_one_is_taken_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from rollnest.abc import Instrument

    class Bad(Instrument):
        calls = 0

        def sample_ended(self, sample: object) -> None:
            Bad.calls += 1
            raise RuntimeError("bad instrument")

    recording = RecordingInstrument()
    async with Engine(ScriptedController(), spec(), instruments=[Bad(), recording]) as engine:
        await engine.next_batch(2)
        async with engine.paused():
            pass
    assert Bad.calls == 1
    assert "is taken out" in caplog.text
    assert len(recording.samples) == 4
    assert len(recording.named("turn_started")) == len(recording.named("turn_ended")) == 4
    assert sorted(recording.named("group_ended")) == [("task", 0, "ready"), ("task", 1, "ready")]
    hooks = [event[0] for event in recording.events]
    assert hooks[-3:] == ["gate_closed", "paused", "gate_opened"]
    assert recording.named("batch_delivered") == [(1,)]


async def test_sampling_that_the_controller_cannot_honour_is_refused_at_entry() -> None:
    controller = ScriptedController(capabilities=Capabilities(vocab_size=100, max_context=50))
    with pytest.raises(UnsupportedSampling, match=r"top_p=0\.5"):
        async with Engine(controller, spec(sampling=Sampling(8, top_p=0.5))):
            pytest.fail("entered")
    raw = Capabilities(vocab_size=100, max_context=50, logprobs="raw", sampling={"temperature"})
    with pytest.raises(UnsupportedSampling, match=r"raw logprobs.*temperature=0\.5"):
        async with Engine(
            ScriptedController(capabilities=raw), spec(sampling=Sampling(8, temperature=0.5))
        ):
            pytest.fail("entered")


async def test_seeds_are_derived_for_every_attempt() -> None:
    seeds: list[object] = []

    def script(attempt: Attempt) -> Reply:
        seeds.append(attempt.sampling.seed)
        return Reply([5, 0])

    for seed in (3, "derived"):
        await one_batch(
            ScriptedController(script), spec(group_size=4, sampling=Sampling(8, seed=seed))
        )
    assert len(set(seeds)) == len(seeds) == 8
    again = list(seeds)
    seeds.clear()
    await one_batch(ScriptedController(script), spec(group_size=4, sampling=Sampling(8, seed=3)))
    assert set(seeds) == set(again[:4])


async def test_fail_after_around_the_engine() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    with pytest.raises(TimeoutError), fail_after(3):
        async with Engine(controller, spec()) as engine:
            await engine.next_batch(1)
    assert not controller.open
    assert_conserved(engine, committed=controller.committed)
