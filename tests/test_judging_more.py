"""Judgers of whole groups, judgers made of others, and loops that judge or score themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from anyio import create_task_group, current_time, sleep
from anyio.lowlevel import checkpoint
from attrs import evolve

from rollnest import (
    AsyncStrategy,
    Batch,
    Capacity,
    ComposedJudger,
    Engine,
    Limits,
    Prompt,
    Rollout,
    RoutedJudger,
    Sample,
    Status,
    SyncStrategy,
    TaskSpec,
    Verdict,
)
from rollnest.abc import Attempt
from rollnest.errors import JudgeError, LoopError, Starved, ToolError
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
    virtual_backends,
)

from .helpers import cancelled_at_every_step, each_way, one_batch, prompts, score_one, spec

pytestmark = pytest.mark.anyio


class Ranking:
    """A preference reward: members ranked by length. Counts its calls."""

    def __init__(self, *, answer: Callable[[Sequence[Sample]], Any] | None = None) -> None:
        self.calls: list[list[int]] = []
        self._answer = answer or self._rank

    async def batch_judge(self, samples: Sequence[Sample]) -> Any:
        self.calls.append([sample.index for sample in samples])
        await checkpoint()
        return self._answer(samples)

    def _rank(self, samples: Sequence[Sample]) -> list[float]:
        lengths = [len(sample.segments[0]) for sample in samples]
        return [float(sorted(lengths).index(length)) for length in lengths]


class RankingInThread:
    def __init__(self) -> None:
        self.threads: set[int] = set()

    def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        self.threads.add(threading.get_ident())
        return [float(sample.index) for sample in samples]


class BothWays:
    """Has both methods; which one is asked is up to its attribute."""

    def judge(self, sample: Sample) -> float:
        return 1.0

    def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        return [2.0 for _ in samples]


class BothWaysByGroup(BothWays):
    judges_groups = True


LENGTHS = [3, 1, 2]


async def of_lengths(rollout: Rollout) -> None:
    """A loop whose samples have these lengths."""
    await rollout.generate(max_tokens=LENGTHS[rollout.index])


def endless(attempt: Attempt) -> Reply:
    return Reply([5] * 100)


async def failed_by(judger: Any, **options: Any) -> list[Sample]:
    """Runs a task until it starves at its first group, and returns that group's members."""
    recording = RecordingInstrument()
    task = spec(judger=judger, starve_after=1, **({"group_size": 3} | options))
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
    ((group, outcome),) = recording.groups
    assert outcome == "judge"
    for sample in group.samples:
        check_sample(sample)
    return list(group.samples)


def message_of(sample: Sample) -> str:
    assert sample.failure is not None
    assert sample.failure.kind == "judge"
    return sample.failure.message


# Judging whole groups


async def test_bug_050_a_group_is_judged_in_one_call_in_member_order() -> None:
    judger = Ranking()
    recording = RecordingInstrument()
    batch, _ = await one_batch(
        ScriptedController(endless),
        spec(judger=judger, loop=of_lengths, group_size=3),
        instruments=[recording],
    )
    assert batch.groups[0].rewards == (2.0, 0.0, 1.0)
    assert judger.calls == [[0, 1, 2]]
    assert [s.reward for s in recording.samples] == [2.0, 0.0, 1.0]  # told once, when judged


async def test_a_sync_batch_judger_runs_in_a_thread() -> None:
    judger = RankingInThread()
    batch, _ = await one_batch(ScriptedController(), spec(judger=judger, group_size=3))
    assert batch.groups[0].rewards == (0.0, 1.0, 2.0)
    assert threading.get_ident() not in judger.threads


