"""Agent loops that run elsewhere, on hosts that may be killed at any moment."""

from __future__ import annotations

from array import array
from typing import Any

import anyio
import pytest
from anyio import create_task_group, move_on_after, sleep, sleep_forever

from rollnest import (
    Batch,
    Engine,
    Limits,
    PauseMode,
    Rollout,
    Sample,
    Sampling,
    TaskSpec,
    Verdict,
    tool_key,
)
from rollnest._host_messages import Appended, Ask, End, Ended, Generate, Ran, Withdraw
from rollnest.errors import EndOfPrompts, HostLost, JudgeError, Starved, ToolError
from rollnest.testing import (
    Reply,
    ScriptedController,
    assert_conserved,
    check_loop,
    check_sample,
)

from .helpers import prompts, spec
from .local_hosts import LocalHosts

pytestmark = pytest.mark.anyio


def task_of(loop: Any, **options: Any) -> TaskSpec:
    """A task of one sample, whose turns take 2 s, one second a token."""
    defaults = {"group_size": 1, "sampling": Sampling(2), "judger": None, "shuffle": False}
    return spec(loop=loop, **(defaults | options))


def server(**options: Any) -> ScriptedController:
    return ScriptedController(rate=1.0, stop_every=10_000, **options)


def columns(sample: Sample) -> list[tuple[list[int], list[int], list[int]]]:
    return [(s.prompt_ids.tolist(), s.ids.tolist(), s.mask.tolist()) for s in sample.segments]


async def killed(
    hosts: LocalHosts, controller: ScriptedController, *times: float, **options: Any
) -> tuple[Sample, Engine]:
    """Takes one sample, and kills the host that runs it at these times."""
    got: list[Batch] = []

    async def take(engine: Engine) -> None:
        got.append(await engine.next_batch(1))

    async with (
        Engine(controller, task_of(hosts, **options)) as engine,
        create_task_group() as tasks,
    ):
        started = anyio.current_time()
        tasks.start_soon(take, engine)
        for at in times:
            await anyio.sleep_until(started + at)
            hosts.kill()
            assert_conserved(engine, committed=controller.committed)
    assert await hosts.orphans() == []
    assert_conserved(engine, committed=controller.committed)
    (sample,) = got[0].samples
    check_sample(sample)
    return sample, engine


async def talk(rollout: Rollout) -> None:
    """Three turns, with something appended after each."""
    for number in range(3):
        turn = await rollout.generate()
        assert turn.ids.tolist() == rollout.response.ids.tolist()[-2:]
        rollout.append([500 + number])


async def whole(loop: Any, **options: Any) -> Sample:
    async with Engine(server(), task_of(loop, **options)) as engine:
        (sample,) = (await engine.next_batch(1)).samples
    return sample


@pytest.mark.parametrize("workers", [None, 1, 3])
async def test_one_argument_says_where_a_loop_runs(workers: int | None) -> None:
    sample = await whole(talk if workers is None else LocalHosts(talk, workers))
    assert columns(sample) == columns(await whole(talk))
    assert [turn.attempts for turn in sample.turns] == [1, 1, 1]


async def test_a_turn_of_a_host_that_is_lost_comes_to_its_end_and_is_given_again() -> None:
    controller = server()
    sample, engine = await killed(LocalHosts(talk), controller, 3.0)
    assert columns(sample) == columns(await whole(talk))
    assert len(controller.prompts) == 3  # none was asked for twice
    statistics = engine.statistics().tasks["task"]
    assert (statistics.replayed_turns, statistics.tokens_discarded, statistics.redrawn) == (2, 0, 0)


async def test_lost_again_and_again_a_loop_goes_on() -> None:
    controller = server()
    sample, engine = await killed(LocalHosts(talk, 1), controller, 1.0, 3.0, 5.0)
    assert columns(sample) == columns(await whole(talk))
    assert len(controller.prompts) == 3
    assert engine.statistics().tasks["task"].replayed_turns == 1 + 2 + 3


async def test_a_loop_that_brings_its_host_down_fails_its_sample() -> None:
    hosts: LocalHosts

    async def deadly(rollout: Rollout) -> None:
        hosts.kill()
        await sleep_forever()

    hosts = LocalHosts(deadly)
    async with Engine(server(), task_of(hosts, prompts=prompts(1), epochs=1)) as engine:
        with pytest.raises((Starved, EndOfPrompts)):
            await engine.next_batch(1)
        assert engine.statistics().tasks["task"].dropped == {"loop": 1}
    assert hosts.kills == 4


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_whoever_ran_beside_a_loop_that_brings_hosts_down_is_not_to_blame(
    workers: int,
) -> None:
    hosts: LocalHosts

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        if rollout.prompt.uid == "p3":
            (at,) = [host for host in hosts.living if rollout.uid in host.here.sessions]
            hosts.kill(at)
            await sleep_forever()
        await rollout.generate()

    hosts = LocalHosts(loop, workers)
    async with Engine(server(), task_of(hosts, prompts=prompts(8))) as engine:
        result = await engine.evaluate("task")
        failed = {s.prompt.uid: s.failure.message for s in result.samples if s.failure}
    assert failed == {"p3": failed["p3"]}
    assert "was lost 4 times" in failed["p3"]
    assert hosts.kills == 4
    assert [len(s.segments[0]) for s in result.samples if not s.failure] == [4] * 7


