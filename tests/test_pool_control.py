"""Control calls of a pool go to all servers side by side, under deadlines; servers join and leave while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from anyio import create_task_group, current_time, fail_after, move_on_after, sleep, sleep_forever

from rollnest import AsyncStrategy, Attempt, Capabilities, Engine, PauseMode, Sampling, Status
from rollnest.abc import FinishReason, Health, InferenceController, ReleaseTag, WeightSource
from rollnest.errors import (
    EngineBroken,
    InferenceError,
    PauseFailed,
    WeightsState,
    WeightUpdateFailed,
)
from rollnest.testing import RecordingInstrument, ScriptedController, assert_conserved, check_sample
from rollnest_adapters.pool import (
    AdaptiveConcurrency,
    ControllerPool,
    PoolUpdateFailed,
    ServerState,
)

from .helpers import prompts, spec

pytestmark = pytest.mark.anyio

AHEAD = AsyncStrategy(max_staleness=3)


class Slow(ScriptedController):
    """Control calls take some time, hang, or fail."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"rate": 10.0, "stop_every": 10**9, "stream": True}
        super().__init__(**(defaults | options))
        self.takes: dict[str, float] = {}
        self.hangs: set[str] = set()
        self.fails: dict[str, Exception] = {}

    async def _do(self, call: str) -> None:
        if call in self.hangs:
            await sleep_forever()
        await sleep(self.takes.get(call, 0.0))
        if error := self.fails.get(call):
            raise error.with_traceback(None)

    async def abort(self, ids: Collection[str] | None) -> None:
        await self._do("abort")
        await super().abort(ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._do("pause")
        await super().pause(mode)

    async def resume(self) -> None:
        await self._do("resume")
        await super().resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        await self._do("update")
        await super().update_weights(source, version)

    async def health(self) -> Health:
        await self._do("health")
        return await super().health()

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        await self._do("release")
        await super().release(tags)

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        await self._do("reload")
        await super().reload(tags)

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == name]


def some(names: str = "abc", **options: Any) -> dict[str, Slow]:
    return {name: Slow(**options) for name in names}


def attempt(number: int = 0, *, affinity: str = "", max_tokens: int = 20) -> Attempt:
    return Attempt(
        [1 + number, 2], max_tokens=max_tokens, sampling=Sampling(max_tokens), affinity=affinity
    )


def state(pool: ControllerPool, name: str) -> ServerState:
    (found,) = [server for server in pool.servers if server.name == name]
    return found


def states(pool: ControllerPool) -> dict[str, str]:
    return {server.name: server.state for server in pool.servers}


def settled(engine: Engine, servers: Collection[ScriptedController]) -> None:
    assert all(not server.open for server in servers)
    assert all(server.while_paused == 0 for server in servers)
    assert all(server.refused == [] for server in servers)
    assert_conserved(engine, committed=sum(server.committed for server in servers))


# Pause and resume


async def test_control_calls_go_to_all_side_by_side() -> None:
    servers = some()
    for one in servers.values():
        one.takes = {"pause": 3.0, "update": 3.0, "resume": 3.0, "release": 3.0, "reload": 3.0}
    async with ControllerPool(servers) as pool:
        for call in (
            pool.pause(PauseMode.ABORT),
            pool.release(["kv", "weights"]),
            pool.reload(["kv", "weights"]),
            pool.update_weights({}, 1),
            pool.resume(),
        ):
            before = current_time()
            await call
            assert current_time() - before == pytest.approx(3.0)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_pauses_of_every_mode_over_three_servers(mode: PauseMode) -> None:
    servers = some()
    task = spec(strategy=AHEAD, group_size=4, sampling=Sampling(30))
    async with Engine(ControllerPool(servers), task, batch_size=3) as engine:
        for _ in range(6):
            await sleep(0.35)
            async with engine.paused(mode, grace=1.0) as pause:
                if mode is not PauseMode.KEEP:
                    assert not any(one.open for one in servers.values())
                made = [one.sampled for one in servers.values()]
                await sleep(5)
                assert [one.sampled for one in servers.values()] == made
                await pause.update_weights({})
            batch = await engine.next_batch()
            for sample in batch.samples:
                check_sample(sample)
        assert len({one.weights is not None for one in servers.values()}) == 1
    settled(engine, servers.values())


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_server_that_dies_does_not_keep_a_pause_from_coming_about(
    mode: PauseMode, silent: bool
) -> None:
    servers = some()
    task = spec(strategy=AHEAD, group_size=4, sampling=Sampling(30))
    pool = ControllerPool(servers)
    async with Engine(pool, task, batch_size=3) as engine:
        await sleep(0.75)
        servers["a"].crash(silent=silent)
        before = current_time()
        async with engine.paused(mode, grace=4.0) as pause:
            assert current_time() - before <= 20.0
            await pause.update_weights({})
            if not silent:
                assert states(pool) == {"a": "out", "b": "serving", "c": "serving"}
        for _ in range(4):
            batch = await engine.next_batch()
            assert len(batch) == 3
            for sample in batch.samples:
                check_sample(sample)
        servers["a"].restart()
        await sleep(60)
        assert states(pool) == {"a": "stale", "b": "serving", "c": "serving"}
        async with engine.paused(mode) as pause:
            await pause.update_weights({})
        await sleep(5)
        assert states(pool) == {"a": "serving", "b": "serving", "c": "serving"}
    settled(engine, servers.values())


