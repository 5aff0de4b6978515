"""What `engine.tree()` returns: everything that lives in an engine, and what each of it waits for.

Plain frozen records, made on demand from what is there; printing one gives the page to look at when a run hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from attrs import asdict, field, frozen

__all__ = [
    "ConsumerTree",
    "EngineTree",
    "GroupTree",
    "HolderTree",
    "PauseTree",
    "SampleTree",
    "SlotsTree",
    "StallReport",
    "TaskTree",
    "Wait",
    "WaitKind",
]

WaitKind: TypeAlias = Literal[
    "gate",
    "turn slot",
    "server",
    "tool slot",
    "tool",
    "judge slot",
    "process",
    "judger",
    "siblings",
    "loop",
    "prompt",
]
"""What a live sample may wait for; `"loop"` is the user's own code, between its calls."""


@frozen
class Wait:
    """What one live thing waits for.

    Attributes:
        kind: What it is.
        seconds: For how long.
        what: The same in words, with what is known of it.
    """

    kind: WaitKind
    seconds: float
    what: str

    def __str__(self) -> str:
        return f"{self.what}, {self.seconds:.1f} s"


@frozen(kw_only=True)
class HolderTree:
    """One call that holds a slot.

    Attributes:
        name: What was called, and for whom.
        seconds: For how long it has held the slot; if it is abandoned, since when.
        abandoned: Whether nobody waits for it any more, and a thread that can't be stopped keeps its slot.
    """

    name: str
    seconds: float
    abandoned: bool = False

    def __str__(self) -> str:
        abandoned = "abandoned, its thread still runs, " if self.abandoned else ""
        return f"{self.name}: {abandoned}{self.seconds:.1f} s"


@frozen(kw_only=True)
class SlotsTree:
    """One of the engine's bounds, and who uses it.

    Attributes:
        size: The bound; `None` is none.
        used: Slots that are taken.
        waiting: How many calls wait for one.
        holders: Who holds them.
    """

    size: int | None
    used: int
    waiting: int
    holders: tuple[HolderTree, ...]

    @property
    def abandoned(self) -> tuple[HolderTree, ...]:
        """The holders that are threads which nobody can stop."""
        return tuple(holder for holder in self.holders if holder.abandoned)

    def __str__(self) -> str:
        size = "no bound" if self.size is None else f"of {self.size}"
        waiting = f", {self.waiting} wait" if self.waiting else ""
        return f"{self.used} {size} used{waiting}"


@frozen(kw_only=True)
class PauseTree:
    """The pause that is on.

    Attributes:
        mode: What becomes of the turns in flight.
        phase: `"quiet"` (turns are brought to rest), `"confirm"` (the controller is asked to stop), `"evict"`
            (groups are cancelled and settle), `"body"` (the block runs) or `"leaving"` (the controller is asked to
            resume).
        by: The task that pauses.
        seconds: Since the gate closed.
        turns_in_flight: Turns that are not back yet.
    """

    mode: str
    phase: str
    by: str
    seconds: float
    turns_in_flight: int

    def __str__(self) -> str:
        doing = {
            "quiet": f"waits for {_count(self.turns_in_flight, 'turn')} to come back",
            "confirm": "waits for the controller to confirm",
            "evict": "waits for the groups to settle",
            "body": "its block runs",
            "leaving": "waits for the controller to resume",
        }
        phase = doing.get(self.phase, self.phase)
        return f"paused({self.mode}) by {self.by}, {self.seconds:.1f} s: {phase}"


@frozen(kw_only=True)
class ConsumerTree:
    """A `next_batch` that waits.

    Attributes:
        groups: How many it asked for.
        lacking: How many of which task are not ready yet.
        seconds: How long it has waited.
    """

    groups: int
    lacking: Mapping[str, int]
    seconds: float

    def __str__(self) -> str:
        lacking = ", ".join(f"{count} of {task!r}" for task, count in self.lacking.items())
        return (
            f"next_batch({self.groups}) waits, {self.seconds:.1f} s: lacks {lacking or 'nothing'}"
        )


@frozen(kw_only=True)
class SampleTree:
    """One member of a live group.

    Attributes:
        uid: Its name: task, prompt, visit and index.
        index: Its place in the group.
        status: How it ended; `"live"` until then.
        turns: Turns that it has had.
        tokens: Policy tokens so far.
        version: The oldest weight version among them; `None` without any.
        waits: What it waits for; several where contexts or tools run side by side, none once it has ended.
    """

    uid: str
    index: int
    status: str
    turns: int
    tokens: int
    version: int | None
    waits: tuple[Wait, ...] = ()

    def __str__(self) -> str:
        version = "" if self.version is None else f", v{self.version}"
        turns, tokens = _count(self.turns, "turn"), _count(self.tokens, "token")
        doing = "; ".join(map(str, self.waits)) or self.status
        return f"sample {self.index} ({turns}, {tokens}{version}): {doing}"


@frozen(kw_only=True)
class GroupTree:
    """One live group.

    Attributes:
        uid: Its name: task, prompt and visit.
        visit: Number of the visit in its task.
        prompt: The prompt's uid.
        seconds: Since it started.
        samples: Its members.
        waits: What the group as a whole waits for, besides its members.
    """

    uid: str
    visit: int
    prompt: str
    seconds: float
    samples: tuple[SampleTree, ...]
    waits: tuple[Wait, ...] = ()

    @property
    def all_waits(self) -> Iterator[tuple[str, Wait]]:
        """Each wait in it, with the name of who waits."""
        yield from ((self.uid, wait) for wait in self.waits)
        for sample in self.samples:
            yield from ((sample.uid, wait) for wait in sample.waits)

    def __str__(self) -> str:
        waits = "".join(f"; {wait}" for wait in self.waits)
        return f"group {self.visit} of prompt {self.prompt!r}, {self.seconds:.1f} s{waits}"


