"""Controllers that cost next to nothing, so that what is measured is the engine."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence

from anyio import Event
from anyio.lowlevel import checkpoint

from benches.harness import now
from rollnest import Attempt, Capabilities, Group, PauseMode
from rollnest.abc import Health, Instrument, ReleaseTag, WeightSource

__all__ = [
    "IDS",
    "LOGPROBS",
    "InstantController",
    "Line",
    "LineController",
    "NextInLine",
    "ParkingController",
    "Relay",
]

IDS = [5] * 16
LOGPROBS = [-1.0] * 16

Columns = tuple[Sequence[int], Sequence[float]]


class InstantController:
    """Answers every attempt at once with 16 tokens."""

    capabilities = Capabilities(vocab_size=100, max_context=1_000_000)

    async def __aenter__(self) -> InstantController:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, attempt: Attempt) -> None:
        """Answers at once."""
        await checkpoint()
        attempt.commit(IDS, LOGPROBS)
        attempt.finish("stop")

    async def abort(self, ids: Collection[str] | None) -> None:
        """Nothing is ever open."""

    async def pause(self, mode: PauseMode) -> None:
        """Confirms at once."""

    async def resume(self) -> None:
        """Resumes at once."""

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Takes anything."""

    async def version(self) -> int | None:
        """Keeps none."""
        return None

    async def health(self) -> Health:
        """Works."""
        return Health()

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Has nothing to release, and says so in `capabilities`."""

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Has released nothing."""


class ParkingController(InstantController):
    """Holds every attempt until it is told to let them go, by an abort or by `answer`; then all return at once.

    Args:
        tokens: Of each reply; its columns are made when the attempt arrives, like bytes that have come and are decoded.
        packed: Whether the columns are arrays, or lists of Python numbers.

    Attributes:
        open: Attempts that wait, by id.
    """

    def __init__(self, tokens: int = 16, *, packed: bool = False) -> None:
        self.open: dict[str, Event] = {}
        self._tokens = tokens
        self._packed = packed
        self._finish = "abort"

    async def generate(self, attempt: Attempt) -> None:
        """Waits until it is let go."""
        columns = self._columns()
        self.open[attempt.id] = let_go = Event()
        try:
            await let_go.wait()
        finally:
            del self.open[attempt.id]
        if self._tokens:
            attempt.commit(*columns)
        attempt.finish(self._finish)

    async def abort(self, ids: Collection[str] | None) -> None:
        """Lets them return with a partial."""
        self._let_go("abort")

    def answer(self) -> None:
        """Lets them return with an answer."""
        self._let_go("stop")

    def _let_go(self, finish: str) -> None:
        self._finish = finish
        for let_go in self.open.values():
            let_go.set()

    def _columns(self) -> Columns:
        if self._packed:
            return array("i", (5,)) * self._tokens, array("f", (-1.0,)) * self._tokens
        return [5] * self._tokens, [-1.0] * self._tokens


class Line:
    """Calls that wait in line, group by group; `step` lets the next group go.

    Args:
        stride: Groups that go one after the other in a turn of a `Relay`.

    Attributes:
        paces: Seconds of a group, stride by stride.
    """

    def __init__(self, *, stride: int = 1) -> None:
        self.paces: list[float] = []
        self._stride = stride
        self._left = 0
        self._began = 0.0
        self._hand_over: Callable[[], None] = _nobody
        self._groups: dict[Hashable, list[Event]] = {}
        self._waiting = 0

    async def wait(self, group: Hashable) -> None:
        """Waits for its group's turn."""
        mine = Event()
        self._groups.setdefault(group, []).append(mine)
        self._waiting += 1
        await mine.wait()

    def step(self) -> None:
        """Lets the group go whose first call has waited longest."""
        if self._groups:
            events = self._groups.pop(next(iter(self._groups)))
            self._waiting -= len(events)
            for event in events:
                event.set()

    def begin(self, hand_over: Callable[[], None]) -> None:
        """Lets the first group of a stride go; calls `hand_over` when the last one has ended."""
        self._hand_over = hand_over
        self._left = self._stride
        self._began = now()
        self.step()

    def ended(self) -> None:
        """A group has ended: the next one goes, or the stride is over."""
        self._left -= 1
        if self._left:
            self.step()
            return
        self.paces.append((now() - self._began) / self._stride)
        self._hand_over()

    def __len__(self) -> int:
        return self._waiting


def _nobody() -> None:
    pass


class Relay:
    """Has lines take turns, a stride of each, until all are through; so all see the same machine."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = deque(lines)

    def hand_over(self) -> None:
        """Lets the next line go."""
        for _ in range(len(self._lines)):
            line = self._lines[0]
            self._lines.rotate(-1)
            if len(line):
                line.begin(self.hand_over)
                return


class LineController(InstantController):
    """Answers group after group, as its line says."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def generate(self, attempt: Attempt) -> None:
        """Waits for its turn in the line, and answers."""
        await self._line.wait(attempt.affinity.rpartition("/")[0])
        attempt.commit(IDS, LOGPROBS)
        attempt.finish("stop")


class NextInLine(Instrument):
    """Lets the next group go when one has ended."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def group_ended(self, group: Group, outcome: str) -> None:
        """A group ended."""
        self._line.ended()

    def __len__(self) -> int:
        return len(self._line)