@pytest.mark.parametrize("on_unknown", ["rerun", "fail"])
async def test_a_tool_that_was_lost_follows_on_unknown(on_unknown: Any) -> None:
    keys: list[str] = []

    async def done(number: int) -> int:
        keys.append(tool_key())
        return number

    async def book() -> int:
        keys.append(tool_key())
        await sleep(1)
        return 600

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([await rollout.tool(done, 500)])
        rollout.append([await rollout.tool(book, on_unknown=on_unknown)])
        await rollout.generate()

    controller = server()
    sample, engine = await killed(LocalHosts(loop), controller, 2.5, prompts=prompts(2), epochs=1)
    dropped = engine.statistics().tasks["task"].dropped
    if on_unknown == "rerun":
        assert keys == [f"task/p0/0/0/{n}" for n in (1, 2, 2)]
        assert sample.segments[0].ids.tolist()[2:4] == [500, 600]
        assert dropped == {}
    else:
        assert keys == [
            *(f"task/p0/0/0/{n}" for n in (1, 2)),
            *(f"task/p1/1/0/{n}" for n in (1, 2)),
        ]
        assert dropped == {"tool": 1}


async def test_a_verdict_that_was_asked_for_is_not_asked_for_again() -> None:
    asked: list[str] = []

    async def judge(sample: Sample) -> float:
        asked.append(sample.uid)
        await sleep(2)
        return 0.5

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        assert await rollout.judge() == Verdict(0.5)

    sample, _ = await killed(LocalHosts(loop), server(), 3.0, judger=judge)
    assert asked == ["task/p0/0/0"]
    assert sample.verdict == Verdict(0.5)


async def test_lost_between_two_turns_only_the_loops_own_code_runs_again() -> None:
    runs: list[int] = []

    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        runs.append(rollout.random.randrange(1000))
        await sleep(3)
        rollout.append([runs[-1]])
        rollout.score(2.0, part=1.0)
        rollout.finish("enough")

    controller = server()
    sample, _ = await killed(LocalHosts(loop), controller, 4.0, judger=lambda sample: 0.0)
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert len(controller.prompts) == 1
    assert (sample.verdict, sample.finish_reason) == (Verdict(2.0, parts={"part": 1.0}), "enough")


async def test_parts_that_run_side_by_side_go_on_where_they_were() -> None:
    async def part(rollout: Rollout, number: int) -> None:
        context = rollout.segment([30 + number])
        for step in range(2):
            await context.generate()
            await rollout.tool(touch, number, step)
            context.append([700 + 10 * number + step])

    async def touch(number: int, step: int) -> None:
        touched.append((number, step))

    async def loop(rollout: Rollout) -> None:
        async with create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(part, rollout, number)
        await rollout.generate()

    touched: list[tuple[int, int]] = []
    at_home = await whole(loop)
    touched.clear()
    controller = server()
    sample, engine = await killed(LocalHosts(loop), controller, 3.0)
    assert sorted(columns(sample)) == sorted(columns(at_home))
    assert sorted(touched) == [(number, step) for number in range(3) for step in range(2)]
    assert len(controller.prompts) == 7
    assert engine.statistics().tasks["task"].diverged == 0


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_needs_no_host(mode: PauseMode) -> None:
    """Hosts that answer nothing can't delay it; the loops go on afterwards, or again."""
    hosts = LocalHosts(talk, 2)
    controller = server()
    task = task_of(hosts, group_size=4)
    got: list[Batch] = []

    async def take() -> None:
        got.append(await engine.next_batch(1))

    async with Engine(controller, task) as engine, create_task_group() as tasks:
        tasks.start_soon(take)
        await sleep(2.5)
        hosts.kill()
        async with engine.paused(mode, grace=0.0) as pause:
            assert pause.quiet_seconds == 0.0
            assert controller.open == {} or mode is PauseMode.KEEP
            if mode is PauseMode.EVICT:
                assert await hosts.orphans() == []
            else:
                await sleep(100)
                assert len(await hosts.orphans()) >= 2
            assert_conserved(engine)
    for sample in got[0].samples:
        check_sample(sample)
        assert len(sample.segments[0]) == 9
    assert await hosts.orphans() == []
    assert_conserved(engine, committed=controller.committed)


