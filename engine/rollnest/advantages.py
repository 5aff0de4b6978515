"""Advantages of the samples of one group: plain arithmetic over its rewards.

Each estimator takes the rewards of one group's members, by index, and returns one advantage for each. `for_groups`
applies one to whole groups and keys the result by the group's own name, so that no batch layout can mix prompts.

What holds for all of them:

- A member without a reward (`None`: it failed, was aborted, or was not judged) is outside the baseline, as if the
  group were smaller, and its advantage is 0.0. It is never counted as reward 0.
- A group with one reward, and a group whose rewards are all equal, teach nothing: every advantage is exactly 0.0.
- Nothing is NaN or infinite, and the order of the members does not matter, not even to the last bit.

An advantage belongs to the whole response; the trainer puts it on the tokens whose mask is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import TypeAlias, overload

from ._checks import check_real, check_whole
from ._records import Group, Sample

__all__ = [
    "Estimator",
    "GroupKey",
    "LengthEstimator",
    "dr_grpo",
    "for_groups",
    "grpo",
    "opo",
    "pass_at_k",
    "rloo",
]

GroupKey: TypeAlias = "tuple[str, int]"
"""What names a group: its task and its visit."""

Estimator: TypeAlias = "Callable[[Sequence[float | None]], Sequence[float]]"
"""Makes the advantages of one group from its rewards."""

LengthEstimator: TypeAlias = "Callable[[Sequence[float | None], Sequence[int]], Sequence[float]]"
"""Makes the advantages of one group from its rewards and the lengths of its responses."""

_LARGEST = 1e100  # differences, their squares and the sums of those stay finite
_GRPO_EPSILON = 1e-8


def grpo(rewards: Sequence[float | None]) -> list[float]:
    """Returns rewards in standard deviations from the group's mean.

    `A_i = (r_i - mean(r)) / (std(r) + 1e-8)`, with the unbiased standard deviation (divisor K - 1).

    Source: Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2. The paper leaves the divisor open and has no
    epsilon; both are what XTuner and TRL compute.

    Args:
        rewards: The K members' rewards; `None` for a member without one.

    Returns:
        K advantages, which sum to 0.

    Raises:
        ValueError: No member has a reward, or one is not finite or above 1e100 in size.
        TypeError: A reward is no number.
    """

    def of_scored(scored: list[float]) -> list[float]:
        centred = _centred(scored)
        variance = math.fsum(c * c for c in centred) / (len(centred) - 1)
        scale = math.sqrt(variance) + _GRPO_EPSILON
        return [c / scale for c in centred]

    return _over_scored(rewards, of_scored)


def dr_grpo(rewards: Sequence[float | None]) -> list[float]:
    """Returns rewards less the group's mean, not divided by their spread.

    `A_i = r_i - mean(r)`

    Source: Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2. The paper's other half is
    in the loss: sum the tokens' losses and divide by a constant (such as the most tokens a response may have), not by
    the response's own length. A trainer that averages over each response's tokens gets the same by multiplying each
    advantage with `length / constant`. XTuner's estimator of this name does that multiplication, but on GRPO's
    advantage, divided by the spread; ours is the paper's.

    Args:
        rewards: The K members' rewards; `None` for a member without one.

    Returns:
        K advantages, which sum to 0.

    Raises:
        ValueError: No member has a reward, or one is not finite or above 1e100 in size.
        TypeError: A reward is no number.
    """
    return _over_scored(rewards, _centred)


def rloo(rewards: Sequence[float | None]) -> list[float]:
    """Returns each reward less the mean of the other members' rewards.

    `A_i = r_i - (sum(r) - r_i) / (K - 1)`

    Source: Ahmadian et al., Back to Basics, arXiv:2402.14740 (after Kool et al., 2019). With one reward there is no
    baseline: the advantage is 0.0, where XTuner has the reward itself.

    Args:
        rewards: The K members' rewards; `None` for a member without one.

    Returns:
        K advantages, which sum to 0.

    Raises:
        ValueError: No member has a reward, or one is not finite or above 1e100 in size.
        TypeError: A reward is no number.
    """

    def of_scored(scored: list[float]) -> list[float]:
        # The same formula over centred rewards, which do not lose digits to a large common part.
        size = len(scored)
        return [c * size / (size - 1) for c in _centred(scored)]

    return _over_scored(rewards, of_scored)


def opo(rewards: Sequence[float | None], lengths: Sequence[int]) -> list[float]:
    """Returns rewards less their mean weighted by length, the baseline of least gradient variance.

    `A_i = r_i - sum(l_j * r_j) / sum(l_j)`

    Source: Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.

    Args:
        rewards: The K members' rewards; `None` for a member without one.
        lengths: The K responses' lengths in tokens; at least 1 where there is a reward.

    Returns:
        K advantages; weighted by length, they sum to 0.

    Raises:
        ValueError: No member has a reward, one is not finite or above 1e100 in size, there are not as many lengths
            as rewards, or a scored response has no length.
        TypeError: A reward is no number, or a length no int.
    """
    if len(lengths) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(lengths)} lengths")
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        check_whole(f"lengths[{i}]", length, 0 if reward is None else 1)
    weights = [length for r, length in zip(rewards, lengths, strict=True) if r is not None]

    def of_scored(scored: list[float]) -> list[float]:
        centred = _centred(scored)
        total = sum(weights)
        shift = math.fsum(c * (w / total) for c, w in zip(centred, weights, strict=True))
        return [c - shift for c in centred]

    return _over_scored(rewards, of_scored)


def pass_at_k(
    rewards: Sequence[float | None], *, k: int = 4, threshold: float = 0.0
) -> list[float]:
    """Returns the advantage of each member over all sets of k members, a set being right if one of its members is.

    With n members that have a reward, w of them wrong, `p = 1 - C(w, k) / C(n, k)` (the pass@k of the group) and
    `s = sqrt(p * (1 - p))`:

    - a right member: `A = (1 - p) / s`
    - a wrong one: `A = (1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / s`

    Source: Chen et al., Pass@k Training, arXiv:2508.10751, the analytical derivation. All advantages are 0.0 where the
    sets don't differ (s = 0) or there is none (k > n), so k must be below the group's size to teach anything. XTuner
    has -1e6 for the members of a group without a right one.

    Args:
        rewards: The members' rewards; `None` for a member without one.
        k: Members in a set.
        threshold: A member is right if its reward is above it.

    Returns:
        One advantage per member, which sum to 0.

    Raises:
        ValueError: No member has a reward, one is not finite or above 1e100 in size, `k` is below 1, or `threshold`
            is not finite.
        TypeError: A reward or `threshold` is no number, or `k` no int.
    """
    check_whole("k", k, 1)
    check_real("threshold", threshold, -math.inf)

    def of_scored(scored: list[float]) -> list[float]:
        size = len(scored)
        wrong = sum(r <= threshold for r in scored)
        sets = math.comb(size, k)
        failing = math.comb(wrong, k) / sets if sets else 0.0
        if failing in (0.0, 1.0):
            return [0.0] * size
        spread = math.sqrt((1 - failing) * failing)
        of_right = failing / spread
        # Of the sets that a wrong member is in, this share fails.
        of_wrong = (failing - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / spread
        return [of_wrong if r <= threshold else of_right for r in scored]

    return _over_scored(rewards, of_scored)


@overload
def for_groups(
    groups: Iterable[Group], estimator: Estimator = ...
) -> dict[GroupKey, list[float]]: ...
@overload
def for_groups(
    groups: Iterable[Group], estimator: LengthEstimator, *, lengths: Callable[[Sample], int]
) -> dict[GroupKey, list[float]]: ...
def for_groups(
    groups: Iterable[Group],
    estimator: Callable[..., Sequence[float]] = grpo,
    *,
    lengths: Callable[[Sample], int] | None = None,
) -> dict[GroupKey, list[float]]:
    """Returns the advantages of every group by its `(task, visit)`, one for each of its samples, in their order.

    A group is a group because it says so: neither the batch's layout nor equal uids of two tasks can merge two.

        advantages = for_groups(batch.groups, rloo)
        zip(group.samples, advantages[group.task, group.visit], strict=True)

    Args:
        groups: Groups, such as a batch's.
        estimator: One of this module, or another function of a group's rewards. Options go in with
            `functools.partial(pass_at_k, k=2)`.
        lengths: For an estimator that weighs by length, such as `opo`: what measures a sample, such as
            `lambda sample: sample.policy_tokens`.

    Raises:
        ValueError: A group is there twice, or has no reward at all (its task has `judger=None`); the estimator
            refuses a group's rewards, or its answer is not one finite number for each member.
    """
    advantages: dict[GroupKey, list[float]] = {}
    for group in groups:
        key, name = (group.task, group.visit), f"group {group.task}/{group.visit}"
        if key in advantages:
            raise ValueError(f"{name} is there twice")
        if all(reward is None for reward in group.rewards):
            raise ValueError(
                f"{name} has no reward at all, so its members can't be compared "
                "(a task with judger=None has no advantages)"
            )
        try:
            if lengths is None:
                result = list(estimator(group.rewards))
            else:
                result = list(estimator(group.rewards, [lengths(s) for s in group.samples]))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if len(result) != len(group) or not all(map(math.isfinite, result)):
            raise ValueError(
                f"{name}: the estimator must return {len(group)} finite numbers, got {result}"
            )
        advantages[key] = result
    return advantages


def _over_scored(
    rewards: Sequence[float | None], formula: Callable[[list[float]], list[float]]
) -> list[float]:
    """Applies a formula to the rewards that are there; keeps the promises that all estimators make."""
    scored = [_checked(i, r) for i, r in enumerate(rewards) if r is not None]
    if not scored:
        raise ValueError(f"at least one member needs a reward, got {list(rewards)}")
    # Compared, not computed: the rounded mean of equal rewards may differ from them.
    if min(scored) == max(scored):
        return [0.0] * len(rewards)
    results = iter(formula(scored))
    return [0.0 if reward is None else next(results) for reward in rewards]


def _centred(scored: list[float]) -> list[float]:
    # `fsum` rounds once, whatever the order.
    mean = math.fsum(scored) / len(scored)
    return [r - mean for r in scored]


def _checked(index: int, reward: object) -> float:
    if not isinstance(reward, Real):
        raise TypeError(f"rewards[{index}] must be a number or None, got {reward!r}")
    try:
        value = float(reward)
    except OverflowError:  # an int beyond any float
        value = math.inf
    if not abs(value) <= _LARGEST:
        raise ValueError(
            f"rewards[{index}] must be finite and at most {_LARGEST:g} in size, got {reward!r}"
        )
    return value
