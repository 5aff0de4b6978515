"""What a task's `refine` may do with a group, and in which order the user's functions are asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from attrs import evolve

from rollnest import Engine, Group, Prompt, Sample
from rollnest.errors import Starved
from rollnest.testing import RecordingInstrument, ScriptedController, assert_conserved

from .helpers import run_to_its_exit, spec

pytestmark = pytest.mark.anyio


async def by_index(sample: Sample) -> float:
    return float(sample.index)


def best_first(group: Group) -> list[Sample]:
    """The two best, the best first."""
    return sorted(group.samples, key=lambda s: -(s.reward or 0.0))[:2]


async def one(refine: Any, **options: Any) -> tuple[Group, Engine]:
    controller = ScriptedController(rate=10.0)
    task = spec(judger=by_index, refine=refine, group_size=4, **options)
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
        assert_conserved(engine, committed=controller.committed)
    assert_conserved(engine, committed=controller.committed)
    return batch.groups[0], engine


async def test_the_chosen_samples_are_delivered_in_their_order() -> None:
    group, engine = await one(best_first)
    assert [s.index for s in group.samples] == [3, 2]
    assert group.rewards == (3.0, 2.0)
    figures = engine.statistics().tasks["task"]
    assert figures.members_shrunk == {"refined": 2}
    assert (figures.members, figures.members_delivered, figures.produced_samples) == (4, 2, 4)


@pytest.mark.parametrize("wrap", [tuple, iter, lambda chosen: evolve_group(chosen)])
async def test_any_iterable_or_a_group_will_do(wrap: Any) -> None:
    group, _ = await one(lambda g: wrap(best_first(g)))
    assert [s.index for s in group.samples] == [3, 2]


def evolve_group(chosen: list[Sample]) -> Group:
    first = chosen[0]
    return Group(first.task, first.prompt, first.visit, chosen)


async def test_the_filter_sees_what_refine_left() -> None:
    order: list[str] = []

    def refine(group: Group) -> Iterable[Sample]:
        order.append(f"refine {len(group)}")
        return best_first(group)

    def keep(group: Group) -> bool:
        order.append(f"keep {len(group)}")
        return True

    await one(refine, keep=keep)
    assert order[:2] == ["refine 4", "keep 2"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda g: None, "must return samples of the group, got None"),
        (lambda g: "abc", "must return samples of the group, got 'abc'"),
        (lambda g: {}, "must return samples of the group"),
        (lambda g: [], "must leave at least one sample"),
        (lambda g: [g.samples[0], g.samples[0]], "once at most"),
        (lambda g: [evolve(g.samples[0], verdict=None)], "once at most"),
        (lambda g: [7], "once at most, got 7"),
        (lambda g: 1 // 0, "ZeroDivisionError"),
    ],
)
async def test_anything_else_fails_the_group(answer: Any, said: str) -> None:
    controller, recording = ScriptedController(), RecordingInstrument()
    task = spec(refine=answer, starve_after=1)
    async with Engine(controller, task, instruments=[recording]) as engine:
        with pytest.raises(Starved, match=said) as caught:
            await engine.next_batch(1)
        assert set(caught.value.reasons) == {"filter"}
        assert engine.statistics().tasks["task"].members_shrunk == {}
    assert_conserved(engine, committed=controller.committed)


async def test_refine_sees_completed_groups_only() -> None:
    seen: list[Group] = []

    async def judge(sample: Sample) -> float:
        if sample.prompt.uid == "a":
            raise ValueError("no")
        return 1.0

    def refine(group: Group) -> Group:
        seen.append(group)
        return group

    pair = [Prompt("a", token_ids=[1]), Prompt("b", token_ids=[2])]
    task = spec(judger=judge, refine=refine, prompts=pair, epochs=1)
    async with Engine(ScriptedController(), task) as engine:
        await engine.next_batch(2)
    assert [group.prompt.uid for group in seen] == ["b"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_exit_after_refine_counts_each_member_once(backend: str) -> None:
    def keep(group: Group) -> bool:
        raise SystemExit

    async def main() -> None:
        async with engine:
            await engine.next_batch(1)

    engine = Engine(ScriptedController(), spec(refine=lambda g: g.samples[:1], keep=keep))
    run_to_its_exit(main, backend, SystemExit)
    assert_conserved(engine)
    assert engine.statistics().tasks["task"].members_shrunk == {"refined": 1}


async def test_refine_is_a_function() -> None:
    with pytest.raises(TypeError, match="refine"):
        spec(refine=3)