async def test_a_judger_with_both_methods_judges_samples_unless_it_says_otherwise() -> None:
    for judger, reward in ((BothWays(), 1.0), (BothWaysByGroup(), 2.0)):
        batch, _ = await one_batch(ScriptedController(), spec(judger=judger))
        assert {s.reward for s in batch.samples} == {reward}


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("judges_groups", True, "has no batch_judge"),
        ("judges_groups", "yes", "judges_groups of judger must be True or False, got 'yes'"),
        ("uses_policy", 1, "uses_policy of judger must be True or False, got 1"),
    ],
)
def test_what_a_judger_says_of_itself_is_checked(flag: str, value: Any, message: str) -> None:
    def judge(sample: Sample) -> float:
        return 1.0

    setattr(judge, flag, value)
    with pytest.raises(TypeError, match=message):
        spec(judger=judge)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "answers",
    [(1.0,) * 3, [Verdict(1.0)] * 3, np.ones(3), [{"score": 1}] * 3],
    ids=["tuple", "verdicts", "numpy", "mappings"],
)
async def test_what_a_batch_judger_may_answer(answers: Any, size: int) -> None:
    judger = Ranking(answer=lambda samples: answers[: len(samples)])
    batch, _ = await one_batch(ScriptedController(), spec(judger=judger, group_size=size))
    assert batch.groups[0].rewards == (1.0,) * size


REFUSED: list[tuple[Any, str]] = [
    ([1, 0], "batch_judge gave 2 answers for 3 samples"),
    ([1, 0, 1, 1], "batch_judge gave 4 answers for 3 samples"),
    ([1, None, 1], "answer 1 of batch_judge: the judger answered None"),
    ([1, 0, float("nan")], "answer 2 of batch_judge: .* must be finite"),
    (None, "must answer with a sequence, got None"),
    ("111", "must answer with a sequence, got '111'"),
    ({0: 1, 1: 1, 2: 1}, "must answer with a sequence"),
    ({1, 2, 3}, "must answer with a sequence"),
    ((x for x in (1, 2, 3)), "must answer with a sequence"),
]


@pytest.mark.parametrize(("answers", "message"), REFUSED)
async def test_bug_047_a_wrong_answer_about_a_group_fails_every_member(
    answers: Any, message: str
) -> None:
    samples = await failed_by(Ranking(answer=lambda samples: answers))
    assert [s.status for s in samples] == [Status.FAILED] * 3
    for sample in samples:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(message_of(sample))


async def test_a_batch_judger_that_raises_fails_every_member() -> None:
    def broken(samples: Sequence[Sample]) -> Any:
        raise ZeroDivisionError("by zero")

    samples = await failed_by(Ranking(answer=broken))
    assert {s.status for s in samples} == {Status.FAILED}
    assert all("ZeroDivisionError: by zero" in message_of(s) for s in samples)
    assert samples[0].failure is not None
    assert "in broken" in samples[0].failure.traceback


async def test_a_batch_judger_has_one_limit_for_its_call() -> None:
    class Slow:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            await sleep(100)
            return [1.0] * len(samples)

    samples = await failed_by(Slow(), limits=Limits(judge=2.0))
    assert all("the judger took over 2.0 s" in message_of(s) for s in samples)


async def test_a_batch_judger_takes_one_slot_for_each_call() -> None:
    now = most = 0

    class Counting:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await sleep(1)
            now -= 1
            return [1.0] * len(samples)

    task = spec(judger=Counting(), group_size=4)
    await one_batch(ScriptedController(), task, 6, capacity=Capacity(judges=2))
    assert most == 2


async def test_a_group_with_a_failed_member_is_not_judged_and_no_member_stays_completed() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if (rollout.prompt.uid, rollout.index) == ("p0", 1):
            rollout.fail("broken")

    judger = Ranking()
    recording = RecordingInstrument()
    controller = ScriptedController()
    task = spec(judger=judger, loop=loop, group_size=3, shuffle=False)
    batch, engine = await one_batch(controller, task, instruments=[recording])
    assert batch.groups[0].prompt.uid == "p1"
    assert judger.calls == [[0, 1, 2]]
    dropped = recording.groups[0][0]
    # I11: completed means judged.
    assert [s.status for s in dropped.samples] == [Status.ABORTED, Status.FAILED, Status.ABORTED]
    assert all(s.verdict is None for s in dropped.samples)
    assert_conserved(engine, committed=controller.committed)


