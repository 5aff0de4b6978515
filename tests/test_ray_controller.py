"""A policy in an actor, under a whole engine: pauses, updates, deaths, restarts, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection
from typing import Any

import anyio
import pytest
import ray

from rollnest import AsyncStrategy, Attempt, Engine, PauseMode, Sampling
from rollnest.abc import Capabilities, FinishReason
from rollnest.errors import EngineBroken, InferenceError, WeightsState, WeightUpdateFailed
from rollnest.testing import ScriptedController, assert_conserved
from rollnest_adapters.pool import ControllerPool
from rollnest_adapters.ray import (
    GenerateReply,
    GenerateRequest,
    PolicyHost,
    RayController,
    RayMethods,
    RayOptions,
    call,
    policy_actor,
)
from tests.helpers import spec
from tests.ray_actors import HANG, method, remote, until
from tests.ray_policies import ScriptedHost, scripted, stalled

pytestmark = [pytest.mark.ray, pytest.mark.anyio, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: Any) -> Any:
    return request.param


@pytest.fixture(scope="module")
def shared(local_ray: None) -> Any:
    return policy_actor(scripted(stop_every=10**9), host=ScriptedHost)


@pytest.fixture
async def actor(shared: Any) -> Any:
    """A policy that is where it began; whoever used it must have left nothing there."""
    await call(shared.restart)
    yield shared
    assert await call(shared.tasks) == []
    assert await call(shared.in_flight) == ()
    figures = await call(shared.figures)
    assert (figures["open"], figures["while_paused"], figures["refused"]) == ([], 0, [])


def attempt(first: int = 1, max_tokens: int = 8) -> Attempt:
    return Attempt([first, 7, 5], max_tokens=max_tokens, sampling=Sampling(max_tokens))


async def in_flight(actor: Any, number: int) -> None:
    """Waits until the actor has that many calls of `generate`."""

    async def has_all() -> bool:
        return len(await call(actor.in_flight)) == number

    await until(has_all)


# Pauses and updates


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.EVICT, PauseMode.KEEP, PauseMode.WAIT])
async def test_a_pause_with_an_update_keeps_every_token(actor: Any, mode: PauseMode) -> None:
    """BUG-031: partials are read; BUG-063: nothing frozen is aborted by an update."""
    controller = RayController(actor)
    task = spec(sampling=Sampling(6), strategy=AsyncStrategy(max_staleness=1, lead=0))
    batches: list[Any] = []
    with anyio.fail_after(HANG):
        await call(actor.hold, 3)
        async with Engine(controller, task, batch_size=2) as engine:

            async def take() -> None:
                batches.append(await engine.next_batch(2, wait_in_pause=True))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take)
                await in_flight(actor, 4)
                if mode is PauseMode.WAIT:
                    await call(actor.let_go)
                async with engine.paused(mode=mode) as pause:
                    await pause.update_weights({"layer": [2.0]})
                if mode is not PauseMode.WAIT:
                    await call(actor.let_go)
            assert engine.version == 1
            samples = [sample for group in batches[0].groups for sample in group.samples]
            assert all(len(sample.segments[0].response) == 6 for sample in samples)
            if mode is not PauseMode.WAIT:
                versions = {v for s in samples for v in s.segments[0].response.versions}
                assert versions == {0, 1}
        assert_conserved(engine, committed=controller.tokens_committed)
    assert engine.statistics().total("flight") == 0


async def test_an_update_brings_weights_through_the_object_store(actor: Any) -> None:
    with anyio.fail_after(HANG):
        async with RayController(actor) as controller:
            await controller.pause(PauseMode.ABORT)
            await controller.update_weights({"layer": list(range(1000))}, 3)
            await controller.update_weights("/a/path", 4)
            moved: list[str] = []

            async def move() -> None:
                moved.append("here")

            await controller.update_weights(move, 5)
            assert moved == ["here"]
            assert await controller.version() == 5
            await controller.resume()
    log = (await call(actor.figures))["log"]
    assert [entry[1] for entry in log if entry[0] == "update_weights"][-3:] == [3, 4, 5]


async def test_a_callable_that_fails_leaves_unknown_weights(actor: Any) -> None:
    async def move() -> None:
        raise OSError("the network is down")

    with anyio.fail_after(HANG):
        async with RayController(actor) as controller:
            await controller.pause(PauseMode.ABORT)
            with pytest.raises(WeightUpdateFailed, match="the network is down") as caught:
                await controller.update_weights(move, 1)
    assert caught.value.weights is WeightsState.UNKNOWN


# Many at once


async def test_bug_067_control_calls_pass_1500_calls_in_flight(actor: Any) -> None:
    """Ray runs a thousand calls of an actor at once; control calls don't stand behind them."""
    many = [attempt(1 + number % 900) for number in range(1500)]
    with anyio.fail_after(HANG):
        async with RayController(actor) as controller, anyio.create_task_group() as tasks:
            async with stalled(actor, after=2):
                for one in many:
                    tasks.start_soon(controller.generate, one)
                await in_flight(actor, 1500)
                assert (await controller.health()).running == 1500
                await controller.abort(None)
                await in_flight(actor, 0)
                await controller.pause(PauseMode.ABORT)
                await controller.resume()
        assert {one.finish_reason for one in many} == {FinishReason.ABORT}
        assert all(len(one.received) == 2 for one in many)


