"""`engine.evaluate`: another tenant, beside production and apart from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

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
    EvalResult,
    FailurePolicy,
    PauseMode,
    Prompt,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
)
from rollnest.abc import Attempt
from rollnest.errors import (
    EngineBroken,
    EngineBusy,
    EngineClosed,
    EvaluationCancelled,
    InferenceError,
    UnsupportedSampling,
)
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import cancelled_at_every_step, each_way, prompts, spec

anyio_only = pytest.mark.anyio

GREEDY = Sampling(20, temperature=0)


def heldout(count: int = 6, **options: Any) -> TaskSpec:
    """An evaluation's task, whose prompts begin with ids from 500."""
    asked = [Prompt(f"e{i}", token_ids=[500 + i, 2]) for i in range(count)]
    return spec(**({"name": "heldout", "prompts": asked, "group_size": 2} | options))


async def _into(got: list[Any], call: Callable[[], Any]) -> None:
    got.append(await call())


def settled(engine: Engine, controller: ScriptedController) -> None:
    assert not controller.open
    assert controller.while_paused == 0
    assert not engine._entered().evaluations.live  # pyright: ignore[reportPrivateUsage]
    assert engine.statistics().total("flight") == 0
    assert_conserved(engine, committed=controller.committed)


@anyio_only
async def test_each_prompt_is_answered_and_judged_once() -> None:
    controller = ScriptedController(rate=10.0)
    recording = RecordingInstrument()
    async with Engine(controller, spec(), instruments=[recording]) as engine:
        result = await engine.evaluate(heldout(), sampling=GREEDY)
        assert engine.statistics().tasks["task"].drawn == 0
    assert [g.prompt.uid for g in result.groups] == [f"e{i}" for i in range(6)]
    assert [s.index for s in result.samples] == [0, 1] * 6
    for sample in result.samples:
        check_sample(sample)
        assert sample.sampling == GREEDY
        assert sample.task == "heldout"
    rewards = [s.reward for s in result.samples if s.reward is not None]
    assert result.score == sum(rewards) / len(rewards)
    assert result.versions == {0: 12}
    assert result.pinned
    assert result.failures == {}
    assert result.statistics.samples == 12
    assert result.statistics.policy_tokens == controller.committed
    assert recording.named("evaluation_ended") == [(result,)]
    assert not recording.samples
    assert not recording.groups
    assert len(recording.named("turn_started")) == 12  # what goes to the server is told
    assert "score 0." in repr(result)
    assert "12 samples, 0 failed, v0" in repr(result)
    assert dict(line.split(None, 1) for line in str(result).splitlines())["prompts"] == "6"
    settled(engine, controller)


@anyio_only
async def test_bug_042_settings_of_an_evaluation_do_not_leak_into_training() -> None:
    seen: dict[str, set[tuple[float, int]]] = {"train": set(), "eval": set()}
    sizes: dict[int, int] = {}

    def script(attempt: Attempt) -> Reply:
        first = attempt.prompt_ids[0]
        sizes[first] = sizes.get(first, 0) + 1
        kind = "eval" if first >= 500 else "train"
        seen[kind].add((attempt.sampling.temperature, attempt.max_tokens))
        return Reply([5, 0], delay=1.0)

    controller = ScriptedController(script)
    task = spec(group_size=4, sampling=Sampling(30))
    async with Engine(controller, task) as engine, create_task_group() as group:
        for _ in range(2):
            got: list[EvalResult] = []
            held = heldout(3, group_size=1)
            group.start_soon(_into, got, lambda: engine.evaluate(held, sampling=GREEDY))  # noqa: B023
            batch = await engine.next_batch(2)
            await anyio.sleep(5)
            assert {g.task for g in batch.groups} == {"task"}
            assert len(got[0].samples) == 3
    assert seen == {"train": {(1.0, 30)}, "eval": {(0.0, 20)}}
    assert {count for first, count in sizes.items() if first < 500} == {4}
    assert {count for first, count in sizes.items() if first >= 500} == {2}  # twice, one each
    settled(engine, controller)


