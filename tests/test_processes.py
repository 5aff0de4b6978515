"""Judgers in worker processes: what they get, how they end, and that nothing of them is left behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import pytest
from anyio import create_task_group, current_time, sleep
from anyio.lowlevel import checkpoint

from rollnest import (
    Capacity,
    ComposedJudger,
    Engine,
    Limits,
    PauseMode,
    ProcessJudger,
    Prompt,
    RoutedJudger,
    Sample,
    Sampling,
    Status,
)
from rollnest.errors import Starved
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    free_running_threads,
)

from . import judgers_in_processes as judgers
from .helpers import in_turn, one_batch, prompts, score_parity, spec

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], object]) -> None:
    """Keeps the loop busy, so that no clock can jump, until a process has got that far."""
    last = monotonic() + 60  # of real time: rather a failure than a run that hangs
    while not condition():
        assert monotonic() < last
        await checkpoint()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_it_judges_in_processes_that_are_kept() -> None:
    task = spec(judger=ProcessJudger(judgers.who, workers=1), limits=Limits(judge=0.001))
    async with Engine(ScriptedController(), task) as engine:
        before = current_time()
        samples = [s for _ in range(3) for s in (await engine.next_batch(2)).samples]
        assert current_time() == before  # virtual time stands still while a process works
        details = [s.verdict.details for s in samples if s.verdict is not None]
        assert len(details) == 12
        pids = {d["pid"] for d in details}
        assert len(pids) == 1
        assert os.getpid() not in pids
        assert all(d["main thread"] for d in details)  # where signals work
        (pid,) = pids
        assert is_alive(pid)
        assert engine.tree().slots["judge"].used == 0
    assert not is_alive(pid)


async def test_what_it_keeps_it_keeps_for_each_process() -> None:
    task = spec(judger=ProcessJudger(judgers.Counting(2), workers=1))
    batch, _ = await one_batch(ScriptedController(), task, 2)
    assert sorted(s.reward or 0 for s in batch.samples) == [2.0, 4.0, 6.0, 8.0]


async def test_groups_parts_and_routes_may_be_in_processes() -> None:
    composed = ComposedJudger(
        {"length": ProcessJudger(judgers.score), "rank": ProcessJudger(judgers.Ranking())}
    )
    routed = RoutedJudger({"a": composed}, default=score_parity)
    asked = [Prompt("p0", token_ids=[1, 2], data_source="a"), Prompt("p1", token_ids=[2, 2])]
    batch, _ = await one_batch(ScriptedController(), spec(judger=routed, prompts=asked), 2)
    judged = {group.prompt.uid: group for group in batch.groups}
    for sample in judged["p0"].samples:
        assert sample.verdict is not None
        parts = {"length": float(len(sample.segments[0])), "rank": float(sample.index)}
        assert sample.verdict.parts == parts
    for sample in judged["p1"].samples:
        assert sample.reward == float(len(sample.segments[0]) % 2)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("exit code", "the judger's process ended with exit code 3"),
        ("signal", "the judger's process died of SIGSEGV"),
        ("exit", "the judger raised SystemExit: 5"),
        ("raise", "the judger raised ZeroDivisionError: by zero"),
        ("picky", "the judger raised PickyError: picky"),
        ("none", "the judger answered None"),
        ("unpicklable", "the judger raised TypeError: cannot pickle '_thread.lock' object"),
        ("coroutine", "the judger raised TypeError: the judger answered a coroutine"),
    ],
)
async def test_what_goes_wrong_fails_the_sample_and_the_run_goes_on(
    label: str, message: str
) -> None:
    asked = [Prompt("bad", token_ids=[1, 2], label=label), *prompts(2)]
    recording = RecordingInstrument()
    controller = ScriptedController()
    task = spec(
        judger=ProcessJudger(judgers.misbehave, workers=1),
        prompts=asked,
        group_size=1,
        epochs=1,
        shuffle=False,
    )
    async with Engine(controller, task, instruments=[recording]) as engine:
        batch = await engine.next_batch(2)
    assert [s.reward for s in batch.samples] == [1.0, 1.0]
    (failed,) = [s for s in recording.samples if s.status is Status.FAILED]
    assert failed.failure is not None
    assert failed.failure.kind == "judge"
    assert message in failed.failure.message
    if label == "raise":
        assert "in misbehave" in failed.failure.traceback  # the process's own traceback
    assert_conserved(engine, committed=controller.committed)


async def test_a_batch_judger_that_forgets_one_fails_all() -> None:
    task = spec(judger=ProcessJudger(judgers.Short()), starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match="batch_judge gave 1 answers for 2 samples"):
            await engine.next_batch(1)


async def test_a_judger_that_cannot_be_loaded_there() -> None:
    task = spec(judger=ProcessJudger(judgers.Unloadable()), group_size=1, starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match="can't be loaded in its process: ImportError: no module"):
            await engine.next_batch(1)


async def test_a_sample_that_cannot_be_sent_fails() -> None:
    asked = [*prompts(1), Prompt("bad", token_ids=[1], media=lambda: 1)]
    recording = RecordingInstrument()
    task = spec(judger=ProcessJudger(judgers.score), prompts=asked, group_size=1, epochs=1)
    async with Engine(ScriptedController(), task, instruments=[recording]) as engine:
        batch = await engine.next_batch(2)
    assert batch.short
    (failed,) = [s for s in recording.samples if s.status is Status.FAILED]
    assert failed.failure is not None
    assert "the sample can't be pickled, to be sent to a process" in failed.failure.message


@pytest.mark.parametrize("judge", [judgers.block, judgers.spin])
async def test_one_that_takes_too_long_is_killed_with_its_children(
    judge: Callable[[Sample], float], tmp_path: Path
) -> None:
    told = tmp_path / "pids"
    asked = [Prompt("slow", token_ids=[1, 2], label=str(told))]
    recording = RecordingInstrument()
    task = spec(
        judger=ProcessJudger(judge),
        prompts=asked,
        group_size=1,
        limits=Limits(judge=5.0),
        starve_after=1,
    )
    async with (
        Engine(ScriptedController(), task, instruments=[recording]) as engine,
        create_task_group() as group,
    ):
        with free_running_threads():
            group.start_soon(expect_starved, engine)
            await until(told.exists)
            await sleep(5)
            await until(lambda: recording.samples)
        (sample,) = recording.samples
        assert sample.failure is not None
        assert sample.failure.message == "JudgeError: the judger took over 5.0 s"
        pids = [int(pid) for pid in told.read_text().split()]
        await until(lambda: not any(map(is_alive, pids)))
        assert engine.tree().slots["judge"].used == 0  # a thread would have kept it
        assert engine.statistics().abandoned_threads == 0


async def expect_starved(engine: Engine) -> None:
    with pytest.raises(Starved):
        await engine.next_batch(1)


async def test_leaving_the_block_kills_what_works(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    asked = [Prompt("slow", token_ids=[1, 2], label=str(told))]
    controller = ScriptedController()
    task = spec(
        judger=ProcessJudger(judgers.block), prompts=asked, group_size=1, limits=Limits(judge=None)
    )
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await until(told.exists)
        (sample,) = (s for g in engine.tree().tasks["task"].groups for s in g.samples)
        assert [wait.kind for wait in sample.waits] == ["judger"]
        (holder,) = engine.tree().slots["judge"].holders
        assert holder.name == "judger of task/slow/0/0"
        group.cancel_scope.cancel()
    pids = [int(pid) for pid in told.read_text().split()]
    await until(lambda: not any(map(is_alive, pids)))
    assert engine.statistics().tasks["task"].waiting == 1
    assert_conserved(engine, committed=controller.committed)


async def test_processes_bound_the_calls_and_those_that_wait_hold_no_judge_slot(
    tmp_path: Path,
) -> None:
    told = tmp_path / "pids"
    asked = [Prompt(f"p{i}", token_ids=[1, 2], label=str(told)) for i in range(3)]
    task = spec(
        judger=ProcessJudger(judgers.block, workers=1),
        prompts=asked,
        group_size=1,
        limits=Limits(judge=None),
    )
    quick = spec(name="quick", judger=score_parity)
    async with (
        Engine(ScriptedController(), [task, quick], capacity=Capacity(judges=2)) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 6)
        await until(told.exists)
        kinds = [
            wait.kind
            for g in engine.tree().tasks["task"].groups
            for s in g.samples
            for wait in s.waits
        ]
        assert sorted(kinds) == ["judger", "process", "process"]
        assert engine.tree().slots["judge"].used == 1
        assert engine.statistics().tasks["quick"].ready == 3  # judged meanwhile
        group.cancel_scope.cancel()


async def test_one_that_asks_the_policy_waits_for_the_gate() -> None:
    def kinds() -> set[str]:
        groups = engine.tree().tasks["task"].groups
        return {wait.kind for g in groups for s in g.samples for wait in s.waits}

    task = spec(judger=ProcessJudger(judgers.AsksPolicy(), workers=2))
    controller = ScriptedController(in_turn(Reply([5, 0], delay=1.0)))
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(0.5)
        async with engine.paused(PauseMode.WAIT):
            await sleep(10)
            assert kinds() == {"gate"}


# Building one


def local() -> Callable[[Sample], float]:
    def judge(sample: Sample) -> float:
        return 1.0

    return judge


def test_what_cannot_be_sent_is_refused_when_it_is_built() -> None:
    with pytest.raises(TypeError, match="judger of a ProcessJudger must be picklable"):
        ProcessJudger(local())
    with pytest.raises(TypeError, match="must be synchronous"):
        ProcessJudger(score_parity)
    composed = ComposedJudger({"one": judgers.score})
    for judger in (3, composed, ProcessJudger(judgers.score)):
        with pytest.raises(TypeError, match="must be a function of a sample"):
            ProcessJudger(judger)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers must be >= 1, got 0"):
        ProcessJudger(judgers.score, workers=0)


def test_prompts_that_cannot_be_sent_are_refused_with_the_task() -> None:
    bad = [Prompt("bad", token_ids=[1], media=lambda: 1)]
    judger = RoutedJudger({"a": judgers.score}, default=ProcessJudger(judgers.score))
    with pytest.raises(TypeError, match=r"prompts\[0\], .* must be picklable"):
        spec(judger=judger, prompts=bad)
    spec(judger=judgers.score, prompts=bad)


def test_an_interactive_judger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ModuleType("__main__")

    def judge(sample: Sample) -> float:
        return 1.0

    judge.__module__, judge.__qualname__ = "__main__", "judge"
    session.judge = judge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(TypeError, match="interactive session"):
        ProcessJudger(judge)


def test_it_can_be_tried_in_this_process(sample: Sample) -> None:
    assert ProcessJudger(judgers.score)(sample) == float(len(sample.segments[0]))
    assert ProcessJudger(judgers.Ranking())([sample]) == [0.0]


def test_by_default_there_is_one_for_each_cpu() -> None:
    assert ProcessJudger(judgers.score).at_most >= 1
    assert ProcessJudger(judgers.score, workers=3).at_most == 3


# Scripts


SCRIPT = """
import os
import anyio
from rollnest import Engine, ProcessJudger, Prompt, TaskSpec, Verdict
from rollnest.testing import ScriptedController

