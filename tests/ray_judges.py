"""Judgers that run in actors, and an actor in which they note what they did."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from rollnest import Sample, Verdict
from tests.ray_actors import remote

__all__ = ["Book", "BookActor", "Judge", "WholeGroup", "parity"]


class BookActor:
    """Notes what judgers in other actors do, and holds them up."""

    def __init__(self) -> None:
        self.marks: Counter[str] = Counter()
        self.pids: Counter[int] = Counter()
        self.at_once = 0
        self.most = 0

    def note(self, mark: str, pid: int = 0) -> int:
        """Notes something; returns how often that was."""
        self.marks[mark] += 1
        if pid:
            self.pids[pid] += 1
        if mark == "begin":
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        if mark == "end":
            self.at_once -= 1
        return self.marks[mark]

    def read(self) -> dict[str, Any]:
        """What was noted."""
        return {"marks": dict(self.marks), "pids": dict(self.pids), "most": self.most}

    def clear(self) -> None:
        """Forgets everything."""
        self.marks.clear()
        self.pids.clear()
        self.at_once = self.most = 0


Book = remote(BookActor)


def parity(sample: Sample) -> float:
    """A plain function."""
    return float(len(sample.segments[0].response) % 2)


class Judge:
    """An asynchronous judger; what it does says the first id of the prompt."""

    def __init__(self, book: Any) -> None:
        self.book = book

    async def judge(self, sample: Sample) -> Verdict:
        what = sample.prompt.meta.get("what", "well")
        await self.book.note.remote("begin", os.getpid())
        try:
            count = await self.book.note.remote(what)
            if what == "crash" or (what == "crash once" and count == 1):
                os._exit(11)
            if what == "hang":
                await self.book.note.remote("hangs")
                await asyncio.Event().wait()
            if what == "raise":
                raise ValueError("no such answer")
        finally:
            self.book.note.remote("end")
        return Verdict(0.5, details={"pid": os.getpid()})


class Stubborn:
    """A synchronous judger that can't be stopped, unless it is told that it may end."""

    def __init__(self, book: Any) -> None:
        self.book = book

    def judge(self, sample: Sample) -> float:
        if sample.prompt.meta.get("what") == "hang":
            ray.get(self.book.note.remote("hangs"))
            threading.Event().wait()
        return 1.0


class WholeGroup:
    """Judges groups."""

    async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        return [float(sample.index) for sample in samples]