async def test_a_cancelled_loop_has_ended_before_its_group_has() -> None:
    ended: list[str] = []

    async def loop(rollout: Rollout) -> None:
        try:
            await rollout.generate()
            await sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await sleep(0.5)
            ended.append(rollout.uid)

    hosts = LocalHosts(loop)
    async with Engine(server(), task_of(hosts, group_size=3)) as engine:
        with move_on_after(3):
            await engine.next_batch(1)
        async with engine.paused(PauseMode.EVICT):
            assert len(ended) == 3
            assert await hosts.orphans() == []


async def test_a_host_that_does_not_end_a_loop_is_given_up() -> None:
    hosts = LocalHosts(talk, 1)
    async with Engine(server(), task_of(hosts)) as engine:
        with move_on_after(1):
            await engine.next_batch(1)
        (deaf,) = hosts.living
        deaf.deaf = lambda message: isinstance(message, End)
        async with engine.paused(PauseMode.EVICT):
            pass
        assert deaf.there.lost == "it did not end the loop of task/p0/0/0 in 5.0 s"
        assert deaf.there not in hosts.hosts
        (sample,) = (await engine.next_batch(1)).samples
    assert columns(sample) == columns(await whole(talk))
    assert await hosts.orphans() == []


async def test_without_a_host_rollouts_wait_for_one() -> None:
    hosts = LocalHosts(talk, 1, restart=False)
    async with Engine(server(), task_of(hosts)) as engine, create_task_group() as tasks:
        tasks.start_soon(engine.next_batch, 1)
        await sleep(1)
        hosts.kill()
        await sleep(1000)
        assert engine.statistics().total("flight") == 1
        hosts.start()


async def test_rollouts_go_to_the_host_that_has_the_fewest_and_come_back() -> None:
    where: dict[str, list[str]] = {}
    hosts: LocalHosts

    async def loop(rollout: Rollout) -> None:
        (at,) = [h.there.name for h in hosts.all if rollout.uid in h.here.sessions]
        where.setdefault(rollout.uid, []).append(at)
        await talk(rollout)

    hosts = LocalHosts(loop, 3)
    async with Engine(server(), task_of(hosts, group_size=9)) as engine:
        with move_on_after(3):
            await engine.next_batch(1)
        assert sorted(len(host.there.sessions) for host in hosts.all) == [3, 3, 3]
        async with engine.paused(PauseMode.EVICT):
            pass
        await engine.next_batch(1)
    nine = [names for uid, names in where.items() if "/p0/" in uid]
    assert [len(set(names)) for names in nine] == [1] * 9
    assert [len(names) for names in nine] == [2] * 9


async def test_a_tool_that_takes_too_long_is_stopped_there() -> None:
    stopped: list[str] = []

    async def slow() -> None:
        try:
            await sleep_forever()
        finally:
            stopped.append("slow")

    async def loop(rollout: Rollout) -> None:
        with pytest.raises(ToolError, match=r"tool slow took over 3\.0 s"):
            await rollout.tool(slow)
        assert stopped == ["slow"]
        await rollout.generate()

    sample, _ = await killed(LocalHosts(loop), server(), limits=Limits(tool=3.0))
    assert sample.policy_tokens == 2


def test_a_hosted_loop_is_interrupted_at_every_step() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate(max_tokens=2)
        rollout.append([await rollout.tool(add, 3, 4)])
        await rollout.generate(max_tokens=2)

    def add(a: int, b: int) -> int:
        return a + b

    report = check_loop(LocalHosts(loop, 1), every=7)
    assert report.tool_calls == 1
    assert report.replayed_turns > 0


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            Ask(1, 0, 0, [Appended(7, array("i", [1]))], Generate(0, None, None)),
            "names context 7 of 1",
        ),
        (Ask(1, 0, 0, [], Generate(-1, None, None)), "names context -1 of 1"),
        (
            Ask(1, 0, 0, [Appended(0, array("i", [5000]))], Generate(0, None, None)),
            "outside the vocabulary",
        ),
        (Ended(1, [Appended(0, array("i", [-5]))]), "must be >= 0"),
    ],
)
async def test_what_a_host_says_is_checked_before_it_changes_anything(
    message: Any, said: str
) -> None:
    async def loop(rollout: Rollout) -> None:
        hosts.all[0].send_back(message)
        await sleep_forever()

    hosts = LocalHosts(loop, 1)
    async with Engine(server(), task_of(hosts, prompts=prompts(1))) as engine:
        result = await engine.evaluate("task")
    failure = result.samples[0].failure
    assert failure is not None
    assert failure.kind == "loop"
    assert said in failure.message
    assert await hosts.orphans() == []


