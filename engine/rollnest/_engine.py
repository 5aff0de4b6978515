"""The engine: owns everything that runs, and is the only owner.

    engine's task group
        controller          entered first, left last, in a task of its own; so are agent loops that have a block
        production          one scope, cancelled when the block is left or the engine breaks
            producer per task
                group
                    member

Nothing outside cancels production: the block's end does, in its first synchronous step. So every cancellation
takes one path, and what it cuts settles in the table before the controller is closed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from anyio import (
    CancelScope,
    Event,
    create_task_group,
    current_time,
    fail_after,
    get_cancelled_exc_class,
    get_current_task,
    move_on_after,
)
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint
from attrs import evolve

from ._allocation import Allocate, by_weight
from ._bell import Bell
from ._blocking import BlockingEngine
from ._checks import check_real, check_whole
from ._continuation import check_sampling
from ._control import Control
from ._evaluation import Evaluation, OnUpdate
from ._instruments import Instruments
from ._loops import AgentLoop
from ._options import Capacity, Sampling
from ._overview import consumer_tree, statistics, tree
from ._parts import Hooks, Parts, Setup, assemble
from ._pause import Pause, PauseContext
from ._records import Batch, EvalResult
from ._shortage import check_starved, check_stuck
from ._statistics import EngineStatistics
from ._table import Row
from ._task import TaskSpec, check_tasks, check_token_ids
from ._tree import EngineTree, StallReport
from .abc import InferenceController, Instrument, PauseMode, ReleaseTag, Tokenizer
from .errors import (
    CheckpointError,
    EndOfPrompts,
    EngineBroken,
    EngineBusy,
    EngineClosed,
    InferenceError,
    describe,
    leaves,
)

# Checkpoints are imported by who saves or restores one: `import rollnest` is faster without.
if TYPE_CHECKING:
    from ._restore import Restoration, Restored

__all__ = ["Engine"]

_log = logging.getLogger("rollnest")

_MANY_KEPT = 32  # batches that are not committed, until the log says so

_GROUPS_AT_ONCE = 512  # of an evaluation, where neither groups nor turns have a bound

_FIRST_ASKED_AGAIN = 0.05
"""Seconds until a server is asked again for its first weights; doubled each time."""


class _State(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Engine:
    """Turns prompts into judged, train-ready batches while its block is open.

        async with Engine(controller, [task], batch_size=64) as engine:
            batch = await engine.next_batch()
            async with engine.paused() as pause:
                await pause.update_weights(train(batch))

    Args:
        controller: The policy. The engine enters and leaves it.
        tasks: One data source, or several with different names.
        batch_size: Groups of a batch; required by strategies that run ahead.
        publish_every: After how many batches you load new weights; strategies that run ahead plan by it.
        tokenizer: For prompts and appends that are text or messages, and to decode turns.
        capacity: How much runs at once.
        allocate: Shares each batch among the tasks; asked once a step, and again if a task ends.
        control_timeout: Seconds that one control call of the controller (pause, resume) may take.
        outage: Seconds for which the policy's server may be down, pauses not counted. Requests that fail for a reason
            that may pass are sent again, and turns wait; after that long without one that worked, the engine breaks.
        stall_after: Seconds with the gate open in which nothing ends (no turn, tool, judger or group) and no token
            comes, until a `next_batch` that waits says so: one warning in the log names who waits for what. `None` is
            never.
        exit_grace: Seconds at the end of the block for closing the controller, and for worker threads.
        version: Weight version that the policy starts with.
        start_paused: Whether the policy gets its first weights from the trainer, so that nothing is generated before.
            The gate opens when a `paused()` block has updated or published them, with this `version` or a later one;
            or when the server itself reports this version, unless that is 0: every server reports it that never got
            weights. Until then the engine asks the controller for its version (when it is entered, and in
            `next_batch`), and makes the calls of `paused()`; no others.
        seed: Of shuffles, `rollout.random` and derived sampling seeds.
        instruments: Hear what happens.

    Raises:
        ValueError: An option has a value that can't be.
        TypeError: An option has the wrong type.

    Errors of the block's body leave it as they are, never inside an exception group. A failure of the engine itself
    arrives as one `EngineBroken`, at the next call, or when the block is left if there was none.
    """

    def __init__(
        self,
        controller: InferenceController,
        tasks: TaskSpec | Sequence[TaskSpec],
        *,
        batch_size: int | None = None,
        publish_every: int = 1,
        tokenizer: Tokenizer | None = None,
        capacity: Capacity = Capacity(),  # noqa: B008  (frozen)
        allocate: Allocate = by_weight,
        control_timeout: float = 30.0,
        outage: float = 600.0,
        stall_after: float | None = 300.0,
        exit_grace: float = 5.0,
        version: int = 0,
        start_paused: bool = False,
        seed: int = 0,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        specs = check_tasks(tasks, batch_size)
        if tokenizer is None:
            check_token_ids(specs)
        if batch_size is not None:
            check_whole("batch_size", batch_size, 1)
        check_whole("publish_every", publish_every, 1)
        if not callable(allocate):
            raise TypeError(
                f"allocate must be a function of an AllocationRequest, got {allocate!r}"
            )
        check_real("control_timeout", control_timeout, 0, open_below=True)
        check_real("outage", outage, 0, open_below=True)
        if stall_after is not None:
            check_real("stall_after", stall_after, 0, open_below=True)
        check_real("exit_grace", exit_grace, 0)
        check_whole("version", version, 0)
        if not isinstance(start_paused, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"start_paused must be a bool, got {start_paused!r}")
        check_whole("seed", seed, 0)
        self._controller = controller
        self._specs = specs
        self._batch_size = batch_size
        self._publish_every = publish_every
        self._tokenizer = tokenizer
        self._capacity = capacity
        self._allocate = allocate
        self._control_timeout = control_timeout
        self._outage = outage
        self._stall_after = stall_after
        self._exit_grace = exit_grace
        self._first_version = version
        self._start_paused = start_paused
        self._first_from_trainer = start_paused  # whether the policy got its first weights from it
        self._seed = seed
        self._run = uuid4().hex
        self._instruments = Instruments(instruments)
        self._state = _State.NEW
        self._causes: list[BaseException] = []
        self._broken = ""
        self._told = False  # whether a call has raised `EngineBroken`
        self._consumer: tuple[int, float] | None = None  # the groups asked for, and since when
        # Tasks that have a group less in flight since whoever waits for a batch has looked; `None` if nobody waits.
        self._fewer: set[str] | None = None
        self._pauser: int | None = None
        self._pausing: PauseContext | None = None
        self._control = Control(controller)
        self._told_keep = False  # whether the log says that KEEP is ABORT here
        self._parts: Parts | None = None
        self._restoration: Restoration | None = None
        self._keeps_batches = False  # until they are committed: there is a checkpoint to go back to
        self._told_kept = False  # whether the log says that many of them wait

    @classmethod
    def restore(
        cls,
        directory: str | PathLike[str],
        controller: InferenceController,
        tasks: TaskSpec | Sequence[TaskSpec],
        *,
        trained_through: int | None = None,
        missing: Literal["error", "fresh"] = "error",
        batch_size: int | None = None,
        publish_every: int = 1,
        tokenizer: Tokenizer | None = None,
        capacity: Capacity = Capacity(),  # noqa: B008  (frozen)
        allocate: Allocate = by_weight,
        control_timeout: float = 30.0,
        outage: float = 600.0,
        stall_after: float | None = 300.0,
        exit_grace: float = 5.0,
        version: int | None = None,
        start_paused: bool = False,
        seed: int | None = None,
        instruments: Sequence[Instrument] = (),
    ) -> Engine:
        """Returns an engine that goes on from a checkpoint; enter its block as that of any other.

            engine = Engine.restore("run/engine", controller, tasks, batch_size=64, trained_through=trainer.step)

        It first hands over the batches again that were not committed, in their order and as they were. Then it goes on:
        what was ready is ready, what was in flight or waited is drawn before fresh prompts, and loops get what their
        rollouts had from their journals. `restored` says what it holds.

        It starts paused: nothing is sampled before the weights are known to be right. The gate opens when a `paused()`
        block has updated or published weights, with `version` or a later one, or when the server itself reports this
        version.

        Call it before anything else runs: it reads the whole checkpoint, and blocks meanwhile.

        Args:
            directory: Where an engine saved, or one of the checkpoints in it.
            controller: The policy, as for `Engine`. Its vocabulary must have the size that it had.
            tasks: As they were: names, prompts, `group_size` and `shuffle`. Anything else may change.
            trained_through: Number of the last batch that your trainer's weights have seen. The newest checkpoint from
                which that can go on is taken, and batches after it are handed over again. `None` takes the newest, and
                all that were not committed come again.
            missing: What happens if there is no checkpoint: an error, or `"fresh"` returns a new engine, so that a
                first start and a restart are the same lines. It is an error all the same if something was trained.
            batch_size: As for `Engine`; so are the options that aren't explained here.
            version: The policy's weight version; `None` is the checkpoint's. Where it is lower, what newer weights have
                made is let go, and its prompts are drawn again (`restored.newer`).
            start_paused: For a new engine; a restored one always does.
            seed: `None` is the checkpoint's, and 0 for a new engine.

        Raises:
            CheckpointError: There is no checkpoint, or none that fits; it is damaged; or the tasks or the seed are not
                what they were. Says which and how.
            ValueError: An option has a value that can't be.
            TypeError: An option has the wrong type.
        """
        if missing not in ("error", "fresh"):
            raise ValueError(f"missing must be 'error' or 'fresh', got {missing!r}")
        if trained_through is not None:
            check_whole("trained_through", trained_through, 0)
        from ._checkpoint import read_files
        from ._restore import find

        path = find(directory, trained_through)
        if path is None and (missing == "error" or trained_through):
            trained = f", and trained_through is {trained_through}" if trained_through else ""
            raise CheckpointError(f"there is no checkpoint in {fspath(directory)}{trained}")
        engine = cls(
            controller,
            tasks,
            batch_size=batch_size,
            publish_every=publish_every,
            tokenizer=tokenizer,
            capacity=capacity,
            allocate=allocate,
            control_timeout=control_timeout,
            outage=outage,
            stall_after=stall_after,
            exit_grace=exit_grace,
            version=0 if version is None else version,
            start_paused=start_paused,
            seed=0 if seed is None else seed,
            instruments=instruments,
        )
        if path is not None:
            manifest, files = read_files(path)
            engine._go_on(files, manifest, seed, trained_through, version, path)
        return engine

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        trained_through: int | None = None,
        version: int | None = None,
    ) -> None:
        """Goes on from what `state_dict` returned, as `restore` does from a folder; before the block is entered.

        Args:
            state: From your trainer's own checkpoint.
            trained_through: As for `restore`.
            version: As for `restore`; `None` is the state's, whatever the engine was given.

        Raises:
            CheckpointError: It is damaged, or doesn't fit.
            EngineBusy: The engine was entered, or was restored already.
            TypeError: It is no state of an engine.
        """
        if self._state is not _State.NEW or self._restoration is not None:
            raise EngineBusy(
                "load_state_dict() is for an engine that was neither entered nor restored"
            )
        if trained_through is not None:
            check_whole("trained_through", trained_through, 0)
        if version is not None:
            check_whole("version", version, 0)
        from ._checkpoint import unpack

        manifest, files = unpack(state)
        self._go_on(files, manifest, self._seed, trained_through, version, None)

    def _go_on(
        self,
        files: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        seed: int | None,
        trained_through: int | None,
        version: int | None,
        path: Path | None,
    ) -> None:
        from ._restore import fit

        restoration = fit(
            files,
            manifest,
            self._specs,
            seed=seed,
            trained_through=trained_through,
            version=version,
            path=path,
        )
        # Everything is read and checked: from here on nothing fails.
        self._restoration = restoration
        self._run = restoration.report.run
        self._seed = restoration.saved.engine.seed
        self._first_version = restoration.report.version
        self._start_paused = True
        self._first_from_trainer = restoration.saved.engine.start_paused
        self._keeps_batches = True

    @property
    def restored(self) -> Restored | None:
        """From what it was restored; `None` for a new engine."""
        return None if self._restoration is None else self._restoration.report

    # The block

    async def __aenter__(self) -> Engine:
        """Enters the controller and starts production.

        Raises:
            UnsupportedSampling: The controller can't honour a task's sampling.
            ValueError: The controller reports another weight version than the engine's.
            EngineClosed: The engine was entered before.

        Cancellation: whatever was opened is closed again.
        """
        if self._state is not _State.NEW:
            raise EngineClosed("an engine is entered once; make another")
        self._state = _State.OPEN
        self._lifetime = CancelScope()
        self._production = CancelScope(shield=True)
        self._production_over = Event()
        self._ready = Bell()
        self._group: TaskGroup = create_task_group()
        await self._group.__aenter__()
        try:
            await self._group.start(self._host_controller, name="rollnest controller")
            # It is ours now: only production's end, and then `exit_grace`, end it. Not earlier, because
            # start() has to be able to cancel it as long as it waits for it.
            self._lifetime.shield = True
            reported = await self._check_version()
            if self._restoration is not None:
                self._restoration.check_vocabulary(self._controller.capabilities.vocab_size)
            self._parts = parts = assemble(
                self._setup(),
                self._hooks(),
                awaits_weights=self._start_paused and not self._is_first(reported),
            )
            try:
                self._restore(parts)
            finally:  # if it fails, too: production is ended then, and closes what was built
                self._group.start_soon(self._host_production, parts, name="rollnest production")
        except BaseException as error:
            if self._parts is None:
                self._production_over.set()  # production never began, so nobody else would say so
            await self._leave(error)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancels production, waits until everything has settled, and closes the controller.

        Raises:
            EngineBroken: The engine broke, and the body left normally.
        """
        await self._leave(exc)

    async def _leave(self, exc: BaseException | None) -> None:
        self._state = _State.CLOSED
        self._end_production()
        try:
            with self._ready:
                traceback = None if exc is None else exc.__traceback__
                await self._group.__aexit__(None if exc is None else type(exc), exc, traceback)
        except BaseExceptionGroup as group:
            # Python re-raises the body's own error once we return: it is never seen inside a group.
            own: set[int] = set() if exc is None else {id(error) for error in leaves(exc)}
            foreign = [e for e in leaves(group) if id(e) not in own and not _is_cancellation(e)]
            if foreign or exc is None:
                raise (foreign or [group])[0] from None
            return
        if exc is None and not self._told:
            self._check_whole()

    async def _host_controller(self, *, task_status: TaskStatus[None]) -> None:
        """Keeps the controller open until production is over, and agent loops that have a block of their own."""
        opened = False
        with self._lifetime as lifetime:
            try:
                async with self._controller, AsyncExitStack() as loops:
                    for loop in {id(s.loop): s.loop for s in self._specs}.values():
                        if isinstance(loop, AbstractAsyncContextManager):
                            await loops.enter_async_context(loop)
                    opened = True
                    task_status.started()
                    await self._production_over.wait()
                    lifetime.deadline = current_time() + self._exit_grace
                    await self._control.close()  # a pause in another task may be at it
            except Exception as error:
                if not opened:
                    raise  # the error belongs to whoever enters the engine
                self._break("the controller, or what runs the agent loops, failed", error)
        if lifetime.cancelled_caught:
            _log.warning("the controller did not close within %s s", self._exit_grace)

    async def _host_production(self, parts: Parts) -> None:
        """Runs the producers until the block is left or the engine breaks."""
        try:
            with self._production:
                async with create_task_group() as producers:
                    producers.start_soon(parts.prober.run, name="rollnest prober")
                    producers.start_soon(parts.stall.run, name="rollnest stall watch")
                    for name, producer in parts.producers.items():
                        producers.start_soon(producer.run, name=f"producer {name}")
                if not self._production.cancel_called:
                    raise RuntimeError("a task of production was cancelled, and not by the engine")
        except Exception as error:
            self._break("production failed", error)
        finally:
            try:
                parts.lag.stop()
                with CancelScope(shield=True):
                    await parts.evaluations.settled()  # they were cancelled
                    await parts.processes.close(self._exit_grace)
                    await parts.workers.drain(self._exit_grace)
            finally:
                self._production_over.set()

    # What a trainer calls

    @property
    def version(self) -> int:
        """The policy's weight version."""
        return self._first_version if self._parts is None else self._parts.gate.version

    async def next_batch(self, n: int | None = None, *, wait_in_pause: bool = False) -> Batch:
        """Waits until `n` groups over all tasks are ready, and takes them.

        Args:
            n: Groups; `None` is the engine's `batch_size`.
            wait_in_pause: Whether to wait if the gate is closed now; for a consumer in a task of its own. Otherwise
                a call inside `paused()` takes what is ready, or raises.

        Returns:
            The batch, oldest groups first. It is short once, when the prompts end. Taking it commits the one before.

        Raises:
            EndOfPrompts: Every task's prompts are used up and delivered.
            Starved: Too many groups of a task in a row were unusable; the next call goes on.
            Stuck: Groups are missing, none is in flight, and no strategy lets one start.
            EngineBusy: Another call waits already; or the gate is closed and too few groups are ready; or the engine
                started paused, and the first weights are missing (with `wait_in_pause` after `outage` seconds).
            EngineBroken: The engine can't go on.
            EngineClosed: The block is not open.
            ValueError: `n` is below 1, or missing where the engine has no `batch_size`.

        Cancellation: nothing is taken. Taking is the last step and has no await after it.
        """
        n = self._batch_size if n is None else n
        if n is None:
            raise ValueError("n must be given where the engine has no batch_size, got None")
        check_whole("n", n, 1)
        await checkpoint()
        parts = self._usable()
        if self._consumer is not None:
            raise EngineBusy("next_batch() is waiting already; only one call at a time")
        again = parts.delivery.hand_over_again()
        if again is not None:
            return self._handed_over(parts, again)
        self._consumer = n, parts.gate.clock()
        try:
            if parts.gate.awaits_weights:
                await self._first_weights(parts, n, wait=wait_in_pause)
        finally:
            self._consumer = None
        if parts.gate.closed and not wait_in_pause:
            batch = parts.delivery.take(n, parts.gate.version)
            if batch is None:
                ready = parts.delivery.ready(n)
                raise EngineBusy(
                    f"the gate is closed, and {ready} of {n} groups are ready", ready=ready, asked=n
                )
            return self._handed_over(parts, batch)
        self._consumer = n, parts.gate.clock()
        self._fewer = set()
        parts.stall.begin()
        try:
            while True:
                batch = parts.delivery.take(n, parts.gate.version)
                if batch is not None:
                    return self._handed_over(parts, batch)
                self._let_start(parts, self._fewer)
                self._demand(parts, parts.delivery.plan(n).groups)
                check_starved(parts.producers)
                check_stuck(parts.producers, parts.gate, n)
                await self._ready.wait()
                self._usable()
        finally:
            parts.stall.end()
            self._consumer = None
            fewer, self._fewer = self._fewer, None
            self._let_start(parts, fewer)
            self._demand(parts, {})

    def batches(self, n: int | None = None) -> AsyncIterator[Batch]:
        """Iterates over batches until the prompts end; each step is a `next_batch(n)`."""
        return _Batches(self, n)

    def commit(self, batch: Batch) -> None:
        """Says that a batch was trained, so that the engine need not keep it. Idempotent.

        While the engine has never been saved, the next `next_batch` says it of the batch before. From the first
        checkpoint on only this call does: a batch that is not committed is in every checkpoint, and handed over again
        by an engine that is restored from it. What a restored engine has still to hand over again stays until then.

        Raises:
            ValueError: The engine has not handed this batch over.
        """
        parts = self._entered()
        if not 1 <= batch.index <= parts.delivery.batches:
            raise ValueError(
                f"batch {batch.index} was not handed over; the last one was {parts.delivery.batches}"
            )
        parts.delivery.commit(batch.index)

    async def save(self, directory: str | PathLike[str], *, keep_last: int = 2) -> Path:
        """Writes a checkpoint, from which `restore` goes on; at any moment: while turns, tools and judgers run, in a
        pause, of a broken engine, and after the block.

            await engine.save("run/engine")

        What it holds is that of one moment, noted in one step. It is written in a worker thread while production goes
        on, and gets its name once it is complete and on the disk: a crash at any moment leaves the older ones whole.

        Args:
            directory: Where checkpoints go; one engine's only.
            keep_last: How many stay, this one among them.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It can't be written, the folder holds checkpoints of another run, or something has no form
                in a checkpoint: details of a verdict, prompts or the state of a source.
            EngineBusy: Another call saves already.
            EngineClosed: The engine was not entered.
            ValueError: `keep_last` is below 1.

        Cancellation: nothing of it is left, unless it was complete.
        """
        path = Path(directory)
        check_whole("keep_last", keep_last, 1)
        await checkpoint()
        saver = self._entered().saver
        if saver.busy:
            raise EngineBusy("save() is at it already; only one call at a time")
        self._keeps_batches = True
        return await saver.save(path, keep_last)

    def state_dict(self) -> dict[str, bytearray]:
        """Returns what `save` would write, for your trainer's own checkpoint; `load_state_dict` goes on from it.

        Strings and bytearrays, as `torch.load` takes them with its defaults. It takes its time on the event loop, about
        a second for 100 MB; `save` does not.

        Raises:
            CheckpointError: As `save`.
            EngineBusy: A task's `PromptSource` draws in a thread at this moment; `save` waits for it.
            EngineClosed: The engine was not entered.
        """
        state = self._entered().saver.state_dict()
        self._keeps_batches = True
        return state

    def paused(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        grace: float = 5.0,
        release: Collection[ReleaseTag] = (),
    ) -> AbstractAsyncContextManager[Pause]:
        """A block in which no forward pass of the policy runs.

            async with engine.paused() as pause:
                await pause.update_weights(model.state_dict())

        The gate closes at once; turns in flight are brought to rest, at most `grace` seconds; the controller confirms,
        within `control_timeout`. Then the block begins. Afterwards production goes on.

        Args:
            mode: What happens to the turns in flight.
            grace: Seconds until turns that have not ended are cut; they keep what they received. With `EVICT`, judgers
                are cancelled then, too.
            release: What the controller gives its memory back of while the block is on: `"kv"`, `"weights"`. When the
                block is left, and before `update_weights`, the weights are reloaded, and then the cache.

        Raises:
            PauseFailed: The controller did not confirm, or did not release, or evicted groups did not end. Production
                goes on with the old weights.
            ValueError: The controller can't release what is named; or the mode is `KEEP`, whose turns need the cache.
            EngineBusy: Another pause is on.
            EngineBroken: The weights are unknown (an update failed or was cancelled), or the controller won't resume.
            EngineClosed: The engine's block is not open.

        Cancellation: on the way in, production goes on with the old weights. In `update_weights`, the engine breaks. A
        cancellation or an error that leaves the block is never replaced by another.
        """
        parts = self._usable()
        self._check_release(mode, release)
        if mode is PauseMode.KEEP and not self._can_keep():
            mode = PauseMode.ABORT
        return PauseContext(
            mode,
            grace,
            gate=parts.gate,
            eviction=parts.eviction,
            controller=self._control,
            control_timeout=self._control_timeout,
            instruments=self._instruments,
            claim=self._claim_pause,
            release=self._release_pause,
            give_way=self._give_way,
            updated=parts.evaluations.updated,
            break_engine=self._break,
            check=self._usable,
            give_back=release,
        )

    async def evaluate(
        self,
        task: TaskSpec | str,
        *,
        limit: int | None = None,
        sampling: Sampling | None = None,
        on_update: OnUpdate = "wait",
        patience: float = 600.0,
    ) -> EvalResult:
        """Answers and judges each prompt of a task once, beside production.

            result = await engine.evaluate(heldout, sampling=Sampling(512, temperature=0))

        It shares the policy, the slots for turns, judgers and tools, and the limits; nothing of it gets into batches or
        the tasks' figures. Each prompt gets `group_size` samples. `epochs`, `shuffle`, `weight`, `strategy`, `keep` and
        what else concerns training is not used. Several may run at once. It begins when no pause is on.

        Args:
            task: What to evaluate, or the name of one of the engine's own tasks.
            limit: Most prompts; the first ones are taken.
            sampling: How the policy samples, greedily (temperature 0) too; `None` is the task's.
            on_update: What a pause means to it, since new weights may come. `"wait"` has `paused()` wait for it before
                the gate closes, at most `patience` seconds; then it goes on as with `"mark"`. `"cancel"` lets new
                weights cancel it; a pause that brings none does not. `"mark"` goes on with the new weights.
                `result.versions` says what made it.
            patience: Seconds for which `paused()` waits for it.

        Raises:
            EvaluationCancelled: New weights came, and `on_update="cancel"`.
            EngineBusy: Called by the task that is inside `paused()`, which would wait for itself.
            EngineBroken: The engine can't go on.
            EngineClosed: The engine's block is not open, or was left meanwhile.
            UnsupportedSampling: The controller can't honour the sampling.
            ValueError: An argument has a value that can't be, or names no task.

        Cancellation: all of it is cancelled and has settled.
        """
        check_real("patience", patience, 0)
        if limit is not None:
            check_whole("limit", limit, 1)
        if on_update not in ("wait", "cancel", "mark"):
            raise ValueError(f"on_update must be 'wait', 'cancel' or 'mark', got {on_update!r}")
        if sampling is not None and not isinstance(sampling, Sampling):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"sampling must be a Sampling or None, got {sampling!r}")
        spec = self._spec(task)
        if not isinstance(spec.prompts, Sequence):
            raise TypeError(
                f"evaluate() needs a sequence of prompts; task {spec.name!r} has {spec.prompts!r}"
            )
        if limit is not None:
            spec = evolve(spec, prompts=spec.prompts[:limit])
        if self._tokenizer is None:
            check_token_ids([spec])
        await checkpoint()
        parts = self._usable()
        if self._pausing is not None and self._pauser == get_current_task().id:
            raise EngineBusy("evaluate() inside paused() would wait for itself; call it after")
        sampling = spec.sampling if sampling is None else sampling
        check_sampling(sampling, self._controller.capabilities)
        if sampling.stop and self._tokenizer is None:
            raise ValueError(f"sampling.stop={sampling.stop!r} needs a tokenizer")
        parts.lag.wake()
        evaluation = Evaluation(
            spec,
            sampling,
            parts.services,
            judging_of=parts.judging_of,
            at_once=self._capacity.groups or self._capacity.turns or _GROUPS_AT_ONCE,
            on_update=on_update,
            patience=patience,
            break_engine=self._break,
        )
        async with AsyncExitStack() as loops:
            if isinstance(spec.loop, AbstractAsyncContextManager) and not self._opens(spec.loop):
                await loops.enter_async_context(spec.loop)
            ended = await parts.evaluations.run(evaluation)
        if not ended:
            self._usable()
            raise RuntimeError("an evaluation was ended by nobody")
        result = evaluation.result()
        self._instruments.tell("evaluation_ended", result)
        return result

    def _opens(self, loop: AgentLoop) -> bool:
        return any(spec.loop is loop for spec in self._specs)

    def _spec(self, task: TaskSpec | str) -> TaskSpec:
        if isinstance(task, TaskSpec):
            return task
        for spec in self._specs:
            if spec.name == task:
                return spec
        if not isinstance(task, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"task must be a TaskSpec or the name of one, got {task!r}")
        raise ValueError(f"task {task!r} is none of {[spec.name for spec in self._specs]}")

    def statistics(self) -> EngineStatistics:
        """Returns where everything is now. Works after the block too."""
        return statistics(self._entered())

    def tree(self) -> EngineTree:
        """Returns everything that lives in the engine, and what each of it waits for; printed, it is a page of text.

        It may be called at any moment: before, in and after the block, in a pause, by an instrument, of an engine that
        is broken. It takes time in proportion to what lives, and changes nothing.
        """
        state = f"broken: {self._broken}" if self._broken else self._state.value
        parts = self._parts
        if parts is None:
            return EngineTree(state=state, version=self.version)
        pause = None if self._pausing is None else self._pausing.tree(parts.gate.clock())
        consumer = None if self._consumer is None else consumer_tree(parts, *self._consumer)
        return tree(parts, state, pause, consumer)

    def blocking(self, backend: str = "asyncio") -> BlockingEngine:
        """Returns a context manager for ordinary synchronous code; the engine runs in a thread of its own.

            with Engine(controller, tasks, batch_size=64).blocking() as engine:
                batch = engine.next_batch()

        Args:
            backend: `"asyncio"` or `"trio"`.
        """
        return BlockingEngine(self, backend)

    def __repr__(self) -> str:
        tasks = ", ".join(spec.name for spec in self._specs)
        state = f"broken: {self._broken}" if self._broken else self._state.value
        return f"<Engine {state}, v{self.version}, tasks {tasks}>"

    # How it works

    def _can_keep(self) -> bool:
        """Whether the controller can freeze turns; says once in the log that it can't."""
        known = self._controller.capabilities
        if PauseMode.KEEP not in known.pause_modes:
            why = "it does not offer that (capabilities.pause_modes)"
        elif not known.version_spans:
            why = "it does not report the version of each token (capabilities.version_spans)"
        else:
            return True
        if not self._told_keep:
            self._told_keep = True
            _log.warning("the controller can't keep turns through a pause: %s; they abort", why)
        return False

    def _check_release(self, mode: PauseMode, release: Collection[ReleaseTag]) -> None:
        if isinstance(release, str):
            raise TypeError(f"release must be a collection of tags, got the string {release!r}")
        known = self._controller.capabilities.release_tags
        for tag in release:
            if tag not in known:
                raise ValueError(
                    f"release holds {tag!r}, and the controller can release {sorted(known) or 'nothing'}"
                )
        if release and mode is PauseMode.KEEP:
            raise ValueError(
                f"release must be empty with KEEP, whose turns stay in the controller's memory, got {release!r}"
            )

    async def _check_version(self) -> int | None:
        """Asks which weights the policy has; with `start_paused` any will do for now."""
        with fail_after(self._control_timeout):
            reported = await self._control.version()
        if reported not in (None, self._first_version) and not self._start_paused:
            raise ValueError(
                f"version is {self._first_version}, but the controller reports {reported}"
            )
        return reported

    def _is_first(self, reported: int | None) -> bool:
        """Whether the server's report says that it has its first weights. A server that never got any reports 0."""
        if reported is None or reported != self._first_version:
            return False
        return reported > 0 or not self._first_from_trainer

    async def _first_weights(self, parts: Parts, n: int, *, wait: bool) -> None:
        """Asks the server whether it has its first weights; waits for them, at most `outage` seconds.

        Raises:
            EngineBusy: They are missing.
        """
        gate, says = parts.gate, "nothing"
        by, again = gate.clock() + (self._outage if wait else 0.0), _FIRST_ASKED_AGAIN
        while gate.awaits_weights:
            if self._pausing is None:  # a pause is at the controller itself
                try:
                    with fail_after(self._control_timeout):
                        reported = await self._control.version()
                except (InferenceError, TimeoutError) as error:
                    says = describe(error)
                else:
                    says = "no version" if reported is None else f"version {reported}"
                    if self._is_first(reported) and gate.awaits_weights:
                        gate.adopt(self._first_version)
                        if self._pausing is None:
                            gate.open()
                            self._instruments.tell("gate_opened", gate.version)
                            self._ring()
                        return
            left = by - gate.clock()
            if left <= 0:
                raise EngineBusy(
                    f"the engine started paused, and waits for weights of version {gate.version}: no paused() block "
                    f"has updated or published them, and the server reports {says}",
                    ready=parts.delivery.ready(n),
                    asked=n,
                )
            with move_on_after(min(again, left)):
                await self._ready.wait()
            self._usable()
            again *= 2

    def _setup(self) -> Setup:
        return Setup(
            controller=self._controller,
            specs=self._specs,
            batch_size=self._batch_size,
            publish_every=self._publish_every,
            tokenizer=self._tokenizer,
            capacity=self._capacity,
            allocate=self._allocate,
            outage=self._outage,
            stall_after=self._stall_after,
            version=self._first_version,
            start_paused=self._first_from_trainer,
            seed=self._seed,
            run=self._run,
            instruments=self._instruments,
        )

    def _hooks(self) -> Hooks:
        return Hooks(
            settled=self._settled,
            look=self._ready.ring,
            stalled=self._tell_stall,
            give_up=self._give_up,
            break_engine=self._break,
        )

    def _restore(self, parts: Parts) -> None:
        """Puts what a checkpoint holds into an engine in which nothing runs yet."""
        restoration = self._restoration
        if restoration is None:
            return
        saved = restoration.saved
        for name, counters in parts.counters.items():
            counters.restore(saved.engine.tasks[name].tokens)
        for producer in parts.producers.values():
            producer.restore(saved, self._first_version)
        parts.delivery.restore(
            restoration.report.batches, saved.engine.taken, restoration.owed, restoration.again
        )
        self._restoration = evolve(
            restoration, saved=evolve(saved, visits=(), batches=()), again=()
        )  # it has changed hands, and must not be kept alive here

    def _settled(self, task: str, row: Row) -> None:
        """A group of a task has ended: a batch may be complete, and there may be room for another."""
        parts = self._entered()
        parts.producers[task].settled(row)
        self._ready.ring()
        if self._fewer is None:
            parts.admission.changed(task)
        else:  # who waits for a batch looks first: producers would start groups before that
            self._fewer.add(task)
        parts.eviction.settled()

    def _let_start(self, parts: Parts, fewer: set[str]) -> None:
        """Has producers look that have not heard that a group of theirs has ended."""
        while fewer:
            parts.admission.changed(fewer.pop())

    def _tell_stall(self, seconds: float) -> None:
        report = StallReport(seconds, self.tree())
        _log.warning("%s\n  print(engine.tree()) shows everything", report)
        self._instruments.tell("stalled", report)

    def _demand(self, parts: Parts, shares: Mapping[str, int]) -> None:
        for name, producer in parts.producers.items():
            producer.demand = shares.get(name, 0)

    def _handed_over(self, parts: Parts, batch: Batch) -> Batch:
        kept = parts.delivery.uncommitted
        if not self._keeps_batches:
            # Without a checkpoint to go back to, the trainer's next call says that it is done with the batch before.
            for index in [i for i in kept if i < batch.index]:
                parts.delivery.commit(index)
        elif len(kept) > _MANY_KEPT and not self._told_kept:
            self._told_kept = True
            _log.warning(
                "%d batches wait for engine.commit(batch), and every checkpoint holds them all",
                len(kept),
            )
        self._instruments.tell("batch_delivered", batch)
        for producer in parts.producers.values():
            producer.wake()
        return batch

    def _claim_pause(self, pause: PauseContext) -> None:
        self._usable()
        if self._pausing is not None:
            raise EngineBusy("paused() is on already; only one at a time")
        self._pausing = pause
        self._pauser = get_current_task().id
        self._entered().evaluations.hold()

    async def _give_way(self) -> None:
        await self._entered().evaluations.give_way()
        self._usable()

    def _release_pause(self) -> None:
        self._pausing = None
        self._ring()

    def _ring(self) -> None:
        """The gate may have opened, or the version changed: everybody looks again."""
        parts = self._entered()
        parts.evaluations.go_on()
        parts.delivery.expire(parts.gate.version)
        for producer in parts.producers.values():
            producer.runner.cancel_lost(parts.gate.version)
            producer.wake()
        self._ready.ring()

    def _break(self, why: str, cause: BaseException) -> None:
        """Ends production for good; what is in flight settles. Every call raises from now on."""
        causes = list(leaves(cause))
        self._broken = self._broken or f"{why}: {describe(causes[0])}"
        self._causes.extend(causes)
        _log.error("the engine is broken: %s", why, exc_info=cause)
        self._end_production()
        self._instruments.tell("engine_broken", self._broken, causes[0])

    def _end_production(self) -> None:
        self._production.cancel()
        if self._parts is not None:
            self._parts.evaluations.end()
        self._ready.ring()  # a consumer in another task hears it now

    def _give_up(self, causes: Sequence[Exception]) -> None:
        why = f"no request to the policy's server worked for {self._outage:g} s"
        self._break(why, ExceptionGroup(why, causes))

    def _entered(self) -> Parts:
        if self._parts is None:
            raise EngineClosed("the engine was not entered: use `async with engine`")
        return self._parts

    def _check_whole(self) -> None:
        if self._broken:
            self._told = True
            raise EngineBroken(self._broken, causes=self._causes) from self._causes[0]

    def _usable(self) -> Parts:
        parts = self._entered()
        self._check_whole()
        if self._state is _State.CLOSED:
            raise EngineClosed("the engine's block was left")
        return parts


class _Batches:
    """Iterates over an engine's batches; no generator, so nothing is left open when a loop is left early."""

    def __init__(self, engine: Engine, n: int | None) -> None:
        self._engine = engine
        self._n = n

    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self._engine.next_batch(self._n)
        except EndOfPrompts:
            raise StopAsyncIteration from None


def _is_cancellation(error: BaseException) -> bool:
    return isinstance(error, get_cancelled_exc_class())
