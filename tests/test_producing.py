"""How far production runs ahead, and what becomes of groups that are too old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest

from rollnest import (
    AllocationRequest,
    AsyncStrategy,
    Engine,
    Group,
    Sample,
    SyncStrategy,
    _producer,
)
from rollnest._strategies import Production
from rollnest.abc import Attempt
from rollnest.errors import EngineBroken, Starved, Stuck
from rollnest.testing import Reply, ScriptedController, assert_conserved

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio


def one_of(number: int) -> Callable[[Group], bool]:
    """Keeps the last of each so many groups."""
    return lambda group: group.visit % number == number - 1


def none(group: Group) -> bool:
    return False


def first_two(group: Group) -> bool:
    return group.visit < 2


async def test_oversampling_starts_a_share_on_top() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=1, lead=0, oversample=0.5))
    async with Engine(controller, task, batch_size=3) as engine:
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].ready == 5  # 3 and ceil(1.5)
        await engine.next_batch()
        await anyio.sleep(100)
        assert engine.statistics().tasks["task"].ready == 5  # what was not taken stays for later
    assert_conserved(engine, committed=controller.committed)


async def test_what_is_too_old_may_be_dropped() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=1, expired="drop"))
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(100)
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
        assert set(batch.statistics.lag_histogram) == {0}
        assert batch.statistics.dropped == {"expired": 4}
    figures = engine.statistics().tasks["task"]
    assert figures.dropped["expired"] == 4
    assert figures.redrawn == 0
    assert_conserved(engine, committed=controller.committed)


async def test_a_pause_while_a_batch_is_awaited_makes_sync_groups_too_old() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    ways: list[tuple[Literal["retry", "drop"], int]] = [("retry", 1), ("drop", 0)]
    for expired, redrawn in ways:
        task = spec(group_size=1, strategy=SyncStrategy(expired=expired))
        async with Engine(controller, task) as engine, anyio.create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await anyio.sleep(5)
            async with engine.paused() as pause:
                await pause.update_weights({}, engine.version + 1)
        assert engine.statistics().total("redrawn") == redrawn
        controller = ScriptedController(rate=1.0, stop_every=10_000)


async def test_expired_groups_wait_until_they_are_a_tail_batch() -> None:
    controller = ScriptedController(rate=10.0)
    strategy = AsyncStrategy(max_staleness=0, lead=0, oversample=1.0, expired="tail", tail_batch=3)
    async with Engine(controller, spec(strategy=strategy), batch_size=2) as engine:
        await anyio.sleep(100)
        assert _where(engine) == {"drawn": 4, "ready": 4, "waiting": 0, "flight": 0}
        await engine.next_batch()
        await anyio.sleep(100)
        assert _where(engine) == {"drawn": 6, "ready": 4, "waiting": 0, "flight": 0}
        async with engine.paused() as pause:
            await pause.update_weights({})
        # All four expired, so they are a tail batch: drawn again before anything fresh, and nothing on top.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert _where(engine) == {"drawn": 6, "ready": 0, "waiting": 2, "flight": 2}
        await anyio.sleep(100)
        batch = await engine.next_batch()
        assert {group.visit for group in batch.groups} == {2, 3}
        await anyio.sleep(100)
        # The other two came next; when they had ended, the batch on top was started again.
        assert _where(engine) == {"drawn": 8, "ready": 4, "waiting": 0, "flight": 0}
        batch = await engine.next_batch()
        assert {group.visit for group in batch.groups} == {4, 5}
    assert_conserved(engine, committed=controller.committed)


async def test_what_is_held_back_for_a_tail_batch_comes_when_the_prompts_end() -> None:
    controller = ScriptedController(rate=10.0)
    strategy = AsyncStrategy(max_staleness=0, lead=1, expired="tail", tail_batch=9)
    task = spec(strategy=strategy, prompts=prompts(5), epochs=1, shuffle=False)
    visits: list[int] = []
    async with Engine(controller, task, batch_size=1) as engine:
        await anyio.sleep(100)
        async with engine.paused() as pause:
            await pause.update_weights({})
        assert engine.statistics().total("expired") == 2
        async for batch in engine.batches():
            visits += [group.visit for group in batch.groups]
    assert (set(visits[:3]), set(visits[3:])) == ({2, 3, 4}, {0, 1})
    assert_conserved(engine, committed=controller.committed)


async def test_the_freshest_first() -> None:
    controller = ScriptedController(rate=10.0)
    strategy = AsyncStrategy(max_staleness=2, lead=1, expired="drop", order="freshest")
    task = spec(strategy=strategy, shuffle=False)
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(100)  # visits 0 to 3, of version 0
        async with engine.paused() as pause:
            await pause.update_weights({})
        taken: list[list[tuple[int, int | None]]] = []
        for _ in range(3):
            batch = await engine.next_batch()
            taken.append([(group.visit, group.oldest_version) for group in batch.groups])
            await anyio.sleep(100)
    assert taken == [[(0, 0), (1, 0)], [(4, 1), (5, 1)], [(6, 1), (7, 1)]]


async def test_a_publication_moves_what_is_too_old_at_once() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=0, lead=0))
    async with Engine(controller, task, batch_size=2) as engine:
        await anyio.sleep(100)
        async with engine.paused() as pause:
            await pause.update_weights({})
        await anyio.sleep(100)  # while the trainer does something else
        assert engine.statistics().total("redrawn") == 2
        before = anyio.current_time()
        await engine.next_batch()
        assert anyio.current_time() == before


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 2, 3])
async def test_the_default_lead_wastes_nothing_however_often_weights_are_published(
    every: int, staleness: int
) -> None:
    """A policy that is faster than the trainer, and a filter that drops half: all of the bound is used, no more."""
    controller = ScriptedController(rate=1000.0)
    task = spec(strategy=AsyncStrategy(max_staleness=staleness), keep=one_of(2))
    lags: Counter[int] = Counter()
    async with Engine(controller, task, batch_size=2, publish_every=every) as engine:
        for step in range(1, 25):
            with anyio.fail_after(1.0):  # whatever is lacking comes at the policy's speed
                batch = await engine.next_batch()
            lags.update(batch.statistics.lag_histogram)
            await anyio.sleep(100)  # training
            if step % every == 0:
                async with engine.paused() as pause:
                    await pause.update_weights({})
    figures = engine.statistics().tasks["task"]
    assert (figures.expired, max(lags)) == (0, staleness)
    assert figures.dropped["filtered"] > 0
    assert_conserved(engine, committed=controller.committed)


async def test_a_trainer_that_publishes_less_often_than_it_said_is_still_served() -> None:
    task = spec(strategy=AsyncStrategy(max_staleness=0))
    async with Engine(ScriptedController(rate=10.0), task, batch_size=2) as engine:
        for _ in range(5):
            assert len(await engine.next_batch()) == 2
            await anyio.sleep(100)


async def test_a_larger_lead_keeps_turns_in_flight_while_training_inside_the_pause() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(strategy=AsyncStrategy(max_staleness=1, lead=1), group_size=1)
    async with Engine(controller, task, batch_size=2) as engine:
        for _ in range(5):
            await engine.next_batch()
            async with engine.paused() as pause:
                statistics = engine.statistics()
                assert statistics.total("flight") + statistics.total("ready") >= 2
                await anyio.sleep(100)
                await pause.update_weights({})


@pytest.mark.parametrize("expired", ["drop", "retry"])
async def test_a_group_that_can_not_be_delivered_any_more_is_cancelled(
    expired: Literal["drop", "retry"],
) -> None:
    """One member has ended, with the old weights; the other would be sampled for 100 s more, in vain."""

    def script(attempt: Attempt) -> Reply:
        slow = attempt.affinity.endswith("/0/1")  # of visit 0
        return Reply([5, 0], delay=100.0 if slow else 1.0)

    controller = ScriptedController(script)
    strategy = AsyncStrategy(max_staleness=0, lead=0, expired=expired)
    task = spec(strategy=strategy, shuffle=False)
    async with Engine(controller, task, batch_size=1) as engine:
        await anyio.sleep(10)
        async with engine.paused() as pause:
            await pause.update_weights({})
        await anyio.sleep(10)
        figures = engine.statistics().tasks["task"]
        if expired == "drop":
            assert figures.dropped == {"expired": 1}
            assert (figures.drawn, figures.ready) == (2, 1)
        else:  # it may expire; what its second member has is not thrown away
            assert (figures.drawn, figures.flight) == (1, 1)
    assert_conserved(engine, committed=controller.committed)


# Stuck


class Capped(SyncStrategy):
    """At most two groups are live, whatever is asked for."""

    def room(self, production: Production) -> int:
        return max(0, 2 - production.flight - production.ready)


async def test_stuck_when_more_is_asked_for_than_a_strategy_lets_start() -> None:
    async with Engine(ScriptedController(), spec(strategy=Capped())) as engine:
        with pytest.raises(Stuck, match="3 groups were asked for at version 0") as caught:
            await engine.next_batch(3)
        assert caught.value.version == 0
        counters = caught.value.counters["task"]
        assert (counters["lacking"], counters["ready"], counters["max_staleness"]) == (1, 2, 0)
        assert len(await engine.next_batch(2)) == 2  # what can come does
        with pytest.raises(Stuck):
            await engine.next_batch(3)


class OneAhead(AsyncStrategy):
    """One group runs ahead of what is asked for."""

    def room(self, production: Production) -> int:
        return max(0, 1 - production.flight - production.ready)


class Never(SyncStrategy):
    """No group starts."""

    def room(self, production: Production) -> int:
        return 0


async def test_stuck_is_no_matter_of_another_tasks_groups() -> None:
    def all_to_b(request: AllocationRequest) -> dict[str, int]:
        return {"b": request.groups}

    tasks = [spec(name="a"), spec(name="b", strategy=Never())]
    async with Engine(ScriptedController(), tasks, allocate=all_to_b) as engine:
        with pytest.raises(Stuck, match="'b'"):
            await engine.next_batch(1)


@pytest.mark.parametrize("others", [1, 3])
async def test_stuck_is_found_when_the_last_group_of_another_task_ends(others: int) -> None:
    """Which lacks nothing itself, and whose producer has still to find that it can't start another one."""

    def all_to_last(request: AllocationRequest) -> dict[str, int]:
        return {"last": request.groups}

    controller = ScriptedController(lambda _: Reply([5, 0], delay=1.0))
    tasks = [spec(name=f"other {number}", strategy=OneAhead()) for number in range(others)]
    tasks.append(spec(name="last", strategy=Never()))
    async with Engine(controller, tasks, batch_size=1, allocate=all_to_last) as engine:
        with anyio.fail_after(1.5), pytest.raises(Stuck, match="'last'"):
            await engine.next_batch()
        assert engine.statistics().total("ready") == others
    assert_conserved(engine, committed=controller.committed)


