"""The servers of a pool: who serves, and which weights they are to hold. Synchronous.

Only a server that holds the pool's weights may serve. What it says of itself counts, unless an update has failed
there; one that says nothing is believed to hold what it was given last, until it was away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollnest.abc import ReleaseTag
from rollnest.errors import InferenceError

from ._pool_server import Server

__all__ = ["Roster", "said"]

_log = logging.getLogger("rollnest")


class Roster:
    """Who is in the pool.

    Attributes:
        servers: By name.
        open: Whether the pool's block is on.
        paused: Whether the pool is paused: then nobody gets turns, and nobody is brought back.
        released: What the servers have given back the memory of.
        version: Weight version that a server has to hold.
        source: The path that those weights came from, if they did from one.
        updated: Whether there was an update yet.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called when a server begins or ceases to serve."""
        self.servers: dict[str, Server] = {}
        self.open = False
        self.paused = False
        self.released: set[ReleaseTag] = set()
        self.version = 0
        self.source: str | None = None
        self.updated = False
        self._changed = changed

    def serving(self) -> list[Server]:
        """Those that get turns."""
        return [server for server in self.servers.values() if server.serving]

    def reachable(self) -> list[Server]:
        """Those that answered the last check, whether they serve or not."""
        return [server for server in self.servers.values() if server.up]

    def is_current(self, server: Server, reported: int | None) -> bool:
        """Whether a server holds the pool's weights; `reported` is what it says itself."""
        if server.doubtful:
            return False
        return (server.holds if reported is None else reported) == self.version

    def loaded(self, version: int, source: str | None) -> None:
        """These are the weights to hold from now on."""
        self.version, self.source, self.updated = version, source, True

    def adopt(self, version: int) -> None:
        """All servers have got newer weights than the pool knows of, from somebody else."""
        self.loaded(version, None)
        for server in self.servers.values():
            server.want_check()

    def admit(self, server: Server) -> None:
        """It serves."""
        server.admit()
        self._changed()

    def put_out(self, server: Server, why: str) -> None:
        """It does not serve any more, or still not."""
        server.times_out += 1
        if server.put_out(why):
            _log.warning("server %r is out: %s", server.name, why)
            self._changed()

    def is_down(self, server: Server, why: str) -> None:
        """It does not answer. If it comes back it may be another process, with the weights that it was started with."""
        server.up = server.stale = False
        if self.updated and not server.labels:
            server.doubtful = True
        self.put_out(server, why)

    def is_stale(self, server: Server) -> None:
        """It works, but holds other weights."""
        server.stale = True
        held = "weights that nobody knows" if server.doubtful else f"version {server.holds}"
        self.put_out(server, f"it holds {held}, not version {self.version}")

    def nobody(self) -> InferenceError:
        """The error where no server serves."""
        why = "; ".join(f"{server.name}: {server.why}" for server in self.servers.values())
        return InferenceError(
            f"no server of the pool serves: {why or 'it has none'}",
            retryable=True,
            maybe_executed=False,
        )


def said(error: BaseException) -> str:
    """An error's text; its type if that says nothing."""
    return str(error) or type(error).__name__
