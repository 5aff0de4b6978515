"""Draws from a user's prompt source, off the event loop, one prompt at a time.

What a draw brought is put down here in the step in which it came, in the thread that called `draw`, if it is
synchronous. So a prompt is not lost if whoever asked for it was cancelled meanwhile: it is handed out next.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from inspect import isawaitable, iscoroutinefunction
from threading import Lock

from ._clock import loop_clock
from ._codecs import decode, encode
from ._records import Group, Prompt
from ._sampler import SamplerNote
from ._slots import Call, Slots
from ._task import as_prompt
from ._workers import Workers
from .abc import Curriculum, PromptSource
from .errors import CheckpointError, DataError, describe

__all__ = ["SourceSampler"]

_REMEMBERED = 2**16


class SourceSampler:
    """The prompts of one task that come from a source.

    Attributes:
        uid: The task's name.
        drawing: Whether the source is drawing now.
        ended: Whether the source has said that there are no more.
    """

    def __init__(self, task: str, source: PromptSource, workers: Workers) -> None:
        self.uid = task
        self.drawing: bool = False
        self.ended: bool = False
        self._source = source
        self._workers = workers
        self._slots = Slots(None, loop_clock())  # asked when the loop may have ended
        self._held: deque[Prompt] = deque()
        self._drawn = 0
        self._known: dict[str, Prompt] = {}  # by uid, the last ones
        self._reports: deque[Group] = deque()
        self._lock = Lock()  # held by a thread while it draws, also by one that nobody waits for

    @property
    def held(self) -> int:
        """Prompts that were drawn, and that no group has taken yet."""
        return len(self._held)

    @property
    def exhausted(self) -> bool:
        """Whether there are no more prompts."""
        return self.ended and not self._held

    def draw(self) -> Prompt | None:
        """Hands out a prompt that is held; `None` if none is, and the source has to be asked."""
        return self._held.popleft() if self._held else None

    async def fetch(self) -> None:
        """Asks the source for one prompt, and holds it; or notes that it has ended.

        Raises:
            DataError: The source raised, or what it gave is no prompt. `__cause__` is its own error.

        Cancellation: a draw in a thread runs on, and what it brings is held. An async draw is cancelled.
        """
        self.drawing = True
        try:
            if iscoroutinefunction(self._source.draw):
                self._put(await self._source.draw())
            else:
                call = Call(self._slots, "prompt source", self, self)
                await self._workers.run(call, nullcontext(), self._draw)
        except Exception as error:
            raise self._attributed("draw", error) from error
        finally:
            self.drawing = False
        self._report_all()

    def _report_all(self) -> None:
        while self._reports:
            self._report(self._reports.popleft())

    def report(self, group: Group) -> None:
        """Tells a curriculum how a group ended; while it draws, afterwards.

        Raises:
            DataError: `report` raised.
        """
        if isinstance(self._source, Curriculum):
            if self.drawing:
                self._reports.append(group)
            else:
                self._report(group)

    def _report(self, group: Group) -> None:
        if isinstance(self._source, Curriculum):
            try:
                self._source.report(group)
            except Exception as error:
                raise self._attributed("report", error) from error

    def _draw(self) -> None:
        with self._lock:
            item = self._source.draw()
            if isawaitable(item):
                raise TypeError(
                    "draw() returned an awaitable, but is not declared with `async def`"
                )
            self._put(item)

    def wait_for_thread(self) -> None:
        """Blocks until no thread draws; for a worker thread."""
        with self._lock:
            pass

    def note(self) -> SamplerNote | None:
        """Where the source is, together with what is held: neither changes meanwhile; `None` while a thread draws.

        Raises:
            CheckpointError: The source raised, or its state is nothing that a checkpoint can hold.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not iscoroutinefunction(self._source.draw):
                self._report_all()  # no thread draws now, so it may hear of what has ended meanwhile
            state = dict(self._source.state_dict())
            plain = encode(state, f"the prompt source of task {self.uid!r} has a state with")
        except Exception as error:
            raise CheckpointError(
                f"the prompt source of task {self.uid!r}, state_dict(): {describe(error)}"
            ) from error
        finally:
            self._lock.release()
        return SamplerNote(0, self._drawn, plain, tuple(self._held), self.ended)

    def restore(self, note: SamplerNote) -> None:
        """Goes on from a checkpoint; before the first draw.

        Raises:
            CheckpointError: The source raised.
        """
        try:
            self._source.load_state_dict(decode(note.state))
        except Exception as error:
            raise CheckpointError(
                f"the prompt source of task {self.uid!r}, load_state_dict(): {describe(error)}"
            ) from error
        self._drawn, self.ended = note.drawn, note.ended
        self._held.extend(note.held)
        self._known.update({prompt.uid: prompt for prompt in note.held})

    def _put(self, item: object) -> None:
        if item is None:
            self.ended = True
            return
        prompt = as_prompt(item, self._drawn, "draw()")
        known = self._known.setdefault(prompt.uid, prompt)
        if known is not prompt and (known.token_ids, known.messages) != (
            prompt.token_ids,
            prompt.messages,
        ):
            raise ValueError(f"draw() gave two different prompts with the uid {prompt.uid!r}")
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._drawn += 1
        self._held.append(prompt)

    def _attributed(self, what: str, error: Exception) -> DataError:
        return DataError(f"the prompt source of task {self.uid!r}, {what}(): {describe(error)}")

    def __repr__(self) -> str:
        state = "ended" if self.ended else "drawing" if self.drawing else "resting"
        return f"<SourceSampler {self.uid!r}: {self._drawn} drawn, {self.held} held, {state}>"
