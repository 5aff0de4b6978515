"""How many turns a server should have at once, by what it says of its own load. Pure."""

from __future__ import annotations

import math

from attrs import field, frozen

from rollnest.abc import Health

from ._checks import positive, whole

__all__ = ["AdaptiveConcurrency"]


@frozen(kw_only=True)
class AdaptiveConcurrency:
    """A limit that grows while a server takes all that it gets, and is cut when requests wait there or its cache fills.

    It knows only what the server says (`Health`), and keeps nothing itself, so one serves any number of servers. It
    grows by an eighth at a time, and only if the limit was used up and the server said that nothing waits or that its
    cache has room. It is cut by what waits, a quarter at most at a time, and not again before that has had its effect.
    In between it stays, as with a server that says nothing.

    Attributes:
        start: The limit of a server that nothing is known of.
        least: It is never cut below that.
        most: It never grows beyond that.
        queue: Share of the limit that may wait at the server; a few always do, between two forward passes.
        full: Share of the cache in use from which on the limit is cut. It grows below three quarters of that.
    """

    start: int = field(default=64, validator=whole(1))
    least: int = field(default=1, validator=whole(1))
    most: int = field(default=1024, validator=whole(1))
    queue: float = field(default=0.1, validator=positive(1))
    full: float = field(default=0.95, validator=positive(1))

    def __attrs_post_init__(self) -> None:
        if not self.least <= self.start <= self.most:
            raise ValueError(
                f"start must be between least {self.least} and most {self.most}, got {self.start}"
            )

    def next(self, limit: int, load: Health, turns: int) -> int:
        """Returns the limit from now on.

        Args:
            limit: The limit so far.
            load: What the server says now.
            turns: Most turns that it had in flight under this limit.
        """
        if turns > limit:  # it was cut, and turns that began before that still run
            return self._within(limit)
        waiting = load.waiting or 0
        is_full = load.cache is not None and load.cache >= self.full
        if is_full or waiting > self.queue * limit:
            most_cut = math.ceil(limit / 4)
            cut = most_cut if is_full else min(waiting, most_cut)
            return self._within(limit - cut)
        if turns >= limit and not waiting and self._has_room(load):
            return self._within(limit + math.ceil(limit / 8))
        return self._within(limit)

    def _has_room(self, load: Health) -> bool:
        if load.cache is None:
            return load.waiting is not None
        return load.cache < 0.75 * self.full

    def _within(self, limit: int) -> int:
        return max(self.least, min(self.most, limit))
