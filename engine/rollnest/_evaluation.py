"""Evaluations: other tenants of the engine's capacity, beside production.

An evaluation has a table, counters and judging of its own, so nothing of it can get into a batch or a task's figures.
What it shares are the gate, the breaker, the slots and the policy. It runs in the task of whoever asked for it: that
task's cancellation ends it, and the engine's end does; `evaluate` returns or raises only once all of it has settled.

It begins while no pause is on, so that one version is meant, and what a pause means to it is its caller's choice.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from anyio import CancelScope, Event, current_time, move_on_after
from attrs import evolve, field, frozen

from ._admission import Admission
from ._attempt import TokenCounters
from ._context import RolloutServices
from ._continuation import check_sampling
from ._figures import GroupFigures
from ._gate import Gate
from ._group import GroupRunner
from ._instruments import Instruments
from ._judging import Judging
from ._loops import overrides_generate_group, replays_groups
from ._options import FailurePolicy, Sampling
from ._producer import Producer
from ._records import EvalResult, Sample
from ._response import CONTEXT_VERSION
from ._sampler import Sampler
from ._statistics import Reading, batch_statistics, read, share_of
from ._strategies import Production
from ._table import GroupTable, Row
from ._task import TaskSpec
from .errors import EvaluationCancelled

__all__ = ["Evaluation", "Evaluations", "OnUpdate"]

OnUpdate: TypeAlias = Literal["wait", "cancel", "mark"]
"""What new weights mean to an evaluation that runs."""


def _all_counted(failures: FailurePolicy) -> FailurePolicy:
    """A policy by which every sample is in the result: nobody leaves a group, and failures end no engine."""
    return FailurePolicy(
        on_dead_member="retry" if failures.on_dead_member == "retry" else "drop",
        retries=failures.retries,
        max_failures_in_a_row=None,
    )


@frozen
class _EachPromptOnce:
    """Starts what is asked for, so many groups at once."""

    at_once: int
    max_staleness: int = field(default=0, init=False)
    needs_batch_size: bool = field(default=False, init=False)
    expired: Literal["drop"] = field(default="drop", init=False)

    def room(self, production: Production) -> int:
        return max(0, min(production.lacking, self.at_once) - production.flight)


class _Listener(Instruments):
    """Lets the engine's instruments hear of an evaluation's requests, and keeps its rows.

    Its samples and groups are not told: what counts those, counts what is trained.
    """

    def __init__(self, instruments: Instruments, table: GroupTable) -> None:
        super().__init__([])
        self._instruments = instruments
        self._table = table
        self.rows: dict[int, Row] = {}

    def tell(self, hook: str, *args: Any) -> None:
        if hook == "group_started":
            visit = args[1]
            self.rows[visit] = self._table.flight[visit]
        elif hook in ("turn_started", "turn_ended"):
            self._instruments.tell(hook, *args)


class Evaluation:
    """One evaluation.

    Attributes:
        spec: What is asked, and how it is judged.
        asked: How many prompts it has.
        counters: Where its tokens went.
        producer: Starts and owns its groups.
        on_update: What new weights mean to it.
        patience: Seconds for which a pause waits for it.
        version: The policy's weight version when it began; `None` before.
        scope: Ends it.
        cancelled: Whether new weights have.
    """

    def __init__(
        self,
        spec: TaskSpec,
        sampling: Sampling,
        services: RolloutServices,
        *,
        judging_of: Callable[[TaskSpec], Judging | None],
        at_once: int,
        on_update: OnUpdate,
        patience: float,
        break_engine: Callable[[str, BaseException], None],
    ) -> None:
        prompts = spec.prompts
        assert isinstance(prompts, Sequence)
        self.asked = len(prompts)
        self.spec = spec = evolve(
            spec,
            strategy=_EachPromptOnce(at_once),
            epochs=1,
            shuffle=False,
            redundancy=0,
            refine=None,
            keep=None,
            failures=_all_counted(spec.failures),
            starve_after=sys.maxsize,
        )
        self.counters = TokenCounters()
        self.on_update: OnUpdate = on_update
        self.patience = patience
        self.version: int | None = None
        self.scope = CancelScope()
        self.cancelled = False
        self._gate = gate = services.gate
        self._until_done = CancelScope()
        self._table = table = GroupTable(
            spec.name,
            max_staleness=0,
            retries=0,
            restart_whole=overrides_generate_group(spec.loop),
            replays_groups=replays_groups(spec.loop),
        )
        self._listener = _Listener(services.instruments, table)
        services = evolve(
            services,
            task=spec.name,
            counters=self.counters,
            instruments=self._listener,
            sampling=sampling,
            check=check_sampling,
            limits=spec.limits,
            max_response_tokens=spec.max_response_tokens,
            max_context=min(
                spec.max_context or services.capabilities.max_context,
                services.capabilities.max_context,
            ),
        )
        self.producer = Producer(
            spec,
            table=table,
            sampler=Sampler(spec.name, prompts, epochs=1, shuffle=False, seed=services.seed),
            gate=gate,
            runner=GroupRunner(
                spec,
                table=table,
                services=services,
                judging=judging_of(spec),
                on_settled=self._settled,
                on_break=break_engine,
            ),
            admission=Admission(None, {spec.name: 1.0}),
            share=lambda: None,
            taken=lambda: 0,
            publish_every=1,
            on_idle=lambda: None,
            on_crash=lambda error: break_engine("an evaluation failed", error),
        )
        self._began = self._read()

    @property
    def ended(self) -> int:
        """How many of them have all their samples."""
        return self._table.ready + self._table.dropped.total()

    async def run(self, version: int) -> None:
        """Answers and judges each prompt once.

        Cancellation: its groups are cancelled and settle.
        """
        self.version = version
        self._began = self._read()
        self.producer.demand = self.asked
        with self._until_done:
            await self.producer.run()

    def result(self) -> EvalResult:
        """What came out; all must have ended."""
        version = self.version or 0
        rows = [self._listener.rows[visit] for visit in sorted(self._listener.rows)]
        groups = [row.members for row in rows]
        for row, group in zip(rows, groups, strict=True):
            row.figures = GroupFigures.of(group)  # of those with a failed member too
        share = share_of(self._table, rows, self.asked, self._began, self._read())
        return EvalResult(
            task=self.spec.name,
            version=version,
            groups=groups,
            statistics=batch_statistics([share], version),
            versions=_versions([sample for group in groups for sample in group.samples]),
        )

    def _settled(self, _: Row) -> None:
        self.producer.wake()
        if self.producer.exhausted:
            self._until_done.cancel()

    def _read(self) -> Reading:
        gate, produced = self._gate, self.producer.runner.produced
        return read(self._table, self.counters, produced, gate.closed_seconds, gate.clock())

    def __repr__(self) -> str:
        return f"<Evaluation of {self.spec.name!r}: {self.ended} of {self.asked} prompts>"


class Evaluations:
    """The evaluations of an engine.

    Attributes:
        count: Evaluations so far.
    """

    def __init__(self, gate: Gate) -> None:
        self.count = 0
        self._gate = gate
        self._all: dict[Evaluation, None] = {}  # a set, in order
        self._held = False
        self._ending = False
        self._tokens = 0  # of those that are over
        self._changed = Event()

    @property
    def on(self) -> bool:
        """Whether any runs, or waits for a pause to end."""
        return bool(self._all)

    @property
    def live(self) -> tuple[Evaluation, ...]:
        """Those that run, or wait for a pause to end."""
        return tuple(self._all)

    @property
    def tokens(self) -> int:
        """Tokens recorded in attempts of evaluations."""
        return self._tokens + sum(evaluation.counters.committed for evaluation in self._all)

    async def run(self, evaluation: Evaluation) -> bool:
        """Runs an evaluation to its end, once no pause is on.

        Returns:
            Whether it has ended; the engine's end may have ended it before.

        Raises:
            EvaluationCancelled: New weights have, as it was asked for.

        Cancellation: it is cancelled, and has settled.
        """
        self._all[evaluation] = None
        self.count += 1
        try:
            with evaluation.producer.bell, evaluation.scope:
                if self._ending:
                    return False
                while self._held:
                    await self._changed.wait()
                await evaluation.run(self._gate.version)
        finally:
            del self._all[evaluation]
            self._tokens += evaluation.counters.committed
            self._tell()
        if evaluation.producer.exhausted:
            return True
        if evaluation.cancelled:
            raise EvaluationCancelled(
                f"the evaluation of {evaluation.spec.name!r} was cancelled by new weights, after "
                f"{evaluation.ended} of {evaluation.asked} prompts",
                ended=evaluation.ended,
                asked=evaluation.asked,
            )
        return False

    def hold(self) -> None:
        """From now on none begins."""
        self._held = True

    def go_on(self) -> None:
        """Those that wait to begin, begin."""
        self._held = False
        self._tell()

    async def give_way(self) -> None:
        """Waits for those that new weights are to wait for, as long as each has patience.

        Cancellation: nothing has changed.
        """
        started = current_time()
        while waiting := [e for e in self._all if e.version is not None and e.on_update == "wait"]:
            first = min(waiting, key=lambda e: e.patience)
            with move_on_after(started + first.patience - current_time()) as patience:
                await self._changed.wait()
            if patience.cancelled_caught:
                first.on_update = "mark"  # it goes on, and its result says what made it

    def updated(self, version: int) -> None:
        """Before turns go on with these weights: cancels those that are to be cancelled by new ones."""
        for evaluation in self._all:
            if evaluation.on_update == "cancel" and evaluation.version not in (None, version):
                evaluation.cancelled = True
                evaluation.scope.cancel()

    def end(self) -> None:
        """Ends all of them, for good."""
        self._ending = True
        for evaluation in self._all:
            evaluation.scope.cancel()

    async def settled(self) -> None:
        """Waits until all of them have ended."""
        while self._all:
            await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def __repr__(self) -> str:
        return f"<Evaluations: {len(self._all)} of {self.count} run>"


def _versions(samples: Sequence[Sample]) -> dict[int, int]:
    """How many samples have tokens of which version."""
    counts = Counter(
        version
        for sample in samples
        for version in {
            version
            for segment in sample.segments
            for version, _, _ in segment.response.version_runs
        }
        if version != CONTEXT_VERSION
    )
    return dict(sorted(counts.items()))
