"""Saving and restoring an engine: what is in a checkpoint comes back, each visit once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import create_task_group, sleep

from rollnest import (
    AgentLoop,
    AsyncStrategy,
    Batch,
    Engine,
    FailurePolicy,
    Group,
    LiveGroup,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    SyncStrategy,
    TaskSpec,
    Verdict,
)
from rollnest.errors import (
    CheckpointError,
    EndOfPrompts,
    EngineBroken,
    EngineBusy,
    EngineClosed,
)
from rollnest.testing import (
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio


def server(**options: Any) -> ScriptedController:
    """A token takes a second, and comes when it is made."""
    defaults: dict[str, Any] = {"rate": 1.0, "stream": True, "stop_every": 10_000}
    return ScriptedController(**(defaults | options))


def task_of(**options: Any) -> TaskSpec:
    """Turns of two tokens."""
    return spec(**{"sampling": Sampling(2), "epochs": 1, "judger": None, **options})


def always_one(sample: Sample) -> float:
    return 1.0


def always_two(sample: Sample) -> float:
    return 2.0


def always_half(sample: Sample) -> float:
    return 0.5


def content(groups: Iterable[Group]) -> Counter[tuple[Any, ...]]:
    """What groups hold, to be compared over engines."""
    return Counter(
        (
            group.task,
            group.prompt.uid,
            group.visit,
            tuple(
                (s.index, s.reward, tuple(tuple(segment.ids) for segment in s.segments))
                for s in group.samples
            ),
        )
        for group in groups
    )


def visits(groups: Iterable[Group]) -> list[tuple[str, str, int]]:
    return sorted((group.task, group.prompt.uid, group.visit) for group in groups)


async def rest_of(engine: Engine, n: int = 1) -> list[Batch]:
    """Takes batches until the prompts end."""
    batches: list[Batch] = []
    while True:
        try:
            batch = await engine.next_batch(n)
        except EndOfPrompts:
            return batches
        batches.append(batch)
        engine.commit(batch)


async def all_of(task: TaskSpec, n: int = 1, **options: Any) -> list[Batch]:
    """What an uninterrupted run gives."""
    async with Engine(server(), task, **options) as engine:
        return await rest_of(engine, n)


def groups_of(batches: Iterable[Batch]) -> list[Group]:
    return [group for batch in batches for group in batch.groups]


async def saved_after(
    seconds: float, task: TaskSpec, path: Path, n: int = 1, **options: Any
) -> tuple[list[Batch], ScriptedController]:
    """Runs until a time, saves then, and ends."""
    batches: list[Batch] = []
    controller = server()
    async with Engine(controller, task, **options) as engine, create_task_group() as group:

        async def take() -> None:
            batches.extend(await rest_of(engine, n))

        group.start_soon(take)
        await sleep(seconds)
        await engine.save(path)
        assert_conserved(engine, committed=controller.committed)
        group.cancel_scope.cancel()
    return batches, controller


def names(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


# At any moment


async def test_a_run_that_was_saved_goes_on_where_it_was(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(6), strategy=AsyncStrategy(max_staleness=1, lead=2))
    whole = content(groups_of(await all_of(task, 1, batch_size=1)))
    for tenths in range(0, 130, 7):
        path = tmp_path / str(tenths)
        before: list[Batch] = []
        taken: list[Batch] = []
        committed = 0
        first = server()
        async with Engine(first, task, batch_size=1) as engine, create_task_group() as group:

            async def take(engine: Engine = engine, before: list[Batch] = before) -> None:
                while True:
                    try:
                        batch = await engine.next_batch()
                    except EndOfPrompts:
                        return
                    before.append(batch)
                    engine.commit(batch)

            group.start_soon(take)
            await sleep(tenths / 10)
            taken = list(before)
            await engine.save(path)
            committed = first.committed
            group.cancel_scope.cancel()
        second = server()
        async with Engine.restore(path, second, task, batch_size=1) as engine:
            assert_conserved(engine, committed=committed)
            after = await rest_of(engine)
            assert_conserved(engine, committed=committed + second.committed)
            assert engine.statistics().total("diverged") == 0
        assert content(groups_of([*taken, *after])) == whole
        assert [batch.index for batch in [*taken, *after]] == list(range(1, 7))
        for batch in after:
            for sample in batch.samples:
                check_sample(sample)


async def test_a_partial_turn_goes_on_from_its_tokens(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(1), group_size=1, sampling=Sampling(6))
    (whole,) = (await all_of(task))[0].samples
    await saved_after(3.5, task, tmp_path)
    second = server()
    async with Engine.restore(tmp_path, second, task) as engine:
        (batch,) = await rest_of(engine)
    (sample,) = batch.samples
    assert sample.segments[0].ids.tolist() == whole.segments[0].ids.tolist()
    assert sample.segments[0].logprobs.tolist() == whole.segments[0].logprobs.tolist()
    assert second.prompts == [[1, 2, *whole.segments[0].ids[:3]]]
    assert sample.turns[0].attempts == 2
    assert second.committed == 3


async def test_partials_that_are_not_to_be_kept_begin_again(tmp_path: Path) -> None:
    task = task_of(
        prompts=prompts(1),
        group_size=1,
        sampling=Sampling(6),
        strategy=AsyncStrategy(partial=False),
    )
    _, first = await saved_after(3.5, task, tmp_path, batch_size=1)
    second = server()
    async with Engine.restore(tmp_path, second, task, batch_size=1) as engine:
        assert engine.statistics().total("tokens_discarded") == 3
        await rest_of(engine)
        assert_conserved(engine, committed=3 + second.committed)
    assert second.prompts == [[1, 2]]
    assert first.prompts == second.prompts


calls: list[int] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def look_up(number: int) -> int:
    calls.append(number)
    await sleep(1)
    return 500 + number


async def tool_turns(rollout: Rollout) -> None:
    """Three turns of two seconds, with a tool of one second after each."""
    for number in range(3):
        await rollout.generate()
        rollout.append([await rollout.tool(look_up, number)])


async def test_a_tool_loop_saved_after_its_second_turn_goes_on_with_the_third(
    tmp_path: Path,
) -> None:
    task = task_of(prompts=prompts(1), group_size=1, loop=tool_turns)
    (whole,) = (await all_of(task))[0].samples
    calls.clear()
    await saved_after(6.0, task, tmp_path)
    assert calls == [0, 1]
    second = server()
    async with Engine.restore(tmp_path, second, task) as engine:
        (batch,) = await rest_of(engine)
        assert engine.statistics().total("replayed_turns") == 2
    (sample,) = batch.samples
    assert sample.segments[0].ids.tolist() == whole.segments[0].ids.tolist()
    assert second.prompts == [[1, 2, *whole.segments[0].ids[:6]]]
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("on_unknown", ["rerun", "fail"])
async def test_a_tool_that_ran_when_it_was_saved_follows_on_unknown(
    tmp_path: Path, on_unknown: Any
) -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([await rollout.tool(look_up, 7, on_unknown=on_unknown)])

    task = task_of(prompts=prompts(1), group_size=1, loop=loop)
    await saved_after(2.5, task, tmp_path)
    assert calls == [7]
    async with Engine.restore(tmp_path, server(), task) as engine:
        batches = await rest_of(engine)
        dropped = engine.statistics().tasks["task"].dropped
    if on_unknown == "rerun":
        assert calls == [7, 7]
        assert len(batches) == 1
    else:
        assert calls == [7]
        assert dropped == {"tool": 1}
        assert batches == []


async def test_what_lacks_its_verdict_only_is_judged_and_not_made_again(tmp_path: Path) -> None:
    judged: list[str] = []

    async def slow(sample: Sample) -> float:
        judged.append(sample.uid)
        await sleep(10)
        return 1.0

    task = task_of(prompts=prompts(1), judger=slow)
    await saved_after(5, task, tmp_path)
    assert len(judged) == 2
    second = server()
    async with Engine.restore(tmp_path, second, task) as engine:
        (batch,) = await rest_of(engine)
    assert second.prompts == []
    assert [sample.reward for sample in batch.samples] == [1.0, 1.0]
    assert len(judged) == 4


async def test_a_judger_of_groups_is_asked_again_about_the_same_samples(tmp_path: Path) -> None:
    class Ranks:
        judges_groups = True

        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            await sleep(10)
            return [float(sample.index) for sample in samples]

    task = task_of(prompts=prompts(1), judger=Ranks())
    await saved_after(5, task, tmp_path)
    second = server()
    async with Engine.restore(tmp_path, second, task) as engine:
        (batch,) = await rest_of(engine)
    assert second.prompts == []
    assert [sample.reward for sample in batch.samples] == [0.0, 1.0]


async def test_a_group_loop_begins_anew_as_a_whole(tmp_path: Path) -> None:
    class InTurn(AgentLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            await rollout.generate()

        async def generate_group(self, group: LiveGroup) -> None:
            for rollout in group.rollouts:
                await group.run(rollout)

    task = task_of(prompts=prompts(1), loop=InTurn())
    await saved_after(3, task, tmp_path)  # one has ended, the other has a token
    second = server()
    async with Engine.restore(tmp_path, second, task) as engine:
        (batch,) = await rest_of(engine)
        assert_conserved(engine, committed=3 + second.committed)
    assert len(batch.groups) == 1
    assert len(second.prompts) == 2


async def test_a_failed_member_lets_its_group_go_once(tmp_path: Path) -> None:
    async def first_fails(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.index == 0:
            raise ValueError("no")
        await rollout.generate()

    task = task_of(prompts=prompts(3), loop=first_fails, starve_after=10)
    await saved_after(3, task, tmp_path)
    async with Engine.restore(tmp_path, server(), task) as engine:
        assert await rest_of(engine) == []
        figures = engine.statistics().tasks["task"]
        assert_conserved(engine)
    assert (figures.drawn, figures.dropped) == (3, {"loop": 3})


async def test_a_group_that_can_do_without_its_dead_goes_on(tmp_path: Path) -> None:
    async def first_fails(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.index == 0:
            raise ValueError("no")
        await rollout.generate()

    task = task_of(
        prompts=prompts(1),
        group_size=3,
        loop=first_fails,
        failures=FailurePolicy(on_dead_member="shrink"),
    )
    await saved_after(3, task, tmp_path)
    second = server()
    async with Engine.restore(tmp_path, second, task) as engine:
        (batch,) = await rest_of(engine)
        figures = engine.statistics().tasks["task"]
        assert figures.members_shrunk == {"loop": 1}
        assert_conserved(engine, committed=8 + second.committed)
    assert [sample.index for sample in batch.samples] == [1, 2]


@pytest.mark.parametrize("seconds", [1.5, 2.0, 2.5, 30.0])
async def test_filters_are_asked_once_for_each_group(tmp_path: Path, seconds: float) -> None:
    def keep(group: Group) -> bool:
        return group.prompt.uid != "p1"

    task = task_of(prompts=prompts(4), keep=keep, shuffle=False, judger=always_one)
    taken: list[Batch] = []
    async with Engine(server(), task) as engine, create_task_group() as group:

        async def take() -> None:
            taken.append(await engine.next_batch(3))

        group.start_soon(take)
        await sleep(seconds)
        await engine.save(tmp_path)
        group.cancel_scope.cancel()
    async with Engine.restore(tmp_path, server(), task) as engine:
        groups = groups_of(await rest_of(engine, 3))
        figures = engine.statistics().tasks["task"]
        assert_conserved(engine)
    assert [uid for _, uid, _ in visits(groups)] == ["p0", "p2", "p3"]
    assert figures.dropped == {"filtered": 1}
    assert figures.drawn == 4


# In every state of the engine


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_in_a_pause(tmp_path: Path, mode: PauseMode) -> None:
    task = task_of(prompts=prompts(4))
    whole = content(groups_of(await all_of(task, 2)))
    before: list[Batch] = []
    async with Engine(server(), task) as engine, create_task_group() as group:

        async def take() -> None:
            before.append(await engine.next_batch(2, wait_in_pause=True))

        group.start_soon(take)
        await sleep(1.5)
        async with engine.paused(mode):
            await engine.save(tmp_path)
        group.cancel_scope.cancel()
    async with Engine.restore(tmp_path, server(), task) as engine:
        assert content(groups_of(await rest_of(engine, 2))) == whole


async def test_of_a_broken_engine_and_after_the_block(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(4))
    whole = content(groups_of(await all_of(task, 2)))
    engine = Engine(server(), task)

    async def fails() -> None:
        raise OSError("no")

    async def run() -> None:
        async with engine, create_task_group() as group:

            async def take() -> None:
                with pytest.raises(EngineBroken):
                    await engine.next_batch(2, wait_in_pause=True)

            group.start_soon(take)
            await sleep(1.5)
            with pytest.raises(EngineBroken):
                async with engine.paused() as pause:
                    with pytest.raises(OSError, match="no"):
                        await pause.update_weights(fails)
            await engine.save(tmp_path / "broken")

    await run()
    await engine.save(tmp_path / "after")
    for name in ("broken", "after"):
        async with Engine.restore(tmp_path / name, server(), task) as again:
            assert content(groups_of(await rest_of(again, 2))) == whole


async def test_while_weights_are_loaded_the_old_version_is_saved(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(2), strategy=SyncStrategy(max_staleness=1))
    async with Engine(server(), task) as engine:
        await engine.next_batch(1)
        async with engine.paused() as pause:

            async def load() -> None:
                await engine.save(tmp_path)

            await pause.update_weights(load)
        assert engine.version == 1
    engine = Engine.restore(tmp_path, server(), task)
    assert engine.restored is not None
    assert (engine.restored.version, engine.version) == (0, 0)


async def test_what_cannot_be_saved_yet(tmp_path: Path) -> None:
    engine = Engine(server(), task_of())
    with pytest.raises(EngineClosed):
        await engine.save(tmp_path)
    with pytest.raises(EngineClosed):
        engine.state_dict()
    with pytest.raises(ValueError, match="keep_last must be >= 1, got 0"):
        await engine.save(tmp_path, keep_last=0)


# What comes again


async def test_batches_that_were_not_committed_come_again_as_they_were(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(8))
    async with Engine(server(), task) as engine:
        first = await engine.next_batch(2)
        await engine.save(tmp_path)
        second, third = await engine.next_batch(1), await engine.next_batch(3)
        engine.commit(first)
        await engine.save(tmp_path)
    engine = Engine.restore(tmp_path, server(), task)
    assert engine.restored is not None
    assert (engine.restored.batches, engine.restored.again) == (3, (2, 3))
    async with engine:
        again = [await engine.next_batch(5), await engine.next_batch(5)]
        for old, new in zip((second, third), again, strict=True):
            assert (new.index, new.version, new.again, old.again) == (
                old.index,
                old.version,
                True,
                False,
            )
            assert [g.prompt.uid for g in new.groups] == [g.prompt.uid for g in old.groups]
            assert content(new.groups) == content(old.groups)
            assert new.statistics == old.statistics
            assert new.tasks == old.tasks
        new = await engine.next_batch(2)
        assert (new.index, new.again) == (4, False)
        figures = engine.statistics().tasks["task"]
        assert figures.delivered == 8
        assert_conserved(engine)
    everything = groups_of([first, *again, new])
    assert len(set(visits(everything))) == len(visits(everything)) == 8


async def test_what_was_trained_does_not_come_again(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(6))
    async with Engine(server(), task) as engine:
        await engine.save(tmp_path)
        for _ in range(4):
            await engine.next_batch(1)
        await engine.save(tmp_path)
    for trained, again in ((0, (1, 2, 3, 4)), (2, (3, 4)), (4, ())):
        engine = Engine.restore(tmp_path, server(), task, trained_through=trained)
        assert engine.restored is not None
        assert engine.restored.again == again
    async with Engine.restore(tmp_path, server(), task, trained_through=2) as engine:
        assert [batch.index for batch in await rest_of(engine)] == [3, 4, 5, 6]


async def test_before_the_first_checkpoint_the_next_batch_commits_the_one_before(
    tmp_path: Path,
) -> None:
    task = task_of(prompts=prompts(6))
    async with Engine(server(), task) as engine:
        for _ in range(3):
            await engine.next_batch(1)
        await engine.save(tmp_path)
        for _ in range(2):
            await engine.next_batch(1)
        await engine.save(tmp_path)
    engine = Engine.restore(tmp_path, server(), task)
    assert engine.restored is not None
    assert engine.restored.again == (3, 4, 5)


async def test_the_newest_checkpoint_that_fits_the_trainer_is_taken(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(8))
    async with Engine(server(), task) as engine:
        for _ in range(4):
            batch = await engine.next_batch(1)
            await engine.save(tmp_path, keep_last=9)
            engine.commit(batch)
        await engine.save(tmp_path, keep_last=9)
    found = {}
    for trained in range(5):
        engine = Engine.restore(tmp_path, server(), task, trained_through=trained)
        assert engine.restored is not None
        assert engine.restored.path is not None
        found[trained] = engine.restored.path.name[-1], engine.restored.again
    assert found == {0: ("1", (1,)), 1: ("2", (2,)), 2: ("3", (3,)), 3: ("4", (4,)), 4: ("5", ())}
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* fits trained_through=5: checkpoint-000005 fits 4 to 4;",
    ):
        Engine.restore(tmp_path, server(), task, trained_through=5)


async def test_many_batches_that_nobody_commits_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(ScriptedController(), task_of(prompts=prompts(40))) as engine:
        await engine.save(tmp_path)
        for _ in range(36):
            await engine.next_batch(1)
    told = [r.getMessage() for r in caplog.records if "engine.commit" in r.getMessage()]
    assert told == ["33 batches wait for engine.commit(batch), and every checkpoint holds them all"]


# Weights


async def test_bug_073_nothing_is_sampled_before_the_weights_are_known(tmp_path: Path) -> None:
    """A restore in which trainer and rollouts wait for each other, both for ever."""
    task = task_of(prompts=prompts(4), strategy=SyncStrategy(max_staleness=9))
    async with Engine(server(), task) as engine:
        for version in range(1, 6):
            async with engine.paused() as pause:
                await pause.update_weights({}, version)
        await engine.save(tmp_path)
    second = server()  # it has the initial weights, and says version 0
    async with Engine.restore(tmp_path, second, task) as engine:
        with pytest.raises(EngineBusy, match="waits for weights of version 5"):
            await engine.next_batch(1)
        with anyio.fail_after(1000), pytest.raises(EngineBusy, match="version 5"):
            await engine.next_batch(1, wait_in_pause=True)
        assert second.prompts == []
        async with engine.paused() as pause:
            with pytest.raises(ValueError, match="version must be >= 5"):
                await pause.update_weights({}, 4)
            await pause.update_weights({})
        assert engine.version == 5
        assert len(await rest_of(engine)) == 4
    third = server(version=5)  # its server says that it has them
    async with Engine.restore(tmp_path, third, task) as engine:
        assert len(await rest_of(engine)) == 4


async def test_at_an_older_step_what_newer_weights_made_is_let_go(tmp_path: Path) -> None:
    task = task_of(
        prompts=prompts(8), strategy=AsyncStrategy(max_staleness=9, lead=1), shuffle=False
    )
    async with Engine(server(), task, batch_size=2) as engine:
        first = await engine.next_batch()
        await engine.save(tmp_path)
        engine.commit(first)
        second = await engine.next_batch()
        async with engine.paused(PauseMode.WAIT, grace=60.0) as pause:
            await pause.update_weights({})
        await engine.next_batch()  # the old weights made it
        fourth = await engine.next_batch()
        assert {group.oldest_version for group in fourth.groups} == {1}
        await engine.save(tmp_path)
    restored = Engine.restore(tmp_path, server(), task, batch_size=2, version=0, trained_through=1)
    assert restored.restored is not None
    assert restored.restored.again == (2, 3)
    assert restored.restored.batches == 3
    assert restored.restored.saved_version == 1
    assert (restored.restored.newer, restored.restored.groups) == (2, 2)
    async with restored as engine:
        batches = await rest_of(engine, 2)
        assert_conserved(engine)
        figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"newer weights": 4}
    assert {v for b in batches for s in b.samples for v in s.segments[0].versions} == {0}
    assert content(batches[0].groups) == content(second.groups)
    assert [batch.index for batch in batches] == [2, 3, 4]
    assert visits(batches[2].groups) == visits(fourth.groups)
    assert len(set(visits(groups_of([first, *batches])))) == 8


async def test_partial_turns_of_newer_weights_are_let_go_too(tmp_path: Path) -> None:
    task = task_of(
        prompts=prompts(1),
        group_size=1,
        sampling=Sampling(6),
        strategy=SyncStrategy(max_staleness=5),
    )
    async with Engine(server(), task) as engine, create_task_group() as group:

        async def take() -> None:
            await engine.next_batch(1)

        group.start_soon(take)
        await sleep(2.5)
        await engine.save(tmp_path / "old")
        async with engine.paused() as pause:
            await pause.update_weights({})
        await sleep(2.5)
        await engine.save(tmp_path / "new")
        group.cancel_scope.cancel()
    for name, newer in (("old", 0), ("new", 1)):
        second = server()
        engine = Engine.restore(tmp_path / name, second, task, version=0)
        assert engine.restored is not None
        assert engine.restored.newer == newer
        async with engine:
            (batch,) = await rest_of(engine)
            assert_conserved(engine)
        assert len(second.prompts[0]) == (2 if newer else 4)
        assert next(batch.samples).segments[0].versions.tolist() == [0] * 6


async def test_what_has_become_too_old_expires_as_ever(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(4), strategy=AsyncStrategy(max_staleness=1, lead=1))
    async with Engine(server(), task, batch_size=2) as engine:
        await engine.next_batch()
        await sleep(30)
        assert engine.statistics().total("ready") == 2
        await engine.save(tmp_path)
    async with Engine.restore(
        tmp_path, server(version=2), task, batch_size=2, version=2, trained_through=1
    ) as engine:
        (batch,) = await rest_of(engine, 2)
        assert engine.statistics().total("expired") == 2
    assert {v for s in batch.samples for v in s.segments[0].versions.tolist()} == {2}


# Twice


async def test_bug_077_a_save_right_after_a_restore_is_the_same(tmp_path: Path) -> None:
    """Positions that are stored again as they were before the load."""
    task = task_of(
        prompts=prompts(9),
        judger=always_half,
        strategy=AsyncStrategy(max_staleness=1, lead=1),
    )
    await saved_after(7.5, task, tmp_path / "one", 2, batch_size=2)
    restored = Engine.restore(tmp_path / "one", server(), task, batch_size=2)
    async with restored as engine:
        state = engine.state_dict()
    again = Engine(server(), task, batch_size=2)
    again.load_state_dict(state)
    async with again as engine:
        twice = engine.state_dict()
    assert facts(state) == facts(twice)
    assert state["columns.safetensors"] == twice["columns.safetensors"]


async def test_a_batch_that_is_committed_before_it_comes_again_is_still_in_the_next_checkpoint() -> (
    None
):
    task = task_of(prompts=prompts(4), judger=always_half)
    async with Engine(server(), task) as engine:
        batch = await engine.next_batch(1)
        state = engine.state_dict()
    restored = Engine(server(), task)
    restored.load_state_dict(state)
    async with restored as engine:
        engine.commit(batch)
        state = engine.state_dict()
        again = await engine.next_batch(1)
        assert (again.index, again.again) == (batch.index, True)
        engine.commit(again)
        later = engine.state_dict()
    for saved, least in ((state, 0), (later, 1)):
        third = Engine(server(), task)
        third.load_state_dict(saved, trained_through=least)
        async with third as engine:
            comes = await engine.next_batch(1)
        assert (comes.index, comes.again) == ((1, True) if saved is state else (2, False))


def facts(state: Mapping[str, bytearray]) -> Any:
    lines = [json.loads(line) for line in state["groups.jsonl"].splitlines()]
    return json.loads(state["engine.json"]), lines


async def test_bug_077_the_next_prompt_is_the_next_one(tmp_path: Path) -> None:
    """After a restart the first prompts are trained again."""
    task = task_of(prompts=prompts(10), shuffle=False)
    async with Engine(server(), task) as engine:
        await engine.save(tmp_path)
        for _ in range(5):
            engine.commit(await engine.next_batch(1))
        await engine.save(tmp_path)
    async with Engine.restore(tmp_path, server(), task) as engine:
        batch = await engine.next_batch(1)
        assert batch.groups[0].prompt.uid == "p5"
        engine.commit(batch)
        await engine.save(tmp_path)
    assert facts_of(tmp_path)["tasks"]["task"]["drawn"] == 6


def facts_of(path: Path) -> Any:
    newest = sorted(path.glob("checkpoint-*"))[-1]
    return json.loads((newest / "engine.json").read_text())


async def test_bug_075_what_was_handed_out_and_not_trained_comes_once(tmp_path: Path) -> None:
    """A position that is ahead of what was trained: a window of prompts is skipped, mostly the long ones."""

    def script(attempt: Any) -> Reply:
        slow = attempt.prompt_ids[0] - 1 in (3, 5)
        return Reply([7, 0], delay=100.0 if slow else 1.0)

    task = task_of(
        prompts=prompts(10),
        shuffle=False,
        group_size=1,
        strategy=AsyncStrategy(max_staleness=1, lead=2),
    )
    trained: list[str] = []
    async with Engine(ScriptedController(script), task, batch_size=2) as engine:
        for _ in range(2):
            batch = await engine.next_batch()
            trained += [group.prompt.uid for group in batch.groups]
            engine.commit(batch)
        await sleep(10)
        await engine.save(tmp_path)
    assert sorted(trained) == ["p0", "p1", "p2", "p4"]
    async with Engine.restore(
        tmp_path, ScriptedController(), task, batch_size=2, trained_through=2
    ) as engine:
        rest = [group.prompt.uid for group in groups_of(await rest_of(engine, 2))]
    assert sorted(rest) == ["p3", "p5", "p6", "p7", "p8", "p9"]


async def test_bug_083_saving_leaves_what_lives_as_it_was(tmp_path: Path) -> None:
    """Saving replaced what the buffer referred to, so that code afterwards met something else."""
    marker = object()
    given = [Prompt(f"p{i}", token_ids=[1 + i, 2], media=marker) for i in range(4)]
    task = task_of(prompts=given, strategy=AsyncStrategy(max_staleness=1, lead=1))
    whole = content(groups_of(await all_of(task, 2, batch_size=2)))
    got: list[Batch] = []
    async with Engine(server(), task, batch_size=2) as engine, create_task_group() as group:

        async def save() -> None:
            while True:
                await engine.save(tmp_path)
                await sleep(0.3)

        group.start_soon(save)
        got = await rest_of(engine, 2)
        group.cancel_scope.cancel()
    assert content(groups_of(got)) == whole
    assert all(g.prompt.media is marker for g in groups_of(got))
    async with Engine.restore(tmp_path, server(), task, batch_size=2) as engine:
        for group_ in groups_of(await rest_of(engine, 2)):
            assert group_.prompt.media is marker


async def test_bug_081_checkpoints_of_another_run_are_left_alone(tmp_path: Path) -> None:
    """Files of an earlier run were consumed by a fresh one."""
    task = task_of()
    async with Engine(server(), task) as engine:
        await engine.save(tmp_path)
    async with Engine(server(), task) as engine:
        with pytest.raises(CheckpointError, match=r"holds checkpoints of another run \("):
            await engine.save(tmp_path)
    async with Engine.restore(tmp_path, server(), task) as engine:
        await engine.save(tmp_path)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


# Two at once, and cancellation


async def test_one_at_a_time(tmp_path: Path) -> None:
    errors: list[Exception] = []
    async with Engine(server(), task_of()) as engine, create_task_group() as group:

        async def save() -> None:
            try:
                await engine.save(tmp_path)
            except EngineBusy as error:
                errors.append(error)

        group.start_soon(save)
        group.start_soon(save)
    assert len(errors) == 1
    assert names(tmp_path) == ["checkpoint-000001"]


async def test_a_cancelled_save_leaves_nothing_and_the_next_works(tmp_path: Path) -> None:
    task = task_of()
    async with Engine(server(), task) as engine:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await engine.save(tmp_path)
        await engine.save(tmp_path)
    assert names(tmp_path) == ["checkpoint-000001"]


# The trainer's own checkpoint


async def test_a_state_goes_into_the_trainers_own_checkpoint(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    task = task_of(prompts=prompts(4))
    whole = content(groups_of(await all_of(task, 2)))
    async with Engine(server(), task) as engine:
        await sleep(1)
        torch.save({"step": 0, "engine": engine.state_dict()}, tmp_path / "trainer.pt")
    loaded = torch.load(tmp_path / "trainer.pt", weights_only=True)
    engine = Engine(server(), task)
    engine.load_state_dict(loaded["engine"], trained_through=loaded["step"])
    assert engine.restored is not None
    assert engine.restored.path is None
    with pytest.raises(EngineBusy, match="neither entered nor restored"):
        engine.load_state_dict(loaded["engine"])
    async with engine:
        assert content(groups_of(await rest_of(engine, 2))) == whole


def test_from_synchronous_code(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(6))
    with Engine(ScriptedController(), task).blocking() as engine:
        engine.commit(engine.next_batch(2))
        assert engine.save(tmp_path).name == "checkpoint-000001"
        assert engine.state_dict().keys() == {
            "manifest.json",
            "engine.json",
            "groups.jsonl",
            "prompts.jsonl",
            "columns.safetensors",
        }
    with Engine.restore(tmp_path, ScriptedController(), task).blocking() as engine:
        assert engine.restored is not None
        assert [batch.index for batch in engine.batches(2)] == [2, 3]


# Missing, damaged, foreign


async def test_a_first_start_and_a_restart_are_the_same_lines(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(4))
    for indexes in ([1], [2], [3], [4], []):
        engine = Engine.restore(
            tmp_path / "run", ScriptedController(), task, missing="fresh", seed=3
        )
        assert (engine.restored is None) == (indexes == [1])
        async with engine:
            try:
                batch = await engine.next_batch(1)
            except EndOfPrompts:
                assert indexes == []
                continue
            assert [batch.index] == indexes
            engine.commit(batch)
            await engine.save(tmp_path / "run")


def test_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}"):
        Engine.restore(tmp_path, server(), task_of())
    with pytest.raises(CheckpointError, match="and trained_through is 3"):
        Engine.restore(tmp_path, server(), task_of(), missing="fresh", trained_through=3)
    with pytest.raises(ValueError, match="missing must be 'error' or 'fresh', got 'no'"):
        Engine.restore(tmp_path, server(), task_of(), missing="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trained_through must be >= 0, got -1"):
        Engine.restore(tmp_path, server(), task_of(), trained_through=-1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "other"}, r"is of the tasks \['task'\], and tasks has \['other'\]"),
        ({"group_size": 3}, "its group_size was 2, and is 3"),
        ({"shuffle": False}, "its shuffle was True, and is False"),
        ({"prompts": prompts(5)}, "its number of prompts was 4, and is 5"),
        ({"prompts": prompts(5)[1:]}, "its prompts' fingerprint was '[0-9a-f]+', and is"),
    ],
)
async def test_other_tasks_and_other_data_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    async with Engine(server(), task_of(prompts=prompts(4))) as engine:
        await engine.save(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        Engine.restore(tmp_path, server(), task_of(**{"prompts": prompts(4), **options}))
    with pytest.raises(CheckpointError, match="was saved with seed 0, and seed is 1"):
        Engine.restore(tmp_path, server(), task_of(prompts=prompts(4)), seed=1)


async def test_another_vocabulary_is_refused_when_the_policy_is_known(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(4))
    async with Engine(server(), task) as engine:
        await engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="vocabulary of 1000 tokens, and this one has 999"):
        async with Engine.restore(tmp_path, server(vocab_size=999), task):
            raise AssertionError("unreachable")


async def test_what_may_change_may_change(tmp_path: Path) -> None:
    task = task_of(prompts=prompts(4))
    await saved_after(1.5, task, tmp_path, 2)
    changed = task_of(
        prompts=prompts(4),
        judger=always_two,
        sampling=Sampling(3, temperature=0.5),
        strategy=AsyncStrategy(max_staleness=1),
        weight=2.0,
        epochs=None,
    )
    async with Engine.restore(tmp_path, server(), changed, batch_size=4) as engine:
        batch = await engine.next_batch()
        assert len(batch) == 4
        assert batch.statistics.reward_mean == 2.0


NAMES = ("engine.json", "groups.jsonl", "prompts.jsonl", "columns.safetensors", "manifest.json")
Damage = Callable[[Path], object]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2] if path.stat().st_size else b"x")


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, name: str, damage: Damage
) -> None:
    task = task_of(prompts=prompts(4))
    async with Engine(server(), task) as engine:
        await engine.save(tmp_path)
        await sleep(1.5)
        newest = await engine.save(tmp_path)
    damage(newest / name)
    with pytest.raises(CheckpointError, match=str(newest)):
        Engine.restore(tmp_path, server(), task)
    older = tmp_path / "checkpoint-000001"
    async with Engine.restore(older, server(), task) as engine:
        assert len(await rest_of(engine)) == 4


async def test_what_has_no_form_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    class Odd:
        pass

    def judge(sample: Sample) -> Verdict:
        return Verdict(1.0, details={"odd": Odd()})

    task = task_of(prompts=prompts(4), judger=judge)
    async with Engine(server(), task) as engine:
        await engine.save(tmp_path)
        batch = await engine.next_batch(1)
        with pytest.raises(CheckpointError, match=r"verdict of sample task/.*Odd.*register_codec"):
            await engine.save(tmp_path)
        engine.commit(batch)
        await engine.save(tmp_path)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


async def test_details_of_verdicts_come_back(tmp_path: Path) -> None:
    details = {"bytes": b"\0\xff", "pair": (1, 2.5), "$odd": {"$": None}, "nan": float("inf")}

    def judge(sample: Sample) -> Verdict:
        return Verdict(0.5, parts={"format": 0.25}, details=details)

    task = task_of(prompts=prompts(1), judger=judge)
    async with Engine(server(), task) as engine:
        await engine.next_batch(1)
        await engine.save(tmp_path)
    async with Engine.restore(tmp_path, server(), task) as engine:
        (batch,) = await rest_of(engine)
    verdict = next(batch.samples).verdict
    assert verdict == Verdict(0.5, parts={"format": 0.25}, details=details)


# Other tasks and sources


async def test_shares_of_several_tasks_go_on(tmp_path: Path) -> None:
    def tasks() -> list[TaskSpec]:
        return [
            task_of(name="a", prompts=prompts(40), weight=3.0, shuffle=True),
            task_of(name="b", prompts=prompts(40), weight=1.0),
        ]

    async with Engine(server(), tasks()) as engine:
        whole = [await engine.next_batch(2) for _ in range(8)]
    got: list[Batch] = []
    async with Engine(server(), tasks()) as engine:
        for _ in range(3):
            got.append(await engine.next_batch(2))
            engine.commit(got[-1])
        await engine.save(tmp_path)
    async with Engine.restore(tmp_path, server(), tasks()) as engine:
        for _ in range(5):
            got.append(await engine.next_batch(2))
    assert [visits(batch.groups) for batch in got] == [visits(batch.groups) for batch in whole]


class Counting:
    """A source of its own: it hears which groups ended."""

    def __init__(self, count: int) -> None:
        self.state: dict[str, Any] = {"next": 0, "heard": []}
        self._count = count

    def draw(self) -> Prompt | None:
        number = self.state["next"]
        if number == self._count:
            return None
        self.state["next"] += 1
        meta = {"raw": b"\1", "number": number}
        return Prompt(
            f"q{number}", token_ids=[5, number], label=(number,), data_source="x", meta=meta
        )

    def report(self, group: Group) -> None:
        self.state["heard"].append(group.prompt.uid)

    def state_dict(self) -> Mapping[str, Any]:
        return {**self.state, "heard": list(self.state["heard"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.0, 2.5, 4.5, 9.0])
async def test_a_source_goes_on_with_what_it_gave_and_heard(tmp_path: Path, seconds: float) -> None:
    source = Counting(5)
    task = task_of(prompts=source, epochs=None, strategy=AsyncStrategy(max_staleness=1, lead=1))
    got: list[Batch] = []
    before: list[Batch] = []
    async with Engine(server(), task, batch_size=2) as engine, create_task_group() as group:

        async def take() -> None:
            while True:
                try:
                    batch = await engine.next_batch()
                except EndOfPrompts:
                    return
                got.append(batch)
                engine.commit(batch)

        group.start_soon(take)
        await sleep(seconds)
        before = list(got)
        await engine.save(tmp_path)
        group.cancel_scope.cancel()
    again = Counting(5)
    task = task_of(prompts=again, epochs=None, strategy=AsyncStrategy(max_staleness=1, lead=1))
    async with Engine.restore(tmp_path, server(), task, batch_size=2) as engine:
        rest = await rest_of(engine, 2)
        assert_conserved(engine)
    groups = groups_of([*before, *rest])
    assert [uid for _, uid, _ in visits(groups)] == [f"q{i}" for i in range(5)]
    assert sorted(again.state["heard"]) == [f"q{i}" for i in range(5)]
    for group_ in groups:
        number = int(group_.prompt.uid[1:])
        assert group_.prompt.label == (number,)
        assert group_.prompt.meta == {"raw": b"\1", "number": number}
        assert group_.prompt.token_ids == (5, number)


async def test_bug_076_what_a_source_gave_ahead_is_saved(tmp_path: Path) -> None:
    """The rest of a loader's batch that was not needed yet was thrown away."""

    class Slow(Counting):
        async def draw(self) -> Prompt | None:  # type: ignore[override]
            await sleep(1)
            return Counting.draw(self)

    task = task_of(prompts=Slow(3), epochs=None, group_size=1)
    async with Engine(server(), task) as engine:
        with anyio.move_on_after(1.0):  # the consumer goes when the draw comes back
            await engine.next_batch(1)
        await sleep(0.5)
        held = engine.statistics().tasks["task"].held
        drawn = engine.statistics().tasks["task"].drawn
        await engine.save(tmp_path)
    assert held + drawn == 1
    task = task_of(prompts=Slow(3), epochs=None, group_size=1)
    async with Engine.restore(tmp_path, server(), task) as engine:
        groups = groups_of(await rest_of(engine))
    assert [uid for _, uid, _ in visits(groups)] == ["q0", "q1", "q2"]


