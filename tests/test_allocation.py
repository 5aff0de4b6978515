"""How a user's own allocator shares batches among tasks."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from rollnest import AllocationRequest, AsyncStrategy, Engine, Prompt, TaskSpec, by_weight
from rollnest.abc import Attempt
from rollnest.testing import Reply, ScriptedController, assert_conserved

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


async def test_a_task_that_is_switched_off_does_not_run_ahead() -> None:
    """Its groups would only become too old, again and again."""

    def only_a(request: AllocationRequest) -> Mapping[str, int]:
        return {"a": request.groups}

    controller = ScriptedController(rate=10.0)
    tasks = [task(name, strategy=AsyncStrategy(max_staleness=1)) for name in "ab"]
    async with Engine(controller, tasks, batch_size=4, allocate=only_a) as engine:
        await anyio.sleep(100)
        assert engine.statistics().tasks["b"].drawn == 2  # nothing was said yet: by weight
        for _ in range(6):
            await engine.next_batch()
            await anyio.sleep(100)
            async with engine.paused() as pause:
                await pause.update_weights({})
        figures = engine.statistics().tasks
        assert figures["a"].ready == 4
        assert figures["b"].drawn == 2
        assert figures["b"].redrawn == 0  # they expired, and nobody needs them


async def test_when_a_task_ends_the_others_run_ahead_for_the_whole_batch() -> None:
    tasks = [
        task("a", strategy=AsyncStrategy(max_staleness=1), epochs=1),
        spec(name="b", strategy=AsyncStrategy(max_staleness=1)),
    ]
    async with Engine(ScriptedController(rate=10.0), tasks, batch_size=6) as engine:
        for _ in range(4):
            await engine.next_batch()
            await anyio.sleep(100)
        assert engine.statistics().tasks["a"].delivered == 9
        assert engine.statistics().tasks["b"].ready == 6


async def test_share_0_for_a_step_stalls_nobody() -> None:
    """The slow task is left out at every other step; the fast one does not wait for it then."""

    def script(attempt: Attempt) -> Reply:
        return Reply([5, 0], delay=50.0 if attempt.prompt_ids[0] > 20 else 1.0)

    def by_turns(request: AllocationRequest) -> Mapping[str, int]:
        slow = 1 if request.step % 2 == 0 else 0
        return {"slow": slow, "fast": request.groups - slow}

    slow = spec(name="slow", prompts=[Prompt(f"s{i}", token_ids=[30 + i]) for i in range(5)])
    fast = spec(name="fast", prompts=[Prompt(f"f{i}", token_ids=[1 + i]) for i in range(9)])
    waited: list[float] = []
    async with Engine(ScriptedController(script), [slow, fast], allocate=by_turns) as engine:
        for _ in range(4):
            before = anyio.current_time()
            await engine.next_batch(3)
            waited.append(round(anyio.current_time() - before))
    assert waited == [1, 50, 1, 50]