@anyio_only
async def test_one_of_the_engines_own_tasks_by_its_name() -> None:
    kept: list[object] = []

    def keep(group: object) -> bool:
        kept.append(group)
        return False

    controller = ScriptedController(rate=10.0)
    task = spec(redundancy=1, keep=keep, strategy=AsyncStrategy(), epochs=3)
    async with Engine(controller, task, batch_size=2) as engine:
        result = await engine.evaluate("task", limit=5)
        assert len(result.groups) == 5
        assert all(len(g.samples) == 2 for g in result.groups)
        assert {s.status for s in result.samples} == {Status.COMPLETED}
        assert all(getattr(group, "samples", None) for group in kept)  # training's only
        with pytest.raises(ValueError, match="task 'tusk' is none of \\['task'\\]"):
            await engine.evaluate("tusk")
    settled(engine, controller)


@anyio_only
async def test_failures_are_counted_and_are_no_reward() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid == "e1":
            raise ValueError("broken environment")

    def judge(sample: Sample) -> float:
        if sample.prompt.uid == "e2" and sample.index == 1:
            raise RuntimeError("no verdict")
        return 1.0

    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec()) as engine:
        result = await engine.evaluate(heldout(loop=loop, judger=judge))
        nothing = await engine.evaluate(heldout(judger=None))
        with fail_after(100):
            lost = await engine.evaluate(heldout(200, loop=_raise, starve_after=1))
    assert len(result.samples) == 12
    assert result.failures == {"loop": 2, "judge": 1}
    assert result.score == 1.0
    assert result.statistics.dropped == {"loop": 1, "judge": 1}
    assert "failed     2 loop, 1 judge" in str(result)
    assert nothing.score is None
    assert "no score" in repr(nothing)
    assert lost.failures == {"loop": 400}
    assert lost.score is None
    assert engine.statistics().tasks["task"].dropped == {}
    settled(engine, controller)


@anyio_only
async def test_a_failure_policy_takes_no_sample_out_of_the_result() -> None:
    tries: list[str] = []

    async def loop(rollout: Rollout) -> None:
        tries.append(rollout.uid)
        await rollout.generate()
        if rollout.index == 0:
            raise ValueError("broken environment")

    async with Engine(ScriptedController(rate=10.0), spec()) as engine:
        shrink = FailurePolicy(on_dead_member="shrink", min_members=1, max_failures_in_a_row=1)
        whole = await engine.evaluate(heldout(loop=loop, failures=shrink))
        assert len(tries) == len(whole.samples)
        retry = FailurePolicy(on_dead_member="retry", retries=2, min_members=1)
        again = await engine.evaluate(heldout(loop=loop, failures=retry))
    assert len(whole.samples) == len(again.samples)
    assert whole.failures == again.failures
    assert whole.failures["loop"] == len(whole.groups)
    assert len(tries) == len(whole.samples) * 2 + 2 * len(whole.groups)


async def _raise(rollout: Rollout) -> None:
    raise ValueError("always")


@anyio_only
async def test_it_overlaps_production_and_shares_the_slots() -> None:
    most = {"turns": 0, "judges": 0}
    judging = 0

    class Counting(ScriptedController):
        async def generate(self, attempt: Attempt) -> None:
            most["turns"] = max(most["turns"], len(self.open) + 1)
            await super().generate(attempt)

    async def judge(sample: Sample) -> float:
        nonlocal judging
        judging += 1
        most["judges"] = max(most["judges"], judging)
        await anyio.sleep(0.5)
        judging -= 1
        return 1.0

    controller = Counting(rate=10.0)
    task = spec(strategy=AsyncStrategy(lead=3), judger=judge)
    engine = Engine(controller, task, batch_size=4, capacity=Capacity(turns=5, judges=3))
    got: list[EvalResult] = []
    async with engine, create_task_group() as group:
        for _ in range(3):
            group.start_soon(_into, got, lambda: engine.evaluate(heldout(judger=judge)))
        batches = [await engine.next_batch() for _ in range(4)]
        assert all(g.task == "task" for b in batches for g in b.groups)
    assert [len(r.samples) for r in got] == [12, 12, 12]
    assert most == {"turns": 5, "judges": 3}
    settled(engine, controller)


