"""A user's prompt source: drawn from off the event loop, only when there is room, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollnest import (
    AllocationRequest,
    AsyncStrategy,
    Engine,
    Group,
    Prompt,
    Rollout,
    SyncStrategy,
)
from rollnest.errors import DataError, EndOfPrompts, EngineBroken, EngineClosed, Stuck
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio


class Listed:
    """A source over a list, synchronous; knows its threads and whether two calls overlapped."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.drawn = 0
        self.threads: set[int] = set()
        self.running = 0
        self.overlaps = 0

    def draw(self) -> Any:
        self.threads.add(threading.get_ident())
        self.overlaps += self.running
        self.running += 1
        try:
            if self.drawn == len(self.items):
                return None
            self.drawn += 1
            return self.items[self.drawn - 1]
        finally:
            self.running -= 1

    def state_dict(self) -> Mapping[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]


class Awaited(Listed):
    """The same, asynchronous."""

    seconds = 0.5

    async def draw(self) -> Any:
        await anyio.sleep(self.seconds)
        return super().draw()


@pytest.mark.parametrize("kind", [Listed, Awaited])
async def test_prompts_come_from_a_source_in_its_order_until_it_ends(kind: type[Listed]) -> None:
    source = kind(prompts(5))
    uids: list[str] = []
    async with Engine(ScriptedController(), spec(prompts=source)) as engine:
        for size, short in ((2, False), (2, False), (1, True)):
            batch = await engine.next_batch(2)
            assert (len(batch), batch.short) == (size, short)
            uids += [group.prompt.uid for group in batch.groups]
        with pytest.raises(EndOfPrompts, match="5 groups delivered"):
            await engine.next_batch(2)
    assert sorted(uids) == ["p0", "p1", "p2", "p3", "p4"]
    assert source.overlaps == 0
    if kind is Listed:
        assert threading.get_ident() not in source.threads  # never on the event loop
    assert_conserved(engine)


async def test_no_more_is_drawn_than_may_start() -> None:
    source = Listed(prompts(40))
    strategy = AsyncStrategy(max_staleness=1, lead=1)
    task = spec(prompts=source, strategy=strategy)
    async with Engine(ScriptedController(), task, batch_size=2) as engine:
        await anyio.sleep(100)
        assert source.drawn == engine.statistics().total("drawn") == 4
        await engine.next_batch()
        await anyio.sleep(100)
        assert source.drawn == engine.statistics().total("drawn") == 6
    async with Engine(ScriptedController(), spec(prompts=Listed([]))) as engine:
        with pytest.raises(EndOfPrompts):
            await engine.next_batch(1)


async def test_strings_and_messages_are_prompts_too() -> None:
    source = Listed(
        ["hello", [{"role": "user", "content": "you"}], Prompt("x", messages=[{"role": "user"}])]
    )

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()

    async with Engine(ScriptedController(), spec(prompts=source, loop=loop)) as engine:
        with pytest.raises(EndOfPrompts, match="3 dropped"):  # there is no tokenizer
            await engine.next_batch(3)
    assert engine.statistics().tasks["task"].dropped == {"data": 3}


async def test_a_prompt_whose_asker_went_is_handed_out_next() -> None:
    """The consumer gives up while the draw runs: the strategy has no room then, and the prompt waits."""
    source = Awaited(prompts(3))
    async with Engine(ScriptedController(), spec(prompts=source)) as engine:
        with anyio.move_on_after(0.2):
            await engine.next_batch(1)
        await anyio.sleep(100)
        figures = engine.statistics().tasks["task"]
        assert (source.drawn, figures.held, figures.drawn) == (1, 1, 0)
        batch = await engine.next_batch(1)
        assert batch.groups[0].prompt.uid == "p0"
        assert engine.statistics().tasks["task"].held == 0
    assert source.drawn == 1


async def test_a_prompt_that_a_thread_draws_while_the_engine_is_left_is_counted() -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(Listed):
        def draw(self) -> Any:
            started.set()
            go_on.wait(30)
            return super().draw()

    source = Slow(prompts(3))
    async with anyio.create_task_group() as group:
        async with Engine(ScriptedController(), spec(prompts=source)) as engine:
            group.start_soon(_until_closed, engine, go_on.set)
            while not started.is_set():
                await anyio.lowlevel.checkpoint()
    figures = engine.statistics().tasks["task"]
    assert (source.drawn, figures.held, figures.drawn) == (1, 1, 0)


async def _until_closed(engine: Engine, then: Callable[[], None] = lambda: None) -> None:
    with pytest.raises(EngineClosed):
        await engine.next_batch(1)
    then()


async def test_rows_that_wait_are_drawn_again_while_the_source_is_slow() -> None:
    source = Awaited(prompts(2))
    controller = ScriptedController(rate=10.0)
    task = spec(prompts=source, strategy=AsyncStrategy(max_staleness=0, lead=0))
    async with Engine(controller, task, batch_size=1) as engine:
        await anyio.sleep(100)
        source.seconds = 1000.0
        await engine.next_batch()
        await anyio.sleep(10)  # it draws the second one
        async with engine.paused() as pause:
            await pause.update_weights({})
        assert engine.statistics().total("waiting") == 0
    assert_conserved(engine, committed=controller.committed)