async def test_a_server_that_works_and_does_not_confirm_fails_the_pause() -> None:
    servers, recording = some(), RecordingInstrument()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=3, instruments=[recording]) as engine:
        await sleep(0.35)
        servers["b"].hangs.add("pause")
        before = current_time()
        with pytest.raises(PauseFailed, match="b: no answer within 10 s"):
            async with engine.paused():
                pytest.fail("the pause came about")
        assert current_time() - before <= 16.0
        assert set(states(pool).values()) == {"serving"}
        assert all(one.calls("resume") for one in servers.values())
        servers["b"].hangs.clear()
        await engine.next_batch()
        async with engine.paused() as pause:
            await pause.update_weights({})
    settled(engine, servers.values())


async def test_a_pause_with_no_server_left_fails() -> None:
    servers = some("ab")
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=3) as engine:
        await sleep(0.35)
        for one in servers.values():
            one.crash()
        with pytest.raises(PauseFailed, match="no server of the pool serves"):
            async with engine.paused():
                pytest.fail("the pause came about")
        for one in servers.values():
            one.restart()
        await engine.next_batch()
    settled(engine, servers.values())


async def test_a_pool_whose_servers_all_restarted_gets_the_weights_with_the_next_update() -> None:
    servers = some("ab")
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=3) as engine:
        async with engine.paused() as pause:
            await pause.update_weights({})
        for one in servers.values():
            one.crash()
        await sleep(5)
        for one in servers.values():
            one.restart()
        await sleep(60)
        assert set(states(pool).values()) == {"stale"}
        async with engine.paused() as pause:
            await pause.update_weights({})
        with fail_after(100):
            await engine.next_batch()
        assert set(states(pool).values()) == {"serving"}
    settled(engine, servers.values())


async def test_a_server_that_can_not_resume_is_out_and_comes_back() -> None:
    servers = some()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=3) as engine:
        await engine.next_batch()
        async with engine.paused() as pause:
            await pause.update_weights({})
            servers["b"].fails["resume"] = InferenceError("503: not yet", retryable=True)
        assert states(pool) == {"a": "serving", "b": "out", "c": "serving"}
        assert state(pool, "b").why == "it did not resume: 503: not yet"
        await engine.next_batch()
        await sleep(3)
        assert "it could not be brought back: 503: not yet" in state(pool, "b").why
        servers["b"].fails.clear()
        await sleep(30)
        assert set(states(pool).values()) == {"serving"}
    settled(engine, servers.values())


async def test_if_no_server_resumes_it_is_asked_again_until_one_does() -> None:
    servers = some("ab")
    for one in servers.values():
        one.fails["resume"] = InferenceError("503: not yet", retryable=True)
    async with ControllerPool(servers) as pool:
        await pool.pause(PauseMode.ABORT)
        with pytest.raises(InferenceError, match="a: 503: not yet; b: 503: not yet"):
            await pool.resume()
        servers["a"].fails.clear()
        await pool.resume()
        assert states(pool) == {"a": "serving", "b": "out"}


