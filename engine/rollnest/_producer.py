"""Starts the groups of one task, and owns them: they are children of its task group.

It wakes when something changed, asks the strategy how many groups may start, and draws them: rows that wait
first, then fresh prompts. Before every draw it looks whether it is cancelled, so nothing is drawn in vain.

A sequence of prompts is drawn from in the same step. A user's source is asked in a child task, one prompt at a time
and only while there is room; meanwhile rows that wait are drawn as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from anyio import create_task_group
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from ._admission import Admission
from ._bell import Bell
from ._checks import check_whole
from ._gate import Gate
from ._group import GroupRunner
from ._sampler import Sampler
from ._slots import Call
from ._source import SourceSampler
from ._strategies import Production
from ._table import GroupTable, Row, RowState
from ._task import TaskSpec
from ._tree import TaskTree
from .errors import CheckpointError, describe

if TYPE_CHECKING:
    from ._saved import Saved
    from ._snapshot import TaskNote

__all__ = ["Producer"]

_log = logging.getLogger("rollnest")

_AT_A_STRETCH = 4
"""Groups that are started before others get their turn."""

_MOST_LIVE = 2**15
"""Groups of a task that may be live beyond what a waiting `next_batch` lacks, whatever a strategy of one's own says."""


class Producer:
    """The producer of one task.

    Attributes:
        spec: What the user said.
        table: The task's rows.
        runner: Runs its groups.
        bell: Rung when room may have appeared.
    """

    def __init__(
        self,
        spec: TaskSpec,
        *,
        table: GroupTable,
        sampler: Sampler | SourceSampler,
        gate: Gate,
        runner: GroupRunner,
        admission: Admission,
        share: Callable[[], float | None],
        taken: Callable[[], int],
        publish_every: int,
        on_idle: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.spec = spec
        self.table = table
        self.runner = runner
        self.bell = Bell()
        self._demand = 0
        self._is_looking = True  # whether something has changed since it found nothing to start
        self._is_drawing = False
        self._warned = False
        self._sampler = sampler
        self._gate = gate
        self._admission = admission
        self._share = share
        self._taken = taken
        self._publish_every = publish_every
        self._on_idle = on_idle
        self._on_crash = on_crash
        admission.join(spec.name, self)

    @property
    def demand(self) -> int:
        """The task's share of the batch that a `next_batch` waits for; 0 if none waits."""
        return self._demand

    @demand.setter
    def demand(self, groups: int) -> None:
        if groups != self._demand:
            self._demand = groups
            self._admission.changed(self.spec.name)

    @property
    def exhausted(self) -> bool:
        """Whether no group will become ready any more."""
        table = self.table
        return self._sampler.exhausted and not table.flight and not table.waiting

    @property
    def starved(self) -> bool:
        """Whether too many groups in a row were unusable."""
        return self.table.dropped_in_a_row.total() >= self.spec.starve_after * max(1.0, self.share)

    @property
    def share(self) -> float:
        """The task's part of a batch, in groups; a fraction is possible."""
        share = self._share()
        return self.demand if share is None else share

    @property
    def missing(self) -> int:
        """Groups that a waiting `next_batch` lacks: those that are not ready yet."""
        return max(0, self.demand - self.table.ready)

    @property
    def room(self) -> int:
        """How many groups may start now."""
        return self._admission.room(self.spec.name)

    @property
    def wanted(self) -> int:
        """How many groups would start now if the engine had no bound of its own."""
        if self._gate.closed or self.starved:
            return 0
        if not self.table.waiting and (self._sampler.exhausted or self._is_drawing):
            return 0
        table, missing = self.table, self.missing
        flight, ready = len(table.flight), table.ready
        room = self.spec.strategy.room(
            Production(
                lacking=missing,
                flight=flight,
                ready=ready,
                share=self.share,
                tail=table.tail,
                publish_every=self._publish_every,
                taken=self._taken(),
            )
        )
        if type(room) is not int or room < 0:  # what is wrong is put into words only then
            check_whole(f"what {self.spec.strategy!r} answers for room", room, 0)
        most = _MOST_LIVE + missing - flight - ready
        if room > most and not self._warned:
            self._warned = True
            _log.warning(
                "task %r has %d groups live and gets no more for now, though %r has room for %d",
                self.spec.name,
                flight + ready,
                self.spec.strategy,
                room,
            )
        return min(room, max(0, most))

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or drawn, and nothing can start until something changes."""
        return not (self._is_looking or self._is_drawing or self.table.flight)

    @property
    def in_flight(self) -> int:
        """How many groups run."""
        return len(self.table.flight)

    @property
    def lacking(self) -> int:
        """Groups that a waiting `next_batch` lacks, and that do not run yet."""
        return max(0, self.demand - self.table.ready - len(self.table.flight))

    def wake(self) -> None:
        """Has the producer look again for how many groups it may start."""
        # Else it was rung already, or is awake and looks again before it waits.
        if not self._is_looking:
            self._is_looking = True
            self.bell.ring()

    def tree(self, now: float, calls: Mapping[object, Sequence[Call]]) -> TaskTree:
        """Where its groups stand; with the calls that hold or wait for slots, by who waits for them."""
        table, room = self.table, self.room
        groups = sorted(self.runner.live, key=lambda group: (group.started, group.row.visit))
        return TaskTree(
            demand=self.demand,
            flight=len(table.flight),
            ready=table.ready,
            waiting=table.waiting,
            room=room,
            idle=self._idle(room),
            groups=tuple(group.tree(now, calls) for group in groups),
        )

    def _idle(self, room: int) -> str | None:
        """Why no group may start."""
        if self._gate.closed:
            return "the gate is closed"
        if self.starved:
            return f"{self.table.dropped_in_a_row.total()} groups in a row were unusable"
        if self._sampler.exhausted and not self.table.waiting:
            return "its prompts are used up"
        if self._is_drawing:
            return "its prompt source is drawing"
        if room > 0:
            return None
        if self.wanted:
            return (
                f"all of the engine's {self._admission.bound} groups run, or another task is first"
            )
        if not self.demand and not self.table.flight and not self.table.ready:
            return "no batch is asked for"
        return "what is in flight and ready is enough"

    async def run(self) -> None:
        """Starts groups for ever.

        Cancellation: its groups are cancelled and settle; it returns when the last has ended.
        """
        with self.bell:
            async with create_task_group() as groups:
                try:
                    await self._produce(groups)
                except Exception as error:
                    # Said before the groups are cancelled, so that they settle as what they are.
                    self._on_crash(error)

    async def _produce(self, groups: TaskGroup) -> None:
        stretch = _AT_A_STRETCH
        while True:
            while (room := self.room) > 0:
                await checkpoint_if_cancelled()
                # Nobody else runs until the next await, so there is room for as many, and no cancellation can come.
                count = min(room, stretch)
                if not self._start(groups, count):
                    self._ask_source(groups)
                    break
                stretch -= count
                if not stretch:
                    stretch = _AT_A_STRETCH
                    await checkpoint()
            # Nothing was awaited since it looked, so this is still true.
            self._is_looking = False
            if self.idle:
                # Whatever it lacks itself: another task's batch may be one that can't come only now.
                self._on_idle()
            await self.bell.wait()

    def _start(self, groups: TaskGroup, count: int) -> bool:
        """Draws rows and starts their groups; false if there were not so many to draw."""
        for _ in range(count):
            row = self._draw()
            if row is None:
                return False
            name = f"group {self.spec.name}/{row.visit}"
            groups.create_task(self.runner.run(self.runner.admit(row)), name=name)
            self._admission.started(self.spec.name)
        return True

    def _ask_source(self, groups: TaskGroup) -> None:
        source = self._sampler
        if isinstance(source, SourceSampler) and not (source.ended or self._is_drawing):
            self._is_drawing = True
            groups.start_soon(self._fetch, source, name=f"prompts of {self.spec.name}")

    async def _fetch(self, source: SourceSampler) -> None:
        try:
            await source.fetch()
        except Exception as error:
            self._on_crash(error)
        finally:
            self._is_drawing = False
            self._admission.changed(self.spec.name)
            if source.exhausted:
                self._on_idle()  # a batch may be as complete as it will ever be

    def settled(self, row: Row) -> None:
        """Hears that a run of a row has ended; tells the curriculum."""
        if isinstance(self._sampler, SourceSampler) and row.state is not RowState.WAITING:
            try:
                self._sampler.report(row.members)
            except Exception as error:
                self._on_crash(error)

    @property
    def held(self) -> int:
        """Prompts that a source gave and that no group has taken yet."""
        return self._sampler.held if isinstance(self._sampler, SourceSampler) else 0

    @property
    def source(self) -> SourceSampler | None:
        """What draws from the user's source, if the task has one."""
        return self._sampler if isinstance(self._sampler, SourceSampler) else None

    def note(self, now: float, tokens: Mapping[str, int]) -> TaskNote | None:
        """What there is of the task, for a checkpoint; `None` while a thread draws from its source.

        Raises:
            CheckpointError: The source can't say where it is.
        """
        from ._snapshot import TaskNote

        sampler = self._sampler.note()
        if sampler is None:
            return None
        prompts, produced = self.spec.prompts, self.runner.produced
        return TaskNote(
            group_size=self.spec.group_size,
            shuffle=self.spec.shuffle,
            prompts=prompts if isinstance(prompts, Sequence) else None,
            sampler=sampler,
            table=self.table.note(),
            flight=self.runner.note(now),
            tokens=tokens,
            produced={name: getattr(produced, name) for name in produced.__slots__},
        )

    def restore(self, saved: Saved, version: int) -> None:
        """Goes on from a checkpoint; before it runs.

        Raises:
            CheckpointError: What is there does not fit together.
        """
        name = self.spec.name
        task = saved.engine.tasks[name]
        try:
            self.table.restore(task.table)
            self.runner.produced.restore(task.produced)
            self._sampler.restore(saved.samplers[name])
            for visit in saved.visits:
                if visit.group.task == name:
                    self.runner.restore(visit, version)
            self.table.balance()
        except (KeyError, ValueError, AssertionError) as error:
            raise CheckpointError(
                f"the checkpoint's task {name!r} does not fit together: {describe(error)}"
            ) from error

    def _draw(self) -> Row | None:
        row = self.table.redraw(self._gate.version, everything=self._sampler.exhausted)
        if row is None and (prompt := self._sampler.draw()) is not None:
            row = self.table.draw(prompt)
        return row

    def __repr__(self) -> str:
        return f"<Producer of {self.spec.name!r}: room for {self.room}, {self.table!r}>"
