"""`partial=False` discards what a pause has cut; `max_token_lag` masks what has become too old."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from anyio import sleep

from rollnest import (
    AsyncStrategy,
    Engine,
    PauseMode,
    Prompt,
    Response,
    Rollout,
    Sample,
    Sampling,
    Segment,
    Status,
    SyncStrategy,
)
from rollnest._table import GroupTable
from rollnest.abc import Attempt
from rollnest.testing import (
    RecordingInstrument,
    Reply,
    ScriptedController,
    assert_conserved,
    check_sample,
)

from .helpers import in_turn, prompts, spec

pytestmark = pytest.mark.anyio

WHOLE = AsyncStrategy(max_staleness=1, lead=0, partial=False)


# partial=False


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("deaf", [0, -1], ids=["aborts", "deaf"])
async def test_a_partial_is_discarded_and_its_turn_begins_again(stream: bool, deaf: int) -> None:
    controller = ScriptedController(
        lambda _: Reply([5] * 20, finish="length", delay=20.0, deaf=deaf), stream=stream
    )
    async with Engine(controller, spec(strategy=WHOLE), batch_size=1) as engine:
        await sleep(4.5)
        async with engine.paused(grace=1.0) as pause:
            figures = engine.statistics().tasks["task"]
            kept = {(0, False): 4, (0, True): 4, (-1, False): 0, (-1, True): 5}[deaf, stream]
            assert figures.tokens_discarded == 2 * kept
            assert figures.restarted_turns == (2 if kept else 0)
            assert figures.unseen_turns == (0 if kept else 2)
            assert figures.tokens_in_records == 0
            await pause.update_weights({})
            assert_conserved(engine, committed=controller.committed)
        batch = await engine.next_batch()
    assert batch.statistics.restarted_turns == (2 if kept else 0)
    assert [len(ids) for ids in controller.prompts] == [2] * 4  # without a partial
    for sample in batch.samples:
        check_sample(sample)
        assert sample.segments[0].response.version_runs == ((1, 0, 20),)
        assert [turn.attempts for turn in sample.turns] == [2]
    assert batch.statistics.resumed_turns == 0
    assert_conserved(engine, committed=controller.committed)


async def test_earlier_turns_stay() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([9])
        await rollout.generate()

    controller = ScriptedController(in_turn(Reply([5, 0]), Reply([6, 7, 8, 0], delay=4.0)))
    task = spec(loop=loop, strategy=WHOLE, group_size=1)
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(2.5)
        async with engine.paused():
            pass
        batch = await engine.next_batch()
    (sample,) = batch.samples
    assert sample.segments[0].ids.tolist() == [5, 0, 9, 6, 7, 8, 0]
    assert controller.prompts[1] == controller.prompts[2]
    assert engine.statistics().total("tokens_discarded") == 2


@pytest.mark.parametrize(
    ("ids", "cap"), [([5, 6, 0, 8], 20), ([5, 6, 7, 8], 3)], ids=["stop id", "cap"]
)
async def test_what_was_cut_when_it_was_complete_is_kept(ids: list[int], cap: int) -> None:
    """The server says it was aborted, but the turn has ended."""
    reply = Reply(ids[:3], finish="abort")
    task = spec(strategy=WHOLE, group_size=1, sampling=Sampling(cap))
    controller = ScriptedController(in_turn(reply))
    async with Engine(controller, task, batch_size=1) as engine:
        batch = await engine.next_batch()
    assert next(batch.samples).segments[0].ids.tolist() == ids[:3]
    assert engine.statistics().total("restarted_turns") == 0


async def test_a_server_that_always_aborts_is_not_asked_for_ever() -> None:
    recording = RecordingInstrument()
    controller = ScriptedController(in_turn(Reply([5, 6], finish="abort")))
    task = spec(strategy=WHOLE, group_size=1, epochs=1, prompts=prompts(1))
    async with Engine(controller, task, batch_size=1, instruments=[recording]) as engine:
        await sleep(100)
    ((group, outcome),) = recording.groups
    assert outcome == "inference"
    assert group.samples[0].failure is not None
    assert "without a token to keep" in group.samples[0].failure.message
    assert len(controller.prompts) < 10
    assert_conserved(engine, committed=controller.committed)


async def test_the_loops_own_timeout_keeps_its_partial() -> None:
    async def loop(rollout: Rollout) -> None:
        with anyio.move_on_after(2.5):
            await rollout.generate()

    controller = ScriptedController(rate=1.0, stop_every=10_000, stream=True)
    task = spec(loop=loop, strategy=WHOLE, group_size=1)
    async with Engine(controller, task, batch_size=1) as engine:
        batch = await engine.next_batch()
    assert next(batch.samples).policy_tokens == 2
    assert engine.statistics().total("tokens_discarded") == 0
    assert_conserved(engine, committed=controller.committed)


async def test_kept_turns_are_no_partials() -> None:
    controller = ScriptedController(rate=1.0, stop_every=10_000)
    async with Engine(controller, spec(strategy=WHOLE), batch_size=1) as engine:
        await sleep(4.5)
        async with engine.paused(PauseMode.KEEP) as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
    assert engine.statistics().total("restarted_turns") == 0
    assert next(batch.samples).segments[0].response.version_runs == ((0, 0, 4), (1, 4, 20))


# max_token_lag


async def test_bug_025_old_tokens_are_masked_and_stay_aligned() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([40])
        await rollout.generate()

    controller = ScriptedController(
        in_turn(Reply([10]), Reply([11, 9, 9], delay=3.0), Reply([30, 31]))
    )
    masks: list[list[int]] = []
    for lag in (0, None):
        task = spec(
            prompts=[Prompt("p", token_ids=[1])],
            loop=loop,
            group_size=1,
            strategy=AsyncStrategy(max_staleness=1, lead=0, max_token_lag=lag),
        )
        async with Engine(controller, task, batch_size=1) as engine:
            await sleep(1.5)
            async with engine.paused() as pause:
                await pause.update_weights({})
            batch = await engine.next_batch()
        (sample,) = batch.samples
        check_sample(sample)
        (segment,) = sample.segments
        assert segment.ids.tolist() == [10, 40, 11, 30, 31]
        assert segment.response.origin.tolist() == [1, 0, 1, 1, 1]
        assert segment.versions.tolist() == [0, -1, 0, 1, 1]
        assert len(segment.logprobs) == 5
        masks.append(segment.mask.tolist())
        assert sample.lag(1) == (1 if lag is None else 0)
        assert batch.statistics.masked_tokens == (0 if lag is None else 2)
        assert batch.statistics.policy_tokens == 4
        controller = ScriptedController(
            in_turn(Reply([10]), Reply([11, 9, 9], delay=3.0), Reply([30, 31]))
        )
    assert masks == [[0, 0, 0, 1, 1], [1, 0, 1, 1, 1]]


async def test_a_sample_without_a_token_to_train_is_made_again() -> None:
    controller = ScriptedController(lambda a: Reply([5, 0], delay=float(a.affinity[-1])))
    strategy = AsyncStrategy(max_staleness=9, lead=0, max_token_lag=0)
    async with Engine(controller, spec(strategy=strategy), batch_size=1) as engine:
        await sleep(0.4)  # the first member has ended, the second is in its turn without a token
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
    assert {s.oldest_version for s in batch.samples} == {1}
    figures = engine.statistics().tasks["task"]
    assert (figures.expired, figures.tokens_expired) == (1, 2)
    assert batch.statistics.masked_tokens == 0
    assert_conserved(engine, committed=controller.committed)


def _sample(visit: int, *runs: tuple[int, int], index: int = 0) -> Sample:
    """A sample of context (version -1) and policy tokens."""
    response = Response()
    for version, count in runs:
        if version < 0:
            response.append_context([7] * count)
        else:
            response.append_policy([5] * count, [-1.0] * count, version)
    return Sample(
        task="t",
        prompt=prompts(1)[0],
        visit=visit,
        index=index,
        status=Status.COMPLETED,
        segments=(Segment(memoryview(b"").cast("i"), response.seal()),),
    )


@pytest.mark.parametrize(
    ("runs", "version", "lag", "staleness", "mask"),
    [
        ([(0, 2), (-1, 1), (2, 1)], 2, 1, 0, [0, 0, 0, 1]),
        ([(0, 2), (-1, 1), (2, 1)], 2, 2, 2, [1, 1, 0, 1]),
        ([(0, 2), (-1, 1), (2, 1)], 2, 2, 1, None),  # the mask does not reach far enough
        ([(0, 1), (1, 1), (2, 1), (-1, 2)], 3, 1, 5, [0, 0, 1, 0, 0]),
        ([(0, 3)], 1, 0, 5, None),  # nothing is left
        ([(-1, 1), (3, 2)], 3, 0, 0, [0, 1, 1]),
        ([(0, 1), (5, 1)], 6, None, 5, None),
    ],
)
def test_masking_is_by_lag_and_lag_is_by_the_mask(
    runs: Sequence[tuple[int, int]],
    version: int,
    lag: int | None,
    staleness: int,
    mask: list[int] | None,
) -> None:
    table = GroupTable("t", max_staleness=staleness, retries=3, max_token_lag=lag)
    row = table.draw(prompts(1)[0])
    table.settle(row, [_sample(0, *runs)], 1.0)
    assert table.expire(version) == (mask is None)
    assert table.ready == (mask is not None)
    if mask is not None:
        (row,) = table.parked
        (sample,) = row.members.samples
        assert sample.segments[0].mask.tolist() == mask
        assert sample.lag(version) <= staleness
    assert table.expire(version) == 0
    table.balance()


def test_the_mask_never_comes_back() -> None:
    sample = _sample(0, (0, 2), (3, 2))
    masked = sample.trained_from(2)
    assert masked.trained_from(1) is masked
    assert masked.trained_from(2) is masked
    assert masked.oldest_version == 3
    assert masked.segments[0].response is sample.segments[0].response
    assert masked.trained_from(4).segments[0].mask.tolist() == [0, 0, 0, 0]
    assert masked.trained_from(4).oldest_version is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_token_lag": -1}, ValueError),
        ({"max_token_lag": 0.5}, TypeError),
        ({"partial": None}, TypeError),
        ({"partial": 0}, TypeError),
    ],
    ids=str,
)
def test_options_that_can_not_be(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        AsyncStrategy(**options)
    with pytest.raises(TypeError, match="unexpected keyword"):
        SyncStrategy(**options)


async def test_group_members_keep_their_mask_over_a_redraw() -> None:
    """A fresh enough member is masked, kept, and delivered with the one that was made again."""

    def script(attempt: Attempt) -> Reply:
        first = attempt.affinity.endswith("/0")
        return Reply([5] * 10, finish="length", delay=10.0 if first else 0.0)

    strategy = AsyncStrategy(max_staleness=0, lead=0, max_token_lag=0)
    controller = ScriptedController(script)
    task = spec(strategy=strategy, sampling=Sampling(10))
    async with Engine(controller, task, batch_size=1) as engine:
        await sleep(4.5)
        async with engine.paused() as pause:
            await pause.update_weights({})
        batch = await engine.next_batch()
    first, second = batch.samples
    assert first.segments[0].mask.tolist() == [0] * 4 + [1] * 6
    assert second.segments[0].mask.tolist() == [1] * 10
    assert batch.statistics.masked_tokens == 4
    assert_conserved(engine, committed=controller.committed)