async def test_an_abort_reaches_the_server_that_has_the_turn_and_no_other() -> None:
    servers = some()
    many = [attempt(number) for number in range(9)]
    async with ControllerPool(servers, concurrency=2) as pool:
        async with create_task_group() as tasks:
            for one in many:
                tasks.start_soon(pool.generate, one)
                await sleep(0.001)
            await sleep(0.5)
            assert [len(one.open) for one in servers.values()] == [2, 2, 2]
            await pool.abort([many[0].id, many[8].id, "unknown"])
            await sleep(0.01)
            assert many[0].finish_reason is many[8].finish_reason is FinishReason.ABORT
            assert len(many[0].received) == 5
            assert len(many[8].received) == 0  # it had waited for a server
            assert servers["a"].calls("abort") == [("abort", (many[0].id,))]
            assert not servers["b"].calls("abort")
            assert not servers["c"].calls("abort")
            await pool.abort(None)
        assert [one.finish_reason for one in many] == [FinishReason.ABORT] * 9
        assert all(("abort", None) in one.log for one in servers.values())


async def test_a_server_that_does_not_hear_an_abort_keeps_no_other_from_hearing_it() -> None:
    servers = some("ab")
    servers["a"].hangs.add("abort")
    async with ControllerPool(servers) as pool, create_task_group() as tasks:
        many = [attempt(number) for number in range(4)]
        for one in many:
            tasks.start_soon(pool.generate, one)
            await sleep(0.001)
        before = current_time()
        with pytest.raises(
            InferenceError, match="not every server did abort: a: no answer within 1 s"
        ):
            await pool.abort(None)
        assert current_time() - before == pytest.approx(1.0)
        assert [one.finish_reason for one in many] == [None, FinishReason.ABORT] * 2


# New weights


async def test_an_update_that_fails_on_a_server_says_which_servers_have_which_weights() -> None:
    servers = some()
    servers["b"].fails["update"] = WeightUpdateFailed("no such file", weights=WeightsState.OLD)
    servers["c"].fails["update"] = RuntimeError("half of it was there")
    pool = ControllerPool(servers)
    task = spec(strategy=AHEAD, group_size=4)
    async with Engine(pool, task, batch_size=2) as engine:
        await engine.next_batch()
        with pytest.raises(PoolUpdateFailed) as caught:
            async with engine.paused() as pause:
                await pause.update_weights({})
        assert str(caught.value) == (
            "version 1 did not load on every server: a has new weights; b has old weights (no such file); "
            "c has unknown weights (half of it was there)"
        )
        assert caught.value.servers == {
            "a": WeightsState.NEW,
            "b": WeightsState.OLD,
            "c": WeightsState.UNKNOWN,
        }
        assert caught.value.weights is WeightsState.NEW
        assert engine.version == 1
        assert states(pool) == {"a": "serving", "b": "stale", "c": "stale"}
        before = [len(one.prompts) for one in servers.values()]
        for _ in range(8):
            await engine.next_batch()
        batch = await engine.next_batch()
        assert {sample.segments[0].response.newest_version for sample in batch.samples} == {1}
        after = [len(one.prompts) for one in servers.values()]
        assert after[0] > before[0]
        assert after[1:] == before[1:]
        for one in servers.values():
            one.fails.clear()
        async with engine.paused() as pause:
            await pause.update_weights({})
        await sleep(1)
        assert set(states(pool).values()) == {"serving"}
    settled(engine, servers.values())


async def test_an_update_that_fails_everywhere_changes_nothing() -> None:
    servers = some("ab", update_error=WeightUpdateFailed("no such file", weights=WeightsState.OLD))
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        with pytest.raises(PoolUpdateFailed) as caught:
            async with engine.paused() as pause:
                await pause.update_weights({})
        assert caught.value.weights is WeightsState.OLD
        assert engine.version == 0
        assert set(states(pool).values()) == {"serving"}
        await engine.next_batch()


async def test_an_update_after_which_nobody_knows_anything_may_be_tried_again() -> None:
    servers = some("ab", update_error=RuntimeError("half of it was there"))
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        async with engine.paused() as pause:
            with pytest.raises(PoolUpdateFailed) as caught:
                await pause.update_weights({})
            assert caught.value.weights is WeightsState.UNKNOWN
            for one in servers.values():
                one.update_error = None
            await pause.update_weights({})
        assert set(states(pool).values()) == {"serving"}
        await engine.next_batch()
        for one in servers.values():
            one.update_error = RuntimeError("half of it was there")
        with pytest.raises(PoolUpdateFailed):
            async with engine.paused() as pause:
                await pause.update_weights({})
        with pytest.raises(EngineBroken):
            await engine.next_batch()