async def test_a_group_that_is_cut_while_it_is_judged_is_drawn_again() -> None:
    class Endless:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            await sleep(1000)
            return [1.0] * len(samples)

    recording = RecordingInstrument()
    controller = ScriptedController()
    task = spec(judger=Endless(), limits=Limits(judge=None))
    async with Engine(controller, task, instruments=[recording]) as engine:
        async with create_task_group() as group:
            group.start_soon(engine.next_batch, 1)
            await sleep(5)
            group.cancel_scope.cancel()
    ((left, outcome),) = recording.groups
    assert outcome == "waiting"
    assert {(s.status, s.verdict) for s in left.samples} == {(Status.ABORTED, None)}
    assert_conserved(engine, committed=controller.committed)


# trio has no cancellation that anybody could raise.
@pytest.mark.parametrize("anyio_backend", [virtual_backends()[0]()], ids=["asyncio"])
async def test_a_batch_judger_that_cancels_itself_fails_its_group(anyio_backend: object) -> None:
    class Quitter:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            raise asyncio.CancelledError

    recording = RecordingInstrument()
    task = spec(judger=Quitter(), starve_after=1)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        with pytest.raises(Starved, match="the judger cancelled itself"):
            await engine.next_batch(1)
    assert {s.status for s in recording.groups[0][0].samples} == {Status.FAILED}


def mixed_group() -> tuple[ScriptedController, dict[str, Any]]:
    """A controller and options: of the only group, the first member becomes too old, the second stays fresh."""

    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=rollout.index + 2)

    def script(attempt: Attempt) -> Reply:
        quick = attempt.max_tokens == 2
        return Reply([5, 6] if quick else [6, 0], delay=0.0 if quick else 100.0)

    strategy = AsyncStrategy(max_staleness=1, lead=0)
    return ScriptedController(script), {"prompts": prompts(1), "loop": loop, "strategy": strategy}


async def run_mixed_group(controller: ScriptedController, task: TaskSpec) -> Batch:
    recording = RecordingInstrument()
    async with Engine(controller, task, batch_size=1, instruments=[recording]) as engine:
        await sleep(5)
        for _ in range(2):
            async with engine.paused() as pause:
                await pause.update_weights({})
            await sleep(1)
        batch = await engine.next_batch()
    assert [s.index for s in recording.samples] == [0, 1, 0]  # the kept one ended only once
    assert_conserved(engine, committed=controller.committed)
    return batch


async def test_the_kept_members_of_an_expired_group_are_judged_again_with_their_siblings() -> None:
    seen: list[list[int | None]] = []

    class Ages:
        async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
            seen.append([sample.oldest_version for sample in samples])
            return [float(len(seen))] * len(samples)

    scored: list[int] = []

    async def score(sample: Sample) -> float:
        scored.append(sample.index)
        return 1.0

    controller, options = mixed_group()
    judger = ComposedJudger({"own": score, "ages": Ages()})
    batch = await run_mixed_group(controller, spec(judger=judger, **options))
    assert seen == [[0, 2], [2, 2]]
    assert batch.groups[0].rewards == (3.0, 3.0)  # both of the second call
    assert scored == [0, 1, 0, 1]


# Judgers made of others


def half(sample: Sample) -> float:
    return 0.5


async def two(sample: Sample) -> Verdict:
    await checkpoint()
    return Verdict(2.0, parts={"inner": 7.0}, details={"why": "two"})


async def test_a_composed_judger_weighs_its_parts_and_names_them() -> None:
    judger = ComposedJudger({"half": half, "two": two}, weights={"half": 4.0, "two": -0.5})
    batch, _ = await one_batch(ScriptedController(), spec(judger=judger, group_size=1))
    (sample,) = batch.samples
    assert sample.verdict == Verdict(
        1.0,
        parts={"half": 0.5, "two": 2.0, "two.inner": 7.0},
        details={"two": {"why": "two"}},
    )


async def test_composites_nest() -> None:
    inner = ComposedJudger({"a": half, "b": two})
    judger = ComposedJudger({"x": RoutedJudger({"maths": inner}, default=score_one), "y": half})
    for source, parts in (
        ("maths", {"x": 2.5, "x.a": 0.5, "x.b": 2.0, "x.b.inner": 7.0, "y": 0.5}),
        (None, {"x": 1.0, "y": 0.5}),
    ):
        prompt = Prompt("p", token_ids=[1], data_source=source)
        batch, _ = await one_batch(ScriptedController(), spec(prompts=[prompt], judger=judger))
        for sample in batch.samples:
            assert sample.verdict is not None
            assert dict(sample.verdict.parts) == parts
            assert sample.reward == parts["x"] + parts["y"]


