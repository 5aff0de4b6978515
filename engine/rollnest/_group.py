"""Runs the groups of one task, and settles each in its row.

Whatever happens to a group, it settles in one synchronous step: members that have ended count as they ended, the
others are frozen as ABORTED with everything they received.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from anyio import get_cancelled_exc_class
from attrs import evolve

from ._capture import NO_TRIES, GroupNote, Tries, Visit
from ._context import RolloutServices
from ._group_loop import run_group_loop
from ._journal import Journal
from ._judging import Judging
from ._lives import GroupRecord
from ._loops import overrides_generate_group, replays_groups
from ._members import Members
from ._records import Failure, Group, Sample, Status
from ._statistics import Produced
from ._streak import FailureStreak
from ._table import GroupTable, Row, RowState
from ._task import TaskSpec
from .errors import leaves

__all__ = ["GroupRunner"]


REFINED = "refined"
"""Why a member left that the task's `refine` did not choose."""


class GroupRunner:
    """Runs the groups of one task.

    Attributes:
        produced: Counts the samples that completed, and their rewards.
        live: The groups in flight.
    """

    def __init__(
        self,
        spec: TaskSpec,
        *,
        table: GroupTable,
        services: RolloutServices,
        judging: Judging | None,
        on_settled: Callable[[Row], None],
        on_break: Callable[[str, BaseException], None],
    ) -> None:
        self._spec = spec
        self._table = table
        self._services = services
        self._judging = judging
        self._on_settled = on_settled
        self._on_break = on_break
        self._streak = FailureStreak(spec.name, spec.failures.max_failures_in_a_row, on_break)
        self._by_group_loop = overrides_generate_group(spec.loop)
        self._replays = replays_groups(spec.loop)
        self.produced = Produced()
        self.live: set[Members] = set()

    @property
    def live_tokens(self) -> int:
        """Policy tokens of the groups in flight."""
        return sum(members.policy_tokens for members in self.live)

    def admit(self, row: Row) -> Members:
        """Takes a row over that has just been drawn, in the same step; `run` its members."""
        members = Members(
            row,
            self._spec,
            table=self._table,
            services=self._services,
            judging=self._judging,
            streak=self._streak,
            replays=self._replays,
        )
        self.live.add(members)
        return members

    def cancel_lost(self, version: int) -> None:
        """Ends the groups that can't be delivered any more, so that nothing is sampled for them in vain."""
        if self._by_group_loop:
            return  # the loop may let the member go that is too old
        for members in list(self.live):
            if self._table.is_lost(members.row, members.samples.values(), version):
                members.scope.cancel()

    async def run(self, members: Members) -> None:
        """Runs an admitted group, and settles its row.

        Cancellation, by the group's own scope too: unfinished members become ABORTED; the row waits to be drawn again.
        """
        row = members.row
        self._services.instruments.tell("group_started", self._spec.name, row.visit)
        try:
            with members.scope:
                if self._by_group_loop:
                    await run_group_loop(members, self._spec, self._services.gate)
                else:
                    await members.run()
        except BaseException as error:
            if any(not isinstance(e, get_cancelled_exc_class()) for e in leaves(error)):
                # A fault of ours, or an exit. Said before the siblings are cancelled, so that they settle as what
                # they are.
                self._on_break("production failed", error)
            if not isinstance(error, Exception):
                raise
        finally:
            # No await from here on: nothing can come between the freezing and the table.
            self._settle(members, self._services.gate.clock() - members.started)

    def note(self, now: float) -> list[Callable[[], GroupNote]]:
        """What there is of the groups in flight, for a checkpoint: what makes the notes, whenever it is called."""
        whole = self._by_group_loop and not self._replays
        return [members.note(now, whole=whole) for members in self.live]

    def restore(self, visit: Visit, version: int) -> None:
        """Enters a visit of a checkpoint; one that was in flight settles, as if it had been cut then."""
        row = self._table.enter(visit, version=version)
        for reason, tokens in visit.left:
            self._table.count_leaving(reason, tokens)
        counters = self._services.counters
        counters.discarded += visit.discarded
        counters.unseen_turns += visit.unseen
        counters.restarted += visit.restarted
        if row.state is RowState.FLIGHT:
            self._end(
                row,
                visit.group.samples,
                0.0,
                visit.journals,
                visit.counted,
                visit.tries,
                visit.record,
            )

    def _settle(self, members: Members, seconds: float) -> None:
        samples = members.freeze()
        self.live.discard(members)
        tries = NO_TRIES if self._by_group_loop else members.tries
        self._end(
            members.row,
            samples,
            seconds,
            members.journals,
            members.row.kept,
            tries,
            members.end_lives(),
            cut=self._by_group_loop and not members.finished,
        )

    def _end(
        self,
        row: Row,
        samples: Sequence[Sample],
        seconds: float,
        journals: Mapping[int, Journal],
        counted: Collection[int],
        tries: Tries,
        record: GroupRecord | None = None,
        *,
        cut: bool = False,
    ) -> None:
        cut = cut or record is not None  # though every member may have completed
        for sample in samples if record is None else ():  # else its loop comes by them again
            if sample.status is Status.COMPLETED and sample.index not in counted:
                self.produced.add(sample)
        try:
            if self._spec.refine is not None and not cut:
                samples = self._chosen(self._refined, row, samples)
            if self._spec.keep is not None and not cut:
                samples = self._chosen(self._filtered, row, samples)
        except BaseException as error:  # an exit, or Ctrl-C: the row settles all the same
            samples = _all_failed(samples, error)
            self._on_break("production failed", error)
            raise
        finally:
            outcome = self._table.settle(
                row, samples, seconds, journals, tries, record=record, cut=cut
            )
            self._services.gate.ended()
            self._services.instruments.tell("group_ended", row.members, outcome)
            self._on_settled(row)

    def _chosen(
        self,
        choose: Callable[[Row, Sequence[Sample]], Sequence[Sample]],
        row: Row,
        samples: Sequence[Sample],
    ) -> Sequence[Sample]:
        """Asks one of the user's functions, if every member completed; others are left to their status."""
        if any(sample.status is not Status.COMPLETED for sample in samples):
            return samples
        try:
            return choose(row, samples)
        except Exception as error:
            return _all_failed(samples, error)

    def _refined(self, row: Row, samples: Sequence[Sample]) -> Sequence[Sample]:
        refine = self._spec.refine
        assert refine is not None
        answer: Any = refine(Group(self._spec.name, row.prompt, row.visit, samples))
        if not isinstance(answer, Group | Iterable) or isinstance(answer, str | bytes | Mapping):
            raise TypeError(f"refine must return samples of the group, got {answer!r}")
        chosen: list[Any] = list(
            cast("Any", answer.samples if isinstance(answer, Group) else answer)
        )
        if not chosen:
            raise ValueError("refine must leave at least one sample, got none")
        given = {id(sample): sample for sample in samples}
        for sample in chosen:
            if given.pop(id(sample), None) is None:
                raise ValueError(
                    f"refine must return each sample of the group once at most, got {sample!r}"
                )
        for sample in given.values():
            self._table.let_go(sample, REFINED)
        return chosen

    def _filtered(self, row: Row, samples: Sequence[Sample]) -> Sequence[Sample]:
        keep = self._spec.keep
        assert keep is not None
        answer: object = keep(Group(self._spec.name, row.prompt, row.visit, samples))
        if answer not in (True, False):  # numpy's bools too
            raise TypeError(f"keep must answer a bool, got {answer!r}")
        return samples if answer else [evolve(s, status=Status.FILTERED) for s in samples]


def _all_failed(samples: Sequence[Sample], error: BaseException) -> Sequence[Sample]:
    failure = Failure.of("filter", error)
    return [
        evolve(sample, status=Status.FAILED, verdict=None, failure=failure) for sample in samples
    ]
