"""Which server of a pool gets a turn. Pure.

The rules, in order:

1. A server that is in doubt gets a turn only if every other that serves is in doubt or full.
2. A rollout stays where its last turn went well, because its prefix is cached there; unless that server has `sticky`
   turns more in flight than the least loaded one, or the rollout's last turn failed there.
3. Else the least loaded server; among equals the one whose last turn is longest ago, so that ties rotate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["Candidate", "Sessions", "choose"]


class Candidate(Protocol):
    """A server, as the choice sees it."""

    @property
    def turns(self) -> int:
        """Turns that it has in flight."""
        ...

    @property
    def limit(self) -> int | None:
        """How many it may have; `None` is no limit."""
        ...

    @property
    def suspected(self) -> bool:
        """Whether it is in doubt."""
        ...

    @property
    def chosen_at(self) -> int:
        """Number of the choice that fell on it last."""
        ...


C = TypeVar("C", bound=Candidate)
S = TypeVar("S")


def choose(
    serving: Iterable[C], *, home: C | None = None, shunned: C | None = None, sticky: int = 0
) -> C | None:
    """Returns the server for a turn; `None` if all are full.

    Args:
        serving: Those that may get turns.
        home: Where the rollout's last turn went well.
        shunned: Where its last turn failed.
        sticky: How many turns more than the least loaded server's may be in flight at its home.
    """
    free = [server for server in serving if server.limit is None or server.turns < server.limit]
    if not free:
        return None
    best = min(free, key=lambda s: (s.suspected, s is shunned, _load(s), s.chosen_at))
    if home in free and home.suspected <= best.suspected and home.turns - best.turns <= sticky:
        return home
    return best


def _load(server: Candidate) -> float:
    """By how much of its limit is used: servers of different sizes fill up evenly."""
    return server.turns if server.limit is None else server.turns / server.limit


class Sessions(Generic[S]):
    """Where each rollout's last turn was, and whether it went well there; of so many rollouts.

    Nobody says when a rollout is over, so those that had no turn for longest are forgotten.
    """

    def __init__(self, size: int = 65_536) -> None:
        self._size = size
        self._last: OrderedDict[str, tuple[S, bool]] = OrderedDict()

    def went(self, session: str, server: S, *, well: bool) -> None:
        """Takes note of a turn's end. A failure elsewhere doesn't take a rollout from its home."""
        known = self._last.get(session)
        if not well and known is not None and known[1] and known[0] is not server:
            return
        self._last[session] = server, well
        self._last.move_to_end(session)
        if len(self._last) > self._size:
            self._last.popitem(last=False)

    def home(self, session: str) -> S | None:
        """Where its last turn went well."""
        server, well = self._last.get(session, (None, False))
        return server if well else None

    def shunned(self, session: str) -> S | None:
        """Where its last turn failed."""
        server, well = self._last.get(session, (None, True))
        return None if well else server

    def forget(self, server: S) -> None:
        """A server has left."""
        for session in [name for name, (last, _) in self._last.items() if last is server]:
            del self._last[session]

    def __len__(self) -> int:
        return len(self._last)
