"""A pool of servers: who gets a turn, what becomes of turns whose server dies, and who comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import anyio
import pytest
from anyio import create_task_group, current_time, fail_after, sleep

from rollnest import (
    AsyncStrategy,
    Attempt,
    Engine,
    PauseMode,
    Prompt,
    Rollout,
    Sampling,
    Status,
)
from rollnest.abc import Health
from rollnest.errors import EngineBroken, InferenceError, UnsupportedSampling
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    Script,
    ScriptedController,
    assert_conserved,
    check_sample,
    expected_token,
)
from rollnest_adapters.pool import ControllerPool, ServerState

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio


def server(script: Script | None = None, **options: Any) -> ScriptedController:
    """Makes ten tokens a second, each of them sent at once."""
    defaults: dict[str, Any] = {"rate": 10.0, "stop_every": 10**9, "stream": True}
    return ScriptedController(script, **(defaults | options))


def two(**options: Any) -> dict[str, ScriptedController]:
    return {"a": server(**options), "b": server(**options)}


def attempt(number: int = 0, *, affinity: str = "", max_tokens: int = 20) -> Attempt:
    return Attempt(
        [1 + number, 2], max_tokens=max_tokens, sampling=Sampling(max_tokens), affinity=affinity
    )


def state(pool: ControllerPool, name: str) -> ServerState:
    (found,) = [server for server in pool.servers if server.name == name]
    return found


def settled(engine: Engine, servers: Collection[ScriptedController]) -> None:
    assert all(not server.open for server in servers)
    assert all(server.while_paused == 0 for server in servers)
    assert all(server.refused == [] for server in servers)
    assert_conserved(engine, committed=sum(server.committed for server in servers))


@contextmanager
def fails(match: str, *, failover: bool = False) -> Generator[None]:
    with pytest.raises(InferenceError, match=match) as caught:
        yield
    assert caught.value.retryable
    assert caught.value.failover is failover


# A server dies


@pytest.mark.parametrize("silent", [False, True])
async def test_a_server_that_dies_costs_no_rollout_and_no_token(silent: bool) -> None:
    servers, recording = two(), RecordingInstrument()
    task = spec(
        group_size=1, prompts=[Prompt(f"p{i}", token_ids=[1 + i]) for i in range(100)], epochs=1
    )
    pool = ControllerPool(servers)
    batches: list[Any] = []
    held: dict[Attempt, list[int]] = {}
    async with Engine(pool, task, instruments=[recording]) as engine:
        async with create_task_group() as tasks:

            async def take() -> None:
                batches.append(await engine.next_batch(100))

            tasks.start_soon(take)
            await sleep(0.85)
            for answering in servers["a"].open.values():
                held[answering.attempt] = answering.attempt.received.ids.tolist()
            assert len(held) >= 20
            assert sum(len(ids) >= 8 for ids in held.values()) >= 10
            servers["a"].crash(silent=silent)
        (batch,) = batches
        assert len(batch) == 100
        assert len({sample.uid for sample in batch.samples}) == 100
        assert all(sample.status is Status.COMPLETED for sample in batch.samples)
        for sample in batch.samples:
            check_sample(sample)
        # Nobody generates from zero what had tokens; every token is there once, as if nothing had happened.
        asked = Counter(tuple(ids) for one in servers.values() for ids in one.prompts)
        assert set(asked.values()) == {1}
        for one, received in held.items():
            assert asked[*one.prompt_ids, *received] == 1
            assert [*one.prompt_ids, *received] in servers["b"].prompts
        for sample in batch.samples:
            (segment,) = sample.segments
            ids = segment.prompt_ids.tolist()
            for token in segment.ids:
                assert token == expected_token(
                    ids, vocab_size=1000, stop_id=0, stop_every=10**9, salt=sample.uid
                )
                ids.append(token)
        figures = engine.statistics()
        assert figures.outages == figures.failed_requests == 0
        assert figures.tasks["task"].retries == len(held)
        assert not recording.named("outage_began")
    settled(engine, servers.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_without_a_token_go_on_elsewhere_at_once(stream: bool) -> None:
    servers, recording = two(stream=stream), RecordingInstrument()
    task = spec(group_size=4, prompts=prompts(10), epochs=1)
    async with Engine(ControllerPool(servers), task, instruments=[recording]) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 10)
            await sleep(0.05)
            assert len(servers["a"].open) == 20
            servers["a"].crash()
        assert current_time() < 2.2
    assert len(servers["b"].prompts) == 40
    assert engine.statistics().failed_requests == 0
    assert all(sample.status is Status.COMPLETED for sample in recording.samples)
    settled(engine, servers.values())


async def test_the_last_server_to_die_is_an_outage_which_ends_when_one_is_back() -> None:
    servers, recording = two(), RecordingInstrument()
    task = spec(group_size=4, prompts=prompts(10), epochs=1)
    async with Engine(ControllerPool(servers), task, instruments=[recording]) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 10)
            await sleep(1.0)
            servers["a"].crash()
            await sleep(0.5)
            servers["b"].crash()
            await sleep(60)
            (error,) = recording.named("outage_began")
            assert "no server of the pool serves: a: a check failed: connection refused" in str(
                error
            )
            servers["b"].restart()
        assert len(recording.named("outage_ended")) == 1
    assert all(sample.status is Status.COMPLETED for sample in recording.samples)
    settled(engine, servers.values())


async def test_a_pool_that_never_comes_back_breaks_the_engine_with_the_causes() -> None:
    servers = two()
    async with create_task_group() as tasks:

        async def crash() -> None:
            await sleep(1.0)
            for one in servers.values():
                one.crash()

        tasks.start_soon(crash)
        with pytest.raises(EngineBroken) as caught:
            async with Engine(ControllerPool(servers), spec(), outage=100.0) as engine:
                await engine.next_batch(1)
        assert 100 < current_time() < 200
        assert any("connection refused" in str(cause) for cause in caught.value.causes)


async def test_bug_088_a_server_that_dies_under_its_requests_keeps_no_slot() -> None:
    servers = two()
    pool = ControllerPool(servers, concurrency=4)
    async with pool:
        errors: list[InferenceError] = []

        async def generate(number: int) -> None:
            try:
                await pool.generate(attempt(number))
            except InferenceError as error:
                errors.append(error)

        async with create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(generate, number)
            await sleep(0.5)
            servers["a"].crash()
        assert [error.failover for error in errors] == [True] * 4
        assert "server 'a' is out: a check failed: connection refused" in str(errors[0])
        assert state(pool, "a").turns == state(pool, "b").turns == 0


async def test_bug_089_what_a_dead_server_had_answered_is_kept_and_the_rest_goes_elsewhere() -> (
    None
):
    def script(one: Attempt) -> Reply:
        return Reply([5] * one.max_tokens, delay=0.1 * one.max_tokens)

    servers = two(script=script, stream=False)
    pool = ControllerPool(servers)
    async with pool:
        many = [attempt(number, max_tokens=2 if number < 4 else 20) for number in range(10)]
        lost: list[Attempt] = []

        async def generate(one: Attempt) -> None:
            try:
                await pool.generate(one)
            except InferenceError:
                lost.append(one)

        async with create_task_group() as tasks:
            for one in many:
                tasks.start_soon(generate, one)
                await sleep(0.001)
            await sleep(1.0)
            servers["a"].crash()
        assert len(lost) == 3  # of the five that it had, it had answered two
        assert all(one.finish_reason for one in many if one not in lost)
        arrived = len(servers["a"].prompts)
        for number in range(4):
            await pool.generate(attempt(number))
        assert len(servers["a"].prompts) == arrived


# Who gets a turn


async def test_bug_093_ties_rotate_fairly() -> None:
    servers = {name: server() for name in "abc"}
    async with ControllerPool(servers) as pool:
        for number in range(9):
            await pool.generate(attempt(number))
    assert [len(one.prompts) for one in servers.values()] == [3, 3, 3]


async def test_turns_go_to_the_least_loaded_server() -> None:
    servers = two()
    async with ControllerPool(servers) as pool, create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(pool.generate, attempt(number, max_tokens=10 if number % 2 else 99))
            await sleep(0.1)
        await sleep(2)  # those of b have ended
        for number in range(4, 6):
            tasks.start_soon(pool.generate, attempt(number, max_tokens=99))
        await sleep(1)
        assert [one.turns for one in pool.servers] == [2, 2]
        assert len(servers["b"].prompts) == 4


class Sessions(ScriptedController):
    """Keeps whose turns it got."""

    def __init__(self) -> None:
        super().__init__(rate=10.0, stop_every=10**9, stream=True)
        self.sessions: list[str] = []

    async def generate(self, attempt: Attempt) -> None:
        self.sessions.append(attempt.affinity)
        await super().generate(attempt)


async def test_a_rollout_stays_where_its_prefix_is() -> None:
    servers = {name: Sessions() for name in "abc"}

    async def five_turns(rollout: Rollout) -> None:
        for _ in range(5):
            await rollout.generate(max_tokens=rollout.random.randrange(1, 9))
            rollout.append([7])

    task = spec(loop=five_turns, group_size=8, max_response_tokens=200)
    async with Engine(ControllerPool(servers), task, batch_size=4) as engine:
        await engine.next_batch(4)
    for one in servers.values():
        assert set(Counter(one.sessions).values()) == {5}  # all five turns of each, and no other
        assert len(one.sessions) >= 50


async def test_bug_094_a_session_moves_once_when_its_server_is_gone() -> None:
    servers = two()
    async with ControllerPool(servers) as pool:
        await pool.generate(attempt(affinity="s"))
        await pool.generate(attempt(1, affinity="other"))
        for _ in range(3):
            await pool.generate(attempt(affinity="s"))
        assert [len(one.prompts) for one in servers.values()] == [4, 1]
        servers["a"].crash()
        with fails("'a' is out", failover=True):
            await pool.generate(attempt(affinity="s"))
        for _ in range(3):
            await pool.generate(attempt(affinity="s"))
        assert [len(one.prompts) for one in servers.values()] == [4, 4]
        servers["a"].restart()
        await sleep(10)
        assert state(pool, "a").state == "serving"
        for _ in range(3):
            await pool.generate(attempt(affinity="s"))
        assert [len(one.prompts) for one in servers.values()] == [4, 7]


async def test_a_session_leaves_a_server_that_is_overloaded() -> None:
    servers = two()
    async with ControllerPool(servers, sticky=2) as pool, create_task_group() as tasks:
        await pool.generate(attempt(affinity="s", max_tokens=1))
        for _ in range(3):
            tasks.start_soon(pool.generate, attempt(affinity="s"))
            await sleep(0.1)
        assert [one.turns for one in pool.servers] == [3, 0]
        tasks.start_soon(pool.generate, attempt(affinity="s"))
        await sleep(0.1)
        assert [one.turns for one in pool.servers] == [3, 1]


async def test_a_session_is_bound_by_turns_that_went_well() -> None:
    refuses = server(lambda _: Reply([], error=InferenceError("503: busy", retryable=True)))
    servers = {"a": refuses, "b": server()}
    async with ControllerPool(servers) as pool:
        with fails("503: busy"):
            await pool.generate(attempt(affinity="s"))
        for _ in range(4):
            await pool.generate(attempt(affinity="s"))
    assert [len(one.prompts) for one in servers.values()] == [1, 4]


async def test_bug_087_waiting_for_a_server_is_no_failure() -> None:
    servers = two()
    most = 0
    async with ControllerPool(servers, concurrency=4) as pool:
        async with create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(pool.generate, attempt(number, max_tokens=1 + number % 7))
            while len(servers["a"].prompts) + len(servers["b"].prompts) < 200:
                most = max(most, *(one.turns for one in pool.servers))
                await sleep(0.05)
        assert most == 4
        assert [one.failed for one in pool.servers] == [0, 0]
        assert sum(one.served for one in pool.servers) == 200
        assert all(one.served > 80 for one in pool.servers)


async def test_turns_that_wait_are_served_in_their_order() -> None:
    servers = two()
    async with ControllerPool(servers, concurrency=1) as pool, create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(pool.generate, attempt(number, max_tokens=1 + number % 3))
            await sleep(0.001)
    firsts = [[ids[0] for ids in one.prompts] for one in servers.values()]
    assert all(arrived == sorted(arrived) for arrived in firsts)
    assert sorted(firsts[0] + firsts[1]) == list(range(1, 13))


# Whose fault a failed turn is


async def test_bug_085_and_086_the_engine_alone_retries() -> None:
    def script(one: Attempt) -> Reply:
        if one.prompt_ids[0] == 1:
            return Reply([], error=InferenceError("503: down", retryable=True))
        if one.prompt_ids[0] == 2:
            return Reply([], error=InferenceError("400: bad request"))
        return Reply([5, 0], delay=1.0)

    servers, recording = two(script=script), RecordingInstrument()
    task = spec(group_size=1, prompts=prompts(4), epochs=1, shuffle=False)
    async with Engine(ControllerPool(servers), task, instruments=[recording]) as engine:
        batch = await engine.next_batch(4)
    assert [group.prompt.uid for group in batch.groups] == ["p2", "p3"]
    asked = Counter(ids[0] for one in servers.values() for ids in one.prompts if len(ids) == 2)
    assert (
        asked[1] == 6
    )  # as with one server: five tries, and one more once another request has worked
    assert asked[2] == 1
    assert not recording.named("outage_began")
    settled(engine, servers.values())


async def test_a_request_that_a_server_refuses_does_not_cost_the_server_its_place() -> None:
    servers = {"a": server(lambda _: Reply([], error=InferenceError("400: bad request")))}
    async with ControllerPool(servers) as pool:
        for _ in range(5):
            with pytest.raises(InferenceError, match="400: bad request") as caught:
                await pool.generate(attempt(affinity="s"))
            assert not caught.value.retryable
        assert state(pool, "a").state == "serving"


async def test_sampling_that_a_server_refuses_is_told_as_it_is() -> None:
    servers = {"a": server(lambda _: Reply([], error=UnsupportedSampling("top_k=3")))}
    async with ControllerPool(servers) as pool:
        with pytest.raises(UnsupportedSampling, match="top_k=3"):
            await pool.generate(attempt())
        assert state(pool, "a").state == "serving"


async def test_a_server_that_fails_every_turn_is_out_although_it_says_that_it_works() -> None:
    broken = server(lambda _: Reply([], error=InferenceError("500: no GPU", retryable=True)))
    servers = {"a": broken, "b": server()}
    task = spec(group_size=4, prompts=prompts(10), epochs=1)
    async with Engine(ControllerPool(servers), task) as engine:
        with fail_after(60):
            await engine.next_batch(10)
        figures = engine.statistics()
        assert figures.tasks["task"].dropped == {}
    assert broken.committed == 0
    settled(engine, servers.values())


async def test_a_lone_server_is_not_out_because_turns_fail() -> None:
    servers = {"a": server(lambda _: Reply([], error=InferenceError("503", retryable=True)))}
    async with ControllerPool(servers) as pool:
        for number in range(6):
            with fails("503"):
                await pool.generate(attempt(number, affinity=str(number)))
        assert state(pool, "a").state == "serving"


async def test_many_turns_that_fail_at_once_ask_the_server_once() -> None:
    class Counting(ScriptedController):
        checks = 0

        async def health(self) -> Health:
            self.checks += 1
            return await super().health()

    counting = Counting(rate=10.0, stop_every=10**9)
    servers = {"a": counting, "b": server()}
    async with ControllerPool(servers) as pool:
        async with create_task_group() as tasks:
            failovers: list[bool] = []

            async def generate(number: int) -> None:
                try:
                    await pool.generate(attempt(number))
                except InferenceError as error:
                    failovers.append(error.failover)

            for number in range(100):
                tasks.start_soon(generate, number)
            await sleep(0.5)
            counting.checks = 0
            servers["a"].crash()
            await sleep(0.1)
            assert failovers == [True] * 50
            assert counting.checks <= 2


class Hanging(ScriptedController):
    """Its health checks hang, so many of them."""

    hangs = 0

    async def health(self) -> Health:
        if self.hangs:
            self.hangs -= 1
            await anyio.sleep_forever()
        return await super().health()


async def test_a_turn_waits_no_longer_than_two_checks_may_take() -> None:
    bad = Hanging(lambda _: Reply([], error=InferenceError("reset", retryable=True)))
    async with ControllerPool({"a": bad, "b": server()}, check_timeout=3.0) as pool:
        bad.hangs = 100
        before = current_time()
        with fails(
            "a check failed: no answer within 3 s; the turn failed with: reset", failover=True
        ):
            await pool.generate(attempt())
        assert current_time() - before == 6.0


async def test_a_server_that_is_busy_for_one_check_keeps_its_turns() -> None:
    busy = Hanging(rate=10.0, stop_every=10**9, stream=True)
    async with ControllerPool({"a": busy, "b": server()}) as pool, create_task_group() as tasks:
        one = attempt(max_tokens=200)
        tasks.start_soon(pool.generate, one)
        await sleep(1)
        busy.hangs = 1
        await sleep(
            6.7
        )  # the check at 2.5 s is not answered within 5, the next one is at once, at 7.5 s
        assert busy.hangs == 0
        assert state(pool, "a").state == "serving"
        assert state(pool, "a").turns == 1
        tasks.cancel_scope.cancel()


# Coming back


async def test_a_server_that_is_out_is_checked_further_and_further_apart() -> None:
    class Timed(ScriptedController):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        async def health(self) -> Health:
            self.times.append(current_time())
            return await super().health()

    one = Timed()
    async with ControllerPool({"a": one, "b": server()}, backoff=1.0, max_backoff=8.0) as pool:
        one.crash()
        await sleep(60)
        waits = [b - a for a, b in pairwise(one.times)]
        assert waits[:6] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
        assert state(pool, "a").state == "out"
        one.restart()
        await sleep(8.1)
        assert state(pool, "a").state == "serving"
        await pool.generate(attempt(1, affinity="x"))
        await pool.generate(attempt(2, affinity="y"))
        one.crash()
        del one.times[:]
        await sleep(6)
        assert len(one.times) == 3  # it had worked meanwhile, so it begins anew


async def test_a_server_that_restarted_with_old_weights_serves_nobody_until_it_has_the_new() -> (
    None
):
    servers = two()
    task = spec(strategy=AsyncStrategy(max_staleness=5), group_size=4)
    pool = ControllerPool(servers)
    async with Engine(pool, task, batch_size=2) as engine:
        await engine.next_batch()
        async with engine.paused() as pause:
            await pause.update_weights({})
        await engine.next_batch()
        servers["a"].crash()
        await sleep(1)
        servers["a"].restart()
        asked = len(servers["a"].prompts)
        await sleep(60)
        await engine.next_batch()
        assert state(pool, "a").state == "stale"
        assert state(pool, "a").why == "it holds version 0, not version 1"
        assert len(servers["a"].prompts) == asked
        async with engine.paused() as pause:
            await pause.update_weights({})
        await sleep(1)
        assert state(pool, "a").state == "serving"
        for _ in range(12):  # more than was ready before
            batch = await engine.next_batch()
            for sample in batch.samples:
                check_sample(sample)
        assert len(servers["a"].prompts) > asked
    settled(engine, servers.values())


async def test_a_server_that_was_away_is_given_weights_that_came_as_a_path() -> None:
    servers = two()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(), batch_size=1) as engine:
        async with engine.paused() as pause:
            await pause.update_weights("/weights/1")
        servers["a"].crash()
        await sleep(5)
        servers["a"].restart()
        await sleep(5)
        assert state(pool, "a").state == "serving"
        assert servers["a"].weights == "/weights/1"
        assert await servers["a"].version() == 1


async def test_a_server_that_restarts_unseen_answers_nobody_with_old_weights() -> None:
    # It was back before anybody could notice, so the next turn goes there; its tokens are refused, not recorded.
    servers = two()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(group_size=1), batch_size=1) as engine:
        async with engine.paused() as pause:
            await pause.update_weights({})
        await engine.next_batch()
        servers["a"].crash()
        servers["a"].restart()
        for _ in range(3):
            batch = await engine.next_batch()
            (sample,) = batch.samples
            assert sample.segments[0].response.oldest_version == 1
        assert state(pool, "a").state == "stale"
        assert engine.statistics().tasks["task"].dropped == {}


async def test_servers_without_labels_are_not_believed_after_they_were_away() -> None:
    class Unlabelled(ScriptedController):
        async def version(self) -> int | None:
            await super().version()
            return None

    servers = {name: Unlabelled(rate=10.0) for name in "ab"}
    pool = ControllerPool(servers)
    async with pool:
        servers["a"].crash()
        await sleep(5)
        servers["a"].restart()
        await sleep(5)
        assert state(pool, "a").state == "serving"  # no weights but the first ones were ever there
        await pool.pause(PauseMode.ABORT)
        await pool.update_weights({}, 1)
        await pool.resume()
        await sleep(5)
        assert [one.state for one in pool.servers] == ["serving", "serving"]
        servers["a"].crash()
        await sleep(5)
        servers["a"].restart()
        await sleep(60)
        assert state(pool, "a").state == "stale"
        assert state(pool, "a").why == "it holds weights that nobody knows, not version 1"
        await pool.pause(PauseMode.ABORT)
        await pool.update_weights({}, 2)
        await pool.resume()
        await sleep(1)
        assert state(pool, "a").state == "serving"
