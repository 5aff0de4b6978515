"""Several policy servers as one controller.

Invariants:

- A turn is with one server, or waits for one. It gets a server, and loses it, in one synchronous step.
- Only servers that hold the pool's weights serve. Whoever was away, or failed to load them, comes back with them or
  not at all.
- The engine sends a turn again, the pool never does: it says that the server is gone (`failover`), and gives the next
  attempt to another one.
- Whether a failed turn is the server's fault is found out by asking the server, not by counting.

The tasks: one for each server, owned by the pool's block. It opens the controller, checks on it, brings it back, and
closes it. Control calls go to all servers side by side; their children are owned by the call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from os import fspath
from types import TracebackType
from typing import cast

from anyio import create_task_group, current_time, fail_after
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint

from rollnest.abc import (
    Attempt,
    Capabilities,
    Health,
    InferenceController,
    PauseMode,
    ReleaseTag,
    WeightSource,
)
from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed

from ._checks import check_text, check_whole
from ._concurrency import AdaptiveConcurrency as AdaptiveConcurrency
from ._pool_calls import Failures, ask_all, not_done
from ._pool_capabilities import check_covers, meet
from ._pool_checks import Checks
from ._pool_roster import Roster, said
from ._pool_server import Server
from ._pool_server import ServerState as ServerState
from ._pool_times import Times
from ._pool_turns import Turns, closed

__all__ = ["AdaptiveConcurrency", "ControllerPool", "PoolUpdateFailed", "ServerState"]

_log = logging.getLogger("rollnest")


class PoolUpdateFailed(WeightUpdateFailed):
    """New weights did not load on every server.

    Attributes:
        servers: Which weights each server holds now.
        weights: `NEW` if one server or more have the new weights; only those serve from then on. Else `OLD` if one or
            more still have the old ones; else `UNKNOWN`.
    """

    def __init__(self, message: str, *, servers: Mapping[str, WeightsState]) -> None:
        held = set(servers.values())
        states = (WeightsState.NEW, WeightsState.OLD)
        weights = next((state for state in states if state in held), WeightsState.UNKNOWN)
        super().__init__(message, weights=weights)
        self.servers: dict[str, WeightsState] = dict(servers)


class ControllerPool:
    """Several controllers as one. Give it to an `Engine`, or enter it with `async with`.

        pool = ControllerPool({"a": VllmController(url_a), "b": VllmController(url_b)})
        async with Engine(pool, task) as engine:
            ...

    It can do what all of them can (`capabilities`). All servers are opened when the pool is; later ones may come and
    go.

    A turn goes to the least loaded server, but a rollout stays where its last turn was, because its prefix is cached
    there. If its server dies, the engine sends it again with what it had received, and another server gets it; so use
    controllers that stream. A server that dies is out at once, and checked again and again, further and further
    apart. It comes back with the pool's weights only: the pool loads them if it got them as a path, else it waits for
    the next update.

    Args:
        servers: By name.
        concurrency: Most turns at one server at once; more of them wait. `AdaptiveConcurrency` finds the number for
            each server by its own load figures. `None` is no limit.
        sticky: How many turns more than the least loaded server's may be in flight at a rollout's own server, before
            the rollout moves.
        check_every: Seconds between two checks of a server that serves.
        check_timeout: Seconds that a server has to answer a check. One that serves and does not is asked once more.
        control_timeout: Seconds that a server has for one control call. Together with `check_timeout` it has to be
            less than the engine's.
        abort_timeout: Seconds that a server has to hear of an abort; the call returns when all have.
        update_timeout: Seconds that a server has to load new weights.
        backoff: Seconds until a server that went out is checked again; doubled each time.
        max_backoff: It is never more than that.
    """

    def __init__(
        self,
        servers: Mapping[str, InferenceController],
        *,
        concurrency: int | AdaptiveConcurrency | None = None,
        sticky: int = 32,
        check_every: float = 2.0,
        check_timeout: float = 5.0,
        control_timeout: float = 10.0,
        abort_timeout: float = 1.0,
        update_timeout: float = 600.0,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
    ) -> None:
        if not isinstance(servers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"servers must map names to controllers, got {servers!r}")
        if not servers:
            raise ValueError(f"servers must not be empty, got {servers!r}")
        for name in servers:
            check_text("a server's name", name)
        if concurrency is not None and not isinstance(concurrency, AdaptiveConcurrency):
            check_whole("concurrency", concurrency, 1)
        check_whole("sticky", sticky, 0)
        self._times = Times(
            check_every=check_every,
            check_timeout=check_timeout,
            control_timeout=control_timeout,
            abort_timeout=abort_timeout,
            update_timeout=update_timeout,
            backoff=backoff,
            max_backoff=max_backoff,
        )
        self._controllers = dict(servers)
        self._concurrency = concurrency
        self._sticky = sticky
        self._tasks: TaskGroup | None = None
        self._start()

    def _start(self) -> None:
        """Begins anew, whatever a block before has left."""
        self._capabilities: Capabilities | None = None
        self._roster = Roster(lambda: self._turns.dispatch())
        self._checks = Checks(self._roster, self._times, lambda: self.capabilities, self._set_limit)
        self._turns = Turns(self._roster, self._checks, self._sticky)

    def __repr__(self) -> str:
        roster, turns = self._roster, self._turns
        state = "closed" if not roster.open else "paused" if roster.paused else "open"
        return (
            f"<ControllerPool {state}, v{roster.version}: {len(roster.serving())} of {len(roster.servers)} servers "
            f"serve, {len(turns)} turns, {turns.waiting} of them wait>"
        )

    # The block

    async def __aenter__(self) -> ControllerPool:
        """Opens every server, and begins to check on them.

        The pool's weights are the newest that a server reports; one with older weights waits for the next update.

        Raises:
            InferenceError: A server did not open; the message names it.
            ValueError: The servers don't serve the same policy in the same way; the message says what differs.

        Cancellation: whatever was opened is closed again.
        """
        if self._tasks is not None:
            raise RuntimeError("the pool is open already")
        self._start()
        roster = self._roster
        for name, controller in self._controllers.items():
            roster.servers[name] = self._server(name, controller)
        self._tasks = create_task_group()
        await self._tasks.__aenter__()
        try:
            await self._open_all(self._tasks)
            self._capabilities = meet(
                {name: server.controller.capabilities for name, server in roster.servers.items()}
            )
        except BaseException:
            await self._close()
            raise
        reported = [s.holds for s in roster.servers.values() if s.holds is not None]
        roster.version = max(reported, default=0)
        roster.open = True
        for server in roster.servers.values():
            self._begin(server)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Takes all turns from the servers, and closes them side by side.

        Cancellation: the servers' own closing is cancelled, and ends as they say.
        """
        await self._close()

    async def _close(self) -> None:
        self._roster.open = False
        for server in self._roster.servers.values():
            server.leave(current_time())
        self._turns.dispatch()
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            await tasks.__aexit__(None, None, None)

    async def _open_all(self, tasks: TaskGroup) -> None:
        try:
            async with create_task_group() as opening:
                for server in self._roster.servers.values():
                    opening.start_soon(tasks.start, self._host, server)
        except BaseExceptionGroup as group:
            raise _first_error(group) from None

    async def _host(self, server: Server, *, task_status: TaskStatus[None]) -> None:
        """Keeps one server open, and checks on it, until it leaves."""
        opened = False
        try:
            async with server.controller:
                with fail_after(self._times.control_timeout):
                    server.holds = await server.controller.version()
                server.labels = server.holds is not None
                if self._capabilities is not None:
                    check_covers(self._capabilities, server.name, server.controller.capabilities)
                opened = server.up = True
                task_status.started()
                await self._checks.run(server)
                await server.drain()
        except (InferenceError, OSError) as error:
            if not opened:
                raise InferenceError(
                    f"server {server.name!r} did not open: {said(error)}", maybe_executed=False
                ) from error
            if not server.leaving:
                raise
            _log.warning("server %r did not close: %s", server.name, said(error))
        finally:
            server.put_out("it has left")
            self._roster.servers.pop(server.name, None)
            self._turns.forget(server)
            server.gone.set()
            self._turns.dispatch()

    # Servers that come and go

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """What is known of each server now."""
        return tuple(server.state for server in self._roster.servers.values())

    async def join(self, name: str, controller: InferenceController) -> None:
        """Takes another server in; it serves as soon as it holds the pool's weights.

        The pool closes it when it leaves, or when the pool is left.

        Raises:
            ValueError: There is one of that name, or it can't do what the pool has promised (`capabilities`).
            InferenceError: It did not open, or the pool is not open.

        Cancellation: it is closed again, and has served nothing.
        """
        check_text("a server's name", name)
        tasks, servers = self._check_open(), self._roster.servers
        if name in servers:
            raise ValueError(f"the pool has a server {name!r} already")
        server = servers[name] = self._server(name, controller)
        await tasks.start(self._host, server)
        self._begin(server)

    async def leave(self, name: str, *, grace: float = 30.0) -> None:
        """Lets a server go: it gets no new turn, has `grace` seconds for those that it has, and is closed.

        Turns that are not done by then go on elsewhere, with what they had received.

        Raises:
            ValueError: There is no server of that name.

        Cancellation: it leaves all the same.
        """
        if not grace >= 0:
            raise ValueError(f"grace must be >= 0, got {grace!r}")
        servers = self._roster.servers
        if name not in servers:
            raise ValueError(f"the pool has no server {name!r}, only {sorted(servers)}")
        server = servers[name]
        server.leave(current_time() + grace)
        self._turns.dispatch()
        await server.gone.wait()

    def _server(self, name: str, controller: InferenceController) -> Server:
        limit = self._concurrency
        if isinstance(limit, AdaptiveConcurrency):
            limit = limit.start
        return Server(name, controller, limit, number=0)

    def _begin(self, server: Server) -> None:
        """Has an open server serve, if it may; else it is looked at soon."""
        roster = self._roster
        if server.leaving:
            return
        if server.holds is None:
            server.holds = roster.version
            server.doubtful = roster.updated  # nobody can tell what it was started with
        if not roster.is_current(server, server.holds):
            roster.is_stale(server)
        elif not roster.paused:
            roster.admit(server)
            return
        server.want_check()

    # Turns

    @property
    def capabilities(self) -> Capabilities:
        """What all servers can do; known once the pool was entered."""
        if self._capabilities is None:
            raise RuntimeError("the pool's capabilities are known once it was entered")
        return self._capabilities

    async def generate(self, attempt: Attempt) -> None:
        """Has a server continue `attempt.prompt_ids`; waits for one while all are full, or the pool is paused.

        Cancellation: as the server's own `generate`; while waiting nothing has happened.

        Raises:
            InferenceError: As the server's own. If the server is gone it is `failover` while others serve, else
                `retryable`.
        """
        self._check_open()
        self._check_not_released("generate")
        await self._turns.run(attempt)

    def _set_limit(self, server: Server, load: Health) -> None:
        if isinstance(self._concurrency, AdaptiveConcurrency) and server.limit is not None:
            server.limit = self._concurrency.next(server.limit, load, server.peak)
            server.peak = server.turns
            self._turns.dispatch()

    # Control calls

    async def abort(self, ids: Collection[str] | None) -> None:
        """Asks the servers to end attempts early, each for its own. Those that wait in the pool end at once.

        Raises:
            InferenceError: Servers were not reached, or took over `abort_timeout` seconds. The others were asked.

        Cancellation: may leave some unasked.
        """
        self._check_open()
        await checkpoint()
        asked = self._turns.abort(ids)
        servers = asked if ids is not None else self._roster.reachable()
        _, failures = await ask_all(
            servers,
            lambda server: server.controller.abort(None if ids is None else asked[server]),
            seconds=self._times.abort_timeout,
        )
        for server in failures:
            server.want_check()
        _raise_if_serving("abort", failures)

    async def pause(self, mode: PauseMode) -> None:
        """Returns once no forward pass can run on any server.

        A server that does not confirm, and does not answer a check either, is out, and not waited for any longer.

        Raises:
            InferenceError: A server that works did not confirm within `control_timeout` seconds, or there is none.

        Cancellation: as the servers' own; `resume` lets all of them go on.
        """
        self._check_open()
        self._roster.paused = True
        servers = self._roster.reachable()
        for server in servers:
            server.paused = True
            if server.readmission is not None:
                server.readmission.cancel()
        failures = await self._control(servers, lambda server: server.controller.pause(mode))
        await self._blame("pause", failures)
        if all(server in failures for server in servers):
            raise self._roster.nobody()  # else an update may help, also where none serves

    async def resume(self) -> None:
        """Lets all servers go on. One that can't is out, as long as another can.

        Raises:
            InferenceError: None of those that serve could. It may be asked again.
        """
        self._check_open()
        self._check_not_released("resume")
        roster = self._roster
        # One that is out and has not got its memory back is not asked: it is brought back later.
        servers = [s for s in roster.servers.values() if (s.up or s.paused) and not s.released]
        failures = await self._control(servers, lambda server: server.controller.resume())
        for server in servers:
            server.paused = server in failures
        serving = roster.serving()
        if all(server in failures for server in serving):
            _raise_if_serving("resume", failures)
        for server in serving:
            if server in failures:
                roster.put_out(server, f"it did not resume: {said(failures[server])}")
            elif not roster.is_current(server, server.holds):
                roster.is_stale(server)
        roster.paused = False
        for server in roster.servers.values():
            server.want_check()
        self._turns.dispatch()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Loads new weights on every server that can be reached, side by side.

        A callable is called once: it moves the weights to all of them. A path is kept, so that servers that were away
        can be given the weights later.

        Raises:
            PoolUpdateFailed: They did not load on every server; it says which server has which. If some have them,
                only those serve from now on.
            WeightUpdateFailed: The pool is not paused, or the callable failed.

        Cancellation: nobody knows then which servers have them; they serve again once an update has succeeded.
        """
        self._check_open()
        await checkpoint()
        roster = self._roster
        if not roster.paused:
            raise WeightUpdateFailed(
                "weights are only updated while paused", weights=WeightsState.OLD
            )
        if "weights" in roster.released:
            raise WeightUpdateFailed(
                "the weights are released; they are reloaded before an update",
                weights=WeightsState.OLD,
            )
        servers = roster.reachable()
        before = {server: server.doubtful for server in servers}
        for server in servers:
            server.doubtful = True
        if callable(source):
            await self._let_move(source, before)
            given: WeightSource = _moved
        else:
            given = source
        _, failures = await ask_all(
            servers,
            lambda server: _update(server, given, version),
            seconds=self._times.update_timeout,
        )
        held = {server: _held(failures.get(server)) for server in servers}
        for server, state in held.items():
            if state is WeightsState.NEW:
                server.holds, server.doubtful = version, False
            elif state is WeightsState.OLD:
                server.doubtful = before[server]
        if WeightsState.NEW in held.values():
            roster.loaded(version, _path(source))
        if failures or not held:
            raise PoolUpdateFailed(
                f"version {version} did not load on every server: {_report(held, failures)}",
                servers={server.name: state for server, state in held.items()},
            )

    async def _let_move(
        self, move: Callable[[], Awaitable[None]], doubtful: Mapping[Server, bool]
    ) -> None:
        """Lets the trainer move the weights to all servers itself."""
        try:
            with fail_after(self._times.update_timeout):
                await move()
        except WeightUpdateFailed as error:
            if error.weights is WeightsState.OLD:
                for server, was in doubtful.items():
                    server.doubtful = was
            raise

    async def version(self) -> int | None:
        """Returns the weight version that the servers report: the lowest of those that serve; `None` if they keep none.

        Raises:
            InferenceError: No server answers.
        """
        self._check_open()
        servers = self._roster.reachable()
        answers, failures = await ask_all(
            servers,
            lambda server: server.controller.version(),
            seconds=self._times.control_timeout,
        )
        if not answers:
            raise not_done("version", failures) if failures else self._roster.nobody()
        known = {server: version for server, version in answers.items() if version is not None}
        newest = max(known.values(), default=0)
        if not failures and newest > self._roster.version and newest == min(known.values()):
            for server in known:
                server.holds = newest
            self._roster.adopt(newest)
        serving = [version for server, version in known.items() if server.serving]
        return min(serving or known.values(), default=None)

    async def health(self) -> Health:
        """Returns the load of all servers that serve; figures that one of them does not tell are `None`.

        Raises:
            InferenceError: No server serves.
        """
        self._check_open()
        await checkpoint()
        serving = self._roster.serving()
        if not serving:
            raise self._roster.nobody()
        loads, failures = await self._ask_health(serving)
        for server in failures:
            server.want_check()
        if not loads:
            raise not_done("health", failures)
        return _sum(loads.values())

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Has every server give memory back.

        Raises:
            InferenceError: The pool is not paused, or a server that works did not.
        """
        self._check_open()
        await checkpoint()
        roster = self._roster
        if not roster.paused:
            raise InferenceError("memory is only released while paused", maybe_executed=False)
        roster.released.update(tags)
        servers = roster.serving()
        for server in servers:
            server.released = True
        failures = await self._control(servers, lambda server: server.controller.release(tags))
        await self._blame("release", failures)

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Has every server take its memory again.

        Raises:
            InferenceError: A server that works did not. It may be asked again.
        """
        self._check_open()
        roster = self._roster
        servers = roster.serving()
        failures = await self._control(servers, lambda server: server.controller.reload(tags))
        await self._blame("reload", failures)
        roster.released.difference_update(tags)
        if not roster.released:
            for server in servers:
                server.released = server in failures

    async def _control(
        self, servers: Iterable[Server], call: Callable[[Server], Awaitable[None]]
    ) -> Failures:
        _, failures = await ask_all(servers, call, seconds=self._times.control_timeout)
        return failures

    async def _ask_health(
        self, servers: Iterable[Server]
    ) -> tuple[Mapping[Server, Health], Failures]:
        return await ask_all(
            servers,
            lambda server: server.controller.health(),
            seconds=self._times.check_timeout,
            locked=False,
        )

    async def _blame(self, what: str, failures: Failures) -> None:
        """Puts out those that failed and don't answer a check either; raises for the others that serve."""
        _, dead = await self._ask_health(failures)
        for server, error in dead.items():
            self._roster.is_down(server, f"it did not {what}, and a check failed: {said(error)}")
        _raise_if_serving(what, failures)

    def _check_open(self) -> TaskGroup:
        if self._tasks is None or not self._roster.open:
            raise closed()
        return self._tasks

    def _check_not_released(self, call: str) -> None:
        if released := self._roster.released:
            raise InferenceError(
                f"{call}() while {', '.join(sorted(released))} released", maybe_executed=False
            )


