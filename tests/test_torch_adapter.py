"""`pack` and `pad`: every column lines up with the tokens, whatever the samples look like."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollnest import Batch, Group, Prompt, Response, Sample, Segment, Status, Verdict
from rollnest.advantages import for_groups, grpo, rloo
from rollnest.testing.strategies import batches, groups
from rollnest_adapters.torch import IGNORED, Packed, Padded, pack, pad
from tests.tiny_llama import tiny_llama

COLUMNS = ("input_ids", "labels", "advantages", "logprobs", "versions", "position_ids")

Tokens = Sequence[tuple[int, float, int] | int]
"""A response: a token of the policy as `(id, logprob, version)`, one of the context as its id."""


def segment(prompt: Iterable[int], tokens: Tokens) -> Segment:
    response = Response()
    for token in tokens:
        if isinstance(token, int):
            response.append_context([token])
        else:
            response.append_policy([token[0]], [token[1]], token[2])
    return Segment(memoryview(array("i", prompt)).toreadonly(), response.seal())


def sample(
    *segments: Segment, reward: float | None = 1.0, index: int = 0, visit: int = 0
) -> Sample:
    return Sample(
        task="maths",
        prompt=Prompt("p", token_ids=[1]),
        visit=visit,
        index=index,
        status=Status.COMPLETED,
        segments=segments,
        verdict=None if reward is None else Verdict(reward),
    )


def group(*samples: Sample) -> Group:
    return Group("maths", samples[0].prompt, samples[0].visit, samples)


def one(*segments: Segment) -> list[Group]:
    """A group of one sample, to be used with an advantage of 2."""
    return [group(sample(*segments))]


few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
small_batches = partial(batches, max_size=2, max_group_size=2, max_tokens=8)

TWO = {("maths", 0): [2.0]}


def expected_rows(
    batch: Batch, advantages: dict[tuple[str, int], list[float]]
) -> list[list[tuple[int, int, float, float, int, int]]]:
    """What each row must hold, token by token, in `COLUMNS`' order."""
    rows: list[list[tuple[int, int, float, float, int, int]]] = []
    for members in batch.groups:
        for member, advantage in zip(
            members.samples, advantages[members.task, members.visit], strict=True
        ):
            for part in member.segments:
                if not any(part.mask):
                    continue
                blank = len(part.prompt_ids)
                ids = [*part.prompt_ids, *part.ids]
                mask = [0] * blank + list(part.mask)
                logprobs = [0.0] * blank + list(part.logprobs)
                versions = [-1] * blank + list(part.versions)
                row: list[tuple[int, int, float, float, int, int]] = []
                for t, token in enumerate(ids):
                    if t + 1 < len(ids) and mask[t + 1]:
                        row.append(
                            (token, ids[t + 1], advantage, logprobs[t + 1], versions[t + 1], t)
                        )
                    else:
                        row.append((token, IGNORED, 0.0, 0.0, -1, t))
                rows.append(row)
    return rows


@few
@given(small_batches(tasks=("maths", "code")))
def test_pack_holds_what_the_segments_hold(batch: Batch) -> None:
    packed = pack(batch, grpo)
    expected = expected_rows(batch, for_groups(batch.groups, grpo))
    assert packed.lengths.tolist() == [len(row) for row in expected]
    assert packed.cu_seqlens.dtype == torch.int32
    for at, name in enumerate(COLUMNS):
        column = getattr(packed, name)
        assert column.shape == packed.input_ids.shape
        flat = torch.tensor([token[at] for row in expected for token in row], dtype=column.dtype)
        assert torch.equal(column, flat), name


@few
@given(small_batches())
def test_every_sampled_token_is_trained_exactly_once(batch: Batch) -> None:
    packed = pack(batch, grpo)
    assert int(packed.mask.sum()) == batch.statistics.policy_tokens
    for row, mask in zip(packed.rows, packed.unpack(packed.mask), strict=True):
        assert int(mask.sum()) == row.sample.segments[row.segment].response.policy_tokens
        assert not mask[-1]
    trained = [(id(row.sample), row.segment) for row in packed.rows]
    assert len(set(trained)) == len(trained)


@few
@given(small_batches(), st.integers(0, 100), st.integers(0, 5))
def test_pad_and_unpack_give_the_same_columns(batch: Batch, pad_token_id: int, more: int) -> None:
    packed = pack(batch, grpo)
    width = int(packed.lengths.max()) + more
    padded = pad(batch, grpo, length=width, pad_token_id=pad_token_id)
    assert [(row.sample, row.segment) for row in padded.rows] == [
        (row.sample, row.segment) for row in packed.rows
    ]
    fillers = dict(zip(COLUMNS, (pad_token_id, IGNORED, 0.0, 0.0, -1, 0), strict=True))
    for name in COLUMNS:
        column = getattr(padded, name)
        assert column.shape == (len(padded.rows), width) == padded.attention_mask.shape
        for got, row in zip(column, packed.unpack(getattr(packed, name)), strict=True):
            assert torch.equal(got[: len(row)], row)
            assert bool((got[len(row) :] == fillers[name]).all())
    assert torch.equal(padded.attention_mask.sum(1), packed.lengths)


