"""The books must balance: nothing lost, nothing doubled."""

from __future__ import annotations

from rollnest._engine import Engine

__all__ = ["assert_conserved"]


def assert_conserved(engine: Engine, *, committed: int | None = None) -> None:
    """Checks I7 for every task, and that no token is lost. Holds at any moment, and after the block.

    Args:
        engine: An engine that was entered.
        committed: The controller's own count of tokens that attempts recorded, to compare with.

    Raises:
        AssertionError: The figures that do not balance.
    """
    statistics = engine.statistics()
    for name, task in statistics.tasks.items():
        dropped = sum(task.dropped.values())
        held = task.delivered + task.ready + task.waiting + task.flight + dropped
        assert task.drawn == held, (
            f"I7: task {name!r} drew {task.drawn}, but delivered {task.delivered} + ready {task.ready} + waiting "
            f"{task.waiting} + flight {task.flight} + dropped {dropped} = {held}"
        )
        shrunk = sum(task.members_shrunk.values())
        placed = (
            task.members_delivered + task.members_parked + task.members_live + task.members_dropped
        )
        assert task.members == placed + shrunk, (
            f"I7: task {name!r} had {task.members} members, but delivered {task.members_delivered} + parked "
            f"{task.members_parked} + live {task.members_live} + dropped {task.members_dropped} + shrunk {shrunk}"
        )
        assert task.tokens_lost == 0, (
            f"task {name!r} lost {task.tokens_lost} tokens: {task.tokens_committed} committed, "
            f"{task.tokens_in_records} in records, {task.tokens_discarded} discarded"
        )
    if committed is not None:
        apart = statistics.evaluation_tokens + statistics.probe_tokens + statistics.judge_tokens
        recorded = statistics.total("tokens_committed") + apart
        assert committed == recorded, (
            f"the controller committed {committed}, attempts recorded {recorded}"
        )
