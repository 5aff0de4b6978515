"""Takes snapshots of an engine, and writes them: one at a time, in a worker thread.

The snapshot is one step on the event loop. Only a user's source that draws in a thread is waited for before: where it
is can't be told meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Lock
from typing import TypeVar

from ._attempt import TokenCounters
from ._breath import Breath
from ._checkpoint import checkpoints, pack, read_manifest, write
from ._delivery import Delivery
from ._fingerprint import fingerprint_of
from ._gate import Gate
from ._producer import Producer
from ._slots import Call, Slots
from ._snapshot import Snapshot, TaskNote
from ._source import SourceSampler
from ._workers import Workers
from .errors import CheckpointError, EngineBusy

__all__ = ["Saver"]

T = TypeVar("T")


class Saver:
    """Saves one engine.

    Attributes:
        run: Names the run, over all restarts.
        busy: Whether it is saving.
    """

    def __init__(
        self,
        run: str,
        *,
        seed: int,
        start_paused: bool,
        vocab_size: int,
        gate: Gate,
        delivery: Delivery,
        producers: Mapping[str, Producer],
        counters: Mapping[str, TokenCounters],
        workers: Workers,
        clock: Callable[[], float],
    ) -> None:
        self.run = run
        self.uid = run
        self.busy: bool = False
        self._seed = seed
        self._start_paused = start_paused
        self._vocab_size = vocab_size
        self._gate = gate
        self._delivery = delivery
        self._producers = producers
        self._counters = counters
        self._workers = workers
        self._clock = clock
        self._slots = Slots(None, clock)  # asked when the loop may have ended
        self._fingerprints: Mapping[str, str] | None = None
        self._writing = Lock()  # held by a thread that writes, also by one that nobody waits for

    def snapshot(self) -> Snapshot | SourceSampler:
        """Returns a snapshot, or the source that has to be waited for; synchronous."""
        tasks: dict[str, TaskNote] = {}
        now = self._clock()
        for name, producer in self._producers.items():
            note = producer.note(now, self._counters[name].counts())
            if note is None:
                assert producer.source is not None
                return producer.source
            tasks[name] = note
        delivery, gate = self._delivery, self._gate
        return Snapshot(
            run=self.run,
            version=gate.version,
            seed=self._seed,
            start_paused=self._start_paused,
            vocab_size=self._vocab_size,
            turns_in_flight=gate.turns,
            batches=delivery.batches,
            taken=delivery.taken_with,
            owed=dict(delivery.owed),
            uncommitted=list(delivery.uncommitted.values()),
            tasks=tasks,
        )

    def state_dict(self) -> dict[str, bytearray]:
        """Returns a checkpoint in memory; synchronous.

        Raises:
            EngineBusy: A source is drawing in a thread.
            CheckpointError: Something can't be held by a checkpoint.
        """
        snapshot = self.snapshot()
        if isinstance(snapshot, SourceSampler):
            raise EngineBusy(
                f"the prompt source of task {snapshot.uid!r} is drawing; `await engine.save()` waits for it"
            )
        return pack(snapshot.files(self._known_prompts(snapshot)), snapshot.manifest)

    async def save(self, directory: Path, keep_last: int) -> Path:
        """Takes a snapshot and writes it; returns its folder.

        Raises:
            CheckpointError: It can't be written.

        Cancellation: nothing of it is left, unless it was complete.
        """
        self.busy = True
        gone = ThreadEvent()
        try:
            while isinstance(snapshot := self.snapshot(), SourceSampler):
                await self._in_thread("prompt source", snapshot.wait_for_thread)
            return await self._in_thread(
                "checkpoint", partial(self._write, directory, keep_last, snapshot, gone.is_set)
            )
        finally:
            self.busy = False
            gone.set()  # whoever still writes for a caller that has gone stops

    async def _in_thread(self, what: str, function: Callable[[], T]) -> T:
        call = Call(self._slots, what, self, self)
        return await self._workers.run(call, nullcontext(), function)

    def _write(
        self, directory: Path, keep_last: int, snapshot: Snapshot, is_cancelled: Callable[[], bool]
    ) -> Path:
        with self._writing:
            self._check_run(directory)
            breathe = Breath()
            files = snapshot.files(self._known_prompts(snapshot, breathe), breathe)
            return write(
                directory, files, snapshot.manifest, keep_last=keep_last, is_cancelled=is_cancelled
            )

    def _check_run(self, directory: Path) -> None:
        for folder in checkpoints(directory)[-1:]:
            try:
                run = read_manifest(folder)["run"]
            except CheckpointError:
                continue  # ours or not: it can't be used any more
            if run != self.run:
                raise CheckpointError(
                    f"{directory} holds checkpoints of another run ({run}); this one is {self.run}"
                )

    def _known_prompts(
        self, snapshot: Snapshot, breathe: Callable[[], object] = bool
    ) -> Mapping[str, str]:
        """What tells the tasks' prompts from others; they never change."""
        if self._fingerprints is None:
            self._fingerprints = {
                name: fingerprint_of(task.prompts, breathe)
                for name, task in snapshot.tasks.items()
                if isinstance(task.prompts, Sequence)
            }
        return self._fingerprints

    def __repr__(self) -> str:
        return f"<Saver of run {self.run}{', saving' if self.busy else ''}>"
