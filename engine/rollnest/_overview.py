"""Where everything in an engine is, for who looks at it. Changes nothing."""

from __future__ import annotations

from ._attempt import TokenCounters
from ._parts import Parts
from ._producer import Producer
from ._slots import Call
from ._statistics import EngineStatistics, TaskStatistics
from ._tree import ConsumerTree, EngineTree, PauseTree

__all__ = ["consumer_tree", "statistics", "tree"]


def statistics(parts: Parts) -> EngineStatistics:
    """See `Engine.statistics`."""
    return EngineStatistics(
        version=parts.gate.version,
        batches=parts.delivery.batches,
        turns_in_flight=parts.gate.turns,
        pauses=parts.gate.epoch,
        pause_seconds=parts.gate.closed_seconds,
        outages=parts.outage.count,
        outage_seconds=parts.outage.seconds,
        failed_requests=parts.outage.failures,
        probe_tokens=parts.outage.counters.committed,
        evaluations=parts.evaluations.count,
        evaluation_tokens=parts.evaluations.tokens,
        judge_tokens=parts.judge_counters.committed,
        loop_lag_max=parts.lag.longest,
        abandoned_threads=len(parts.workers.abandoned),
        tasks={
            name: _task_statistics(producer, parts.counters[name])
            for name, producer in parts.producers.items()
        },
    )


def tree(
    parts: Parts, state: str, pause: PauseTree | None, consumer: ConsumerTree | None
) -> EngineTree:
    """See `Engine.tree`."""
    now = parts.gate.clock()
    calls: dict[object, list[Call]] = {}
    for slots in (parts.judge_slots, parts.tool_slots):
        for call in slots.calls:
            calls.setdefault(call.by, []).append(call)
    for slots in parts.processes.slots:
        for call in slots.calls:
            if not call.running:  # else it stands among the judge slots
                calls.setdefault(call.by, []).append(call)
    return EngineTree(
        state=state,
        version=parts.gate.version,
        turns_in_flight=parts.gate.turns,
        pause=pause,
        consumer=consumer,
        slots={
            "turn": parts.gate.slots.tree(now),
            "judge": parts.judge_slots.tree(now),
            "tool": parts.tool_slots.tree(now),
        },
        tasks={name: producer.tree(now, calls) for name, producer in parts.producers.items()},
        uncommitted=tuple(parts.delivery.uncommitted),
        outage=parts.outage.state,
        evaluations=tuple(
            (f"{each.spec.name!r} (v{each.version})", each.producer.tree(now, calls))
            for each in parts.evaluations.live
            if each.version is not None
        ),
    )


def consumer_tree(parts: Parts, groups: int, since: float) -> ConsumerTree:
    """What a `next_batch` that waits since then lacks of so many groups."""
    lacking = {
        name: producer.demand - producer.table.ready
        for name, producer in parts.producers.items()
        if producer.demand > producer.table.ready
    }
    return ConsumerTree(groups=groups, lacking=lacking, seconds=parts.gate.clock() - since)


def _task_statistics(producer: Producer, counters: TokenCounters) -> TaskStatistics:
    table = producer.table
    parked = [sample for row in table.parked for sample in row.held]
    parked_tokens = sum(sample.policy_tokens for sample in parked)
    held = table.delivered_tokens + table.dropped_tokens + parked_tokens
    return TaskStatistics(
        drawn=table.drawn,
        redrawn=table.redrawn,
        delivered=table.delivered,
        ready=table.ready,
        waiting=table.waiting,
        flight=len(table.flight),
        held=producer.held,
        dropped=dict(table.dropped),
        expired=table.expired,
        members=table.members,
        members_delivered=table.delivered_members,
        members_parked=len(parked),
        members_live=sum(members.held for members in producer.runner.live),
        members_dropped=table.dropped_members,
        members_shrunk=dict(table.shrunk),
        failures=dict(table.failures),
        produced_samples=producer.runner.produced.samples,
        tokens_committed=counters.committed,
        tokens_in_records=held + producer.runner.live_tokens,
        tokens_expired=table.expired_tokens,
        tokens_discarded=counters.discarded,
        tokens_late=counters.late,
        tokens_rejected=counters.rejected,
        resumed_turns=counters.resumed_turns,
        retries=counters.retries,
        restarted_turns=counters.restarted_turns,
        unseen_turns=counters.unseen_turns,
        replayed_turns=counters.replayed_turns,
        diverged=counters.diverged,
        restarted=counters.restarted,
    )