@frozen(kw_only=True)
class TaskTree:
    """One task: its producer, and its live groups.

    Attributes:
        demand: The task's share of the batch that a `next_batch` waits for; 0 if none waits.
        flight: Groups in flight.
        ready: Groups that wait for a batch.
        waiting: Groups that wait to be drawn again.
        room: How many groups may start now.
        idle: Why none may start; `None` if some may.
        groups: The groups in flight, oldest first.
    """

    demand: int
    flight: int
    ready: int
    waiting: int
    room: int
    idle: str | None
    groups: tuple[GroupTree, ...]

    def __str__(self) -> str:
        starts = f"room for {self.room}" if self.idle is None else f"starts none: {self.idle}"
        waiting = f", {self.waiting} to be drawn again" if self.waiting else ""
        return f"{_count(self.flight, 'group')} in flight, {self.ready} ready{waiting}; {starts}"


@frozen(kw_only=True)
class EngineTree:
    """Everything that lives in an engine, and what it waits for, at one moment.

    `str(tree)` is a page of text; `tree.to_dict()` plain values for JSON.

    Attributes:
        state: `"new"`, `"open"`, `"closed"`, or `"broken: "` with the reason.
        version: The policy's weight version.
        turns_in_flight: Turns at the server.
        pause: The pause that is on, if any.
        consumer: The `next_batch` that waits, if any.
        slots: The bounds, and who uses them: `"turn"`, `"judge"`, `"tool"`.
        tasks: The tasks, by name.
        uncommitted: Indices of the batches that were handed over and not committed.
        outage: What is known of the policy's server while it is down or suspected to be; `None` while it works.
        evaluations: The evaluations that run, each with its name and version, in the order in which they began. Those
            that wait for the end of a pause have not begun.
    """

    state: str
    version: int
    turns_in_flight: int = 0
    pause: PauseTree | None = None
    consumer: ConsumerTree | None = None
    slots: Mapping[str, SlotsTree] = field(factory=dict[str, SlotsTree])
    tasks: Mapping[str, TaskTree] = field(factory=dict[str, TaskTree])
    uncommitted: tuple[int, ...] = ()
    outage: str | None = None
    evaluations: tuple[tuple[str, TaskTree], ...] = ()

    def longest(self, count: int = 5) -> tuple[tuple[str, Wait], ...]:
        """The longest waits of live samples and groups, each with the name of who waits.

        Those that only wait for their siblings don't count.
        """
        waits = [
            named
            for task in (*self.tasks.values(), *(task for _, task in self.evaluations))
            for group in task.groups
            for named in group.all_waits
            if named[1].kind != "siblings"
        ]
        return tuple(sorted(waits, key=lambda named: -named[1].seconds)[:count])

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, tuples, strings and numbers, which `json.dumps` takes."""
        return asdict(self)

    def text(self, groups: int = 20) -> str:
        """Returns a page of text.

        Args:
            groups: Most live groups that are shown of each task; the oldest come first.
        """
        return "\n".join(self._lines(groups))

    def __str__(self) -> str:
        return self.text()

    def _lines(self, most: int) -> Iterator[str]:
        turns = _count(self.turns_in_flight, "turn")
        yield f"engine {self.state}, v{self.version}, {turns} at the server"
        if self.pause is not None:
            yield f"  {self.pause}"
        if self.outage is not None:
            yield f"  {self.outage}"
        if self.consumer is not None:
            yield f"  {self.consumer}"
        if self.uncommitted:
            yield f"  batches not committed: {', '.join(map(str, self.uncommitted))}"
        for name, slots in self.slots.items():
            yield f"  {name} slots: {slots}"
            if name != "turn":  # who holds a turn slot stands with its sample
                yield from (f"    {holder}" for holder in slots.holders)
        tasks = [(f"task {name!r}", task) for name, task in self.tasks.items()]
        tasks += [(f"evaluation of {name}", task) for name, task in self.evaluations]
        for name, task in tasks:
            yield f"  {name}: {task}"
            for group in task.groups[:most]:
                yield f"    {group}"
                yield from (f"      {sample}" for sample in group.samples if sample.waits)
                ended = [sample for sample in group.samples if not sample.waits]
                if ended:
                    listed = ", ".join(f"{sample.index} {sample.status}" for sample in ended)
                    yield f"      ended: {listed}"
            if len(task.groups) > most:
                yield f"    and {_count(len(task.groups) - most, 'younger group')}"


@frozen
class StallReport:
    """Nothing has finished for a while, though a batch is waited for and the gate is open.

    Attributes:
        seconds: For how long.
        tree: Everything that lives.
    """

    seconds: float
    tree: EngineTree

    def __str__(self) -> str:
        lines = [f"nothing has finished for {self.seconds:.0f} s"]
        if self.tree.consumer is not None:
            lines.append(f"  {self.tree.consumer}")
        lines += [f"  {who} waits for {wait}" for who, wait in self.tree.longest()]
        lines += [
            f"  {name} slots: {holder}"
            for name, slots in self.tree.slots.items()
            for holder in slots.abandoned
        ]
        if self.tree.consumer is not None:
            tasks = self.tree.tasks
            lines += [f"  task {n!r}: {tasks[n]}" for n in self.tree.consumer.lacking if n in tasks]
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
