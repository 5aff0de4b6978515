"""How a user's own allocator shares batches among tasks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rollnest import AllocationRequest, Engine, Prompt, TaskSpec, by_weight
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import spec

pytestmark = pytest.mark.anyio


def task(name: str, **options: object) -> TaskSpec:
    return spec(
        name=name, prompts=[Prompt(f"{name}{i}", token_ids=[1 + i]) for i in range(9)], **options
    )


async def test_an_allocator_sees_the_step_and_decides() -> None:
    seen: list[AllocationRequest] = []

    def take_turns(request: AllocationRequest) -> Mapping[str, int]:
        seen.append(request)
        return {"a" if request.step % 2 else "b": request.groups}

    controller = ScriptedController()
    async with Engine(controller, [task("a"), task("b")], allocate=take_turns) as engine:
        sizes = [
            {name: s.groups for name, s in (await engine.next_batch(3)).tasks.items()}
            for _ in range(4)
        ]
    assert sizes == [{"a": 3, "b": 0}, {"a": 0, "b": 3}] * 2
    assert [request.step for request in seen] == [1, 2, 3, 4]  # asked once a step
    assert seen[2].delivered == {"a": 3, "b": 3}
    assert seen[0].weights == {"a": 1.0, "b": 1.0}
    assert_conserved(engine, committed=controller.committed)


async def test_shares_may_change_and_switch_a_task_off() -> None:
    def fade(request: AllocationRequest) -> Mapping[str, int]:
        b = min(request.step - 1, request.groups)
        return {"a": request.groups - b, "b": b}

    async with Engine(ScriptedController(), [task("a"), task("b")], allocate=fade) as engine:
        sizes = [(await engine.next_batch(2)).tasks["b"].groups for _ in range(4)]
    assert sizes == [0, 1, 2, 2]


async def test_an_allocator_may_build_on_by_weight() -> None:
    def at_least_one(request: AllocationRequest) -> Mapping[str, int]:
        shares = dict(by_weight(request))
        for name in request.weights:
            if not shares.get(name):
                shares[name] = 1
                shares[max(shares, key=lambda n: shares[n])] -= 1
        return shares

    tasks = [task("a", weight=100), task("b", weight=1)]
    async with Engine(ScriptedController(), tasks, allocate=at_least_one) as engine:
        batch = await engine.next_batch(4)
    assert {name: s.groups for name, s in batch.tasks.items()} == {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 1}, "1 groups in all, of 4"),
        ({"a": 5, "b": 0}, "5 groups in all, of 4"),
        ({"a": 4, "c": 0}, "'c'"),
        ({"a": 5, "b": -1}, "share of 'b'.*-1"),
        ({"a": 4.0}, "share of 'a'.*4.0"),
    ],
)
async def test_bad_shares_are_refused_by_name(shares: Mapping[str, int], message: str) -> None:
    tasks = [task("a"), task("b")]
    async with Engine(ScriptedController(), tasks, allocate=lambda _: shares) as engine:
        with pytest.raises((ValueError, TypeError), match=message):
            await engine.next_batch(4)


async def test_an_allocator_that_is_no_function() -> None:
    with pytest.raises(TypeError, match="allocate"):
        Engine(ScriptedController(), task("a"), allocate="weights")  # type: ignore[arg-type]