async def test_weights_of_a_composed_judger_are_one_unless_given() -> None:
    batch, _ = await one_batch(
        ScriptedController(), spec(judger=ComposedJudger({"a": half, "b": half}))
    )
    assert {s.reward for s in batch.samples} == {1.0}


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_a_failing_part_fails_the_sample_is_named_and_spares_the_rest(sync: bool) -> None:
    async def broken(sample: Sample) -> float:
        raise ZeroDivisionError("by zero")

    def broken_in_thread(sample: Sample) -> float:
        raise ZeroDivisionError("by zero")

    asked: list[int] = []

    async def later(sample: Sample) -> float:
        asked.append(sample.index)
        return 1.0

    inner = ComposedJudger({"bad": broken_in_thread if sync else broken})
    samples = await failed_by(ComposedJudger({"good": half, "inner": inner, "later": later}))
    for sample in samples:
        assert message_of(sample) == (
            "JudgeError: part 'inner.bad': the judger raised ZeroDivisionError: by zero"
        )
        assert sample.failure is not None
        assert "in broken" in sample.failure.traceback
    assert asked == []


async def test_a_part_that_is_late_or_answers_nonsense_is_named() -> None:
    async def slow(sample: Sample) -> float:
        await sleep(100)
        return 1.0

    async def silent(sample: Sample) -> Any:
        return None

    (late, *_) = await failed_by(ComposedJudger({"slow": slow}), limits=Limits(judge=2.0))
    assert message_of(late) == "JudgeError: part 'slow': the judger took over 2.0 s"
    (none, *_) = await failed_by(ComposedJudger({"silent": silent}))
    assert "part 'silent': the judger answered None" in message_of(none)


async def test_each_part_has_the_limit_for_itself() -> None:
    async def slow(sample: Sample) -> float:
        await sleep(8)
        return 1.0

    judger = ComposedJudger({str(i): slow for i in range(3)})
    task = spec(judger=judger, limits=Limits(judge=10.0))
    async with Engine(ScriptedController(), task) as engine:
        await engine.next_batch(1)
        assert current_time() == 24.0


async def test_sync_parts_run_in_threads_and_hold_one_slot_at_a_time() -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def judge(sample: Sample) -> float:
        begun.release()
        assert release.wait(20), "the loop stood still"
        return 1.0

    task = spec(judger=ComposedJudger({"a": judge, "b": judge}), group_size=4)
    engine = Engine(ScriptedController(), task, capacity=Capacity(judges=4))
    async with engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        for _ in range(4):  # all four are blocked, and the loop still turns
            while not begun.acquire(blocking=False):
                await checkpoint()
        assert not begun.acquire(blocking=False)
        release.set()
    assert engine.statistics().total("delivered") == 1


async def test_a_group_part_beside_others_is_asked_once_when_all_have_completed() -> None:
    ranking = Ranking()
    begun: list[int] = []

    async def own(sample: Sample) -> float:
        begun.append(sample.index)
        await sleep(1)
        return 10.0

    judger = ComposedJudger({"rank": ranking, "own": own})
    task = spec(judger=judger, loop=of_lengths, group_size=3)
    async with Engine(ScriptedController(endless), task) as engine:
        batch = await engine.next_batch(1)
        assert current_time() == 1.0  # what concerns a member alone is asked side by side
    assert batch.groups[0].rewards == (12.0, 10.0, 11.0)
    assert ranking.calls == [[0, 1, 2]]
    assert sorted(begun) == [0, 1, 2]


async def test_a_failing_group_part_is_named() -> None:
    samples = await failed_by(ComposedJudger({"own": half, "rank": Ranking(answer=lambda s: [])}))
    assert all(
        message_of(s) == "JudgeError: part 'rank': batch_judge gave 0 answers for 3 samples"
        for s in samples
    )


def sourced(*sources: str | None) -> list[Prompt]:
    return [
        Prompt(f"p{i}", token_ids=[1 + i], data_source=source) for i, source in enumerate(sources)
    ]


