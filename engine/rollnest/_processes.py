"""Worker processes: where judgers run that may have to be killed.

One pool for each such judger, owned by the engine. A process is killed in the step in which its caller goes, with
everything it has started, so nothing that a judger does can outlive its limit, its group or the engine.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import Any, Protocol

from anyio import (
    BrokenResourceError,
    ClosedResourceError,
    EndOfStream,
    IncompleteRead,
    fail_after,
    move_on_after,
    open_process,
)
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from ._clock import clock_hold
from ._process_worker import LENGTH_BYTES, MAIN, Answer, framed, in_worker
from ._slots import Call, Slots
from .errors import JudgeError, describe

__all__ = ["Job", "Processes"]

_START = (
    60.0  # seconds until a process that was started has to be ready: it imports the judger's module
)
_REAP = 5.0  # seconds that the end of a killed process may take

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rollnest._process_worker import main; main()"
)

_GONE = (EndOfStream, IncompleteRead, BrokenResourceError, ClosedResourceError)


class Job(Protocol):
    """What processes of one pool do."""

    @property
    def packed(self) -> bytes:
        """The pickled function."""
        ...

    @property
    def at_most(self) -> int:
        """How many processes."""
        ...


class Processes:
    """The worker processes of one engine.

    Attributes:
        killed: How many were killed while they worked.
    """

    def __init__(self, clock: Callable[[], float], main_file: str | None) -> None:
        self.killed = 0
        self._clock = clock
        self._main_file = main_file
        self._pools: dict[int, tuple[Job, _Pool]] = {}

    @property
    def slots(self) -> list[Slots]:
        """What bounds each pool."""
        return [pool.slots for _, pool in self._pools.values()]

    @property
    def alive(self) -> int:
        """How many processes there are."""
        return sum(len(pool.workers) for _, pool in self._pools.values())

    async def run(
        self,
        job: Job,
        call: Call,
        limit: AbstractContextManager[None],
        given: object,
        *,
        patience: float | None,
    ) -> Any:
        """Calls a job's function in a worker process.

        Args:
            job: Which function; each has a pool of its own.
            call: Names the call, and takes its slot; waiting for it and for a process is not counted.
            limit: Entered around the call.
            given: The function's argument.
            patience: Seconds to wait for a slot while abandoned threads hold all of them.

        Raises:
            JudgeError: It raised, its process died, or something can't be sent.

        Cancellation: its process is killed, with every process that it has started.
        """
        _, pool = self._pools.setdefault(id(job), (job, _Pool(self, job, self._clock)))
        try:
            request = pickle.dumps(given, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise JudgeError(
                f"the sample can't be pickled, to be sent to a process: {describe(error)}"
            ) from error
        # The process first: who waits for one holds no slot that others could use.
        async with Call(pool.slots, call.what, call.of, call.by):
            await call.begin(patience)
            try:
                return await pool.ask(framed(request), limit, self._main_file)
            finally:
                call.end()

    async def close(self, grace: float) -> None:
        """Ends every process: those at rest by themselves within `grace` seconds, the others at once.

        Cancellation: they are killed.
        """
        workers = [worker for _, pool in self._pools.values() for worker in pool.workers]
        try:
            with clock_hold(), move_on_after(grace):
                for worker in workers:
                    await worker.let_go()
                for worker in workers:
                    await worker.wait()
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                await worker.reap()
            for _, pool in self._pools.values():
                pool.workers.clear()


class _Pool:
    """The processes of one job."""

    def __init__(self, processes: Processes, job: Job, clock: Callable[[], float]) -> None:
        self.slots = Slots(job.at_most, clock, name="process")
        self.workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._dying: list[_Worker] = []
        self._processes = processes
        self._job = job

    async def ask(
        self, request: bytes, limit: AbstractContextManager[None], main_file: str | None
    ) -> Any:
        worker = await self._take(main_file)
        well = False
        try:
            with limit, clock_hold():
                answer = await worker.ask(request)
            well = True
        finally:
            if well:
                self._idle.append(worker)
            else:
                self._kill(worker)
        kind, value, text = answer
        if kind == "raised":
            raise JudgeError(f"the judger raised {value}") from _RemoteError(text)
        return value

    async def _take(self, main_file: str | None) -> _Worker:
        await self._clear_away()
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._kill(worker)  # it died while it had nothing to do
        if in_worker():
            raise JudgeError(
                "a worker process would start workers of its own: the main script runs an engine when it is "
                'imported; put its run under `if __name__ == "__main__":`'
            )
        worker = await _Worker.launch(self.workers)
        well = False
        try:
            try:
                order = pickle.dumps((self._job.packed, main_file))
                with clock_hold(), fail_after(_START):
                    kind, value, text = await worker.ask(framed(order))
            except TimeoutError:
                raise JudgeError(f"the judger's process was not ready within {_START} s") from None
            if kind != "ready":
                raise JudgeError(
                    f"the judger can't be loaded in its process: {value}"
                ) from _RemoteError(text)
            well = True
        finally:
            if not well:
                self._kill(worker)
        return worker

    def _kill(self, worker: _Worker) -> None:
        # Not waited for: whoever goes goes at once. The next call, or the pool's end, clears away what has ended.
        if worker.kill():
            self._processes.killed += 1
        self._dying.append(worker)

    async def _clear_away(self) -> None:
        while (worker := next((w for w in self._dying if not w.alive), None)) is not None:
            self._dying.remove(worker)  # before the await: another call may be at it, too
            self.workers.discard(worker)
            await worker.reap()


class _Worker:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests = process.stdin
        self._answers = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def launch(cls, workers: set[_Worker]) -> _Worker:
        """Starts a process, and enters it into `workers` in the same step."""
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])  # pyright: ignore[reportUnnecessaryIsInstance]
        with clock_hold(), move_on_after(_REAP, shield=True):  # not to be lost half-way
            worker = cls(
                await open_process(
                    [sys.executable, "-c", _BOOT, path], stderr=None, start_new_session=True
                )
            )
            workers.add(worker)
            return worker
        raise JudgeError(f"no process could be started within {_REAP} s")

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes) -> Answer:
        """Sends one frame and returns the answer."""
        try:
            await self._requests.send(request)
            length = await self._answers.receive_exactly(LENGTH_BYTES)
            payload = await self._answers.receive_exactly(int.from_bytes(length, "big"))
        except _GONE:
            raise JudgeError(f"the judger's process {await self._end()}") from None
        answer: Answer = _Unpickler(BytesIO(payload)).load()
        return answer

    async def let_go(self) -> None:
        """Lets a process at rest end by itself."""
        await self._requests.aclose()

    async def wait(self) -> None:
        """Waits until it has ended."""
        await self._process.wait()

    def kill(self) -> bool:
        """Kills it and whatever it has started; returns whether it was alive."""
        if not self.alive:
            return False
        try:
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        except ProcessLookupError:
            pass  # it has just ended
        return True

    async def reap(self) -> None:
        """Waits for the end of a killed process."""
        with clock_hold(), move_on_after(_REAP, shield=True):
            await self._process.aclose()

    async def _end(self) -> str:
        with clock_hold(), move_on_after(_REAP):
            await self._process.wait()
        code = self._process.returncode
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"


class _RemoteError(Exception):
    """The traceback of an error in a worker process, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in the judger's process:\n{text}")


class _Unpickler(pickle.Unpickler):
    """What a worker calls the main module is ours."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return super().find_class("__main__" if module_name == MAIN else module_name, global_name)
