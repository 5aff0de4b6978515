"""Checks on a pool's servers: finds out which are gone, and brings them back. Each server's own task runs it.

A server is checked now and then; at once when a turn has failed there, which is how a turn's fault is told from a
server's; and when it is out, further and further apart, until it works again. Then it is brought back: what it still
does is aborted, it gets the pool's weights if the pool can give them, and goes on. A pause cuts that short; it begins
anew afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from anyio import CancelScope, fail_after, move_on_after

from rollnest.abc import Capabilities, Health, PauseMode
from rollnest.errors import InferenceError

from ._pool_calls import late
from ._pool_roster import Roster, said
from ._pool_server import Server
from ._pool_times import Times

__all__ = ["Checks"]

_log = logging.getLogger("rollnest")


class Checks:
    """Checks on the servers of a roster."""

    def __init__(
        self,
        roster: Roster,
        times: Times,
        capabilities: Callable[[], Capabilities],
        measured: Callable[[Server, Health], None],
    ) -> None:
        """`measured` hears what a server that serves has said of its load."""
        self._roster = roster
        self._times = times
        self._capabilities = capabilities
        self._measured = measured

    async def run(self, server: Server) -> None:
        """Checks on a server until it is to leave."""
        while not server.leaving:
            with move_on_after(self._pause_before(server)):
                while not (server.wanted or server.leaving):
                    await server.change()
            if server.leaving:
                return
            server.wanted = False
            server.checks_begun += 1
            with CancelScope() as server.checking:
                await self._check(server)
            server.checking = None
            server.checks_ended = server.checks_begun
            server.tell()

    async def verdict(self, server: Server) -> None:
        """Returns once a check that begins from now on has an answer, or the server does not serve any more."""
        wanted = server.checks_begun + 1
        server.want_check()
        while server.serving and (server.checks_ended < wanted or server.missed):
            await server.change()

    def _pause_before(self, server: Server) -> float:
        times = self._times
        if server.serving:
            return times.check_every
        return min(times.max_backoff, times.backoff * 2.0 ** max(0, server.times_out - 1))

    async def _check(self, server: Server) -> None:
        roster, seconds = self._roster, self._times.check_timeout
        try:
            with fail_after(seconds):
                load = server.load = await server.controller.health()
            server.up = True
            if roster.paused:
                server.missed = False
                return  # whoever has given its memory back can't say which weights it has
            async with server.lock:
                if not roster.paused:
                    await self._take_back(server)
                    with fail_after(seconds):
                        reported = await server.controller.version()
                    await self._judge(server, load, reported)
            server.missed = False
        except Exception as error:
            silent = isinstance(error, TimeoutError) and not str(error)
            if silent and server.serving and not server.missed:
                # It may only be busy, and its turns would move to others, which are busier then: it is asked once more.
                server.missed = server.suspected = server.wanted = True
                return
            server.missed = False
            roster.is_down(server, f"a check failed: {said(late(seconds) if silent else error)}")

    async def _judge(self, server: Server, load: Health, reported: int | None) -> None:
        """Decides what becomes of a server that works; its lock is held."""
        server.labels = reported is not None
        current = self._roster.is_current(server, reported)
        if reported is not None and not server.doubtful:
            server.holds = reported
        if not server.serving:
            await self._bring_back(server, current)
        elif current:
            server.suspected = False
            self._measured(server, load)
        else:
            self._roster.is_stale(server)

    async def _bring_back(self, server: Server, current: bool) -> None:
        roster, controller, seconds = self._roster, server.controller, self._times.control_timeout
        if not current and roster.source is None:
            roster.is_stale(server)
            return
        try:
            with CancelScope() as server.readmission:
                with fail_after(seconds):
                    await controller.abort(None)  # what it still makes is for nobody
                if not current and roster.source is not None:
                    await self._give_weights(server, roster.source, roster.version)
                with fail_after(seconds):
                    await controller.resume()
                server.paused = False
                if not (roster.paused or server.leaving):
                    _log.info("server %r serves again", server.name)
                    roster.admit(server)
        except Exception as error:
            roster.put_out(server, f"it could not be brought back: {said(error)}")
        finally:
            server.readmission = None

    async def _take_back(self, server: Server) -> None:
        """Has a server that was away when the others got their memory back get its own."""
        if server.released:
            with fail_after(self._times.control_timeout):
                await server.controller.reload(self._capabilities().release_tags)
            server.released = False

    async def _give_weights(self, server: Server, source: str, version: int) -> None:
        controller, seconds = server.controller, self._times.control_timeout
        server.doubtful = server.paused = True
        with fail_after(seconds):
            await controller.pause(PauseMode.ABORT)
        with fail_after(self._times.update_timeout):
            await controller.update_weights(source, version)
        with fail_after(seconds):
            reported = await controller.version()
        if reported not in (None, version):
            raise InferenceError(f"it reports version {reported} after an update to {version}")
        server.holds, server.doubtful = version, False