async def test_a_closed_gate_is_not_stuck() -> None:
    got: list[int] = []

    async def consume(engine: Engine) -> None:
        got.append(len(await engine.next_batch(2, wait_in_pause=True)))

    async with Engine(ScriptedController(rate=10.0), spec()) as engine:
        async with anyio.create_task_group() as group:
            async with engine.paused():
                group.start_soon(consume, engine)
                await anyio.sleep(100)
                assert got == []
    assert got == [2]


async def test_groups_that_are_dropped_or_drawn_again_are_not_stuck() -> None:
    controller = ScriptedController(rate=10.0)
    task = spec(keep=one_of(5))
    async with Engine(controller, task) as engine:
        for _ in range(3):
            assert len(await engine.next_batch(2)) == 2


async def test_a_strategy_that_always_has_room_starves_nobody() -> None:
    """It is bounded, others get their turn, and it can be cancelled."""

    class Greedy(SyncStrategy):
        def room(self, production: Production) -> int:
            return 1

    ticks = 0
    async with Engine(
        ScriptedController(rate=10.0), spec(group_size=1, strategy=Greedy())
    ) as engine:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
            ticks += 1
        assert ticks == 5
        assert 0 < engine.statistics().total("flight") < 1000
    assert engine.statistics().total("flight") == 0