@anyio_only
async def test_groups_at_once_are_bounded_like_the_turns() -> None:
    live = most = 0

    async def loop(rollout: Rollout) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await rollout.generate()
        live -= 1

    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec(), capacity=Capacity(turns=4)) as engine:
        await engine.evaluate(heldout(40, loop=loop, group_size=1))
    assert most == 4


@anyio_only
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_waits_for_an_evaluation(mode: PauseMode) -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    got: list[EvalResult] = []
    later: list[EvalResult] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(_into, got, lambda: engine.evaluate(heldout()))
        await anyio.sleep(5)
        async with engine.paused(mode) as pause:
            assert 20 <= current_time() <= 21
            assert len(got) == 1
            await pause.update_weights({})
            # One that is asked for meanwhile begins with the new weights.
            group.start_soon(_into, later, lambda: engine.evaluate(heldout()))
            await anyio.sleep(50)
            assert not controller.open
    assert got[0].versions == {0: 12}
    assert later[0].versions == {1: 12}
    assert (got[0].version, later[0].version) == (0, 1)
    settled(engine, controller)


@anyio_only
async def test_a_pause_that_waits_lets_production_go_on_and_no_other_evaluation_begin() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    task = spec(strategy=AsyncStrategy(lead=50, max_staleness=50))
    got: list[EvalResult] = []
    async with Engine(controller, task, batch_size=1) as engine, create_task_group() as group:
        group.start_soon(_into, got, lambda: engine.evaluate(heldout()))
        await anyio.sleep(5)
        ready = engine.statistics().tasks["task"].ready

        async def late() -> EvalResult:
            await anyio.sleep(5)
            return await engine.evaluate(heldout())

        group.start_soon(_into, got, late)
        async with engine.paused() as pause:
            assert 20 <= current_time() <= 21
            assert engine.statistics().tasks["task"].ready > ready
            await pause.update_weights({})
    assert [r.version for r in got] == [0, 1]
    settled(engine, controller)


@anyio_only
async def test_a_pause_waits_no_longer_than_the_evaluations_patience() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    got: list[EvalResult] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(_into, got, lambda: engine.evaluate(heldout(), patience=7.0))
        await anyio.sleep(5)
        for expected in (12, 12):  # the second pause does not wait for it again
            async with engine.paused() as pause:
                assert expected <= current_time() <= expected + 0.2
                await pause.update_weights({})
    assert got[0].version == 0
    assert got[0].versions == {0: 12, 2: 12}
    assert not got[0].pinned
    settled(engine, controller)


@anyio_only
async def test_new_weights_cancel_an_evaluation_that_asked_for_it_and_a_mere_pause_does_not() -> (
    None
):
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    got: list[object] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:

        async def evaluate() -> object:
            try:
                return await engine.evaluate(heldout(), on_update="cancel")
            except EvaluationCancelled as error:
                return error

        group.start_soon(_into, got, evaluate)
        await anyio.sleep(5)
        async with engine.paused():
            assert 5 <= current_time() <= 5.2
        await anyio.sleep(5)
        assert not got
        async with engine.paused() as pause:
            await pause.update_weights({})
        sent = len(controller.prompts)
        await anyio.sleep(1)
        assert len(controller.prompts) == sent  # not even a request that is cut at once
        (error,) = got
        assert isinstance(error, EvaluationCancelled)
        assert (error.ended, error.asked) == (0, 6)
        assert "cancelled by new weights, after 0 of 6 prompts" in str(error)
    settled(engine, controller)


