"""How many groups a task may start now: pure arithmetic on what is live.

Admission counts live groups, never totals since the start, so it can neither drift nor deadlock: what a waiting
`next_batch` lacks is always admitted. It only saves waste; the staleness bound is enforced when a batch is taken.
"""

from __future__ import annotations

from math import ceil
from typing import Literal, Protocol

from attrs import field, frozen
from attrs.validators import in_, instance_of

from ._checks import real, whole

__all__ = [
    "AsyncStrategy",
    "ProduceStrategy",
    "Production",
    "SyncStrategy",
    "is_freshest_first",
    "keeps_partials",
    "max_token_lag",
    "tail_batch",
]


@frozen
class Production:
    """What one task has going.

    Attributes:
        lacking: Groups that a waiting `next_batch` still lacks, of those not yet ready.
        flight: Groups in flight.
        ready: Groups that are ready.
        share: The task's share of a batch in the long run, in groups; a fraction is possible.
        tail: Groups of a tail batch that have not ended yet.
        publish_every: After how many batches the trainer publishes weights.
        taken: Batches that were taken with the policy's present weights.
    """

    lacking: int
    flight: int
    ready: int
    share: float
    tail: int = 0
    publish_every: int = 1
    taken: int = 0


class ProduceStrategy(Protocol):
    """Says how many groups may start.

    One of your own may also have `tail_batch`, `order`, `partial` and `max_token_lag`, with the meaning that they have
    in `AsyncStrategy`. What `room` answers is asked again whenever a group has ended, a batch was taken, or a
    `next_batch` begins to wait.
    """

    @property
    def max_staleness(self) -> int:
        """Most versions between a delivered sample's oldest trainable token and the policy's."""
        ...

    @property
    def expired(self) -> Literal["retry", "tail", "drop"]:
        """What becomes of groups that are too old: drawn again, or as a tail batch, or let go."""
        ...

    @property
    def needs_batch_size(self) -> bool:
        """Whether it runs ahead of `next_batch`, and so has to know the batch's size beforehand."""
        ...

    def room(self, production: Production) -> int:
        """Returns how many groups may start now, >= 0."""
        ...


@frozen(kw_only=True)
class SyncStrategy:
    """Starts exactly what the waiting `next_batch` still lacks.

    Attributes:
        max_staleness: Most versions of lag in a delivered sample.
        expired: What becomes of groups that are too old, because new weights came before they were taken:
            `"retry"` draws them again, `"drop"` lets them go.
    """

    max_staleness: int = field(default=0, validator=whole(0))
    expired: Literal["retry", "drop"] = field(default="retry", validator=in_(("retry", "drop")))
    needs_batch_size: bool = field(default=False, init=False, repr=False)

    def room(self, production: Production) -> int:
        """See `ProduceStrategy.room`."""
        return max(0, production.lacking - production.flight)


@frozen(kw_only=True)
class AsyncStrategy:
    """Runs ahead while the trainer trains.

    Keeps `flight + ready` below `(1 + lead) * share + ceil(oversample * share)`. What a waiting `next_batch` lacks may
    always start.

    Attributes:
        max_staleness: Most versions of lag in a delivered sample; older groups expire.
        lead: How many batches to run ahead of the next one. `None` is as many as can be taken before they are too old,
            while the trainer trains on the one before and publishes as often as `Engine(publish_every=)` says:
            `(1 + max_staleness) * publish_every - 1`, less the batches that were taken since the last publication. With
            `publish_every=1` that is `max_staleness - 1`. More makes groups that expire.
        oversample: Share of a batch that is started on top, so that the slowest groups need not be waited for.
        expired: What becomes of groups that are too old. `"retry"` draws them again before fresh prompts, and keeps
            their fresh members; `"tail"` does so as soon as `tail_batch` of them wait, and starts nothing on top until
            they have ended; `"drop"` lets them go.
        tail_batch: How many expired groups make a tail batch; with `expired="tail"` only.
        order: Which ready groups a batch takes first: `"oldest"`, or `"freshest"`. The latter starves long answers, so
            it needs `expired="drop"`.
        partial: Whether a turn that a pause has cut goes on from its partial. `False` discards the partial, and the
            turn begins again, so that each turn is of one version; with `PauseMode.KEEP` nothing is cut.
        max_token_lag: Most versions between a token that is trained and the policy's; older tokens of a sample are
            masked when its batch is taken, and no longer count for `max_staleness`. A sample without any token left to
            train is made again. `None` trains all.
    """

    max_staleness: int = field(default=1, validator=whole(0))
    lead: float | None = field(default=None, validator=real(0, optional=True))
    oversample: float = field(default=0.0, validator=real(0))
    expired: Literal["retry", "tail", "drop"] = field(
        default="retry", validator=in_(("retry", "tail", "drop"))
    )
    tail_batch: int | None = field(default=None, validator=whole(1, optional=True))
    order: Literal["oldest", "freshest"] = field(
        default="oldest", validator=in_(("oldest", "freshest"))
    )
    partial: bool = field(default=True, validator=instance_of(bool))
    max_token_lag: int | None = field(default=None, validator=whole(0, optional=True))
    needs_batch_size: bool = field(default=True, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if (self.expired == "tail") != (self.tail_batch is not None):
            raise ValueError(
                f"tail_batch and expired='tail' belong together, got tail_batch={self.tail_batch}, "
                f"expired={self.expired!r}"
            )
        if self.order == "freshest" and self.expired != "drop":
            raise ValueError(
                f"order='freshest' needs expired='drop', got expired={self.expired!r}: groups that are "
                "overtaken again and again would be made for ever"
            )

    def room(self, production: Production) -> int:
        """See `ProduceStrategy.room`."""
        share = production.share
        bound = ceil(self._batches(production) * share)
        if not production.tail:
            bound += ceil(self.oversample * share)
        ahead = bound - production.flight - production.ready
        return max(0, ahead, production.lacking - production.flight)

    def _batches(self, production: Production) -> float:
        """How many batches may be live at once, the next one included."""
        if self.lead is not None:
            return 1 + self.lead
        # A batch that is started now is the last in the line. There are so many places, the next batch's among them,
        # until the version is `max_staleness` above the present one; then it is too old. Running ahead is for the time
        # in which the trainer trains, so one batch counts as taken: when it waits, `lacking` says what it needs.
        every = production.publish_every
        return (1 + self.max_staleness) * every - min(max(production.taken, 1), every)


def tail_batch(strategy: ProduceStrategy) -> int | None:
    """How many expired groups make a tail batch; `None` if they don't wait for one another."""
    groups: object = getattr(strategy, "tail_batch", None)
    return groups if isinstance(groups, int) else None


def is_freshest_first(strategy: ProduceStrategy) -> bool:
    """Whether a batch takes the freshest groups first."""
    return getattr(strategy, "order", "oldest") == "freshest"


def keeps_partials(strategy: ProduceStrategy) -> bool:
    """Whether a turn that a pause has cut goes on from its partial; else it begins again."""
    return getattr(strategy, "partial", True) is not False


def max_token_lag(strategy: ProduceStrategy) -> int | None:
    """Most versions between a trained token and the policy's; `None` trains all."""
    lag: object = getattr(strategy, "max_token_lag", None)
    return lag if isinstance(lag, int) else None
