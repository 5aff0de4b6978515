"""An agent loop that runs elsewhere, as the engine sees it: on a host, chosen among several.

The engine's rollout is the truth. A session does on it what the loop asks for, as if the loop ran here: the gate, the
journal, limits and slots know no difference, and a pause needs nobody's consent.

If a host is lost, what its loops had asked the policy for comes to its end and is recorded. Then each raises
`HostLost`, and the engine runs it again, once, on another host, from the journal. A group loop has one host for all of
its members; if it can't be replayed, its group begins anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count

from anyio import CancelScope, Event, current_time

from ._checks import check_real
from ._context import RolloutServices
from ._group_loop import OpenGroup
from ._group_session import GroupSession, member_run
from ._host_messages import End, Prepare
from ._live import LiveGroup
from ._loops import AgentLoop, ElsewhereLoop, LoopFunction, as_loop
from ._records import Message
from ._rollout import Rollout
from ._sessions import Ending, Host, Running, Session, core_of

__all__ = ["Host", "HostedLoop"]

_REMEMBERED = 8192  # rollouts of which something is known
_SUSPECT = 2  # how often a rollout's host was lost, until it is looked at


class HostedLoop(ElsewhereLoop):
    """An agent loop that runs on one of several hosts. What they are, and how they are reached, is a subclass's.

    A rollout goes to the host that has the fewest, the least recently chosen of them first; one that runs again, to
    where it ran before. Without any host it waits for one. A loop that generates its groups itself has each group on
    one host.

    A loop may be what brings its host down. So a rollout that was lost twice becomes a suspect: a host takes one of
    them at a time, and if it goes down then, the others are not to blame.

    Attributes:
        loop: The loop.
        hosts: The hosts that take rollouts now.

    Args:
        loop: The loop.
        grace: Seconds for which a host may take to end a loop that was cut. Then it is given up.

    Raises:
        ValueError: The loop runs elsewhere already.
    """

    def __init__(self, loop: AgentLoop | LoopFunction, *, grace: float = 5.0) -> None:
        self.loop: AgentLoop = as_loop(loop)
        if isinstance(self.loop, HostedLoop):
            raise ValueError(f"loop must not run elsewhere already, got {self.loop!r}")
        check_real("grace", grace, 0, open_below=True)
        self.tools: Sequence[Message] | None = self.loop.tools
        self.replayable: bool = self.loop.replayable
        self.hosts: list[Host] = []
        self._grace = grace
        self._numbers = count(1)
        self._setups: dict[int, tuple[RolloutServices, Prepare]] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._changed = Event()

    def join(self, host: Host) -> None:
        """From now on a host takes rollouts."""
        self.hosts.append(host)
        self._tell()

    def lose(self, host: Host, why: str) -> None:
        """A host is gone, with the loops that ran there. May be called again."""
        if host in self.hosts:
            self.hosts.remove(host)
        host.lose(why)

    @abstractmethod
    def give_up(self, host: Host, why: str) -> None:
        """Ends a host that does not end a loop: afterwards nothing runs there. Calls `lose`, now or soon."""

    async def generate_sample(self, rollout: Rollout) -> None:
        """See `AgentLoop.generate_sample`.

        Raises:
            HostLost: The host was lost; the engine runs it again.

        Cancellation: the loop is cancelled where it runs, and its end waited for, for `grace` seconds. Then its host is
        given up, so that nothing is left there.
        """
        run = member_run()
        if run is not None:
            await run(rollout)
            return
        known = self._remember(rollout.uid)
        known.host = host = await self._choose(known)
        prepare = self._prepared(rollout, host)
        session = Session(next(self._numbers), rollout, host, is_suspect=known.is_suspect)
        async with self._to_its_end(session, known):
            await session.serve(prepare)
        session.conclude()

    async def generate_group(self, group: LiveGroup) -> None:
        """See `AgentLoop.generate_group`: the loop's own runs on a host, with all members.

        Raises:
            HostLost: The host was lost; the engine cuts the group, and has it run again.

        Cancellation: as in `generate_sample`, for all of them at once.
        """
        assert isinstance(group, OpenGroup)
        known = self._remember(group.uid)
        known.host = host = await self._choose(known)
        prepare = self._prepared(group.rollouts[0], host)
        session = GroupSession(
            next(self._numbers),
            group,
            host,
            is_suspect=known.is_suspect,
            rests=self.replayable,
            numbers=self._numbers.__next__,
            cut=self._cut,
        )
        async with self._to_its_end(session, known):
            await session.serve(prepare)
        session.conclude()

    @asynccontextmanager
    async def _to_its_end(self, session: Running, known: _Known) -> AsyncGenerator[None]:
        """Ends what the block has begun on a host."""
        try:
            yield
        finally:
            try:
                await self._cut(session)
            finally:
                session.forget()
                if session.is_suspect:
                    self._tell()
                known.blamed += session.is_blamed

    async def _cut(self, session: Ending) -> None:
        """Ends a loop if it has not ended, and gives its host up if that does not end it."""
        if session.over:
            return
        try:
            if session.cut_at is None:
                session.cut_at = current_time()
                session.host.send(End(session.number))
            with CancelScope(deadline=session.cut_at + self._grace, shield=True):
                await session.until_over()
        finally:
            if not session.over:
                why = f"it did not end the loop of {session.uid} in {self._grace} s"
                self.give_up(session.host, why)

    def _remember(self, uid: str) -> _Known:
        known = self._known.setdefault(uid, _Known())
        self._known.move_to_end(uid)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    async def _choose(self, known: _Known) -> Host:
        while not (hosts := self._that_take(known)):
            await self._changed.wait()
        if known.host in hosts:
            return known.host
        host = min(hosts, key=lambda host: len(host.sessions))
        # The next of as many comes first: ties go round.
        self.hosts.remove(host)
        self.hosts.append(host)
        return host

    def _that_take(self, known: _Known) -> list[Host]:
        if not known.is_suspect:
            return self.hosts
        return [host for host in self.hosts if not host.suspects]

    def _tell(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def _prepared(self, rollout: Rollout, host: Host) -> Prepare:
        services = core_of(rollout).services
        known = self._setups.get(id(services))
        if known is None:
            prepare = Prepare(
                services.task,
                len(self._setups),
                services.capabilities,
                services.tokenizer,
                services.sampling,
                services.max_response_tokens,
                services.max_context,
                services.stop_token_ids,
            )
            known = self._setups[id(services)] = services, prepare
        if known[1].setup not in host.prepared:
            host.send(known[1])
            host.prepared.add(known[1].setup)
        return known[1]


class _Known:
    """What is known of a rollout.

    Attributes:
        host: Where it ran last.
        blamed: How often it may have brought a host down.
    """

    __slots__ = ("blamed", "host")

    def __init__(self) -> None:
        self.host: Host | None = None
        self.blamed = 0

    @property
    def is_suspect(self) -> bool:
        return self.blamed >= _SUSPECT