async def test_a_strategy_that_always_has_room_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Greedy(SyncStrategy):
        def room(self, production: Production) -> int:
            return 10**9

    monkeypatch.setattr(_producer, "_MOST_LIVE", 50)
    async with Engine(ScriptedController(), spec(group_size=1, strategy=Greedy())) as engine:
        await anyio.sleep(1)
        assert engine.statistics().total("ready") == 50
        assert len(await engine.next_batch(60)) == 60  # what is asked for comes all the same
    assert "Greedy" in caplog.text


@pytest.mark.parametrize("answer", [-1, 0.5, None, "many"])
async def test_a_strategy_that_answers_nonsense_breaks_the_engine_by_name(answer: Any) -> None:
    class Odd(SyncStrategy):
        def room(self, production: Production) -> Any:
            return answer

    with pytest.raises(EngineBroken, match=r"Odd.*room"):
        async with Engine(ScriptedController(), spec(strategy=Odd())) as engine:
            await engine.next_batch(1)


# Starved


async def test_starved_tells_each_reason_and_what_was_said_last() -> None:
    async def judge(sample: Sample) -> float:
        if sample.visit % 3 == 0:
            raise ValueError(f"no answer {sample.visit}")
        return 1.0

    task = spec(judger=judge, keep=none, starve_after=3, group_size=1, shuffle=False)
    async with Engine(ScriptedController(rate=10.0), task) as engine:
        with pytest.raises(Starved, match=r"the last one: .* \(judge\): .*no answer \d") as caught:
            await engine.next_batch(2)
    assert set(caught.value.reasons) == {"judge", "filtered"}
    assert sum(caught.value.reasons.values()) >= 6
    assert list(caught.value.failures) == ["judge"]


