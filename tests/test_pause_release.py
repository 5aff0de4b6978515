"""The controller's memory is given back in a pause; no call reaches it that needs what it does not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import anyio
import pytest
from anyio import CancelScope, create_task_group, sleep

from rollnest import AsyncStrategy, Batch, Capabilities, Engine, PauseMode, Sampling
from rollnest.abc import Attempt, ReleaseTag
from rollnest.errors import EngineBroken, EngineBusy, InferenceError, PauseFailed
from rollnest.testing import ScriptedController, assert_conserved

from .helpers import one_name, spec

pytestmark = pytest.mark.anyio

ALL: tuple[ReleaseTag, ...] = ("kv", "weights")
AHEAD = AsyncStrategy(max_staleness=1)


def called(controller: ScriptedController) -> list[Any]:
    """What was called for pauses, in order; of release and reload also the tags."""
    calls: list[Any] = []
    for entry in controller.log:
        if entry[0] in ("release", "reload"):
            calls.append(entry[:2])
        elif entry[0] in ("pause", "resume", "update_weights"):
            calls.append(entry[0])
    return calls


class Faulty(ScriptedController):
    """Release and reload that fail or hang."""

    def __init__(self, **options: Any) -> None:
        super().__init__(rate=10.0, stop_every=10_000, **options)
        self.release_error: Exception | None = None
        self.reload_failures = 0
        self.hang = ""

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        await super().release(tags)
        if self.hang == "release":
            await anyio.sleep_forever()
        if self.release_error is not None:
            raise self.release_error

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        if self.hang == "reload":
            await anyio.sleep_forever()
        if self.reload_failures:
            self.reload_failures -= 1
            raise InferenceError("out of memory", retryable=True)
        await super().reload(tags)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT, PauseMode.EVICT])
@pytest.mark.parametrize("early", [False, True])
async def test_weights_then_update_then_cache_then_resume(mode: PauseMode, early: bool) -> None:
    controller = Faulty()
    async with Engine(controller, spec(strategy=AHEAD), batch_size=1) as engine:
        await sleep(0.5)
        async with engine.paused(mode, release=ALL) as pause:
            assert not controller.open
            await sleep(10)
            if early:
                await pause.reload("weights")
                await pause.reload("weights")  # has been
            await pause.update_weights({})
        assert engine.version == 1
        await engine.next_batch()
    assert called(controller) == [
        "pause",
        ("release", ALL),
        ("reload", ("weights",)),
        "update_weights",
        ("reload", ("kv",)),
        "resume",
    ]
    assert controller.refused == []
    assert_conserved(engine, committed=controller.committed)


async def test_colocated_and_disaggregated_use_are_the_same_code() -> None:
    """Training inside the pause with everything released, or beside production: only the block's place differs."""

    async def train(engine: Engine, *, colocated: bool) -> list[Batch]:
        batches: list[Batch] = []
        for _ in range(3):
            batch = await engine.next_batch()
            batches.append(batch)
            if colocated:
                async with engine.paused(PauseMode.EVICT, release=ALL) as pause:
                    await sleep(5)  # a training step
                    await pause.update_weights({})
            else:
                await sleep(5)
                async with engine.paused() as pause:
                    await pause.update_weights({})
        return batches

    for colocated in (True, False):
        controller = ScriptedController(rate=20.0, stop_every=10_000)
        task = spec(strategy=AsyncStrategy(max_staleness=1, lead=1))
        async with Engine(controller, task, batch_size=2) as engine:
            batches = await train(engine, colocated=colocated)
        assert [batch.version for batch in batches] == [0, 1, 2]
        assert controller.refused == []
        assert controller.while_paused == 0
        assert_conserved(engine, committed=controller.committed)


async def test_published_weights_come_between_weights_and_cache() -> None:
    controller = Faulty()
    async with Engine(controller, spec()) as engine:
        async with engine.paused(release=ALL) as pause:
            with pytest.raises(EngineBusy, match="reload"):
                pause.published(1)
            assert engine.version == 0
            await pause.reload("weights")
            pause.published(1)
    assert called(controller)[2:] == [
        ("reload", ("weights",)),
        "update_weights",
        ("reload", ("kv",)),
        "resume",
    ]


async def test_leaving_by_an_error_reloads() -> None:
    controller = Faulty()
    async with Engine(controller, spec()) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.paused(release=ALL):
                raise ZeroDivisionError
        await engine.next_batch(1)
    assert controller.refused == []


@pytest.mark.parametrize("fault", ["error", "hang"])
async def test_a_failed_release_fails_the_pause_and_everything_is_reloaded(fault: str) -> None:
    controller = Faulty()
    if fault == "error":
        controller.release_error = InferenceError("no room on the host")
    else:
        controller.hang = "release"
    async with Engine(controller, spec(), control_timeout=3.0) as engine:
        before = anyio.current_time()
        with pytest.raises(PauseFailed, match="did not release kv, weights"):
            async with engine.paused(grace=1.0, release=ALL):
                pytest.fail("entered")
        assert anyio.current_time() - before <= 4.0 + 1e-6
        controller.hang, controller.release_error = "", None
        await engine.next_batch(1)
        assert engine.version == 0
    assert called(controller)[-3:] == [("reload", ("weights",)), ("reload", ("kv",)), "resume"]
    assert controller.refused == []