async def test_calls_that_are_cancelled_at_once_leave_nothing_in_the_actor(actor: Any) -> None:
    """BUG-092, also for those that had only just been sent: Ray loses such cancellations."""
    with anyio.fail_after(HANG):
        async with RayController(actor, grace=HANG) as controller, stalled(actor, after=2):
            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    tasks.start_soon(controller.generate, attempt(1 + number))
                await in_flight(actor, 200)
                tasks.cancel_scope.cancel()
            assert await call(actor.in_flight) == ()
            assert controller.open_requests == ()


async def test_no_more_is_sent_than_the_actor_runs_and_the_rest_can_be_aborted(actor: Any) -> None:
    many = [attempt(1 + number) for number in range(6)]
    with anyio.fail_after(HANG):
        async with (
            RayController(actor, max_in_flight=2) as controller,
            anyio.create_task_group() as tasks,
        ):
            async with stalled(actor, after=2) as stall:
                for one in many:
                    tasks.start_soon(controller.generate, one)
                await stall.reached()
                await in_flight(actor, 2)
                assert len(controller.open_requests) == 6
                sent = set(await call(actor.in_flight))
                waiting = [one for one in many if one.id not in sent]
                await controller.abort([waiting[0].id])
                while waiting[0].finish_reason is None:
                    await anyio.lowlevel.checkpoint()
                assert waiting[0].finish_reason is FinishReason.ABORT
                assert len(waiting[0].received) == 0
        assert sum(one.finish_reason is FinishReason.LENGTH for one in many) == 5


async def test_an_abort_that_overtakes_its_request_is_kept_for_it(actor: Any) -> None:
    with anyio.fail_after(HANG):
        async with RayController(actor) as controller:
            one = attempt()
            await call(actor.abort, [one.id])
            await controller.generate(one)
            assert one.finish_reason is FinishReason.ABORT
            await controller.generate(other := attempt())
            assert other.finish_reason is FinishReason.LENGTH


# Whoever leaves leaves nothing


async def test_a_cancelled_engine_leaves_nothing_in_the_actor(actor: Any) -> None:
    controller = RayController(actor)
    engine = Engine(controller, spec(group_size=4))
    with anyio.fail_after(HANG):
        await call(actor.hold, 3)
        with anyio.CancelScope() as scope:
            async with engine, anyio.create_task_group() as tasks:
                tasks.start_soon(engine.next_batch, 8)
                await in_flight(actor, 32)
                scope.cancel()
        await call(actor.let_go)
        assert scope.cancelled_caught
        assert await call(actor.in_flight) == ()
        assert (await call(actor.figures))["log"][-1] == ("exit", 0)
        assert await call(actor.tasks) == []
    assert_conserved(engine, committed=controller.tokens_committed)


