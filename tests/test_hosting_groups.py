"""Group loops that run elsewhere, on hosts that may be killed at any moment."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from anyio import create_task_group, move_on_after, sleep, sleep_forever, sleep_until
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollnest import (
    AgentLoop,
    Batch,
    Engine,
    Failure,
    Limits,
    LiveGroup,
    PauseMode,
    Rollout,
    Sample,
    Sampling,
    Status,
    TaskSpec,
)
from rollnest._host_messages import (
    Appended,
    Ask,
    Did,
    Dropped,
    End,
    Ended,
    Generate,
    JudgeGroup,
    Resampled,
    RunMember,
    UseTool,
)
from rollnest.errors import EndOfPrompts, HostLost, LoopError, Starved
from rollnest.testing import (
    RecordingInstrument,
    assert_conserved,
    check_sample,
    virtual_backends,
)

from .helpers import prompts, spec
from .local_hosts import LocalHosts
from .test_hosting_machine import STEPS, Do, count, history
from .test_replayable_groups import (
    Board,
    Loop,
    Outcome,
    World,
    each_loop,
    outcome,
    seconds_of,
    server,
    task_of,
    until_the_end,
)

pytestmark = pytest.mark.anyio


class GroupLoop(AgentLoop):
    """A group loop made of a function; it can't be replayed."""

    def __init__(self, solve: Callable[[LiveGroup], Awaitable[None]]) -> None:
        self.solve = solve

    async def generate_sample(self, rollout: Rollout) -> None:
        await rollout.generate()

    async def generate_group(self, group: LiveGroup) -> None:
        await self.solve(group)


def group_task(loop: AgentLoop, **options: Any) -> TaskSpec:
    """A task of groups of two, whose turns take 2 s, one second a token."""
    defaults = {"sampling": Sampling(2), "judger": None, "shuffle": False}
    return spec(loop=loop, **(defaults | options))


async def run_all(group: LiveGroup) -> None:
    await group.each(group.run)


async def killed(loop: Loop, workers: int, *times: float) -> Outcome:
    """Runs a task to its end, and kills the host that has the most to do at these times."""
    hosts = LocalHosts(loop, workers)
    task = task_of(loop)
    task = spec(
        loop=hosts,
        **{
            name: getattr(task, name)
            for name in ("prompts", "judger", "group_size", "sampling", "shuffle", "epochs")
        },
        strategy=task.strategy,
    )
    controller, batches = server(), list[Batch]()
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(until_the_end, engine, batches)
        began = anyio.current_time()
        for at in times:
            await sleep_until(began + at)
            hosts.kill()
            assert_conserved(engine, committed=controller.committed)
    assert_conserved(engine, committed=controller.committed)
    prompted.append(len(controller.prompts))
    return outcome(loop, engine, batches, RecordingInstrument())


prompted: list[int] = []
"""How many requests each run of `killed` took."""


def same(one: Outcome, other: Outcome) -> bool:
    """All but what instruments were told."""
    mine = [
        (o.groups, o.shrunk, o.members, o.failures, o.world.tools, o.world.judged, o.world.ranked)
        for o in (one, other)
    ]
    return mine[0] == mine[1]


@each_loop
@pytest.mark.parametrize("workers", [1, 3])
async def test_one_argument_says_where_a_group_loop_runs(kind: type[Loop], workers: int) -> None:
    whole, _ = await seconds_of(kind)
    assert same(await killed(kind(World()), workers), whole)


@each_loop
async def test_a_group_whose_host_is_lost_goes_on_elsewhere(kind: type[Loop]) -> None:
    whole, seconds = await seconds_of(kind)
    prompted.clear()
    await killed(kind(World()), 2)
    for cut in range(int(seconds / 1.3)):
        at = 0.13 + 1.3 * cut
        assert same(await killed(kind(World()), 2, at), whole), at
    assert len(set(prompted)) == 1  # no turn was asked for twice


@each_loop
async def test_lost_three_times_a_group_goes_on(kind: type[Loop]) -> None:
    whole, seconds = await seconds_of(kind)
    times = [seconds * part for part in (0.2, 0.45, 0.7)]
    assert same(await killed(kind(World()), 1, *times), whole)