async def test_a_server_that_hangs_in_an_update_does_not_keep_the_others() -> None:
    servers = some("ab")
    servers["a"].hangs.add("update")
    pool = ControllerPool(servers, update_timeout=50.0)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        before = current_time()
        async with engine.paused() as pause:
            with pytest.raises(
                PoolUpdateFailed, match=r"a has unknown weights \(no answer within 50 s\)"
            ):
                await pause.update_weights({})
            assert current_time() - before == pytest.approx(50.0)
        assert engine.version == 1
        assert states(pool) == {"a": "stale", "b": "serving"}
        await engine.next_batch()


async def test_a_callable_moves_the_weights_to_all_servers_once() -> None:
    servers, moved = some(), 0

    async def move() -> None:
        nonlocal moved
        await sleep(1)
        moved += 1

    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        async with engine.paused() as pause:
            await pause.update_weights(move)
        assert moved == 1
        assert [await one.version() for one in servers.values()] == [1, 1, 1]
        async with engine.paused() as pause:
            pause.published(7)
        assert [await one.version() for one in servers.values()] == [7, 7, 7]
        await engine.next_batch()
        assert set(states(pool).values()) == {"serving"}


@pytest.mark.parametrize("held", [WeightsState.OLD, WeightsState.UNKNOWN])
async def test_a_callable_that_fails_says_what_is_held(held: WeightsState) -> None:
    servers = some("ab")

    async def move() -> None:
        raise WeightUpdateFailed("the broadcast failed", weights=held)

    async with ControllerPool(servers) as pool:
        await pool.pause(PauseMode.ABORT)
        with pytest.raises(WeightUpdateFailed, match="the broadcast failed"):
            await pool.update_weights(move, 1)
        await pool.resume()
        expected = "serving" if held is WeightsState.OLD else "stale"
        assert set(states(pool).values()) == {expected}


async def test_a_server_that_comes_back_in_a_pause_is_paused_and_updated_with_the_others() -> None:
    servers = some()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        servers["a"].crash()
        async with engine.paused() as pause:
            await sleep(10)
            servers["a"].restart()
            await sleep(60)
            await pause.update_weights({})
        await sleep(1)
        assert set(states(pool).values()) == {"serving"}
        assert await servers["a"].version() == 1
        assert servers["a"].calls("pause")
    settled(engine, servers.values())


# Memory


@pytest.mark.parametrize("dies", ["before", "released", None])
async def test_memory_is_given_back_by_all_that_live(dies: str | None) -> None:
    servers = some()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        await sleep(0.35)
        if dies == "before":
            servers["a"].crash()
        async with engine.paused(release=("kv", "weights")) as pause:
            await sleep(10)
            if dies == "released":
                servers["a"].crash()
                await sleep(10)
            await pause.update_weights({})
        for _ in range(6):
            await engine.next_batch()
        assert states(pool) == {"a": "out" if dies else "serving", "b": "serving", "c": "serving"}
        servers["a"].restart(version=1)
        await sleep(60)
        assert set(states(pool).values()) == {"serving"}
    settled(engine, servers.values())


async def test_a_server_that_was_out_while_memory_was_released_reloads_it_when_it_is_back() -> None:
    servers = some("ab")
    async with ControllerPool(servers) as pool:
        await pool.pause(PauseMode.ABORT)
        await pool.release(["kv", "weights"])
        servers["a"].fails["health"] = InferenceError("a proxy is down", retryable=True)
        await sleep(10)
        assert states(pool) == {"a": "out", "b": "serving"}
        await pool.reload(["kv", "weights"])
        await pool.resume()
        servers["a"].fails.clear()
        await sleep(60)
        assert set(states(pool).values()) == {"serving"}
        assert ("reload", ("kv", "weights")) in [
            (entry[0], tuple(sorted(entry[1]))) for entry in servers["a"].calls("reload")
        ]
        await pool.generate(attempt())
        await pool.generate(attempt())
    assert servers["a"].refused == []


# Coming and going