async def test_stuck_is_found_when_the_source_of_another_task_ends() -> None:
    class Never(SyncStrategy):
        def room(self, production: Any) -> int:
            return 0

    def all_to_last(request: AllocationRequest) -> dict[str, int]:
        return {"last": request.groups}

    tasks = [
        spec(name="other", prompts=Awaited([]), strategy=AsyncStrategy(lead=1)),
        spec(name="last", strategy=Never()),
    ]
    async with Engine(ScriptedController(), tasks, batch_size=1, allocate=all_to_last) as engine:
        with anyio.fail_after(1), pytest.raises(Stuck, match="'last'"):
            await engine.next_batch()


class Curious(Listed):
    """Hears how its prompts went."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items)
        self.heard: list[tuple[str, str]] = []

    def report(self, group: Group) -> None:
        assert not self.running
        self.heard.append((group.prompt.uid, group.status.name))


async def test_a_curriculum_hears_of_every_group_that_has_ended() -> None:
    source = Curious(prompts(4))

    async def judge(sample: Any) -> float:
        if sample.prompt.uid == "p1":
            raise ValueError("unusable")
        return 1.0

    task = spec(prompts=source, judger=judge, keep=lambda group: group.prompt.uid != "p2")
    async with Engine(ScriptedController(rate=10.0), task) as engine:
        assert len(await engine.next_batch(4)) == 2
    assert sorted(source.heard) == [
        ("p0", "COMPLETED"),
        ("p1", "FAILED"),
        ("p2", "FILTERED"),
        ("p3", "COMPLETED"),
    ]


async def test_a_curriculum_is_not_told_of_groups_that_begin_again() -> None:
    source = Curious(prompts(4))
    async with Engine(ScriptedController(rate=1.0), spec(prompts=source)) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await anyio.sleep(0.5)
            group.cancel_scope.cancel()
    assert engine.statistics().total("waiting") == 1
    assert source.heard == []


@pytest.mark.parametrize("kind", [Listed, Awaited])
async def test_a_source_that_raises_breaks_the_engine_with_its_cause(kind: type[Listed]) -> None:
    class Broken(kind):  # type: ignore[misc,valid-type]
        @property
        def items(self) -> Any:
            raise OSError("the disk is gone")

        @items.setter
        def items(self, _: Any) -> None:
            pass

    with pytest.raises(EngineBroken, match=r"source of task 'task', draw\(\): OSError: the disk"):
        async with Engine(ScriptedController(), spec(prompts=Broken([]))) as engine:
            await engine.next_batch(1)
    assert engine.statistics().total("flight") == 0


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ([3], r"draw\(\) must be a Prompt, a string or messages, got 3"),
        ([{"role": "user"}], r"draw\(\) must be a Prompt"),
        ([[]], "needs messages"),
        ([Prompt("p", token_ids=[1]), Prompt("p", token_ids=[2])], "two different prompts"),
    ],
)
async def test_what_is_no_prompt_is_refused_by_name(items: list[Any], match: str) -> None:
    with pytest.raises(EngineBroken, match=match) as caught:
        async with Engine(ScriptedController(), spec(prompts=Listed(items))) as engine:
            await engine.next_batch(2)
    assert isinstance(caught.value.causes[0], DataError)
    assert isinstance(caught.value.causes[0].__cause__, (TypeError, ValueError))


async def test_a_prompt_may_come_again() -> None:
    prompt = prompts(1)[0]
    async with Engine(ScriptedController(), spec(prompts=Listed([prompt, prompt]))) as engine:
        assert len(await engine.next_batch(2)) == 2


async def test_stop_iteration_is_an_error_like_any_other() -> None:
    class Iterated(Listed):
        def draw(self) -> Any:
            return next(iter(()))

    with pytest.raises(EngineBroken, match="StopIteration"):
        async with Engine(ScriptedController(), spec(prompts=Iterated([]))) as engine:
            await engine.next_batch(1)


async def test_a_report_that_raises_breaks_the_engine_with_its_cause() -> None:
    class Deaf(Curious):
        def report(self, group: Group) -> None:
            raise KeyError(group.prompt.uid)

    with pytest.raises(EngineBroken, match=r"report\(\): KeyError: 'p0'"):
        async with Engine(ScriptedController(), spec(prompts=Deaf(prompts(3)))) as engine:
            await engine.next_batch(1)
            await engine.next_batch(1)
    assert_conserved(engine)


async def test_bad_sources_are_refused_at_construction() -> None:
    class Half:
        def draw(self) -> None:
            return None

    class Late(Listed):
        async def report(self, group: Group) -> None:
            pass

    with pytest.raises(TypeError, match=r"prompts must be a PromptSource.*state_dict"):
        spec(prompts=Half())
    with pytest.raises(TypeError, match=r"prompts.report"):
        spec(prompts=Late([]))
    with pytest.raises(ValueError, match="epochs"):
        spec(prompts=Listed([]), epochs=2)
    with pytest.raises(TypeError, match="prompts must be a sequence of prompts or a PromptSource"):
        spec(prompts=3)
    shared = Listed([])
    with pytest.raises(ValueError, match="'b' is the source of task 'a' too"):
        Engine(ScriptedController(), [spec(name=n, prompts=shared) for n in "ab"])
