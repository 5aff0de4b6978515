"""Limits of turns, samples and groups, and what becomes of what is over one."""

from __future__ import annotations

from typing import Any

import pytest
from anyio import create_task_group, current_time, sleep, sleep_forever

from rollnest import (
    Batch,
    Engine,
    FailurePolicy,
    Limits,
    LiveGroup,
    PauseMode,
    Rollout,
    Sample,
    Sampling,
    Status,
)
from rollnest.errors import Starved
from rollnest.testing import RecordingInstrument, ScriptedController, assert_conserved, check_sample

from .helpers import spec
from .test_group_loops import GroupLoop

pytestmark = pytest.mark.anyio


async def by_length(sample: Sample) -> float:
    return float(sample.policy_tokens)


def slow() -> ScriptedController:
    """Ten tokens a second, one by one, and no stop."""
    return ScriptedController(rate=10.0, stop_every=10_000, stream=True)


async def one(controller: ScriptedController | None = None, **options: Any) -> Batch:
    controller = controller or slow()
    task = spec(**({"judger": by_length, "sampling": Sampling(1000), "group_size": 2} | options))
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    assert_conserved(engine, committed=controller.committed)
    for sample in batch.samples:
        check_sample(sample)
    return batch


async def none(controller: ScriptedController | None = None, **options: Any) -> list[Sample]:
    """Runs a group that fails; returns its samples."""
    controller, recording = controller or slow(), RecordingInstrument()
    defaults: dict[str, Any] = {"sampling": Sampling(1000), "group_size": 2, "starve_after": 1}
    task = spec(**(defaults | options))
    async with Engine(controller, task, instruments=[recording]) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
    assert_conserved(engine, committed=controller.committed)
    return list(recording.groups[0][0].samples)


def over(name: str, **options: Any) -> Limits:
    seconds: dict[str, Any] = {name: 2.05}
    return Limits(**(seconds | options))


@pytest.mark.parametrize("name", ["turn", "sample", "group"])
async def test_what_is_over_a_limit_fails(name: str) -> None:
    samples = await none(limits=over(name))
    assert {s.status for s in samples} == {Status.FAILED}
    failures = [s.failure for s in samples if s.failure is not None]
    whose = {"turn": "the turn", "sample": "the agent loop", "group": "the group"}[name]
    assert f"{whose} took over 2.05 s" in failures[0].message
    assert failures[0].kind == ("inference" if name == "turn" else "loop")


@pytest.mark.parametrize("name", ["turn", "sample", "group"])
async def test_what_is_over_a_limit_may_finish_with_what_it_has(name: str) -> None:
    batch = await one(limits=over(name, on_timeout="finish"))
    for sample in batch.samples:
        assert sample.finish_reason == "timeout"
        assert sample.truncated
        assert sample.policy_tokens == 20
        assert sample.reward == 20.0
        assert [turn.finish_reason for turn in sample.turns] == [
            "timeout" if name == "turn" else "abort"
        ]
    assert batch.statistics.truncated == 2


@pytest.mark.parametrize("name", ["turn", "sample", "group"])
async def test_without_a_token_there_is_nothing_to_finish_with(name: str) -> None:
    silent = ScriptedController(rate=10.0, stop_every=10_000)  # sends all tokens at the end
    samples = await none(silent, limits=over(name, on_timeout="finish"))
    assert {s.status for s in samples} == {Status.FAILED}
    assert all(s.failure is not None and "took over 2.05 s" in s.failure.message for s in samples)


async def test_a_turn_that_timed_out_is_a_turn_like_others() -> None:
    async def loop(rollout: Rollout) -> None:
        first = await rollout.generate()
        assert first.finish_reason == "timeout"
        assert not rollout.done
        rollout.append([7])
        second = await rollout.generate(max_tokens=5)
        assert second.finish_reason == "length"

    batch = await one(loop=loop, limits=Limits(turn=1.05, on_timeout="finish"))
    for sample in batch.samples:
        assert [len(turn) for turn in sample.turns] == [10, 5]
        assert (sample.finish_reason, sample.truncated) == ("length", True)


async def test_a_sample_keeps_its_whole_turns() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=5)
        await sleep(1000.0)

    batch = await one(loop=loop, limits=Limits(sample=3.0, on_timeout="finish"))
    assert [s.finish_reason for s in batch.samples] == ["timeout"] * 2
    assert [len(s.turns) for s in batch.samples] == [1, 1]