async def routed(judger: Any, *sources: str | None) -> dict[str | None, list[float | None]]:
    task = spec(prompts=sourced(*sources), judger=judger, shuffle=False)
    batch, _ = await one_batch(ScriptedController(), task, len(sources))
    return {g.prompt.data_source: list(g.rewards) for g in batch.groups}


def always(score: float) -> Callable[[Sample], float]:
    return lambda sample: score


async def test_a_routed_judger_goes_by_the_prompts_data_source() -> None:
    judger = RoutedJudger(
        {"code/*": always(1), "code/easy": always(2), "*": Ranking(answer=lambda s: [3] * len(s))}
    )
    assert await routed(judger, "code/hard", "code/easy", "maths") == {
        "code/hard": [1.0] * 2,
        "code/easy": [2.0] * 2,  # the exact name goes first
        "maths": [3.0] * 2,  # this one's groups are judged as groups
    }


async def test_a_routed_judgers_default_is_for_unknown_and_missing_sources() -> None:
    judger = RoutedJudger({"maths": always(1)}, default=always(2))
    assert await routed(judger, "maths", "code", None) == {
        "maths": [1.0] * 2,
        "code": [2.0] * 2,
        None: [2.0] * 2,
    }


async def test_a_source_is_a_name_before_it_is_a_pattern() -> None:
    assert await routed(RoutedJudger({"set[1]": always(1)}), "set[1]") == {"set[1]": [1.0] * 2}


