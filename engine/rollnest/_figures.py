"""What a batch's statistics need of one group, counted once, when the group has ended: a batch then only adds up."""

from __future__ import annotations

from attrs import frozen

from ._records import Group, Segment

__all__ = ["GroupFigures"]


@frozen(eq=False)
class GroupFigures:
    """Sums over the members of a group.

    Attributes:
        group: Whose they are.
        samples: Members.
        policy_tokens: Tokens that the policy sampled.
        masked_tokens: Of these, tokens that are not trained because they had become too old.
        response_tokens: Tokens of the policy, and what something else put between them.
        longest_response: Tokens of the longest response.
        truncated: Members that the cap cut.
        rewards: How many have a verdict.
        reward_sum: Sum of their rewards.
        reward_min: Lowest reward; `None` without a verdict.
        reward_max: Highest reward; `None` without a verdict.
        ages: The members' oldest versions, and how many have each; `None` is without a trainable token.
    """

    group: Group
    samples: int
    policy_tokens: int
    masked_tokens: int
    response_tokens: int
    longest_response: int
    truncated: int
    rewards: int
    reward_sum: float
    reward_min: float | None
    reward_max: float | None
    ages: tuple[tuple[int | None, int], ...]

    @property
    def has_no_spread(self) -> bool:
        """Whether all members have one reward, or none has any."""
        if self.rewards in (0, self.samples):
            return self.reward_min == self.reward_max
        return False

    @classmethod
    def of(cls, group: Group) -> GroupFigures:
        """Counts."""
        policy_tokens = masked_tokens = response_tokens = longest = truncated = 0
        rewards: list[float] = []
        oldest_versions: dict[int | None, int] = {}
        for sample in group.samples:
            length = 0
            for segment in sample.segments:
                length += len(segment.response)
                if segment.trained_from:
                    masked_tokens += _masked(segment)
            response_tokens += length
            if length > longest:
                longest = length
            policy_tokens += sample.policy_tokens
            truncated += sample.truncated
            if sample.verdict is not None:
                rewards.append(sample.verdict.score)
            oldest = sample.oldest_version
            oldest_versions[oldest] = oldest_versions.get(oldest, 0) + 1
        return cls(
            group,
            len(group.samples),
            policy_tokens,
            masked_tokens,
            response_tokens,
            longest,
            truncated,
            len(rewards),
            sum(rewards),
            min(rewards, default=None),
            max(rewards, default=None),
            tuple(oldest_versions.items()),
        )


def _masked(segment: Segment) -> int:
    return segment.response.policy_tokens - bytes(segment.mask).count(1)