async def test_a_group_that_can_not_be_replayed_begins_anew_elsewhere_once() -> None:
    where: list[str] = []
    hosts: LocalHosts

    async def solve(group: LiveGroup) -> None:
        (at,) = [h.there.name for h in hosts.living if "task/p0/0" in h.here.sessions]
        where.append(at)
        first, second = group.rollouts
        await group.run(first)
        await group.run(second)

    hosts = LocalHosts(GroupLoop(solve))
    controller = server()
    got: list[Batch] = []

    async def take() -> None:
        got.append(await engine.next_batch(1))

    async with Engine(controller, group_task(hosts)) as engine, create_task_group() as tasks:
        tasks.start_soon(take)
        await sleep(3)
        hosts.kill()
        assert_conserved(engine, committed=controller.committed)
    assert len(set(where)) == 2
    assert [sample.prompt.uid for sample in got[0].samples] == ["p0", "p0"]
    figures = engine.statistics().tasks["task"]
    assert (figures.redrawn, figures.delivered, figures.replayed_turns) == (1, 1, 0)
    assert figures.members_shrunk == {"restarted": 1, "aborted": 1}
    assert_conserved(engine, committed=controller.committed)


@pytest.mark.parametrize("replayable", [False, True])
async def test_a_group_loop_that_brings_its_host_down_fails_its_group(replayable: bool) -> None:
    hosts: LocalHosts

    async def solve(group: LiveGroup) -> None:
        if group.prompt.uid == "p3":
            (at,) = [host for host in hosts.living if "task/p3/3" in host.here.sessions]
            hosts.kill(at)
            await sleep_forever()
        await group.each(group.run)

    loop = GroupLoop(solve)
    loop.replayable = replayable
    hosts = LocalHosts(loop, 2)
    async with Engine(server(), group_task(hosts, prompts=prompts(8))) as engine:
        result = await engine.evaluate("task")
        assert_conserved(engine)
    failed = {s.prompt.uid: s.failure.message for s in result.samples if s.failure}
    assert list(failed) == ["p3"]
    assert "what ran the group loop was lost 4 times" in failed["p3"]
    assert hosts.kills == 4
    assert {len(s.segments[0]) for s in result.samples if not s.failure} == {2}


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_needs_no_host(mode: PauseMode) -> None:
    loop = Board(World())
    hosts = LocalHosts(loop, 2)
    controller = server()
    got: list[Batch] = []

    async def take() -> None:
        got.append(await engine.next_batch(2))

    task = group_task(hosts, group_size=3, judger=loop.world.length)
    async with Engine(controller, task) as engine, create_task_group() as tasks:
        tasks.start_soon(take)
        await sleep(5.5)
        hosts.kill()
        async with engine.paused(mode, grace=0.0) as pause:
            assert pause.quiet_seconds == 0.0
            assert controller.open == {} or mode is PauseMode.KEEP
            if mode is PauseMode.EVICT:
                assert await hosts.orphans() == []
            else:
                await sleep(100)
                assert len(await hosts.orphans()) >= 4
            assert_conserved(engine)
    for sample in got[0].samples:
        check_sample(sample)
        assert len(sample.turns) == 2
    assert await hosts.orphans() == []
    assert_conserved(engine, committed=controller.committed)