@few
@given(
    st.lists(groups(visit=0, max_size=2, max_tokens=8), min_size=1, max_size=1), st.integers(0, 3)
)
def test_advantages_given_by_group_are_those_of_the_estimator(
    members: list[Group], at: int
) -> None:
    estimator = (grpo, rloo)[at % 2]
    by_estimator = pack(members, estimator)
    by_group = pack(members, for_groups(members, estimator))
    assert torch.equal(by_estimator.advantages, by_group.advantages)


def test_columns_have_one_length_where_xtuner_has_two() -> None:
    # XTuner: P+R advantages, P+R-1 labels.
    packed = pack(one(segment([1, 2, 3], [(5, -0.5, 0), (9, -0.25, 0)])), TWO)
    assert packed.input_ids.tolist() == [1, 2, 3, 5, 9]
    assert packed.labels.tolist() == [IGNORED, IGNORED, 5, 9, IGNORED]
    assert packed.advantages.tolist() == [0, 0, 2, 2, 0]
    assert packed.logprobs.tolist() == [0, 0, -0.5, -0.25, 0]
    assert packed.versions.tolist() == [-1, -1, 0, 0, -1]


def test_a_prompt_of_one_token() -> None:
    packed = pack(one(segment([1], [(5, -0.5, 3)])), TWO)
    assert packed.labels.tolist() == [5, IGNORED]
    assert packed.versions.tolist() == [3, -1]


def test_advantages_go_to_every_segment_of_a_sample() -> None:
    first, second = segment([1], [(5, -1.0, 0)]), segment([1, 2], [(6, -1.0, 1), (7, -1.0, 1)])
    packed = pack(one(first, second), TWO)
    assert [(row.segment, len(row.sample.segments)) for row in packed.rows] == [(0, 2), (1, 2)]
    assert packed.advantages.tolist() == [2, 0, 0, 2, 2, 0]
    assert packed.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 2, 6]


def test_bug_006_a_sampled_eos_is_trained_though_it_is_the_pad_id() -> None:
    padded = pad(one(segment([1], [(5, -1.0, 0), (9, -1.0, 0)])), TWO, length=5, pad_token_id=9)
    assert padded.input_ids.tolist() == [[1, 5, 9, 9, 9]]
    assert padded.labels.tolist() == [[5, 9, IGNORED, IGNORED, IGNORED]]
    assert padded.attention_mask.tolist() == [[1, 1, 1, 0, 0]]


def test_bug_009_an_empty_response_trains_nothing_of_its_prompt() -> None:
    empty, answered = segment([1, 2, 3], []), segment([1, 2], [(5, -1.0, 0)])
    packed = pack(one(empty, answered), TWO)
    assert [row.segment for row in packed.rows] == [1]
    assert packed.labels.tolist() == [IGNORED, 5, IGNORED]


def test_bug_012_tool_tokens_count_for_length_but_are_not_trained() -> None:
    tokens: Tokens = [(5, -1.0, 0), (6, -1.0, 0), 40, 41, 42, (7, -1.0, 0), (9, -1.0, 0)]
    padded = pad(one(segment([1], tokens)), TWO)
    assert padded.attention_mask.sum() == 8
    assert padded.mask.tolist() == [[True, True, False, False, False, True, True, False]]
    assert torch.isfinite(padded.logprobs).all()


def test_bug_015_packing_shifts_no_logprob() -> None:
    one_sample = sample(segment([1, 2], [(5, -0.5, 0), (6, -0.25, 0)]))
    other = sample(segment([1], [(7, -2.0, 0), (8, -3.0, 0), (9, -4.0, 0)]), index=1, reward=0.0)
    packed = pack([group(one_sample, other)], grpo)
    assert len(packed.input_ids) == len(packed.logprobs) == 8
    first, second = packed.unpack(packed.logprobs)
    assert first.tolist() == [0, -0.5, -0.25, 0]
    assert second.tolist() == [-2, -3, -4, 0]


def test_bug_017_no_nan_where_nothing_is_trained() -> None:
    packed = pack(one(segment([1], [(5, -1.0, 0), 40, (6, -3.0, 0)])), TWO)
    assert torch.isfinite(packed.logprobs).all()
    trainer = packed.logprobs.masked_fill(~packed.mask, float("nan"))
    assert trainer[packed.mask].mean() == -2