async def test_merge_makes_one_verdict_of_all_that_fit() -> None:
    seen: list[list[str]] = []

    def merge(sample: Sample, verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
        seen.append(list(verdicts))
        return {"score": max(v.score for v in verdicts.values()), "of": len(verdicts)}

    judger = RoutedJudger({"maths": always(1), "*": always(3)}, merge=merge, default=always(9))
    assert await routed(judger, "maths", "code", None) == {
        "maths": [3.0] * 2,
        "code": [3.0] * 2,
        None: [9.0] * 2,  # the default's verdict is not merged
    }
    assert sorted(seen) == [["*"]] * 2 + [["maths", "*"]] * 2


@pytest.mark.parametrize("source", ["code", None])
async def test_an_unknown_source_fails_and_names_the_known_ones(source: str | None) -> None:
    judger = RoutedJudger({"maths": half, "logic": half})
    for judge in (judger, ComposedJudger({"routed": judger})):
        samples = await failed_by(judge, prompts=sourced(source))
        for sample in samples:
            assert f"prompt 'p0' has the data_source {source!r}" in message_of(sample)
            assert "known: 'maths', 'logic'" in message_of(sample)


async def test_a_merge_that_raises_fails_the_sample() -> None:
    def merge(sample: Sample, verdicts: Mapping[str, Verdict]) -> float:
        raise ZeroDivisionError("by zero")

    (sample, *_) = await failed_by(
        RoutedJudger({"maths": half}, merge=merge), prompts=sourced("maths")
    )
    assert "ZeroDivisionError: by zero" in message_of(sample)


@pytest.mark.parametrize("selected", [{}, None, {"a": 3}, 5])
async def test_a_composite_of_ones_own_that_selects_nonsense_fails_its_samples(
    selected: Any,
) -> None:
    class Odd:
        def select(self, prompt: Prompt) -> Any:
            return selected

        def combine(self, sample: Sample, verdicts: Mapping[str, Verdict]) -> float:
            return 1.0

    for sample in await failed_by(Odd()):
        assert sample.status is Status.FAILED
        assert message_of(sample)


async def test_a_composite_of_ones_own() -> None:
    class Best:
        def select(self, prompt: Prompt) -> dict[str, Any]:
            return {name: always(float(name)) for name in prompt.meta["judges"]}

        def combine(self, sample: Sample, verdicts: Mapping[str, Verdict]) -> float:
            return max(v.score for v in verdicts.values())

    prompt = Prompt("p", token_ids=[1], meta={"judges": ["1", "3", "2"]})
    batch, _ = await one_batch(ScriptedController(), spec(prompts=[prompt], judger=Best()))
    assert batch.groups[0].rewards == (3.0, 3.0)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ComposedJudger({}), ValueError, "judgers must not be empty"),
    (lambda: ComposedJudger([half]), TypeError, "judgers must map names to judgers"),  # type: ignore[arg-type]
    (lambda: ComposedJudger({"a": 3}), TypeError, r"judgers\['a'\] must be a Judger"),  # type: ignore[dict-item]
    (lambda: ComposedJudger({"": half}), ValueError, "a name in judgers must not be empty"),
    (lambda: ComposedJudger({"a": half}, weights={"b": 1}), ValueError, "weights must name each"),
    (lambda: ComposedJudger({"a": half}, weights={}), ValueError, "weights must name each"),
    (lambda: ComposedJudger({"a": half}, weights={"a": float("nan")}), ValueError, "weights"),
    (lambda: ComposedJudger({"a": half}, weights=[1]), TypeError, "weights must map"),  # type: ignore[arg-type]
    (lambda: RoutedJudger({}), ValueError, "judgers must not be empty"),
    (lambda: RoutedJudger({"a": None}), TypeError, r"judgers\['a'\]"),  # type: ignore[dict-item]
    (lambda: RoutedJudger({"a": half}, default=3), TypeError, "default must be a Judger"),  # type: ignore[arg-type]
    (lambda: RoutedJudger({"a": half}, merge=3), TypeError, "merge must be a plain function"),  # type: ignore[arg-type]
    (lambda: RoutedJudger({"a": half}, merge=two), TypeError, "merge must be a plain function"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_composites_are_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


# Loops that judge or score themselves


class Counting:
    """Scores by what has been generated, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Sample] = []

    async def judge(self, sample: Sample) -> float:
        self.seen.append(sample)
        await checkpoint()
        return float(sample.policy_tokens)


async def run_loop(
    loop: Callable[[Rollout], Any], judger: Any, **options: Any
) -> tuple[Sample, ScriptedController]:
    """Runs one sample of three-token turns."""
    controller = ScriptedController(lambda _: Reply([5, 6, 0]))
    recording = RecordingInstrument()
    task = spec(loop=loop, judger=judger, group_size=1, starve_after=1, **options)
    async with Engine(controller, task, instruments=[recording]) as engine:
        try:
            await engine.next_batch(1)
        except Starved:
            pass
    assert_conserved(engine, committed=controller.committed)
    sample = recording.samples[0]
    check_sample(sample)
    return sample, controller


async def test_a_loop_judges_once_and_is_not_judged_again() -> None:
    verdicts: list[Verdict] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        verdicts.append(await rollout.judge())
        verdicts.append(await rollout.judge())
        rollout.append([9])  # no turn: the verdict holds

    judger = Counting()
    sample, _ = await run_loop(loop, judger)
    assert len(judger.seen) == 1
    assert verdicts == [Verdict(3.0)] * 2
    assert sample.verdict is verdicts[0]


async def test_a_verdict_holds_until_another_turn() -> None:
    verdicts: list[Verdict] = []

    async def loop(rollout: Rollout) -> None:
        for _ in range(2):
            await rollout.generate()
            verdicts.append(await rollout.judge())
        await rollout.generate()

    judger = Counting()
    sample, _ = await run_loop(loop, judger)
    assert [v.score for v in verdicts] == [3.0, 6.0]
    assert sample.reward == 9.0
    assert [len(s.turns) for s in judger.seen] == [1, 2, 3]


async def test_what_a_judger_sees_in_a_loop_is_frozen_and_the_response_is_not() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([8, 9])
        await rollout.judge()
        await rollout.generate()

    judger = Counting()
    sample, controller = await run_loop(loop, judger)
    early, late = judger.seen
    check_sample(early)
    assert early.status is Status.COMPLETED
    assert early.verdict is None
    assert early.finish_reason == "stop"
    assert early.segments[0].ids.tolist() == [5, 6, 0, 8, 9]
    assert early.turns[0].ids.tolist() == [5, 6, 0]
    assert late.segments[0].ids.tolist() == [5, 6, 0, 8, 9, 5, 6, 0]
    assert evolve(late, verdict=sample.verdict).verdict == sample.verdict
    assert list(controller.prompts[1])[-5:] == [5, 6, 0, 8, 9]


async def test_a_turn_that_is_running_is_not_judged_yet() -> None:
    def script(attempt: Attempt) -> Reply:
        return Reply([5] * 4, delay=0.0 if len(attempt.prompt_ids) < 4 else 10.0)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        async with create_task_group() as group:
            group.start_soon(rollout.generate)
            await sleep(6)
            assert len(rollout.response) == 6  # a pause brought half of the second turn
            await rollout.judge()

    judger = Counting()
    controller = ScriptedController(script)
    task = spec(loop=loop, judger=judger, group_size=1, strategy=SyncStrategy(max_staleness=1))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(5)
        async with engine.paused():
            pass
    assert [s.policy_tokens for s in judger.seen] == [4, 10]
    for sample in judger.seen:
        check_sample(sample)
    assert_conserved(engine, committed=controller.committed)


async def test_a_loop_scores_itself_and_the_judger_is_not_asked() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.score(0.5)
        rollout.score(np.float32(0.25), right=True, value=np.int64(2))  # type: ignore[arg-type]
        assert (await rollout.judge()).score == 0.25
        await rollout.generate()

    judger = Counting()
    sample, _ = await run_loop(loop, judger)
    assert sample.verdict == Verdict(0.25, parts={"right": 1.0, "value": 2.0})
    assert judger.seen == []


async def test_a_loop_corrects_the_judger() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        verdict = await rollout.judge()
        rollout.score(verdict.score - 1)

    judger = Counting()
    sample, _ = await run_loop(loop, judger)
    assert sample.reward == 2.0
    assert len(judger.seen) == 1


async def test_a_loop_scores_without_any_judger() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.score(0.5)

    sample, _ = await run_loop(loop, None)
    assert sample.reward == 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
async def test_a_score_that_is_none_fails_the_sample(value: Any) -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.score(value)

    sample, _ = await run_loop(loop, score_one)
    assert (sample.status, sample.verdict) == (Status.FAILED, None)
    assert "score() got" in message_of(sample)


async def test_what_fails_carries_no_verdict_although_it_was_judged() -> None:
    async def fails(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.judge()
        rollout.fail("broken")

    async def raises(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.score(1.0)
        raise ToolError("lost")

    async def empty(rollout: Rollout) -> None:
        rollout.score(1.0)

    for loop in (fails, raises, empty):
        sample, _ = await run_loop(loop, score_one)
        assert (sample.status, sample.verdict) == (Status.FAILED, None)


async def test_a_loop_hears_what_is_wrong_with_the_judger() -> None:
    answers: list[Any] = [None, 1.0]
    heard: list[str] = []

    async def judge(sample: Sample) -> Any:
        return answers.pop(0)

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        try:
            await rollout.judge()
        except JudgeError as error:
            heard.append(str(error))

    sample, _ = await run_loop(loop, judge)
    assert heard == ["the judger answered None, which is no score"]
    assert sample.reward == 1.0  # nothing was recorded, so it was asked again


async def test_a_judger_that_fails_in_a_loop_fails_its_sample() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.judge()

    async def judge(sample: Sample) -> float:
        await sleep(100)
        return 1.0

    sample, _ = await run_loop(loop, judge, limits=Limits(judge=2.0))
    assert message_of(sample) == "JudgeError: the judger took over 2.0 s"


async def test_a_loop_may_not_judge_what_is_not_its_to_judge() -> None:
    said: list[str] = []

    async def nothing_yet(rollout: Rollout) -> None:
        await rollout.judge()

    async def judges(rollout: Rollout) -> None:
        await rollout.generate()
        await rollout.judge()

    async def scores(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.score(1.0)

    async def fails_first(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.fail("broken")
        with pytest.raises(LoopError, match="which was failed"):
            await rollout.judge()

    for loop, judger in (
        (nothing_yet, score_one),
        (judges, None),
        (judges, Ranking()),
        (scores, Ranking()),
        (fails_first, score_one),
    ):
        sample, _ = await run_loop(loop, judger)
        assert sample.failure is not None
        assert sample.failure.kind == "loop"
        said.append(sample.failure.message.removeprefix("LoopError: "))
    assert said == [
        "judge() before anything was generated",
        "judge() on a task without a judger",
        "judge() on a task whose judger judges whole groups",
        "score() on a task whose judger judges whole groups",
        "broken",
    ]


async def test_a_rollout_that_was_made_a_sample_is_not_judged_any_more() -> None:
    kept: list[Rollout] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        kept.append(rollout)

    await run_loop(loop, score_one)
    with pytest.raises(LoopError, match="whose sample was made"):
        kept[0].score(1.0)
    with pytest.raises(LoopError, match="whose sample was made"):
        await kept[0].judge()


# Judgers that use the policy


def asks_policy(times: list[float], seconds: float = 0.0) -> Any:
    async def judge(sample: Sample) -> float:
        times.append(current_time())
        await sleep(seconds)
        return 1.0

    judge.uses_policy = True  # type: ignore[attr-defined]
    return judge


async def test_a_judger_that_uses_the_policy_waits_at_the_gate_without_a_slot() -> None:
    times: list[float] = []
    others: list[float] = []

    async def other(sample: Sample) -> float:
        others.append(current_time())
        return 1.0

    tasks = [
        spec(name="policy", judger=asks_policy(times), group_size=1, loop=slowly(1)),
        spec(name="other", judger=other, group_size=1, loop=slowly(2)),
    ]
    engine = Engine(ScriptedController(), tasks, capacity=Capacity(judges=1))
    async with engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 2)
        await sleep(0.5)
        async with engine.paused():
            await sleep(10)
            assert (times, others) == ([], [2.0])
    assert times == [10.5]
    assert engine.statistics().total("delivered") == 2


def slowly(seconds: float) -> Callable[[Rollout], Any]:
    """A loop that goes on for a while after its turn, as a pause finds it."""

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        await sleep(seconds)

    return loop


async def test_it_looks_at_the_gate_again_when_it_has_its_slot() -> None:
    times: list[float] = []
    task = spec(judger=asks_policy(times, seconds=1.0))
    engine = Engine(ScriptedController(), task, capacity=Capacity(judges=1))
    async with engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(0.5)
        assert times == [0.0]  # the second one waits for the slot
        async with engine.paused():
            await sleep(10)
            assert times == [0.0]
    assert times == [0.0, 10.5]
    assert engine.statistics().total("delivered") == 1


async def test_a_sync_judger_that_uses_the_policy_waits_too() -> None:
    judged: list[bool] = []
    closed = False

    def judge(sample: Sample) -> float:
        judged.append(closed)
        return 1.0

    judge.uses_policy = True  # type: ignore[attr-defined]
    task = spec(judger=ComposedJudger({"policy": judge}), loop=slowly(1))
    async with Engine(ScriptedController(), task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(0.5)
        async with engine.paused():
            closed = True
            await sleep(10)
            closed = False
    assert judged == [False, False]
    assert engine.statistics().total("delivered") == 1


# Cancelled at every step


@each_way
def test_cancelled_at_every_step(backend: Literal["asyncio", "trio"], native: bool) -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.index:
            await rollout.judge()
        else:
            rollout.score(1.0)

    delivered = 0
    recording = RecordingInstrument()

    def make() -> tuple[Engine, ScriptedController]:
        nonlocal recording
        controller = ScriptedController(rate=10.0)
        recording = RecordingInstrument()
        tasks = [
            spec(name="loop", judger=asks_policy([], 0.1), loop=loop),
            spec(name="group", judger=ComposedJudger({"rank": Ranking(), "two": two})),
        ]
        return Engine(controller, tasks, instruments=[recording]), controller

    async def body(engine: Engine) -> None:
        async with create_task_group() as group:
            group.start_soon(engine.next_batch, 2)
            await sleep(0.15)
            async with engine.paused():
                await sleep(1)

    def check(engine: Engine, controller: ScriptedController, where: str) -> None:
        nonlocal delivered
        delivered = engine.statistics().total("delivered")
        for group, _ in recording.groups:
            for sample in group.samples:
                check_sample(sample)
                assert sample.verdict is not None or sample.status is not Status.COMPLETED, where

    cancelled_at_every_step(make, body, backend, native, check=check, at_least=50)
    assert delivered == 2
