"""What the state machine's model knows at the moment of a checkpoint, and how a restored engine's model begins with it.

A group that was in flight is as if it had been cut then: each turn that had not ended keeps what it had. Where nobody
outside can tell what that is (an answer that is over, and not taken in yet), the rollout's columns are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from anyio import current_time
from attrs import evolve, frozen

from rollnest import Batch, Engine

from .machine_model import Done, Mood, Record, Strand, Track, Visit, World

__all__ = ["SavedRun"]


@frozen(kw_only=True)
class SavedRun:
    """A checkpoint, and what was known when it was taken.

    Attributes:
        state: The checkpoint.
        version: The weights' version.
        tokens: Tokens that production had committed.
        open: Batches that had been handed over and not committed.
        first: The least that a trainer must have trained to go on.
    """

    state: Mapping[str, bytearray]
    version: int
    tokens: int
    open: tuple[Batch, ...]
    first: int
    _world: World

    @classmethod
    def of(cls, engine: Engine, world: World) -> SavedRun:
        """Takes a checkpoint of an engine."""
        state = engine.state_dict()
        world.keeps_batches = True
        kept = [batch for batch in world.batches if batch.index not in world.trained]
        return cls(
            state=state,
            version=engine.version,
            tokens=engine.statistics().total("tokens_committed"),
            open=tuple(kept),
            first=max(world.trained & {b.index for b in world.batches}, default=0),
            world=_copy(world),
        )

    @property
    def last(self) -> int:
        """The most that a trainer can have trained."""
        return len(self._world.batches)

    def begin(self, trained_through: int | None, mood: Mood, fired: Counter[str]) -> World:
        """The model of an engine that is restored."""
        world = _copy(self._world)
        world.mood, world.fired = mood, fired
        world.version = self.version
        world.committed = world.by_hand = self.tokens
        world.again = [batch for batch in self.open if batch.index > (trained_through or 0)]
        world.trained |= {b.index for b in self.open if b.index <= (trained_through or 0)}
        world.evicted = world.in_flight
        world.restored = world.entering = True
        world.closed_since = current_time()
        return world


def _copy(world: World) -> World:
    tasks = world.visits
    plans = {name: world.plans[name] for name in tasks}
    copy = World(plans, world.capacity, world.seed, world.fired)
    copy.lives = world.lives.copy()
    copy.visits = {n: {k: _visit(v) for k, v in visits.items()} for n, visits in tasks.items()}
    copy.tracks = {k: _track(t, copy) for k, t in world.tracks.items() if k[0] in tasks}
    copy.restarts = world.restarts.copy()
    copy.dropped = {name: dropped.copy() for name, dropped in world.dropped.items()}
    copy.batches = list(world.batches)
    copy.trained = set(world.trained)
    copy.keeps_batches = True
    copy.restored = world.restored
    copy.again = list(world.again)
    copy.evaluations = world.evaluations
    return copy


def _visit(visit: Visit) -> Visit:
    return evolve(
        visit,
        fresh=dict(visit.fresh),
        unjudged=set(visit.unjudged),
        judging=set(visit.judging),
        resumed=set(visit.resumed),
    )


def _track(track: Track, world: World) -> Track:
    copy = Track.__new__(Track)
    copy.__dict__.update(track.__dict__)
    copy.world = world
    copy.tools, copy.recorded_tools = list(track.tools), list(track.recorded_tools)
    copy.unopened = [_record(record) for record in track.unopened]
    copy.strands = [_strand(strand, copy) for strand in track.strands]
    copy.main = copy.strands[0]
    copy.where = ""
    copy.outcome = track.outcome or "cancelled"
    if track.judged == "asked":
        copy.judged = "cancelled"
    return copy


def _record(record: Record) -> Record:
    return evolve(record, turns=list(record.turns))


def _strand(strand: Strand, track: Track) -> Strand:
    copy = evolve(
        strand,
        record=None if strand.record is None else _record(strand.record),
        ids=list(strand.ids),
        origin=list(strand.origin),
        logprobs=list(strand.logprobs),
        versions=list(strand.versions),
        turns=list(strand.turns),
        asked=None,
    )
    asked = strand.asked
    if asked is None:
        return copy
    last = asked.requests[-1] if asked.requests else None
    is_taken_in = last is None or not last.over or last.reason in ("stop", "length", "abort")
    if asked.given is not None or not asked.partial or not is_taken_in:
        track.unsure = True
        return copy
    start = len(copy.ids)
    copy.keep(asked.requests)
    if len(copy.ids) > start:
        reason = track.said(asked.requests, copy.ids[start:])
        copy.turns.append(Done(start, len(copy.ids), asked.max_tokens, reason))
    return copy