async def test_a_reload_that_fails_is_tried_again() -> None:
    controller = Faulty()
    async with Engine(controller, spec()) as engine:
        async with engine.paused(release=ALL) as pause:
            controller.reload_failures = 1
            with pytest.raises(InferenceError, match="out of memory"):
                await pause.reload("weights")
            controller.reload_failures = 2
        await engine.next_batch(1)
    assert controller.refused == []


@pytest.mark.parametrize("fault", ["error", "hang"])
async def test_what_can_not_be_reloaded_breaks_the_engine(fault: str) -> None:
    controller = Faulty()
    with pytest.raises(EngineBroken, match="did not reload"):
        async with Engine(controller, spec(), control_timeout=2.0) as engine:
            async with engine.paused(release=ALL):
                if fault == "error":
                    controller.reload_failures = 10_000
                else:
                    controller.hang = "reload"
    assert "resume" not in called(controller)
    assert controller.refused == []


async def test_an_update_whose_reload_hangs_changes_nothing() -> None:
    controller = Faulty()
    async with Engine(controller, spec(), control_timeout=2.0) as engine:
        async with engine.paused(release=["weights"]) as pause:
            controller.hang = "reload"
            with pytest.raises(InferenceError, match=r"weights within 2\.0 s"):
                await pause.update_weights({})
            controller.hang = ""
        await engine.next_batch(1)
        assert engine.version == 0


async def test_a_cancelled_release_is_taken_back() -> None:
    controller = Faulty()
    controller.hang = "release"
    async with Engine(controller, spec()) as engine:
        with CancelScope() as scope:
            async with create_task_group() as group:
                group.start_soon(sleep, 0.1)
                group.cancel_scope.deadline = anyio.current_time() + 0.5
                async with engine.paused(release=ALL):
                    pytest.fail("entered")
        assert not scope.cancel_called
        controller.hang = ""
        await engine.next_batch(1)
    assert controller.refused == []


async def test_a_released_pause_that_ends_unknown_reloads_nothing() -> None:
    controller = Faulty(update_error=ZeroDivisionError("who knows"))
    with pytest.raises(EngineBroken):
        async with Engine(controller, spec()) as engine:
            async with engine.paused(release=ALL) as pause:
                with pytest.raises(ZeroDivisionError):
                    await pause.update_weights({})
    assert ("reload", ("kv",)) not in called(controller)
    assert "resume" not in called(controller)
    assert controller.refused == []


@pytest.mark.parametrize(
    ("release", "options", "error", "named"),
    [
        ("kv", {}, TypeError, "release must be a collection.*'kv'"),
        (["gradients"], {}, ValueError, "release holds 'gradients'.*kv"),
        ([1], {}, ValueError, "release holds 1"),
        (ALL, {"mode": PauseMode.KEEP}, ValueError, "KEEP"),
    ],
    ids=one_name,
)
async def test_what_can_not_be_released(
    release: Any, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    controller = ScriptedController()
    async with Engine(controller, spec()) as engine:
        with pytest.raises(error, match=named):
            engine.paused(release=release, **options)
        await engine.next_batch(1)
    assert called(controller) == []


async def test_a_controller_that_releases_nothing() -> None:
    plain = Capabilities(vocab_size=1000, max_context=4096, stop_token_ids={0})
    async with Engine(ScriptedController(capabilities=plain), spec()) as engine:
        with pytest.raises(ValueError, match=r"release holds 'kv'.*nothing"):
            engine.paused(release=["kv"])


async def test_reload_outside_and_of_nonsense() -> None:
    async with Engine(ScriptedController(), spec()) as engine:
        async with engine.paused(release=["kv"]) as pause:
            nonsense: Any = ((), ("gradients",))
            for tags in nonsense:
                with pytest.raises(ValueError, match="reload"):
                    await pause.reload(*tags)
            await pause.reload("weights")  # was not released
            await pause.reload("kv")
        with pytest.raises(EngineBusy):
            await pause.reload("kv")


@pytest.mark.parametrize(
    ("tags", "error"), [("kv", TypeError), (["gradients"], ValueError)], ids=one_name
)
def test_tags_that_no_server_has(tags: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="release_tags"):
        Capabilities(vocab_size=10, max_context=10, release_tags=tags)


@pytest.mark.parametrize("call", ["generate", "abort", "pause", "resume", "update", "version"])
async def test_the_scripted_server_refuses_every_call_while_released(call: str) -> None:
    controller = ScriptedController()
    async with controller:
        await controller.pause(PauseMode.ABORT)
        await controller.release(["weights"])
        calls: dict[str, Any] = {
            "generate": lambda: controller.generate(
                Attempt([1], max_tokens=1, sampling=Sampling(1))
            ),
            "abort": lambda: controller.abort(None),
            "pause": lambda: controller.pause(PauseMode.ABORT),
            "resume": controller.resume,
            "update": lambda: controller.update_weights({}, 1),
            "version": controller.version,
        }
        with pytest.raises(InferenceError, match="released"):
            await calls[call]()
        assert len(controller.refused) == 1
        await controller.reload(["weights"])
        await controller.resume()
