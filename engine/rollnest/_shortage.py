"""Whether a batch that is waited for can't come: everything is unusable, or nobody may start anything."""

from __future__ import annotations

from collections.abc import Mapping

from ._gate import Gate
from ._producer import Producer
from .errors import Starved, Stuck

__all__ = ["check_starved", "check_stuck"]


def check_starved(producers: Mapping[str, Producer]) -> None:
    """Raises if too many groups of a task in a row were unusable."""
    for name, producer in producers.items():
        if producer.demand > producer.table.ready and producer.starved:
            table = producer.table
            reasons, failures = dict(table.dropped_in_a_row), dict(table.failures_in_a_row)
            table.forgive()  # the next call starts counting anew
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            said = "".join(f"; the last one: {text}" for text in failures.values())
            raise Starved(
                f"task {name!r}: {sum(reasons.values())} groups in a row were unusable ({listed}){said}",
                task=name,
                reasons=reasons,
                failures=failures,
            )


def check_stuck(producers: Mapping[str, Producer], gate: Gate, n: int) -> None:
    """Raises if nothing that was asked for can come: nothing is in flight, and nobody may start anything."""
    if gate.closed or not all(producer.idle for producer in producers.values()):
        return
    counters = {
        name: {
            "lacking": producer.missing,
            "ready": producer.table.ready,
            "waiting": producer.table.waiting,
            "drawn": producer.table.drawn,
            "delivered": producer.table.delivered,
            "max_staleness": producer.spec.strategy.max_staleness,
        }
        for name, producer in producers.items()
    }
    listed = "; ".join(
        f"{name!r} ({producer.spec.strategy!r}): "
        + ", ".join(f"{what} {count}" for what, count in counters[name].items())
        for name, producer in producers.items()
    )
    raise Stuck(
        f"{n} groups were asked for at version {gate.version}, but none is in flight and no strategy lets one "
        f"start: {listed}",
        version=gate.version,
        counters=counters,
    )