async def test_starved_does_not_speak_of_failures_before_the_last_good_group() -> None:
    async def judge(sample: Sample) -> float:
        if sample.visit == 0:
            raise ValueError("long ago")
        return 1.0

    task = spec(judger=judge, keep=first_two, starve_after=3, group_size=1)
    async with Engine(ScriptedController(), task) as engine:
        await engine.next_batch(1)
        with pytest.raises(Starved, match=r"unusable \(3 filtered\)$") as caught:
            await engine.next_batch(1)
    assert caught.value.failures == {}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"oversample": -1}, "oversample"),
        ({"expired": "never"}, "expired"),
        ({"expired": "tail"}, "tail_batch"),
        ({"tail_batch": 3}, "tail_batch"),
        ({"expired": "tail", "tail_batch": 0}, "tail_batch"),
        ({"expired": "tail", "tail_batch": 1.5}, "tail_batch"),
        ({"order": "newest"}, "order"),
        ({"order": "freshest"}, "order"),
        ({"lead": -0.5}, "lead"),
        ({"lead": "two"}, "lead"),
    ],
)
async def test_bad_options_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        AsyncStrategy(**options)


@pytest.mark.parametrize("every", [0, 1.5, True])
async def test_publish_every_is_checked(every: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="publish_every"):
        Engine(ScriptedController(), spec(), publish_every=every)


def _where(engine: Engine) -> dict[str, int]:
    figures = engine.statistics().tasks["task"]
    return {n: getattr(figures, n) for n in ("drawn", "ready", "waiting", "flight")}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tasks", [1, 2])
async def test_a_batch_is_returned_the_moment_its_last_group_ends(tasks: int, ahead: bool) -> None:
    controller = ScriptedController(lambda _: Reply([5, 0], delay=1.0))
    strategy = AsyncStrategy(lead=1) if ahead else SyncStrategy()
    specs = [spec(name=f"t{number}", strategy=strategy) for number in range(tasks)]
    async with Engine(controller, specs, batch_size=2) as engine:
        for _ in range(3):
            began = anyio.current_time()
            batch = await engine.next_batch()
            assert len(batch.groups) == 2
            assert anyio.current_time() - began <= 1.001