async def test_a_cancelled_group_loop_has_ended_before_its_group_has() -> None:
    ended: list[str] = []

    class Slow(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            await linger(rollout.uid, rollout.generate())

    async def linger(what: str, first: Awaitable[object]) -> None:
        try:
            await first
            await sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await sleep(0.5)
            ended.append(what)

    async def solve(group: LiveGroup) -> None:
        await linger("group", group.each(group.run))

    hosts = LocalHosts(Slow(solve))
    async with Engine(server(), group_task(hosts)) as engine:
        with move_on_after(3):
            await engine.next_batch(1)
        began = anyio.current_time()
        async with engine.paused(PauseMode.EVICT):
            assert sorted(ended) == ["group", "task/p0/0/0", "task/p0/0/1"]
            assert await hosts.orphans() == []
        assert anyio.current_time() - began == pytest.approx(1.0)


@pytest.mark.parametrize("deaf", ["to all", "in a member"])
async def test_a_host_that_does_not_end_a_group_loop_is_given_up_within_grace(deaf: str) -> None:
    async def solve(group: LiveGroup) -> None:
        await group.each(group.run)

    loop = GroupLoop(solve)
    hosts = LocalHosts(loop, 1)
    async with Engine(server(), group_task(hosts)) as engine:
        with move_on_after(1):
            await engine.next_batch(1)
        (host,) = hosts.living
        group_session = min(host.there.sessions)
        host.deaf = lambda message: (
            isinstance(message, End) and (deaf == "to all" or message.session != group_session)
        )
        began = anyio.current_time()
        async with engine.paused(PauseMode.EVICT):
            pass
        if deaf == "to all":
            assert anyio.current_time() - began == pytest.approx(5.0)
            assert host.there.lost is not None
            assert "it did not end the loop of task/p0/0" in host.there.lost
        else:  # whoever ends the group ends its members
            assert anyio.current_time() == began
            assert host.there.lost is None
        (group,) = (await engine.next_batch(1)).groups
    assert group.status is Status.COMPLETED
    assert await hosts.orphans() == []


async def test_what_a_group_loop_cancels_itself_has_ended_there_and_here() -> None:
    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts
        with move_on_after(1.5):
            await group.run(first)
        assert len(first.response) == 1
        assert (await first.generate(max_tokens=1)).ids.tolist()  # it may go on by hand
        with pytest.raises(LoopError, match="was run and cancelled"):
            await group.run(first)
        await group.run(group.resample(first))
        with move_on_after(0.5):
            await second.generate()
        await second.generate()

    seen: list[list[list[int]]] = []
    for where in (GroupLoop(solve), LocalHosts(GroupLoop(solve), 1)):
        controller = server()
        async with Engine(controller, group_task(where)) as engine:
            batch = await engine.next_batch(1)
        assert_conserved(engine, committed=controller.committed)
        seen.append([sample.segments[0].ids.tolist() for sample in batch.samples])
        assert [len(sample.turns) for sample in batch.samples] == [1, 1]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("limits", [Limits(sample=3.0), Limits(group=3.0)])
async def test_limits_end_what_runs_there(limits: Limits) -> None:
    cut: list[str] = []

    class Endless(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            try:
                await rollout.generate()
                await sleep_forever()
            finally:
                cut.append(rollout.uid)

    hosts = LocalHosts(Endless(run_all), 1)
    async with Engine(server(), group_task(hosts, limits=limits, prompts=prompts(1))) as engine:
        result = await engine.evaluate("task")
    assert sorted(cut) == ["task/p0/0/0", "task/p0/0/1"]
    messages = {s.failure.message for s in result.samples if s.failure}
    (message,) = messages
    assert "took over 3.0 s" in message
    assert await hosts.orphans() == []


async def test_dropped_while_its_turn_runs_the_loop_ends_there() -> None:
    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts
        ended: list[Sample] = []

        async def run() -> None:
            ended.append(await group.run(second))

        async with create_task_group() as tasks:
            tasks.start_soon(run)
            await sleep(0.5)
            group.drop(second, "slow")
            with pytest.raises(LoopError, match="no member"):
                await group.run(second)
        assert [s.status for s in ended] == [Status.ABORTED]
        assert ended[0].prompt is group.prompt
        await group.run(first)
        assert group.samples[0].prompt is group.prompt

    hosts = LocalHosts(GroupLoop(solve), 1)
    async with Engine(server(), group_task(hosts)) as engine:
        batch = await engine.next_batch(1)
    assert len(batch.groups[0]) == 1
    assert engine.statistics().tasks["task"].members_shrunk == {"slow": 1}


async def test_dropped_while_parts_of_it_run_side_by_side_all_of_them_end() -> None:
    class Parts(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            async with create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(rollout.segment([30 + number]).generate)

    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts
        async with create_task_group() as tasks:
            tasks.start_soon(group.run, second)
            await sleep(0.5)
            assert len(controller.open) == 3
            group.drop(second, "slow")
            await sleep(0.1)
            assert not controller.open
        await group.run(first)

    controller = server()
    hosts = LocalHosts(Parts(solve), 1)
    async with Engine(controller, group_task(hosts)) as engine:
        batch = await engine.next_batch(1)
    assert len(batch.groups[0]) == 1
    assert_conserved(engine, committed=controller.committed)


async def test_what_another_task_asked_a_member_for_is_answered_though_its_run_ends() -> None:
    async def slow() -> int:
        await sleep(3)
        return 1

    async def solve(group: LiveGroup) -> None:
        first, second = group.rollouts

        async def meddle() -> None:
            await sleep(0.5)
            answers.append(await first.tool(slow))

        async with create_task_group() as tasks:
            tasks.start_soon(meddle)
            await group.run(first)
            assert answers == []
        await group.run(second)

    answers: list[int] = []
    for where in (GroupLoop(solve), LocalHosts(GroupLoop(solve), 1)):
        answers.clear()
        async with Engine(server(), group_task(where)) as engine:
            await engine.next_batch(1)
        assert answers == [1]


async def test_what_a_loop_shares_between_members_is_shared_there() -> None:
    """Members run in the task that asked for it: what is around it is around them."""
    around: list[str] = []
    place = ContextVar("place", default="nowhere")

    class Sharing(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            around.append(place.get())
            await rollout.generate()

    async def solve(group: LiveGroup) -> None:
        place.set(f"in {group.prompt.uid}")
        await group.each(group.run)

    async with Engine(server(), group_task(LocalHosts(Sharing(solve)))) as engine:
        await engine.next_batch(1)
    assert around == ["in p0", "in p0"]


async def test_a_long_group_keeps_one_task_for_each_of_the_loops() -> None:
    """A task that moves from member to member is served by the same tasks all the time."""
    most = 0

    async def solve(group: LiveGroup) -> None:
        nonlocal most

        async def side() -> None:
            nonlocal most
            for number in range(20):
                for rollout in group.rollouts:
                    await rollout.tool(count, number, 0.1)
                most = max(most, len(anyio.get_running_tasks()))

        async with create_task_group() as tasks:
            tasks.start_soon(side)
        await group.each(group.run)

    async with Engine(server(), group_task(LocalHosts(GroupLoop(solve), 1))) as engine:
        await engine.next_batch(1)
    assert 0 < most < 30


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Ask(1, 0, 0, (), RunMember(77)), "names session 77, which is no member of task/p0/0"),
        (
            Ask(1, 0, 0, (), UseTool("t", ("t", ""), "recorded", "rerun")),
            "asks the group task/p0/0",
        ),
        (Resampled(1, 2, 5), "gives a fresh member the session 5"),
        (Resampled(1, -7, -1), "names session -7"),
        (Dropped(1, 9, "late"), "names member 9 of task/p0/0"),
        (Dropped(1, 0, ""), "needs a reason"),
        (Did(2, [Appended(3, array("i", [1]))]), "names context 3 of 1"),
        (Ask(2, 0, 0, (), Generate(4, None, None)), "names context 4 of 1"),
        (Ask(2, 0, 0, (), JudgeGroup()), "asks task/p0/0/0 for JudgeGroup"),
    ],
)
async def test_what_a_host_says_is_checked_before_it_changes_anything(
    message: Any, said: str
) -> None:
    heard: list[str] = []

    async def solve(group: LiveGroup) -> None:
        hosts.all[0].send_back(message)
        await sleep(1)
        await group.each(group.run)

    hosts = LocalHosts(GroupLoop(solve), 1)
    send = hosts.start

    def start() -> Any:
        host = send()
        there = host.there.send

        def listen(sent: Any) -> None:
            error = getattr(sent, "error", None)
            if error is not None:
                heard.append(str(error))
            there(sent)

        host.there.send = listen
        return host

    hosts.start = start  # type: ignore[method-assign]
    async with Engine(server(), group_task(hosts, prompts=prompts(1))) as engine:
        result = await engine.evaluate("task")
    failures = [sample.failure.message for sample in result.samples if sample.failure]
    assert any(said in what for what in (*heard, *failures)), (heard, failures)
    assert await hosts.orphans() == []


async def test_messages_of_a_group_that_is_over_are_dropped() -> None:
    hosts = LocalHosts(GroupLoop(run_all), 1)
    async with Engine(server(), group_task(hosts)) as engine:
        await engine.next_batch(1)
        (host,) = hosts.living
        for message in (Ended(1), Dropped(1, 0, "late"), Resampled(1, 2, -9), Did(2, ())):
            host.there.receive(message)
        assert_conserved(engine)


async def test_a_failure_there_is_the_failure_here() -> None:
    async def solve(group: LiveGroup) -> None:
        await group.run(group.rollouts[0])
        raise ValueError("of the user's own")

    failures: list[Failure | None] = []
    for where in (GroupLoop(solve), LocalHosts(GroupLoop(solve))):
        async with Engine(server(), group_task(where, prompts=prompts(1), epochs=1)) as engine:
            with pytest.raises((Starved, EndOfPrompts)):
                await engine.next_batch(1)
            result = await engine.evaluate("task")
        first, second = result.samples
        assert first.failure is None
        failures.append(second.failure)
    assert failures[0] is not None
    assert failures[1] is not None
    assert (failures[0].kind, failures[0].message) == (failures[1].kind, failures[1].message)
    assert "in solve" in failures[1].traceback


@pytest.mark.parametrize("hosted", [False, True])
async def test_a_member_whose_loop_says_that_it_was_lost_goes_on_alone(hosted: bool) -> None:
    runs: list[str] = []

    class Sandboxed(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            runs.append(rollout.uid)
            await rollout.generate()
            if runs.count("task/p0/0/1") == 1:
                raise HostLost("the sandbox is gone")
            await rollout.generate()

    async def solve(group: LiveGroup) -> None:
        for rollout in group.rollouts:
            sample = await group.run(rollout)
            assert len(sample.turns) == 2
            assert len(group.rollouts[rollout.index].turns) == 2

    loop = Sandboxed(solve)
    controller = server()
    async with Engine(controller, group_task(LocalHosts(loop) if hosted else loop)) as engine:
        await engine.next_batch(1)
    assert runs == ["task/p0/0/0", "task/p0/0/1", "task/p0/0/1"]
    assert len(controller.prompts) == 4
    assert engine.statistics().tasks["task"].redrawn == 0
    assert_conserved(engine, committed=controller.committed)


async def test_a_group_goes_to_one_host_and_groups_are_spread() -> None:
    where: dict[str, set[str]] = {}
    hosts: LocalHosts

    class Where(GroupLoop):
        async def generate_sample(self, rollout: Rollout) -> None:
            (at,) = [h.there.name for h in hosts.all if rollout.uid in h.here.sessions]
            where.setdefault(rollout.prompt.uid, set()).add(at)
            await rollout.generate()

    hosts = LocalHosts(Where(run_all), 3)
    async with Engine(server(), group_task(hosts, prompts=prompts(6), group_size=3)) as engine:
        await engine.evaluate("task")
    assert all(len(names) == 1 for names in where.values())
    assert Counter(name for names in where.values() for name in names) == {
        "host0": 2,
        "host1": 2,
        "host2": 2,
    }


class Played(AgentLoop):
    """Some of everything: runs, turns by hand, tools of the group's, members that leave, cancelled turns."""

    def __init__(self, *, replayable: bool) -> None:
        self.replayable = replayable

    async def generate_sample(self, rollout: Rollout) -> None:
        await rollout.generate(max_tokens=3)
        rollout.append([700 + await rollout.tool(count, rollout.index, 1.0)])
        await rollout.generate(max_tokens=2)

    async def generate_group(self, group: LiveGroup) -> None:
        first, second, third = group.rollouts
        dice = first.random
        if dice.random() < 0.5:
            first.append([600 + await first.tool(count, 7, 1.0)])
            await second.generate(max_tokens=2)
        if dice.random() < 0.3:
            await group.run(third)
            group.drop(third, "not needed")
        if dice.random() < 0.5:
            await group.run(first)
        await group.each(group.run)


@pytest.mark.parametrize("make", virtual_backends(), ids=["asyncio", "trio"])
@pytest.mark.parametrize("replayable", [False, True])
def test_any_history_of_killed_hosts_keeps_the_invariants(make: Any, replayable: bool) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(STEPS, st.sampled_from(["take", "leave", "cancel"]), st.integers(1, 3))
    def run(steps: Sequence[Do], end: str, workers: int) -> None:
        backend, options = make()
        hosts = LocalHosts(Played(replayable=replayable), workers)
        main: Any = history
        seen.update(
            anyio.run(main, hosts, hosts, steps, end, backend=backend, backend_options=options)
        )

    run()
    assert seen["kills"] > 8
    assert seen["delivered"] > 5
    assert (seen["replayed_turns"] > 10) is replayable
    assert seen["diverged"] == 0