@anyio_only
async def test_evict_leaves_an_evaluation_at_the_gate_where_it_goes_on() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000, stream=True)
    task = spec(strategy=AsyncStrategy(lead=0))
    got: list[EvalResult] = []
    async with Engine(controller, task, batch_size=2) as engine, create_task_group() as group:
        group.start_soon(_into, got, lambda: engine.evaluate(heldout(), on_update="mark"))
        await anyio.sleep(5)
        async with engine.paused(PauseMode.EVICT) as pause:
            figures = engine.statistics().tasks["task"]
            assert (figures.flight, figures.waiting) == (0, 2)
            assert not controller.open
            assert len(engine.tree().evaluations) == 1
            await pause.update_weights({})
        await anyio.sleep(100)
    (result,) = got
    assert result.versions == {0: 12, 1: 12}
    assert {turn.attempts for sample in result.samples for turn in sample.turns} == {2}
    assert not result.failures
    settled(engine, controller)


@anyio_only
async def test_an_evaluation_that_goes_on_says_what_made_it() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    got: list[EvalResult] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(_into, got, lambda: engine.evaluate(heldout(), on_update="mark"))
        await anyio.sleep(5)
        async with engine.paused() as pause:
            assert 5 <= current_time() <= 5.2
            await pause.update_weights({})
    assert got[0].versions == {0: 12, 1: 12}
    assert not got[0].pinned
    assert "v0, v1" in repr(got[0])
    for sample in got[0].samples:
        check_sample(sample)
    settled(engine, controller)


@anyio_only
@pytest.mark.parametrize("on_update", ["wait", "cancel", "mark"])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_in_a_pause_it_waits_and_the_pauser_itself_may_not_call_it(
    mode: PauseMode, on_update: Literal["wait", "cancel", "mark"]
) -> None:
    controller = ScriptedController(rate=10.0)
    got: list[EvalResult] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        async with engine.paused(mode) as pause:
            with pytest.raises(EngineBusy, match="inside paused"):
                await engine.evaluate(heldout())
            group.start_soon(_into, got, lambda: engine.evaluate(heldout(), on_update=on_update))
            await anyio.sleep(10)
            assert not controller.prompts
            await pause.update_weights({})
        result = await engine.evaluate(heldout(), on_update=on_update)
        assert result.version == 1
    assert got[0].versions == {1: 12}
    settled(engine, controller)


@anyio_only
async def test_a_pauser_that_is_cancelled_while_it_waits_leaves_everything_as_it_was() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    got: list[EvalResult] = []
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        group.start_soon(_into, got, lambda: engine.evaluate(heldout()))
        await anyio.sleep(1)
        with move_on_after(3) as scope:
            async with engine.paused():
                pytest.fail("entered")
        assert scope.cancelled_caught
        assert engine.statistics().pauses == 0
        result = await engine.evaluate(heldout(1))  # nothing is held any more
        assert result.versions == {0: 2}
        async with engine.paused():
            pass
    assert got[0].pinned
    settled(engine, controller)


@anyio_only
async def test_the_engines_end_ends_evaluations() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    errors: list[BaseException] = []

    async def evaluate(engine: Engine) -> None:
        try:
            await engine.evaluate(heldout())
        except EngineClosed as error:
            errors.append(error)

    engine = Engine(controller, spec())
    async with create_task_group() as group:
        async with engine:
            group.start_soon(evaluate, engine)
            await anyio.sleep(3)
        assert not controller.open
        assert controller.log[-1] == ("exit", 0)
        assert current_time() <= 4
        with pytest.raises(EngineClosed):
            await engine.evaluate(heldout())
    assert [type(e) for e in errors] == [EngineClosed]
    settled(engine, controller)


@anyio_only
async def test_a_broken_engine_ends_evaluations_with_its_causes() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        errors: list[BaseException] = []

        async def evaluate() -> None:
            try:
                await engine.evaluate(heldout(), on_update="mark")
            except EngineBroken as error:
                errors.append(error)

        group.start_soon(evaluate)
        group.start_soon(evaluate)
        await anyio.sleep(3)
        with move_on_after(1):
            async with engine.paused() as pause:
                await pause.update_weights(lambda: anyio.sleep(100))
        await anyio.sleep(0.1)
        assert len(errors) == 2
        assert all("which weights" in str(e) for e in errors)
    settled(engine, controller)