class Here(Verdict):
    pass

def judge(sample):
    return Here(0.5, details={{"pid": os.getpid(), "name": __name__}})

async def main():
    prompts = [Prompt("p", token_ids=[1, 2])]
    task = TaskSpec("task", prompts, judger=ProcessJudger(judge, workers=1), group_size=1, starve_after=1)
    async with Engine(ScriptedController(), task) as engine:
        batch = await engine.next_batch(1)
    (sample,) = batch.samples
    assert type(sample.verdict) is Here
    assert sample.verdict.details["pid"] != os.getpid()
    print("judged in", sample.verdict.details["name"])

{guard}anyio.run(main, backend={backend!r})
"""


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_judger_of_the_main_script(backend: str, tmp_path: Path) -> None:
    guard = 'if __name__ == "__main__":\n    '
    done = run_script(tmp_path / "script.py", SCRIPT.format(guard=guard, backend=backend))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "judged in __mp_main__"


def test_a_main_script_without_its_guard_is_told(tmp_path: Path) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT.format(guard="", backend="asyncio"))
    assert done.returncode == 1
    assert "put its run under `if __name__ == " in done.stderr


def test_a_process_ends_when_the_trainer_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    script = textwrap.dedent(f"""
        import anyio, os, signal
        from pathlib import Path
        from rollnest import Engine, Limits, ProcessJudger, Prompt, TaskSpec
        from rollnest.testing import ScriptedController
        from tests.judgers_in_processes import block

        async def main():
            prompts = [Prompt("p", token_ids=[1, 2], label={str(told)!r})]
            task = TaskSpec("task", prompts, judger=ProcessJudger(block), group_size=1)
            async with Engine(ScriptedController(), task) as engine, anyio.create_task_group() as group:
                group.start_soon(engine.next_batch, 1)
                while not Path({str(told)!r}).exists():
                    await anyio.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

        anyio.run(main)
        """)
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.exists(), done.stderr
    for pid in map(int, told.read_text().split()):
        while is_alive(pid):  # it ends once it has seen the pipe's end
            os.sched_yield()


# Pickling, which others need as well: Ray, checkpoints


@pytest.fixture
async def batch(anyio_backend: Any) -> Any:
    taken, _ = await one_batch(ScriptedController(), spec(sampling=Sampling(50), group_size=4), 3)
    return taken


@pytest.fixture
async def sample(batch: Any) -> Any:
    return batch.groups[0].samples[0]


async def test_batches_groups_and_samples_survive_a_pickle(batch: Any) -> None:
    again = pickle.loads(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
    assert (again.index, again.version, again.short) == (batch.index, batch.version, batch.short)
    assert again.statistics == batch.statistics
    for group, same in zip(batch.groups, again.groups, strict=True):
        assert (group.task, group.visit, group.rewards) == (same.task, same.visit, same.rewards)
        for one, other in zip(group.samples, same.samples, strict=True):
            assert one.verdict == other.verdict
            assert one.turns[0].ids == other.turns[0].ids
            for segment, copy in zip(one.segments, other.segments, strict=True):
                assert segment.response == copy.response
                assert copy.response.sealed
                assert copy.prompt_ids == segment.prompt_ids
                assert copy.prompt_ids.readonly
                assert copy.ids == segment.ids
                assert copy.logprobs == segment.logprobs
                assert copy.versions == segment.versions
    assert again.groups[0].samples[0].prompt is again.groups[0].samples[1].prompt


async def test_a_pickled_sample_is_compact() -> None:
    task = spec(group_size=1, sampling=Sampling(4000), judger=None)
    controller = ScriptedController(stop_every=10**9, max_context=10_000)
    taken, _ = await one_batch(controller, task)
    (sample,) = taken.groups[0].samples
    assert sample.policy_tokens == 4000
    assert len(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)) <= 12 * 4000
