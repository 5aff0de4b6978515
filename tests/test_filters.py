"""Filters of groups: what they keep and choose, and that a task takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from statistics import pvariance
from typing import Any

import pytest
from anyio import create_task_group, sleep
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollnest import (
    Engine,
    Group,
    PauseMode,
    Prompt,
    Response,
    Sample,
    Sampling,
    Segment,
    Status,
    Verdict,
)
from rollnest.abc import Attempt
from rollnest.advantages import grpo
from rollnest.errors import Starved
from rollnest.filters import all_of, has_spread, max_variance, mean_between, without_truncated
from rollnest.testing import Reply, ScriptedController, assert_conserved

from .helpers import spec

anyio_only = pytest.mark.anyio
quick = settings(max_examples=100, deadline=None)
PROMPT = Prompt("p", token_ids=[1, 2])

rewards_of_group = st.lists(
    st.sampled_from([0.0, 1.0, 0.5]) | st.floats(-1e100, 1e100), min_size=1, max_size=7
)
grades = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=7)


def sample_of(index: int, reward: float | None, reason: str = "stop") -> Sample:
    response = Response()
    response.append_policy([5, 6], [-0.5, -0.5], 0)
    return Sample(
        task="t",
        prompt=PROMPT,
        visit=0,
        index=index,
        status=Status.COMPLETED,
        segments=(Segment(memoryview(b"").cast("B"), response.seal()),),
        verdict=None if reward is None else Verdict(reward),
        finish_reason=reason,
    )


def group_of(rewards: Sequence[float | None]) -> Group:
    samples = tuple(sample_of(i, reward) for i, reward in enumerate(rewards))
    return Group(task="t", prompt=PROMPT, visit=0, samples=samples)


def indexes(samples: Sequence[Sample]) -> list[int]:
    return [sample.index for sample in samples]


@quick
@given(rewards_of_group)
def test_spread_is_what_advantages_need(rewards: list[float]) -> None:
    assert has_spread(group_of(rewards)) == any(grpo(rewards))


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0.0, 0.0, 0.0, 0.0], False),
        ([1.0, 0.0, 0.0, 0.0, 0.0], True),
        ([1.0, 1.0, 1.0, 1.0, 0.0], True),
        ([1.0, 1.0, 1.0, 1.0], False),
        ([0.2], True),
    ],
)
def test_the_mean_is_between_and_the_bounds_are_inside(rewards: list[float], kept: bool) -> None:
    assert mean_between(0.2, 0.8)(group_of(rewards)) is kept


@quick
@given(grades, st.integers(1, 7))
def test_nothing_varies_more_than_what_is_chosen(rewards: list[float], count: int) -> None:
    chosen = max_variance(count)(group_of(rewards))
    assert indexes(chosen) == sorted(set(indexes(chosen)))
    if len(rewards) <= count:
        assert len(chosen) == len(rewards)
        return
    assert len(chosen) == count

    def variance(values: Sequence[float]) -> Fraction:
        return pvariance([Fraction(value) for value in values])

    most = max(variance(values) for values in combinations(rewards, count))
    assert variance([rewards[i] for i in indexes(chosen)]) == most


@quick
@given(rewards_of_group, st.integers(1, 7))
def test_choices_of_any_rewards_are_valid(rewards: list[float], count: int) -> None:
    chosen = max_variance(count)(group_of(rewards))
    assert len(set(indexes(chosen))) == len(chosen) == min(count, len(rewards))


def test_of_equal_rewards_half_are_of_each_end() -> None:
    chosen = max_variance(4)(group_of([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]))
    assert sorted(sample.reward or 0.0 for sample in chosen) == [0.0, 0.0, 1.0, 1.0]
    assert len(max_variance(2)(group_of([1.0, 1.0, 1.0]))) == 2


def test_truncated_samples_leave_but_for_the_last_choice() -> None:
    reasons = ["stop", "length", "timeout", "stop"]
    samples = tuple(sample_of(i, 1.0, reason) for i, reason in enumerate(reasons))
    group = Group(task="t", prompt=PROMPT, visit=0, samples=samples)
    assert indexes(without_truncated(group)) == [0, 3]
    cut = Group(task="t", prompt=PROMPT, visit=0, samples=samples[1:3])
    assert without_truncated(cut) == samples[1:3]


def test_all_are_asked_in_order_up_to_the_first_that_refuses() -> None:
    asked: list[str] = []

    def says(name: str, answer: bool) -> Any:
        def keep(group: Group) -> bool:
            asked.append(name)
            return answer

        return keep

    group = group_of([0.0, 1.0])
    assert all_of(says("a", True), says("b", True))(group)
    assert not all_of(says("c", False), says("d", True))(group)
    assert asked == ["a", "b", "c"]


@pytest.mark.parametrize("filter_", [has_spread, mean_between(0, 1), max_variance(1)])
def test_a_sample_without_a_reward_is_no_zero(filter_: Any) -> None:
    with pytest.raises(ValueError, match=r"needs rewards, and 1 of 2 samples of prompt 'p'"):
        filter_(group_of([1.0, None]))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: mean_between(math.nan, 1.0), ValueError, r"low must be finite, .* got nan"),
        (lambda: mean_between(0.8, 0.2), ValueError, r"high must be finite, >= 0\.8, got 0\.2"),
        (lambda: mean_between("0", 1.0), TypeError, r"low must be a number, got '0'"),  # type: ignore[arg-type]
        (lambda: max_variance(0), ValueError, r"count must be .*1.*got 0"),
        (lambda: max_variance(2.0), TypeError, r"count must be .*got 2\.0"),  # type: ignore[arg-type]
        (lambda: all_of(), ValueError, r"filters must hold at least one function, got none"),
        (lambda: all_of(1), TypeError, r"filters must be functions of a group, got 1"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def by_member(attempt: Attempt) -> Reply:
    """The first prompt's members differ in length, and one is cut; those of the others don't."""
    index = int(attempt.affinity.rsplit("/", 1)[1])
    if attempt.prompt_ids[0] != 1:
        return Reply([5, 0])
    return Reply([5] * 10 if index == 3 else [*[5] * index, 0])


async def length(sample: Sample) -> float:
    return float(sample.policy_tokens)


@anyio_only
async def test_a_task_takes_them() -> None:
    controller = ScriptedController(by_member)
    task = spec(
        judger=length,
        group_size=4,
        shuffle=False,
        epochs=1,
        sampling=Sampling(6),
        refine=without_truncated,
        keep=all_of(has_spread, mean_between(1.5, 2.5)),
    )
    async with Engine(controller, task) as engine:
        batch = await engine.next_batch(1)
    (group,) = batch.groups
    assert group.prompt.uid == "p0"
    assert group.rewards == (1.0, 2.0, 3.0)
    assert_conserved(engine, committed=controller.committed)


@anyio_only
async def test_bug_026_a_filter_is_not_asked_about_a_group_that_was_only_cut() -> None:
    controller = ScriptedController(lambda attempt: evolve(by_member(attempt), delay=1.0))
    task = spec(judger=length, group_size=4, shuffle=False, epochs=1, keep=has_spread)
    async with Engine(controller, task) as engine, create_task_group() as group:
        group.start_soon(engine.next_batch, 1)
        await sleep(0.5)
        async with engine.paused(PauseMode.EVICT):
            figures = engine.statistics().tasks["task"]
            assert (figures.flight, figures.waiting) == (0, 1), figures
            assert not figures.dropped
    assert engine.statistics().tasks["task"].delivered == 1


@anyio_only
async def test_a_filter_that_needs_rewards_fails_a_task_without_a_judger_loudly() -> None:
    task = spec(judger=None, keep=has_spread, starve_after=2)
    async with Engine(ScriptedController(), task) as engine:
        with pytest.raises(Starved, match="has_spread needs rewards, and 2 of 2 samples"):
            await engine.next_batch(1)