async def test_leaving_in_a_pause_ends_the_pause(actor: Any) -> None:
    with anyio.fail_after(HANG):
        async with RayController(actor) as controller:
            await controller.pause(PauseMode.ABORT)
            await controller.release(["kv"])
        assert not (await call(actor.figures))["paused"]
        async with RayController(actor) as controller:
            await controller.generate(attempt())


async def test_the_newest_controller_has_the_policy_and_the_one_before_is_told(actor: Any) -> None:
    """A driver that died without a word can't keep others from its detached actor."""
    with anyio.fail_after(HANG):
        async with RayController(actor) as first, anyio.create_task_group() as tasks:
            cut = attempt()

            async def is_cut() -> None:
                with pytest.raises(InferenceError, match="not served any more"):
                    await first.generate(cut)

            async with stalled(actor, after=2) as stall:
                tasks.start_soon(is_cut)
                await stall.reached()
                async with RayController(actor) as second:
                    assert await call(actor.in_flight) == ()
                    late = GenerateRequest.of(attempt(), serve=first._name)
                    with pytest.raises(InferenceError, match="taken the policy over"):
                        await call(actor.generate, late)
                    assert first._stay is not None
                    await first._stay.wait()
                    for use in (first.generate(attempt()), first.pause(), first.health()):
                        with pytest.raises(InferenceError, match="taken the policy over") as told:
                            await use
                        assert not told.value.retryable
                    with anyio.CancelScope() as scope:
                        scope.cancel()
                        await second.generate(attempt())


# Actors that die


class MortalHost(ScriptedHost):
    """May be killed from within."""

    @method(concurrency_group="control")
    async def die(self) -> None:
        os._exit(9)


def mortal(**options: Any) -> Any:
    return policy_actor(scripted(stop_every=10**9), host=MortalHost, options=RayOptions(**options))


async def kill(actor: Any) -> None:
    with pytest.raises(Exception, match=r"unavailable|died"):
        await call(actor.die)


@pytest.fixture(scope="module")
def immortal(local_ray: None) -> Any:
    return mortal(max_restarts=-1)


async def test_bug_084_an_actor_that_is_restarted_in_mid_turn_costs_no_sample(
    immortal: Any,
) -> None:
    actor = immortal
    await call(actor.restart)
    controller = RayController(actor)
    with anyio.fail_after(HANG):
        async with Engine(controller, spec(sampling=Sampling(6)), outage=HANG) as engine:
            async with anyio.create_task_group() as tasks:
                batches: list[Any] = []

                async def take() -> None:
                    batches.append(await engine.next_batch(2))

                await call(actor.hold, 3)
                tasks.start_soon(take)
                await in_flight(actor, 4)
                await kill(actor)
            assert len(batches[0].groups) == 2
            figures = engine.statistics()
            assert (figures.total("drawn"), figures.total("delivered")) == (2, 2)
            assert await call(actor.in_flight) == ()
    assert_conserved(engine)


async def test_an_actor_that_lost_its_weights_serves_again_once_it_has_them(immortal: Any) -> None:
    """It comes back with what it was started with; nothing is sampled from that."""
    actor = immortal
    await call(actor.restart)
    controller = RayController(actor)
    with anyio.fail_after(HANG):
        async with Engine(
            controller, spec(sampling=Sampling(6)), outage=HANG, control_timeout=HANG
        ) as engine:
            async with engine.paused() as pause:
                await pause.update_weights({}, version=1)
            await kill(actor)
            async with anyio.create_task_group() as tasks:
                batches: list[Any] = []

                async def take() -> None:
                    batches.append(await engine.next_batch(1, wait_in_pause=True))

                tasks.start_soon(take)

                async def is_outdated() -> bool:
                    try:
                        await controller.generate(attempt())
                    except InferenceError as error:
                        return "the policy is at 1" in str(error)
                    return False

                await until(is_outdated)
                async with engine.paused() as pause:
                    await pause.update_weights({}, version=2)
            versions = {
                version
                for sample in batches[0].groups[0].samples
                for version in sample.segments[0].response.versions
            }
            assert versions == {2}