@anyio_only
async def test_an_outage_is_an_evaluations_too() -> None:
    def script(attempt: Attempt) -> Reply:
        if current_time() < 100:
            return Reply([], error=InferenceError("503", retryable=True))
        return Reply([5, 0])

    controller = ScriptedController(script)
    async with Engine(controller, spec()) as engine:
        result = await engine.evaluate(heldout())
        assert engine.statistics().outages == 1
    assert result.failures == {}
    assert len(result.samples) == 12
    settled(engine, controller)

    controller = ScriptedController(
        lambda a: Reply([], error=InferenceError("503", retryable=True))
    )
    async with Engine(controller, spec(), outage=50.0) as engine:
        with pytest.raises(EngineBroken, match="worked for 50 s"):
            await engine.evaluate(heldout())
    settled(engine, controller)


@anyio_only
async def test_a_loop_that_cancels_itself_fails_and_the_evaluation_ends() -> None:
    async def loop(rollout: Rollout) -> None:
        if rollout.prompt.uid == "e0":
            with anyio.CancelScope() as scope:
                scope.cancel()
                await checkpoint()
            return
        await rollout.generate()

    controller = ScriptedController(rate=10.0)
    async with Engine(controller, spec()) as engine:
        result = await engine.evaluate(heldout(loop=loop))
    assert result.failures == {"loop": 2}
    settled(engine, controller)


@anyio_only
async def test_the_tree_shows_evaluations_and_outages() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    async with Engine(controller, spec()) as engine, create_task_group() as group:
        for _ in range(2):
            group.start_soon(engine.evaluate, heldout(2))
        await anyio.sleep(3)
        tree = engine.tree()
        assert [name for name, _ in tree.evaluations] == ["'heldout' (v0)"] * 2
        assert str(tree).count("evaluation of 'heldout' (v0): 2 groups in flight") == 2
        assert "the server (0 of 20 tokens" in str(tree)
        assert len(tree.longest(10)) == 8
        assert tree.outage is None
    assert engine.tree().evaluations == ()

    def down(attempt: Attempt) -> Reply:
        return Reply([], error=InferenceError("503", retryable=True))

    async with Engine(ScriptedController(down), spec()) as engine, create_task_group() as group:
        group.start_soon(engine.evaluate, heldout(2))
        await anyio.sleep(30)
        assert "the server is down for 29.8 s, 570.2 s until the engine gives up" in str(
            engine.tree()
        )
        assert "the server to answer a probe" in str(engine.tree())
        group.cancel_scope.cancel()


@anyio_only
async def test_its_arguments_are_checked() -> None:
    controller = ScriptedController(
        capabilities=Capabilities(vocab_size=1000, max_context=64, sampling={"temperature", "stop"})
    )
    async with Engine(controller, spec()) as engine:
        with pytest.raises(ValueError, match="limit must be >= 1, got 0"):
            await engine.evaluate(heldout(), limit=0)
        with pytest.raises(ValueError, match=r"on_update must be .*, got 'drop'"):
            await engine.evaluate(heldout(), on_update="drop")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="patience must be finite, >= 0, got -1"):
            await engine.evaluate(heldout(), patience=-1)
        with pytest.raises(TypeError, match="sampling must be a Sampling"):
            await engine.evaluate(heldout(), sampling=0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"task must be a TaskSpec or the name"):
            await engine.evaluate(3)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedSampling, match="top_k=5"):
            await engine.evaluate(heldout(), sampling=Sampling(5, top_k=5))
        with pytest.raises(ValueError, match="tokenizer is required: prompt '0' of task 'heldout'"):
            await engine.evaluate(heldout(prompts=["hello"]))
        with pytest.raises(ValueError, match="needs a tokenizer"):
            await engine.evaluate(heldout(), sampling=Sampling(5, stop="x"))
    with pytest.raises(EngineClosed):
        await Engine(controller, spec()).evaluate(heldout())
    assert not controller.prompts