async def test_a_server_joins_while_turns_wait_for_room() -> None:
    servers, late = some("a"), Slow()
    async with ControllerPool(servers, concurrency=2) as pool, create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(pool.generate, attempt(number, max_tokens=100))
        await sleep(1)
        await pool.join("b", late)
        assert states(pool) == {"a": "serving", "b": "serving"}
        await sleep(1)
        assert [server.turns for server in pool.servers] == [2, 2]
    assert late.log[-1] == ("exit", 0)


async def test_who_joins_with_other_weights_waits_for_an_update_or_gets_them_from_the_path() -> (
    None
):
    servers = some("a", version=3)
    async with ControllerPool(servers) as pool:
        assert await pool.version() == 3
        await pool.join("b", Slow(version=1))
        await sleep(60)
        assert state(pool, "b").why == "it holds version 1, not version 3"
        for number in range(4):
            await pool.generate(attempt(number))
        assert state(pool, "b").served == 0
        await pool.pause(PauseMode.ABORT)
        await pool.update_weights("/weights/4", 4)
        await pool.resume()
        await sleep(1)
        assert states(pool) == {"a": "serving", "b": "serving"}
        late = Slow(version=1)
        await pool.join("c", late)
        await sleep(1)
        assert states(pool)["c"] == "serving"
        assert late.weights == "/weights/4"
        assert await late.version() == 4


async def test_who_joins_in_a_pause_serves_after_it() -> None:
    servers, late = some("a"), Slow()
    pool = ControllerPool(servers)
    async with Engine(pool, spec(strategy=AHEAD), batch_size=2) as engine:
        async with engine.paused() as pause:
            await pool.join("b", late)
            await sleep(5)
            assert late.sampled == 0
            await pause.update_weights({})
        await sleep(1)
        assert states(pool) == {"a": "serving", "b": "serving"}
        await engine.next_batch()
    settled(engine, [servers["a"], late])


async def test_who_can_not_do_what_was_promised_does_not_join() -> None:
    servers = some("a")
    async with ControllerPool(servers) as pool:
        poor = Slow(
            capabilities=Capabilities(vocab_size=1000, max_context=4096, stop_token_ids={0})
        )
        with pytest.raises(
            ValueError, match="server 'b' can't join: the pool has promised sampling"
        ):
            await pool.join("b", poor)
        assert poor.log[-1] == ("exit", 0)
        other = Slow(vocab_size=5)
        with pytest.raises(ValueError, match="'the pool' and 'b' differ in vocab_size: 1000 and 5"):
            await pool.join("b", other)
        down = Slow()
        down.crash()
        with pytest.raises(InferenceError, match="server 'b' did not open: connection refused"):
            await pool.join("b", down)
        with pytest.raises(ValueError, match="has a server 'a' already"):
            await pool.join("a", Slow())
        with pytest.raises(ValueError, match="name must not be empty"):
            await pool.join(" ", Slow())
        await pool.join("b", Slow())
        assert states(pool) == {"a": "serving", "b": "serving"}
    with pytest.raises(InferenceError, match="not open"):
        await pool.join("c", Slow())


async def test_a_join_that_is_cancelled_leaves_nothing() -> None:
    servers = some("a")
    async with ControllerPool(servers) as pool:
        hung = Slow()
        hung.crash(silent=True)
        with move_on_after(3) as scope:
            await pool.join("b", hung)
        assert scope.cancelled_caught
        assert states(pool) == {"a": "serving"}
        assert hung.log[-1] == ("exit", 0)


async def test_a_server_that_leaves_keeps_its_turns_as_long_as_it_may() -> None:
    servers = some("ab")
    async with ControllerPool(servers) as pool:
        short, long = attempt(0, affinity="s"), attempt(2, max_tokens=200)
        lost: list[InferenceError] = []

        async def generate(one: Attempt) -> None:
            try:
                await pool.generate(one)
            except InferenceError as error:
                lost.append(error)

        async with create_task_group() as tasks:
            for one in (short, attempt(1), long):
                tasks.start_soon(generate, one)
                await sleep(0.001)
            await sleep(1)
            assert [len(one.open) for one in servers.values()] == [2, 1]
            before = current_time()
            tasks.start_soon(generate, attempt(affinity="s"))
            with fail_after(11):
                await pool.leave("a", grace=10.0)
            assert current_time() - before == pytest.approx(10.0)
        assert short.finish_reason is FinishReason.LENGTH
        assert long.finish_reason is None
        assert len(long.received) >= 100
        (error,) = lost
        assert error.failover
        assert str(error) == "server 'a' is out: it leaves"
        assert states(pool) == {"b": "serving"}
        assert servers["a"].log[-1] == ("exit", 0)
        with pytest.raises(ValueError, match=r"the pool has no server 'a', only \['b'\]"):
            await pool.leave("a")
        with pytest.raises(ValueError, match="grace must be >= 0, got -1"):
            await pool.leave("b", grace=-1)