async def test_bug_088_an_actor_that_is_dead_for_good_breaks_the_engine_in_time() -> None:
    actor = mortal()
    controller = RayController(actor)
    broken: list[EngineBroken] = []

    async def train() -> None:
        with pytest.raises(EngineBroken) as caught:
            async with Engine(controller, spec(), outage=0.1) as engine:
                await engine.next_batch(1)
        broken.append(caught.value)

    with anyio.fail_after(HANG):
        await call(actor.hold, 3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await in_flight(actor, 2)
            await kill(actor)
    causes = [cause for cause in broken[0].causes if "died" in str(cause)]
    assert causes
    assert all(isinstance(cause, InferenceError) and cause.retryable for cause in causes)


async def test_a_pool_of_actors_goes_on_when_one_dies_and_has_it_back_with_its_weights(
    immortal: Any, actor: Any
) -> None:
    await call(immortal.restart)
    pool = ControllerPool(
        {"mortal": RayController(immortal), "other": RayController(actor)},
        check_every=0.1,
        backoff=0.1,
        check_timeout=HANG,
    )
    with anyio.fail_after(HANG):
        async with Engine(pool, spec(group_size=8, sampling=Sampling(6))) as engine:
            async with engine.paused() as pause:
                await pause.update_weights("/weights/1")
            await call(immortal.hold, 3)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.next_batch, 2)
                await in_flight(immortal, 8)
                await kill(immortal)
            assert engine.statistics().total("delivered") == 2
            assert engine.statistics().outages == 0

            async def is_back() -> bool:
                return all(server.state == "serving" for server in pool.servers)

            await until(is_back)
            assert (await call(immortal.figures))["held"] == 1


# Entering


def broken_policy() -> ScriptedController:
    raise OSError("no weights on this node")


async def test_a_policy_that_can_not_be_made_says_why() -> None:
    actor = policy_actor(broken_policy)
    with anyio.fail_after(HANG):
        for _ in range(2):
            with pytest.raises(OSError, match="no weights on this node"):
                async with RayController(actor):
                    pass
    ray.kill(actor)


async def test_an_actor_without_a_place_is_not_waited_for_for_ever() -> None:
    actor = policy_actor(scripted(), options=RayOptions(num_gpus=64))
    with anyio.fail_after(HANG):
        with pytest.raises(InferenceError, match=r"did not begin within 0\.1 s"):
            async with RayController(actor, start_timeout=0.1):
                pass
    ray.kill(actor)


async def test_what_can_not_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def make() -> ScriptedController:
        lock.acquire()
        return ScriptedController()

    with pytest.raises(TypeError, match=r"make must be picklable.* but lock is not"):
        policy_actor(make)