async def test_a_source_that_draws_in_a_thread_is_waited_for(tmp_path: Path) -> None:
    from threading import Event as ThreadEvent

    go_on = ThreadEvent()

    class Blocks(Counting):
        def draw(self) -> Prompt | None:
            go_on.wait()
            return super().draw()

    task = task_of(prompts=Blocks(2), epochs=None, group_size=1)
    async with Engine(server(), task) as engine, create_task_group() as group:

        async def take() -> None:
            await engine.next_batch(2)

        async def save() -> None:
            await engine.save(tmp_path)
            group.cancel_scope.cancel()

        group.start_soon(take)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        group.start_soon(save)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        go_on.set()
    task = task_of(prompts=Counting(2), epochs=None, group_size=1)
    async with Engine.restore(tmp_path, server(), task) as engine:
        groups = groups_of(await rest_of(engine))
    assert [uid for _, uid, _ in visits(groups)] == ["q0", "q1"]


async def test_a_source_that_fails_says_so(tmp_path: Path) -> None:
    class Fails(Counting):
        def state_dict(self) -> Mapping[str, Any]:
            raise RuntimeError("no state")

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise RuntimeError("no load")

    async with Engine(server(), task_of(prompts=Fails(2), epochs=None)) as engine:
        with pytest.raises(CheckpointError, match=r"task 'task', state_dict\(\): .*no state"):
            await engine.save(tmp_path)
    async with Engine(server(), task_of(prompts=Counting(2), epochs=None)) as engine:
        await engine.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"load_state_dict\(\): .*no load"):
        async with Engine.restore(tmp_path, server(), task_of(prompts=Fails(2), epochs=None)):
            raise AssertionError("unreachable")
    with pytest.raises(CheckpointError, match="its prompts was 'a PromptSource', and is 'a seq"):
        Engine.restore(tmp_path, server(), task_of(prompts=prompts(2)))


async def test_an_async_source_is_not_waited_for(tmp_path: Path) -> None:
    class Slow(Counting):
        async def draw(self) -> Prompt | None:  # type: ignore[override]
            await sleep(10)
            return Counting.draw(self)

    async with Engine(server(), task_of(prompts=Slow(2), epochs=None, group_size=1)) as engine:

        async def take() -> None:
            await engine.next_batch(2)

        async with create_task_group() as group:
            group.start_soon(take)
            await sleep(5)
            await engine.save(tmp_path)
            assert anyio.current_time() < 6
            group.cancel_scope.cancel()
    task = task_of(prompts=Slow(2), epochs=None, group_size=1)
    async with Engine.restore(tmp_path, server(), task) as engine:
        groups = groups_of(await rest_of(engine))
    assert [uid for _, uid, _ in visits(groups)] == ["q0", "q1"]