async def test_servers_change_under_a_run_and_no_token_is_lost() -> None:
    servers = some("ab")
    pool = ControllerPool(servers)
    every = list(servers.values())
    task = spec(group_size=8, prompts=prompts(20), epochs=1, sampling=Sampling(60))
    recording = RecordingInstrument()
    async with Engine(pool, task, instruments=[recording]) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 20)
            for number in range(8):
                await sleep(0.45)
                every.append(Slow())
                await pool.join(f"new {number}", every[-1])
                await sleep(0.2)
                await pool.leave(pool.servers[0].name, grace=0.3)
    assert len(recording.samples) == 160
    for sample in recording.samples:
        assert sample.status is Status.COMPLETED
        check_sample(sample)
    asked = Counter(tuple(ids) for one in every for ids in one.prompts)
    assert (
        len([ids for ids in asked if len(ids) > 2]) > 20
    )  # continued elsewhere, from what they had
    assert engine.statistics().failed_requests == 0
    settled(engine, every)


async def test_a_pool_whose_last_server_leaves_waits_for_another() -> None:
    servers, late, recording = some("a"), Slow(), RecordingInstrument()
    pool = ControllerPool(servers)
    task = spec(group_size=4, prompts=prompts(4), epochs=1)
    async with Engine(pool, task, instruments=[recording]) as engine:
        async with create_task_group() as tasks:
            tasks.start_soon(engine.next_batch, 4)
            await sleep(0.55)
            await pool.leave("a", grace=0)
            await sleep(30)
            assert recording.named("outage_began") == [
                ("no server of the pool serves: a: it leaves",)
            ]
            with pytest.raises(InferenceError, match="no server of the pool serves: it has none"):
                await pool.generate(attempt())
            await pool.join("b", late)
    assert all(sample.status is Status.COMPLETED for sample in recording.samples)
    settled(engine, [servers["a"], late])


# Opening and closing


async def test_a_server_that_does_not_open_closes_the_others_again() -> None:
    servers = some()
    servers["b"].crash()
    with pytest.raises(InferenceError, match="server 'b' did not open: connection refused"):
        async with ControllerPool(servers):
            pytest.fail("it opened")
    assert all(one.log[-1] == ("exit", 0) for one in servers.values())


async def test_servers_that_differ_are_no_pool() -> None:
    servers = {"a": Slow(), "b": Slow(vocab_size=7)}
    with pytest.raises(ValueError, match="'a' and 'b' differ in vocab_size"):
        async with ControllerPool(servers):
            pytest.fail("it opened")
    assert all(one.log[-1] == ("exit", 0) for one in servers.values())


async def test_a_pool_that_opens_on_several_versions_serves_the_newest() -> None:
    servers = {"a": Slow(version=2), "b": Slow(version=3), "c": Slow(version=3)}
    async with ControllerPool(servers) as pool:
        assert states(pool) == {"a": "stale", "b": "serving", "c": "serving"}
        assert await pool.version() == 3


async def test_an_engine_that_starts_paused_goes_on_once_all_servers_have_its_weights() -> None:
    servers = some("ab")
    pool = ControllerPool(servers)
    async with Engine(pool, spec(), version=5, start_paused=True) as engine:
        async with create_task_group() as tasks:
            for one in servers.values():

                async def load(one: ScriptedController = one) -> None:
                    await sleep(20)
                    one.crash()
                    one.restart(version=5)

                tasks.start_soon(load)
            with fail_after(200):
                await engine.next_batch(1, wait_in_pause=True)
        assert current_time() >= 20
        await sleep(1)
        assert set(states(pool).values()) == {"serving"}