async def test_a_tools_answer_that_no_journal_can_hold_is_refused() -> None:
    async def loop(rollout: Rollout) -> None:
        with pytest.raises(Exception, match="says that tool touch returned"):
            await rollout.tool(touch)
        await rollout.generate()

    async def touch() -> None:
        hosts.all[0].send_back(Ran(1, 0, {"a": object}))  # type: ignore[dict-item]
        await sleep_forever()

    hosts = LocalHosts(loop, 1)
    await killed(hosts, server())


async def test_messages_of_what_is_over_are_dropped() -> None:
    hosts = LocalHosts(talk, 1)
    async with Engine(server(), task_of(hosts)) as engine:
        await engine.next_batch(1)
        (host,) = hosts.living
        for message in (Ended(1), Ran(99, 0), Ask(1, 0, 0, [], Generate(0, None, None))):
            host.there.receive(message)
        assert_conserved(engine)


async def test_a_request_that_is_withdrawn_at_once_is_cut() -> None:
    """Both messages may come in one bundle, before anything was begun."""

    async def loop(rollout: Rollout) -> None:
        for message in (Ask(1, 90, 5, (), Generate(0, None, None)), Withdraw(1, 90)):
            hosts.all[0].there.receive(message)
        await sleep(1)
        asked.append(len(controller.open))
        await rollout.generate()

    asked: list[int] = []
    controller = server()
    hosts = LocalHosts(loop, 1)
    async with Engine(controller, task_of(hosts)) as engine:
        await engine.next_batch(1)
    assert asked == [0]  # a turn would take two seconds


async def test_errors_of_the_engine_reach_the_loop_as_what_they_are() -> None:
    said: list[str] = []

    async def loop(rollout: Rollout) -> None:
        for call in (rollout.judge, lambda: rollout.generate(max_tokens=-1)):
            try:
                await call()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        await rollout.generate()
        try:
            await rollout.judge()
        except JudgeError as error:
            said.append(f"{type(error).__name__}: {error}")

    def judge(sample: Sample) -> float:
        raise KeyError("k")

    async with Engine(server(), task_of(loop, judger=judge)) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
    at_home, said = said[:3], []
    async with Engine(server(), task_of(LocalHosts(loop), judger=judge)) as engine:
        with pytest.raises(Starved):
            await engine.next_batch(1)
    assert said[:3] == at_home


async def test_a_failure_there_is_the_failure_here() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        raise ValueError("of the user's own")

    failures = []
    for where in (loop, LocalHosts(loop)):
        async with Engine(server(), task_of(where, prompts=prompts(1), epochs=1)) as engine:
            result = await engine.evaluate("task")
        (sample,) = result.samples
        failures.append(sample.failure)
    assert failures[0] is not None
    assert failures[1] is not None
    assert (failures[0].kind, failures[0].message) == (failures[1].kind, failures[1].message)
    assert "of the user's own" in failures[1].traceback


async def test_an_evaluation_opens_the_loop_that_it_brings() -> None:
    heldout = task_of(LocalHosts(talk), name="heldout", prompts=prompts(3))
    async with Engine(server(), task_of(LocalHosts(talk))) as engine:
        result = await engine.evaluate(heldout)
    assert len(result.samples) == 3


async def test_two_tasks_may_share_hosts() -> None:
    hosts = LocalHosts(talk)
    tasks = [task_of(hosts, name=name) for name in ("a", "b")]
    async with Engine(server(), tasks) as engine:
        batch = await engine.next_batch(2)
    assert {sample.task for sample in batch.samples} == {"a", "b"}


def test_a_loop_that_runs_elsewhere_already_is_named() -> None:
    with pytest.raises(ValueError, match="elsewhere already"):
        LocalHosts(LocalHosts(talk))


@pytest.mark.parametrize("hosted", [False, True])
async def test_any_loop_may_say_that_what_runs_it_is_gone(hosted: bool) -> None:
    """The error is public: whoever keeps a loop's work elsewhere can have it run again, from its journal."""
    runs: list[int] = []

    async def loop(rollout: Rollout) -> None:
        runs.append(len(runs))
        await rollout.generate()
        if len(runs) < 3:
            raise HostLost("the sandbox is gone")

    controller = ScriptedController(lambda attempt: Reply([5, 6]))
    where = LocalHosts(loop) if hosted else loop
    async with Engine(controller, task_of(where)) as engine:
        (sample,) = (await engine.next_batch(1)).samples
    assert runs == [0, 1, 2]
    assert len(controller.prompts) == 1
    check_sample(sample)
    assert_conserved(engine, committed=controller.committed)
