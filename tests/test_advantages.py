"""Advantages: their promises as properties, each formula against its own text, groups by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from statistics import mean, pstdev, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollnest import Failure, Group, Prompt, Response, Sample, Segment, Status, Verdict
from rollnest.advantages import dr_grpo, for_groups, grpo, opo, pass_at_k, rloo

quick = settings(max_examples=50, deadline=None)

Estimate = Callable[[Sequence[float | None]], list[float]]


def opo_of_equal_lengths(rewards: Sequence[float | None]) -> list[float]:
    return opo(rewards, [7] * len(rewards))


ESTIMATORS: dict[str, Estimate] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo_of_equal_lengths,
    "pass_at_k": partial(pass_at_k, k=2),
}
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS.keys())
centring = pytest.mark.parametrize(
    "estimate", [grpo, dr_grpo, rloo, opo_of_equal_lengths], ids=lambda f: f.__name__
)

any_reward = st.floats(-1e100, 1e100)
tame_reward = st.integers(-50, 50).map(float) | st.floats(-50, 50)
tame_group = st.lists(tame_reward, min_size=1, max_size=16)


def scored_somewhere(rewards: Sequence[float | None]) -> bool:
    return any(r is not None for r in rewards)


# Promises of all


@every_estimator
@quick
@given(rewards=st.lists(any_reward | st.none(), min_size=1, max_size=12).filter(scored_somewhere))
def test_every_advantage_is_finite_and_unscored_members_get_zero(
    estimate: Estimate, rewards: list[float | None]
) -> None:
    advantages = estimate(rewards)
    assert len(advantages) == len(rewards)
    assert all(type(a) is float and math.isfinite(a) for a in advantages)
    assert all(a == 0.0 for a, r in zip(advantages, rewards, strict=True) if r is None)


@every_estimator
@quick
@given(rewards=tame_group, where=st.data())
def test_unscored_members_leave_the_others_as_if_they_were_not_there(
    estimate: Estimate, rewards: list[float], where: st.DataObject
) -> None:
    at = where.draw(st.integers(0, len(rewards)))
    with_hole: list[float | None] = [*rewards[:at], None, *rewards[at:]]
    advantages = estimate(with_hole)
    assert advantages.pop(at) == 0.0
    assert advantages == estimate(rewards)


@every_estimator
@quick
@given(rewards=tame_group)
def test_advantages_sum_to_zero(estimate: Estimate, rewards: list[float]) -> None:
    advantages = estimate(rewards)
    size = max(map(abs, advantages))
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-9 * max(size, 1))


@every_estimator
@quick
@given(data=st.data(), rewards=tame_group)
def test_members_in_another_order_get_the_same_values(
    estimate: Estimate, data: st.DataObject, rewards: list[float]
) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    before = estimate(rewards)
    assert estimate([rewards[i] for i in order]) == [before[i] for i in order]


@centring
@quick
@given(rewards=st.lists(st.integers(-50, 50), min_size=1, max_size=16), shift=st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(
    estimate: Estimate, rewards: list[int], shift: int
) -> None:
    assert estimate([r + shift for r in rewards]) == pytest.approx(estimate(rewards), abs=1e-9)


@centring
@quick
@given(rewards=tame_group)
def test_a_better_reward_never_has_a_lower_advantage(
    estimate: Estimate, rewards: list[float]
) -> None:
    ranked = sorted(zip(rewards, estimate(rewards), strict=True))
    assert all(a <= b + 1e-9 for (_, a), (_, b) in pairwise(ranked))


@every_estimator
@quick
@given(reward=any_reward, size=st.integers(1, 12))
def test_a_group_without_spread_is_exactly_zero(
    estimate: Estimate, reward: float, size: int
) -> None:
    assert estimate([reward] * size) == [0.0] * size


@every_estimator
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e100, -1e-300, 5e-324])
@pytest.mark.parametrize("size", [1, 3, 8, 10])
def test_a_mean_that_rounds_off_the_common_reward_makes_no_noise(
    estimate: Estimate, reward: float, size: int
) -> None:
    assert estimate([reward] * size) == [0.0] * size


@every_estimator
def test_rewards_that_differ_by_rounding_only_teach_next_to_nothing(estimate: Estimate) -> None:
    if estimate is not ESTIMATORS["pass_at_k"]:
        assert all(abs(a) < 1e-7 for a in estimate([0.1 + 0.2, 0.3, 0.3, 0.3]))


@every_estimator
def test_bug_033_a_singleton_and_a_group_without_variance_get_zero_never_nan(
    estimate: Estimate,
) -> None:
    assert estimate([0.7, None, None, None]) == [0.0, 0.0, 0.0, 0.0]
    assert estimate([1, 1, 1, 1]) == [0.0, 0.0, 0.0, 0.0]
    assert estimate([0.7]) == [0.0]


def test_bug_029_an_aborted_member_is_outside_the_baseline() -> None:
    assert dr_grpo([1, None, 0]) == [0.5, 0.0, -0.5]
    assert rloo([1, None, 0]) == [1.0, 0.0, -1.0]
    assert opo([1, None, 0], [5, 900, 5]) == [0.5, 0.0, -0.5]


def test_bug_051_a_lost_member_is_not_a_wrong_answer() -> None:
    lost = sample_of(1, None, status=Status.FAILED)
    group = Group(
        task="t",
        prompt=PROMPT,
        visit=0,
        samples=(sample_of(0, 1.0), lost, sample_of(2, 0.0)),
    )
    assert for_groups([group], dr_grpo) == {("t", 0): [0.5, 0.0, -0.5]}


@every_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e101, 10**400])
def test_a_reward_that_is_not_finite_is_refused_by_index_and_value(
    estimate: Estimate, bad: float
) -> None:
    with pytest.raises(
        ValueError, match=rf"^rewards\[2\] must be finite .*, got {re.escape(repr(bad))}$"
    ):
        estimate([0.0, None, bad, 1.0])


@every_estimator
def test_a_reward_that_is_no_number_is_refused(estimate: Estimate) -> None:
    bad: Any = "1"
    with pytest.raises(TypeError, match=r"^rewards\[1\] must be a number or None, got '1'$"):
        estimate([0.0, bad])


@every_estimator
@pytest.mark.parametrize("rewards", [[], [None], [None, None]], ids=str)
def test_a_group_without_a_reward_is_refused(
    estimate: Estimate, rewards: list[float | None]
) -> None:
    with pytest.raises(ValueError, match="at least one member needs a reward"):
        estimate(rewards)


@every_estimator
def test_numbers_of_other_kinds_are_rewards_too(estimate: Estimate) -> None:
    kinds: Any = [True, np.float32(0), Fraction(0), np.int64(0), 0.0]
    assert estimate(kinds) == estimate([1.0, 0.0, 0.0, 0.0, 0.0])


# Formulas


@quick
@given(rewards=st.lists(tame_reward, min_size=2, max_size=16))
def test_grpo_is_the_rewards_distance_from_the_mean_in_standard_deviations(
    rewards: list[float],
) -> None:
    spread = stdev(rewards)
    if pstdev(rewards) > 1e-6:
        expected = [(r - mean(rewards)) / (spread + 1e-8) for r in rewards]
        assert grpo(rewards) == pytest.approx(expected, abs=1e-6)


def test_grpo_of_one_right_in_four() -> None:
    assert grpo([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])


@quick
@given(rewards=tame_group)
def test_dr_grpo_is_the_rewards_distance_from_the_mean(rewards: list[float]) -> None:
    exact_mean = sum(map(Fraction, rewards)) / len(rewards)
    expected = [float(Fraction(r) - exact_mean) for r in rewards]
    assert dr_grpo(rewards) == pytest.approx(expected, abs=1e-12)


@quick
@given(rewards=st.lists(tame_reward, min_size=2, max_size=16))
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert rloo(rewards) == pytest.approx(expected, abs=1e-9)


@quick
@given(
    members=st.lists(st.tuples(tame_reward, st.integers(1, 10**9)), min_size=1, max_size=16),
)
def test_opo_compares_with_the_mean_weighted_by_length(members: list[tuple[float, int]]) -> None:
    rewards, lengths = [r for r, _ in members], [n for _, n in members]
    baseline = sum(Fraction(r) * n for r, n in members) / sum(lengths)
    advantages = opo(rewards, lengths)
    assert advantages == pytest.approx([float(Fraction(r) - baseline) for r in rewards], abs=1e-9)
    weighted = math.fsum(a * n for a, n in zip(advantages, lengths, strict=True)) / sum(lengths)
    assert weighted == pytest.approx(0, abs=1e-9)


def test_opo_of_a_long_wrong_answer() -> None:
    assert opo([1, 0], [1, 3]) == [0.75, -0.25]


@quick
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), k=st.integers(1, 10))
def test_pass_at_k_is_what_going_through_all_sets_of_k_gives(rewards: list[float], k: int) -> None:
    # The definition: a set's reward is its best member's, standardised over all sets; a member's advantage is the
    # mean of those of the sets it is in.
    sets = list(combinations(range(len(rewards)), k))
    of_set = [max(rewards[i] for i in members) for members in sets]
    if len(set(of_set)) < 2:
        assert pass_at_k(rewards, k=k) == [0.0] * len(rewards)
        return
    standard = [(r - mean(of_set)) / pstdev(of_set) for r in of_set]
    expected = [
        mean(s for s, members in zip(standard, sets, strict=True) if i in members)
        for i in range(len(rewards))
    ]
    assert pass_at_k(rewards, k=k) == pytest.approx(expected, abs=1e-9)


def test_pass_at_k_of_huge_groups_stays_finite() -> None:
    assert all(map(math.isfinite, pass_at_k([1.0] * 1000 + [0.0] * 1000, k=1000)))
    assert all(map(math.isfinite, pass_at_k([1.0] + [0.0] * 1999, k=1000)))


def test_pass_at_k_counts_rewards_above_the_threshold() -> None:
    assert pass_at_k([0.4, 0.6, 0.9, 0.0], k=2, threshold=0.5) == pass_at_k([0, 1, 1, 0], k=2)


# Options


@pytest.mark.parametrize("k", [0, -1])
def test_pass_at_k_refuses_an_empty_set(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be >= 1, got {k}"):
        pass_at_k([1, 0], k=k)


def test_pass_at_k_refuses_a_threshold_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="threshold must be finite"):
        pass_at_k([1, 0], threshold=math.nan)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1], "2 rewards but 1 lengths"),
        ([1, 0], r"lengths\[1\] must be >= 1, got 0"),
        ([-1, 1], r"lengths\[0\] must be >= 1, got -1"),
    ],
)
def test_opo_refuses_lengths_that_do_not_fit(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opo([1, 0], lengths)


def test_opo_refuses_a_length_that_is_no_int() -> None:
    bad: Any = [1, 2.0]
    with pytest.raises(TypeError, match=r"lengths\[1\] must be an int, got 2.0"):
        opo([1, 0], bad)


# Groups

PROMPT = Prompt("p", token_ids=[1, 2])


def sample_of(
    index: int,
    reward: float | None,
    *,
    task: str = "t",
    visit: int = 0,
    status: Status = Status.COMPLETED,
    tokens: int = 2,
) -> Sample:
    response = Response()
    response.append_policy([5] * tokens, [-0.5] * tokens, 0)
    failed = status is Status.FAILED
    return Sample(
        task=task,
        prompt=PROMPT,
        visit=visit,
        index=index,
        status=status,
        segments=(Segment(memoryview(b"").cast("B"), response.seal()),),
        verdict=None if reward is None else Verdict(reward),
        failure=Failure("loop", "lost") if failed else None,
    )


def group_of(task: str, visit: int, rewards: Sequence[float | None]) -> Group:
    samples = [sample_of(i, r, task=task, visit=visit, tokens=i + 1) for i, r in enumerate(rewards)]
    return Group(task=task, prompt=PROMPT, visit=visit, samples=tuple(samples))


def test_bug_034_uneven_groups_are_centred_each_by_its_own_name() -> None:
    two, three = group_of("t", 0, [0, 2]), group_of("t", 1, [5, 5, 5])
    expected = {("t", 0): [-1.0, 1.0], ("t", 1): [0.0, 0.0, 0.0]}
    assert for_groups([two, three], dr_grpo) == expected
    assert for_groups([three, two], dr_grpo) == expected


def test_bug_039_equal_ids_of_two_tasks_are_two_groups() -> None:
    a, b = group_of("A", 0, [0, 0]), group_of("B", 0, [1, 1])
    assert for_groups([a, b]) == {("A", 0): [0.0, 0.0], ("B", 0): [0.0, 0.0]}


def test_groups_are_estimated_by_grpo_unless_told_otherwise() -> None:
    group = group_of("t", 0, [1, 0, 0.5])
    assert for_groups([group]) == {("t", 0): grpo([1, 0, 0.5])}


def test_options_of_an_estimator_go_in_with_partial() -> None:
    group = group_of("t", 0, [1, 0, 0])
    assert for_groups([group], partial(pass_at_k, k=2))["t", 0] == pass_at_k([1, 0, 0], k=2)


def test_lengths_are_measured_on_the_samples() -> None:
    group = group_of("t", 0, [1, 0, 0])
    advantages = for_groups([group], opo, lengths=lambda sample: sample.policy_tokens)
    assert advantages == {("t", 0): opo([1, 0, 0], [1, 2, 3])}


def test_no_groups_have_no_advantages() -> None:
    assert for_groups([]) == {}


def test_a_group_that_is_there_twice_is_refused() -> None:
    group = group_of("t", 3, [1, 0])
    with pytest.raises(ValueError, match="group t/3 is there twice"):
        for_groups([group, group])


def test_groups_that_were_never_judged_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"group t/4 has no reward at all.*judger=None"):
        for_groups([group_of("t", 4, [None, None])])


def test_what_an_estimator_refuses_names_the_group() -> None:
    with pytest.raises(ValueError, match=r"group t/0: lengths\[0\] must be >= 1, got 0"):
        for_groups([group_of("t", 0, [1, 0])], opo, lengths=lambda _: 0)


@pytest.mark.parametrize("answer", [[], [1.0], [1.0, math.nan], [0.0, math.inf]], ids=str)
def test_an_estimator_of_ones_own_must_answer_one_finite_number_each(answer: list[float]) -> None:
    with pytest.raises(ValueError, match="group t/0: the estimator must return 2 finite numbers"):
        for_groups([group_of("t", 0, [1, 0])], lambda _: answer)