async def test_without_ray_nothing_is_started(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = RayController(actor)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(RuntimeError, match=r"call ray\.init\(\) first"):
            policy_actor(scripted())
        with pytest.raises(RuntimeError, match=r"call ray\.init\(\) first"):
            async with controller:
                pass


# Actors of the user's own


class SeedActor:
    """What trainers have: no concurrency group, no lifetime, and a limit that is soon reached."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.stopped: set[str] = set()
        self.calls: list[str] = []
        self.running = 0
        self.changed = asyncio.Condition()

    async def generate(self, request: GenerateRequest) -> Any:
        self.running += 1
        try:
            async with self.changed:
                await self.changed.wait_for(
                    lambda: request.id in self.stopped or self.go_on.is_set()
                )
        finally:
            self.running -= 1
        if request.id in self.stopped:
            return GenerateReply(ids=[1], logprobs=[-0.5], finish_reason="abort")
        return self.answer(request.prompt_ids[0])

    def answer(self, first: int) -> Any:
        match first:
            case 91:
                return {"ids": [1]}
            case 92:
                return GenerateReply(ids=[1, 2], logprobs=[-0.5], finish_reason="stop")
            case 93:
                return GenerateReply(ids=[1], logprobs=[-0.5], finish_reason="tired")
            case 94:
                return GenerateReply(ids=[1], logprobs=[-0.5], finish_reason="stop", versions=2)
            case _:
                return GenerateReply(ids=[1, 2], logprobs=[-0.5, -0.25], finish_reason="stop")

    async def shut(self) -> None:
        self.go_on.clear()
        self.calls.clear()

    async def open_up(self) -> None:
        self.go_on.set()
        async with self.changed:
            self.changed.notify_all()

    async def abort(self, ids: Collection[str]) -> None:
        self.calls.append("abort")
        self.stopped.update(ids)
        async with self.changed:
            self.changed.notify_all()

    async def pause_generation(self) -> None:
        self.calls.append("pause")

    async def continue_generation(self) -> None:
        self.calls.append("continue")

    async def state(self) -> tuple[int, list[str]]:
        return self.running, self.calls


@pytest.fixture(scope="module")
def seed(local_ray: None) -> Any:
    return remote(SeedActor, max_concurrency=4).remote()


KNOWN = Capabilities(vocab_size=100, max_context=100)


async def test_an_actor_with_the_methods_that_trainers_have_is_enough(seed: Any) -> None:
    """BUG-067: with one limit for all calls, room is kept for the control calls."""
    actor = seed
    await call(actor.shut)
    controller = RayController(actor, capabilities=KNOWN, max_in_flight=2)
    many = [attempt() for _ in range(8)]
    with anyio.fail_after(HANG):
        async with controller, anyio.create_task_group() as tasks:
            for one in many:
                tasks.start_soon(controller.generate, one)

            async def is_busy() -> bool:
                return bool((await call(actor.state))[0] == 2)

            await until(is_busy)
            await controller.abort(None)
            await controller.pause(PauseMode.ABORT)
        assert {one.finish_reason for one in many} == {FinishReason.ABORT}
        assert sorted(len(one.received) for one in many) == [0] * 6 + [1] * 2
        assert (await call(actor.state)) == (0, ["abort", "pause", "continue"])


async def test_what_an_actor_lacks_is_named(seed: Any) -> None:
    with pytest.raises(TypeError, match="has no method 'answers', which is to generate"):
        RayController(seed, capabilities=KNOWN, methods=RayMethods(generate="answers"))
    with pytest.raises(TypeError, match="has no method 'get_version', which is to version"):
        RayController(seed, capabilities=KNOWN, methods=RayMethods(version="get_version"))
    with pytest.raises(TypeError, match="capabilities are needed"):
        RayController(seed)
    with pytest.raises(TypeError, match="handle must be an actor's handle, got 3"):
        RayController(3)
    with anyio.fail_after(HANG):
        async with RayController(seed, capabilities=KNOWN) as controller:
            assert await controller.version() is None
            assert (await controller.health()).running is None
            await controller.pause(PauseMode.ABORT)
            with pytest.raises(WeightUpdateFailed, match="no method that updates weights"):
                await controller.update_weights({}, 1)


async def test_an_answer_that_breaks_a_rule_is_refused(seed: Any) -> None:
    with anyio.fail_after(HANG):
        await call(seed.open_up)
        async with RayController(seed, capabilities=KNOWN) as controller:
            for first, why in ((91, "GenerateReply"), (92, "logprobs"), (93, "'tired'")):
                with pytest.raises(InferenceError, match=f"unusable.*{why}"):
                    await controller.generate(attempt(first))
            old = attempt(94)
            old.version = 5
            with pytest.raises(InferenceError, match="holds weights of version 2") as caught:
                await controller.generate(old)
    assert caught.value.retryable


def test_a_host_is_for_subclasses() -> None:
    assert issubclass(ScriptedHost, PolicyHost)