@anyio_only
async def test_raw_logprobs_and_greedy_turns_are_fine_in_an_evaluation_only() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(sampling=GREEDY)

    raw = Capabilities(vocab_size=1000, max_context=64, logprobs="raw", sampling={"temperature"})
    controller = ScriptedController(rate=10.0, capabilities=raw)
    async with Engine(controller, spec()) as engine:
        result = await engine.evaluate(heldout(loop=loop), sampling=Sampling(9, temperature=0.5))
    assert result.failures == {}
    settled(engine, controller)


def test_a_blocking_trainer_evaluates_too() -> None:
    controller = ScriptedController()
    with Engine(controller, spec()).blocking() as engine:
        result = engine.evaluate(heldout(), sampling=GREEDY)
        assert len(result.samples) == 12
        with engine.paused() as pause:
            with pytest.raises(EngineBusy, match="inside paused"):
                engine.evaluate(heldout())
            pause.update_weights({})
        assert engine.evaluate("task", limit=2).version == 1
    assert not any(t.name.startswith("AnyIO") for t in threading.enumerate())


async def judge(sample: Sample) -> float:
    await checkpoint()
    return 1.0


async def alone(engine: Engine) -> None:
    await engine.evaluate(heldout(3, judger=judge))


async def beside_production(engine: Engine) -> None:
    async with create_task_group() as group:
        group.start_soon(engine.next_batch, 2)
        await engine.evaluate(heldout(3, judger=judge))


async def beside_an_update(engine: Engine) -> None:
    async with create_task_group() as group:
        for on_update in ("mark", "wait"):
            group.start_soon(_evaluate, engine, on_update)
        await anyio.sleep(0.25)
        async with engine.paused() as pause:
            await pause.update_weights({})


async def _evaluate(engine: Engine, on_update: Literal["wait", "mark"]) -> None:
    await engine.evaluate(heldout(2, judger=judge), on_update=on_update, patience=0.2)


@pytest.mark.parametrize("state", [alone, beside_production, beside_an_update])
@each_way
def test_cancelled_at_every_step(
    state: Callable[[Engine], Any], backend: Literal["asyncio", "trio"], native: bool
) -> None:
    def make() -> tuple[Engine, ScriptedController]:
        controller = ScriptedController(rate=10.0)
        return Engine(
            controller, spec(prompts=prompts(9), judger=judge, sampling=Sampling(5))
        ), controller

    def check(engine: Engine, controller: ScriptedController, where: str) -> None:
        assert not engine._entered().evaluations.live, where  # pyright: ignore[reportPrivateUsage]

    cancelled_at_every_step(make, state, backend, native, check=check)


@each_way
def test_the_call_alone_is_cancelled_at_every_step_and_the_engine_goes_on(
    backend: Literal["asyncio", "trio"], native: bool
) -> None:
    # The engine's block stays open: what was cancelled has settled, and the next calls work.
    from rollnest.testing import virtual_backends

    name, options = virtual_backends()[0 if backend == "asyncio" else 1]()

    async def main() -> None:
        for steps in range(120):
            controller = ScriptedController(rate=10.0)
            async with Engine(controller, spec(judger=judge, sampling=Sampling(5))) as engine:
                with anyio.CancelScope() as scope:
                    async with create_task_group() as group:

                        async def cancel() -> None:
                            for _ in range(steps):  # noqa: B023
                                await checkpoint()
                            if steps > 60:  # noqa: B023
                                await anyio.sleep((steps - 60) / 100)  # noqa: B023
                            scope.cancel()

                        group.start_soon(cancel)
                        await engine.evaluate(heldout(2, judger=judge))
                assert not engine._entered().evaluations.live  # pyright: ignore[reportPrivateUsage]
                assert not controller.open
                batch: Batch = await engine.next_batch(1)
                assert len(batch) == 1
                async with engine.paused() as pause:
                    await pause.update_weights({})
                assert (await engine.evaluate(heldout(1))).versions == {1: 2}
            settled(engine, controller)

    anyio.run(main, backend=name, backend_options=options)