def test_bug_018_a_shared_turn_is_trained_in_one_row_only() -> None:
    # The second branch carries the first turn as context.
    root, branch = (
        segment([1], [(5, -1.0, 0), (6, -1.0, 0), (7, -1.0, 0)]),
        segment([1, 5, 6], [(8, -1.0, 0)]),
    )
    packed = pack(one(root, branch), TWO)
    assert packed.labels[packed.mask].tolist() == [5, 6, 7, 8]


def test_bug_025_versions_change_where_a_pause_was() -> None:
    tokens: Tokens = [(10, -1.0, 0), 40, (11, -1.0, 0), (30, -1.0, 1), (31, -1.0, 1)]
    packed = pack(one(segment([1], tokens)), TWO)
    assert packed.mask.tolist() == [True, False, True, True, True, False]
    assert packed.versions.tolist() == [0, -1, 0, 1, 1, -1]


def test_a_row_that_is_too_long_is_refused_by_name() -> None:
    long = group(sample(segment([1, 2], [(5, -1.0, 0), (6, -1.0, 0)]), visit=7))
    pack([long], grpo, max_length=4)
    with pytest.raises(ValueError, match=r"maths/7/0: segment 0 has 4 tokens, above .* 3"):
        pack([long], grpo, max_length=3)
    with pytest.raises(ValueError, match="above the maximum of 3"):
        pad([long], grpo, length=3)


def test_a_sample_without_a_reward_is_refused_by_name() -> None:
    tokens = segment([1], [(5, -1.0, 0)])
    unscored = group(sample(tokens), sample(tokens, index=1, reward=None))
    with pytest.raises(ValueError, match=r"sample maths/0/1 has no reward"):
        pack([unscored], grpo)
    packed = pack([unscored], {("maths", 0): [1.0, -1.0]})  # advantages from elsewhere
    assert packed.advantages.tolist() == [1, 0, -1, 0]


def test_only_completed_samples_are_trained() -> None:
    aborted = Sample(
        task="maths", prompt=Prompt("p", token_ids=[1]), visit=0, index=0, status=Status.ABORTED
    )
    with pytest.raises(ValueError, match=r"maths/0/0 is ABORTED"):
        pack([group(aborted)], grpo)


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ({}, "none for group maths/0"),
        ({("maths", 0): [1.0, 2.0]}, r"1 finite numbers, got \[1.0, 2.0\]"),
        ({("maths", 0): [float("nan")]}, "1 finite numbers"),
    ],
)
def test_bad_advantages_are_refused(
    advantages: dict[tuple[str, int], list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(one(segment([1], [(5, -1.0, 0)])), advantages)


def test_a_group_given_twice_is_refused() -> None:
    twice = one(segment([1], [(5, -1.0, 0)])) * 2
    for advantages in (grpo, TWO):
        with pytest.raises(ValueError, match="group maths/0 is there twice"):
            pack(twice, advantages)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 groups hold no trainable token"):
        pack([], grpo)


def test_a_segment_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="has no prompt"):
        pack(one(segment([], [(5, -1.0, 0)])), TWO)


@few
@given(small_batches(max_size=1))
def test_to_moves_every_column(batch: Batch) -> None:
    moved: list[Packed | Padded] = [pack(batch, grpo).to("meta"), pad(batch, grpo).to("meta")]
    for tensors in moved:
        for name in COLUMNS:
            assert getattr(tensors, name).device.type == "meta"
    assert moved[0].rows[0].sample is moved[1].rows[0].sample


def test_packed_rows_do_not_attend_to_each_other() -> None:
    model = tiny_llama().eval()
    one = Response()
    one.append_policy([5, 6, 7], [-1.0] * 3, 0)
    two = Response()
    two.append_policy([8, 9], [-1.0] * 2, 0)
    rows = [([1, 2, 3], one.seal()), ([4, 5], two.seal())]
    samples = [
        Sample(
            task="t",
            prompt=Prompt("p", token_ids=[1]),
            visit=0,
            index=index,
            status=Status.COMPLETED,
            segments=(Segment(memoryview(array("i", prompt)), response),),
            verdict=Verdict(float(index)),
        )
        for index, (prompt, response) in enumerate(rows)
    ]
    packed = pack([Group("t", samples[0].prompt, 0, samples)], grpo)
    with torch.no_grad():
        logits = model(
            packed.input_ids[None], position_ids=packed.position_ids[None], use_cache=False
        ).logits[0]
        alone = [
            model(torch.tensor([[*prompt, *response.ids]]), use_cache=False).logits[0]
            for prompt, response in rows
        ]
    assert torch.allclose(logits, torch.cat(alone), atol=1e-4)