async def _moved() -> None:
    await checkpoint()


async def _update(server: Server, source: WeightSource, version: int) -> None:
    if not (server.serving and server.paused):  # it may have come back in the middle of the pause
        server.paused = True
        await server.controller.pause(PauseMode.ABORT)
    await server.controller.update_weights(source, version)
    server.holds, server.doubtful = version, False


def _path(source: WeightSource) -> str | None:
    """What can be loaded again later; a state dict is the trainer's, who may change it."""
    return None if callable(source) or isinstance(source, Mapping) else fspath(source)


def _held(error: Exception | None) -> WeightsState:
    if error is None:
        return WeightsState.NEW
    return error.weights if isinstance(error, WeightUpdateFailed) else WeightsState.UNKNOWN


def _report(held: Mapping[Server, WeightsState], failures: Failures) -> str:
    parts: list[str] = []
    for server, state in held.items():
        why = f" ({said(failures[server])})" if server in failures else ""
        parts.append(f"{server.name} has {state.value} weights{why}")
    return "; ".join(parts) or "none can be reached"


def _raise_if_serving(what: str, failures: Failures) -> None:
    left = {server: error for server, error in failures.items() if server.serving}
    if left:
        raise not_done(what, left)


def _sum(loads: Iterable[Health]) -> Health:
    loads = list(loads)
    running, waiting = [load.running for load in loads], [load.waiting for load in loads]
    caches = [load.cache for load in loads]
    return Health(
        running=None if None in running else sum(cast("list[int]", running)),
        waiting=None if None in waiting else sum(cast("list[int]", waiting)),
        cache=None if None in caches else max(cast("list[float]", caches)),
    )


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, flat; the group itself if it holds none but cancellations."""
    errors: BaseException | None = group.split(Exception)[0]
    while isinstance(errors, BaseExceptionGroup):
        errors = cast("BaseExceptionGroup[BaseException]", errors).exceptions[0]
    return errors or group
