"""Filters of whole groups: which are worth training (`TaskSpec(keep=)`), and which of their samples (`refine=`).

    TaskSpec("math", prompts, judger=judge, keep=has_spread, refine=max_variance(4))

They are plain functions of a judged group, asked on the event loop in the step in which it ends: quick, and without a
state. Write your own in the same way. `refine` is asked first, and `keep` sees what it has left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ._checks import check_real, check_whole
from ._records import Group, Sample

__all__ = [
    "Keep",
    "Refine",
    "all_of",
    "has_spread",
    "max_variance",
    "mean_between",
    "without_truncated",
]

Keep: TypeAlias = "Callable[[Group], bool]"
"""Says whether a group is worth training."""

Refine: TypeAlias = "Callable[[Group], Sequence[Sample]]"
"""Chooses the samples of a group that are to be trained, and their order."""


def has_spread(group: Group) -> bool:
    """Keeps a group whose rewards differ; the others teach nothing, since every advantage in them is 0.

    It is the dynamic sampling of DAPO (Yu et al., arXiv:2503.14476, section 3.2). A group of one sample has no spread.

    Raises:
        ValueError: A sample has no reward: the task has `judger=None`.
    """
    rewards = _rewards("has_spread", group)
    return min(rewards) < max(rewards)


def mean_between(low: float, high: float) -> Keep:
    """Returns a filter that keeps groups whose mean reward is within bounds: neither too hard nor too easy.

        keep=mean_between(0.2, 0.8)

    Args:
        low: The least mean that is kept.
        high: The largest mean that is kept.

    Raises:
        ValueError: A bound is not finite, or `low` is above `high`. The filter raises it where a sample has no reward.
        TypeError: A bound is no number.
    """
    check_real("low", low, -math.inf, open_below=True)
    check_real("high", high, low)

    def mean_is_between(group: Group) -> bool:
        rewards = _rewards("mean_between", group)
        return low <= math.fsum(rewards) / len(rewards) <= high

    return mean_is_between


def all_of(*filters: Keep) -> Keep:
    """Returns a filter that keeps what every one of these keeps; they are asked in order, up to the first that doesn't.

    Raises:
        ValueError: There is none.
        TypeError: One is no function.
    """
    if not filters:
        raise ValueError("filters must hold at least one function, got none")
    for filter_ in filters:
        if not callable(filter_):
            raise TypeError(f"filters must be functions of a group, got {filter_!r}")

    def all_keep(group: Group) -> bool:
        return all(filter_(group) for filter_ in filters)

    return all_keep


def max_variance(count: int) -> Refine:
    """Returns a choice of the `count` samples whose rewards vary most: some of the best, and the rest of the worst.

    It is the down-sampling of PODS (Xu et al., arXiv:2504.13818, section 3.2): many samples are generated, and the
    trainer updates on few. A smaller group stays whole. Which of several samples with the same reward are chosen is
    decided by their place in the group; what is chosen stays in the group's order.

    Args:
        count: How many are kept; at least 1.

    Raises:
        ValueError: `count` is below 1. The choice raises it where a sample has no reward.
        TypeError: `count` is no whole number.
    """
    check_whole("count", count, 1)

    def choose(group: Group) -> Sequence[Sample]:
        rewards = _rewards("max_variance", group)
        if len(rewards) <= count:
            return group.samples
        ranked = sorted(range(len(rewards)), key=rewards.__getitem__)
        scale = max(map(abs, rewards)) or 1.0  # squares stay finite

        def split(best: int) -> list[int]:
            return [*ranked[: count - best], *ranked[len(ranked) - best :]]

        def variance(best: int) -> float:
            chosen = [rewards[index] / scale for index in split(best)]
            mean = math.fsum(chosen) / count
            return math.fsum([(reward - mean) ** 2 for reward in chosen])

        # Of those with equal variance the one that is nearest to halves, so that ties don't favor one side.
        best = max(range(count + 1), key=lambda n: (variance(n), -abs(2 * n - count)))
        return [group.samples[index] for index in sorted(split(best))]

    return choose


def without_truncated(group: Group) -> Sequence[Sample]:
    """Leaves out samples that a cap or a limit cut: `Sample.truncated`.

    A group in which all of them are stays as it is, since no choice may be empty; `keep` can drop it.
    """
    whole = [sample for sample in group.samples if not sample.truncated]
    return whole or group.samples


def _rewards(filter_: str, group: Group) -> list[float]:
    rewards = [reward for reward in group.rewards if reward is not None]
    if len(rewards) < len(group):
        raise ValueError(
            f"{filter_} needs rewards, and {len(group) - len(rewards)} of {len(group)} samples of prompt "
            f"{group.prompt.uid!r} have none (a task with judger=None has none)"
        )
    return rewards
