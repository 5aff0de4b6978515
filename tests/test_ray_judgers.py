"""Judgers in actors: where calls go, what happens if actors die or judgers don't end, and what is left behind."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
import ray
from attrs import evolve

from rollnest import (
    ComposedJudger,
    Engine,
    Limits,
    PauseMode,
    ProcessJudger,
    Prompt,
    Sample,
    Sampling,
    Status,
)
from rollnest.errors import JudgeError
from rollnest.testing import ScriptedController, assert_conserved
from rollnest_adapters.ray import RayCallFailed, RayJudgers, RayOptions, call
from tests.helpers import spec
from tests.ray_actors import HANG, until
from tests.ray_judges import Book, Judge, Stubborn, WholeGroup, parity

pytestmark = [pytest.mark.ray, pytest.mark.anyio, pytest.mark.usefixtures("local_ray")]

LIGHT = RayOptions(num_cpus=0)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


@pytest.fixture(scope="module")
def shelf(local_ray: None) -> Any:
    return Book.remote()


@pytest.fixture
async def book(shelf: Any) -> Any:
    await call(shelf.clear)
    return shelf


def prompts(*what: str) -> list[Prompt]:
    return [
        Prompt(f"p{number}", token_ids=[1 + number, 2], meta={"what": one})
        for number, one in enumerate(what)
    ]


async def judged(judger: Any, *what: str, **options: Any) -> list[Sample]:
    """Runs an engine over prompts that say what the judger is to do; returns the samples that failed or not."""
    task = spec(
        prompts=prompts(*what),
        judger=judger,
        group_size=1,
        shuffle=False,
        epochs=1,
        keep=None,
        **options,
    )
    async with Engine(ScriptedController(), task) as engine:
        result = await engine.evaluate(task)
    return sorted(result.samples, key=lambda sample: sample.prompt.uid)


async def is_marked(book: Any, name: str, times: int) -> bool:
    """Whether judgers have noted that, so often."""
    return bool((await call(book.read))["marks"].get(name, 0) == times)


async def test_a_function_judges_in_an_actor_which_ends_with_the_block() -> None:
    with anyio.fail_after(HANG):
        async with RayJudgers(parity, 1, options=LIGHT) as judgers:
            (sample,) = await judged(judgers, "well")
            assert sample.verdict is not None
            assert sample.verdict.score == parity(sample)
            locked = Prompt("p", token_ids=[1], meta={"lock": threading.Lock()})
            with pytest.raises(JudgeError, match=r"but prompt\.meta\.'lock' is not"):
                await judgers.judge(evolve(sample, prompt=locked))
            assert await judgers.judge(sample) == parity(sample)
            with pytest.raises(RuntimeError, match="open already"):
                await judgers.__aenter__()
            (handle,) = judgers.handles
        with pytest.raises(RayCallFailed) as caught:
            await call(handle.ready)
        assert caught.value.actor_gone
        with pytest.raises(JudgeError, match="not open"):
            await judgers.judge(sample)


async def test_a_judger_of_groups_judges_in_actors() -> None:
    with anyio.fail_after(HANG):
        async with RayJudgers(WholeGroup(), 1, options=LIGHT) as judgers:
            async with Engine(ScriptedController(), spec(judger=judgers)) as engine:
                batch = await engine.next_batch(2)
        for group in batch.groups:
            assert [s.verdict.score for s in group.samples if s.verdict] == [0.0, 1.0]


async def test_bug_093_calls_go_to_the_least_loaded_and_ties_go_round(book: Any) -> None:
    with anyio.fail_after(HANG):
        async with RayJudgers(Judge(book), 3, options=LIGHT) as judgers:
            samples = await judged(judgers, *["well"] * 9)
            assert [sample.status for sample in samples] == [Status.COMPLETED] * 9
            read = await call(book.read)
            assert sum(read["pids"].values()) == 9
            assert read["most"] <= 3
            # One after the other they are all idle each time, so each actor gets its share.
            await call(book.clear)
            for sample in samples:
                await judgers.judge(sample)
            assert sorted((await call(book.read))["pids"].values()) == [3, 3, 3]
            # All at once no actor gets more than it runs.
            await call(book.clear)
            async with anyio.create_task_group() as tasks:
                for sample in samples:
                    tasks.start_soon(judgers.judge, sample)
                await anyio.lowlevel.checkpoint()
                assert max(judgers.loads) <= 1
            read = await call(book.read)
            assert (read["marks"]["well"], judgers.loads) == (9, (0, 0, 0))
            assert read["most"] <= 3


async def test_bug_089_what_an_actor_that_died_was_asked_is_asked_again_and_not_for_ever(
    book: Any,
) -> None:
    with anyio.fail_after(HANG):
        async with RayJudgers(Judge(book), 2, options=LIGHT, retries=1) as judgers:
            once, always, well, wrong = await judged(
                judgers, "crash once", "crash", "well", "raise"
            )
            assert once.status is well.status is Status.COMPLETED
            assert always.status is wrong.status is Status.FAILED
            assert "gave no verdict, asked 2 times" in str(always.failure)
            assert "no such answer" in str(wrong.failure)
            assert judgers.replaced == 3
            assert judgers.loads == (0, 0)


async def test_bug_072_an_actor_that_died_is_replaced_once_however_many_calls_it_had(
    book: Any,
) -> None:
    """What comes late from the one before changes nothing about its replacement."""
    with anyio.fail_after(HANG):
        async with RayJudgers(Judge(book), 1, concurrency=4, options=LIGHT) as judgers:
            (sample,) = await judged(judgers, "well")
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(judgers.judge, evolve(sample, prompt=prompts("hang")[0]))

                async def hang(number: int) -> None:
                    await until(lambda: is_marked(book, "hangs", number))

                await hang(3)
                await judgers.judge(evolve(sample, prompt=prompts("crash once")[0]))
                await hang(6)
                assert (judgers.replaced, judgers.loads) == (1, (3,))
                tasks.cancel_scope.cancel()


async def test_a_judger_that_can_not_be_stopped_is_killed_at_its_limit(book: Any) -> None:
    with anyio.fail_after(HANG):
        async with RayJudgers(Stubborn(book), 2, options=LIGHT, grace=0.05) as judgers:
            samples = await judged(judgers, "hang", "well", limits=Limits(judge=2.0))
            assert [s.status for s in samples] == [Status.FAILED, Status.COMPLETED]
            assert "took over 2.0 s" in str(samples[0].failure)
            assert judgers.replaced == 1


async def test_whoever_leaves_takes_the_judgers_calls_along(book: Any) -> None:
    """A call, a group that is evicted, an engine: nothing of them runs in the actor afterwards."""
    with anyio.fail_after(HANG):
        async with RayJudgers(Judge(book), 1, concurrency=4, options=LIGHT) as judgers:
            (sample,) = await judged(judgers, "well")

            async def hang(number: int) -> None:
                await until(lambda: is_marked(book, "hangs", number))

            async def nothing_runs() -> bool:
                return bool(await call(judgers.handles[0].ready) == 0)

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(judgers.judge, evolve(sample, prompt=prompts("hang")[0]))
                await hang(3)
                tasks.cancel_scope.cancel()
            assert await nothing_runs()

            task = spec(prompts=prompts(*["hang"] * 8), judger=judgers, sampling=Sampling(4))
            async with (
                Engine(ScriptedController(), task) as engine,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(engine.next_batch, 2)
                await hang(7)
                async with engine.paused(mode=PauseMode.EVICT, grace=0.01):
                    assert await nothing_runs()
                await hang(11)
                tasks.cancel_scope.cancel()
            assert await nothing_runs()
            assert (judgers.replaced, judgers.loads) == (0, (0,))
        assert_conserved(engine)


async def test_what_can_not_be_used_is_named_when_it_is_given() -> None:
    lock = threading.Lock()

    def with_lock(sample: Sample) -> float:
        return float(lock.locked())

    class Asks:
        uses_policy = True

        async def judge(self, sample: Sample) -> float:
            return 1.0

    for judger, why in (
        (with_lock, r"judger must be picklable.* but lock is not"),
        (Asks(), "asks the policy that is trained"),
        (ComposedJudger({"one": parity}), "must be no composite"),
        (ProcessJudger(parity), "has processes of its own"),
        (3, "must be a function of a sample"),
    ):
        with pytest.raises(TypeError, match=why):
            RayJudgers(judger, 2)  # type: ignore[arg-type]
    for options, why in (
        ({"actors": 0}, "actors must be >= 1, got 0"),
        ({"concurrency": 0}, "concurrency must be >= 1"),
        ({"retries": -1}, "retries must be >= 0"),
        ({"grace": 0}, "grace must be > 0"),
    ):
        with pytest.raises(ValueError, match=why):
            RayJudgers(parity, **({"actors": 1} | options))  # type: ignore[arg-type]


async def test_judgers_that_were_not_entered_say_so() -> None:
    judgers = RayJudgers(parity, 1)
    with pytest.raises(JudgeError, match="not open: enter it before the engine"):
        await judgers.batch_judge([])


async def test_actors_without_a_place_are_not_waited_for_for_ever() -> None:
    nowhere = RayOptions(num_gpus=64)
    with anyio.fail_after(HANG):
        with pytest.raises(JudgeError, match=r"not there within 0\.1 s"):
            async with RayJudgers(parity, 1, options=nowhere, start_timeout=0.1):
                pass


async def test_without_ray_no_judgers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"call ray\.init\(\) first"):
        async with RayJudgers(parity, 1):
            pass