async def test_a_loop_that_fails_while_its_time_is_up_has_failed() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=5)
        try:
            await sleep(1000.0)
        finally:
            rollout.fail("the environment did not close")

    samples = await none(loop=loop, limits=Limits(sample=3.0, on_timeout="finish"))
    assert samples[0].failure is not None
    assert "did not close" in samples[0].failure.message


async def test_a_members_tries_share_the_groups_time() -> None:
    tries: list[float] = []

    async def loop(rollout: Rollout) -> None:
        tries.append(current_time())
        await sleep(4.0)
        raise ValueError("again")

    policy = FailurePolicy(on_dead_member="retry", retries=9)
    samples = await none(loop=loop, group_size=1, limits=Limits(group=10.0), failures=policy)
    assert tries == pytest.approx([0.0, 4.0, 8.0])
    assert samples[0].failure is not None
    assert "the group took over 10.0 s" in samples[0].failure.message


async def test_a_group_limit_stands_still_while_the_gate_is_closed() -> None:
    controller = slow()
    limits = Limits(group=2.05, on_timeout="finish")
    task = spec(sampling=Sampling(1000), limits=limits)
    batches: list[Batch] = []
    async with Engine(controller, task) as engine, create_task_group() as tasks:

        async def take() -> None:
            batches.append(await engine.next_batch(1))

        tasks.start_soon(take)
        await sleep(1.0)
        async with engine.paused():
            await sleep(100.0)
        await sleep(1.5)
        assert len(batches) == 1
    assert all(19 <= s.policy_tokens <= 21 for s in batches[0].samples)


async def test_a_group_loop_is_limited_as_a_whole() -> None:
    async def solve(group: LiveGroup) -> None:
        for rollout in group.rollouts:
            await group.run(rollout)

    limits = Limits(group=1.55)
    options: dict[str, Any] = {"loop": GroupLoop(solve), "sampling": Sampling(10)}
    samples = await none(limits=limits, **options)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED]
    assert samples[1].failure is not None
    assert "the group took over 1.55 s" in samples[1].failure.message

    batch = await one(limits=Limits(group=1.55, on_timeout="finish"), **options)
    assert [s.finish_reason for s in batch.samples] == ["length", "timeout"]
    assert batch.groups[0].rewards == (10.0, 5.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"group": 0}, "group"), ({"group": "1"}, "group"), ({"on_timeout": "keep"}, "on_timeout")],
)
async def test_bad_limits(options: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        Limits(**options)


@pytest.mark.parametrize("limits", [Limits(sample=4.0), Limits(group=4.0)], ids=["sample", "group"])
async def test_a_loop_that_runs_again_after_an_eviction_has_all_its_time_again(
    limits: Limits,
) -> None:
    async def loop(rollout: Rollout) -> None:
        for _ in range(3):
            await rollout.generate(max_tokens=20)

    controller = slow()
    task = spec(loop=loop, limits=limits, sampling=Sampling(100), group_size=1)
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        for _ in range(2):
            await sleep(2.5)
            async with engine.paused(PauseMode.EVICT):
                assert engine.statistics().tasks["task"].waiting == 1
    assert engine.statistics().tasks["task"].delivered == 1  # after 6 s of turns
    assert engine.statistics().tasks["task"].failures == {}
    assert_conserved(engine, committed=controller.committed)


async def test_a_loop_that_hangs_is_ended_though_it_was_evicted_before() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=5)
        await sleep_forever()

    task = spec(loop=loop, limits=Limits(sample=4.0), group_size=1, starve_after=1)
    async with Engine(slow(), task) as engine, create_task_group() as group:

        async def starve() -> None:
            with pytest.raises(Starved, match=r"the agent loop took over 4\.0 s"):
                await engine.next_batch(1)

        group.start_soon(starve)
        await sleep(3.0)
        async with engine.paused(PauseMode.EVICT):
            pass
        evicted = current_time()
        await sleep(3.9)
        assert engine.statistics().tasks["task"].failures == {}
        await sleep(0.2)
        assert engine.statistics().tasks["task"].failures == {"loop": 1}
        assert current_time() - evicted >= 4.0