async def test_a_pool_that_is_left_ends_what_is_in_flight_and_what_waits() -> None:
    servers = some("ab")
    errors: list[InferenceError] = []

    async def generate(pool: ControllerPool, number: int) -> None:
        try:
            await pool.generate(attempt(number))
        except InferenceError as error:
            errors.append(error)

    pool = ControllerPool(servers, concurrency=1)
    async with create_task_group() as tasks:
        async with pool:
            for number in range(4):
                tasks.start_soon(generate, pool, number)
            await sleep(0.55)
    assert [str(error) for error in errors] == ["the pool is not open"] * 4
    assert not any(one.open for one in servers.values())
    policy: InferenceController = pool
    for call in (policy.abort(None), policy.version(), policy.health(), policy.resume()):
        with pytest.raises(InferenceError, match="not open"):
            await call
    assert pool.servers == ()
    async with pool:  # and may be opened again
        await pool.generate(attempt())


async def test_a_server_that_hangs_does_not_keep_an_engine_from_ending() -> None:
    class Stuck(Slow):
        async def __aexit__(self, *error: object) -> None:
            await super().__aexit__(None, None, None)
            await sleep_forever()

    servers = {"a": Stuck(), "b": Slow()}
    async with Engine(ControllerPool(servers), spec()) as engine:
        await engine.next_batch(1)
        before = current_time()
    assert current_time() - before == pytest.approx(5.0)
    assert servers["b"].log[-1] == ("exit", 0)


# How many turns


async def test_limits_follow_the_servers_own_load() -> None:
    servers = some("ab", rate=1.0)
    limit = AdaptiveConcurrency(start=8, most=64)
    async with (
        ControllerPool(servers, concurrency=limit, check_every=1.0) as pool,
        create_task_group() as tasks,
    ):
        servers["a"].load = Health(running=4, waiting=4)
        servers["b"].load = Health(running=8, waiting=0)
        for number in range(200):
            tasks.start_soon(pool.generate, attempt(number, max_tokens=100))
        await sleep(1.5)
        assert [server.limit for server in pool.servers] == [6, 9]
        await sleep(20)
        assert (state(pool, "a").limit, state(pool, "a").turns) == (6, 8)
        servers["a"].load = Health(running=4, waiting=2)
        await sleep(85)  # its first turns end, and no new one begins before that
        assert (state(pool, "a").limit, state(pool, "a").turns) == (4, 6)
        assert state(pool, "b").limit == 64
        assert state(pool, "b").turns == 64
        assert state(pool, "b").load == Health(running=8, waiting=0)
        tasks.cancel_scope.cancel()


async def test_health_adds_up_what_the_servers_say() -> None:
    servers = some()
    async with ControllerPool(servers) as pool:
        servers["a"].load = Health(running=3, waiting=1, cache=0.2)
        servers["b"].load = Health(running=4, waiting=0, cache=0.7)
        servers["c"].load = Health(running=0, waiting=0, cache=0.0)
        assert await pool.health() == Health(running=7, waiting=1, cache=0.7)
        servers["c"].load = Health(running=0)
        assert await pool.health() == Health(running=7)
        servers["c"].crash()
        assert await pool.health() == Health(running=7, waiting=1, cache=0.7)
        servers["a"].crash()
        servers["b"].crash()
        with pytest.raises(InferenceError, match="not every server did health"):
            await pool.health()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"servers": []}, TypeError, r"servers must map names to controllers, got \[\]"),
        ({"servers": {}}, ValueError, "servers must not be empty, got {}"),
        ({"servers": {"": Slow()}}, ValueError, "a server's name must not be empty, got ''"),
        ({"servers": {1: Slow()}}, TypeError, "a server's name must be a string, got 1"),
        ({"concurrency": 0}, ValueError, "concurrency must be >= 1, got 0"),
        ({"concurrency": "many"}, TypeError, "concurrency must be an int, got 'many'"),
        ({"sticky": -1}, ValueError, "sticky must be >= 0, got -1"),
        ({"check_every": 0}, ValueError, "check_every must be > 0 and finite, got 0"),
        ({"control_timeout": None}, TypeError, "control_timeout must be a number, got None"),
        ({"max_backoff": float("inf")}, ValueError, "max_backoff must be > 0 and finite, got inf"),
    ],
)  # fmt: skip
def test_bad_options(options: dict[str, Any], error: type[Exception], named: str) -> None:
    defaults: dict[str, Any] = {"servers": {"a": Slow()}}
    with pytest.raises(error, match=named):
        ControllerPool(**(defaults | options))
