"""The handle of an engine in an actor, for synchronous trainers; it can be pickled, and handed to another actor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Literal, cast

import ray
from ray.exceptions import RayError

from rollnest import (
    Batch,
    Engine,
    EngineStatistics,
    EngineTree,
    EvalResult,
    PauseMode,
    Sampling,
    TaskSpec,
)
from rollnest.abc import ReleaseTag, WeightSource
from rollnest.errors import EndOfPrompts
from rollnest_adapters._checks import check_positive

from ._bridge import check_initialized
from ._engine_host import EngineHost, RayPauseInfo
from ._failures import what_failed
from ._loops import pack
from ._options import RayOptions

__all__ = ["RayEngine", "RayPause"]

_log = logging.getLogger("rollnest")


class RayEngine:
    """An engine in an actor of its own, as a synchronous trainer uses it.

        with RayEngine.start(make_engine) as engine:
            for batch in engine.batches(64):
                weights = train(batch)
                with engine.paused() as pause:
                    pause.update_weights(weights)

    The engine lives in the actor, with all that it owns; what the trainer gets are records. A call that is interrupted,
    by Ctrl-C for one, is cancelled there. A trainer that dies leaves nothing running that waits for it: its calls end,
    and its pause ends when its lease is over. A batch that did not reach it is handed to the next handle that asks.

    One trainer at a time uses it: of several ranks, the first one, which shares the batches out. The handle can be
    pickled; whoever made the engine owns it, and it ends with that process, unless it is detached.

    Args:
        actor: The actor of an engine that was started.
        received: Number of the last batch that this trainer has, from its own checkpoint; an earlier trainer's last
            batch is handed over again otherwise, unless it was committed.
    """

    def __init__(self, actor: Any, *, received: int | None = None) -> None:
        self._actor = actor
        self._received = received
        self._run: Any = None  # the call that owns the engine

    @classmethod
    def start(cls, make: Callable[[], Engine], *, options: RayOptions | None = None) -> RayEngine:
        """Starts an actor, and the engine in it.

        Args:
            make: Makes the engine, in the actor: with its controller, tasks, prompts. It is pickled.
            options: Where the actor runs, and with what; one CPU if nothing is said.

        Raises:
            TypeError: `make` can't be pickled.
            RuntimeError: Ray is not initialized.
            Exception: What making or entering the engine raised.
        """
        check_initialized()
        packed = pack("make", make)
        given = (options or RayOptions()).given(num_cpus=1, max_restarts=0)
        remote: Any = ray.remote
        actor = remote(EngineHost).options(**given).remote(packed)
        engine = cls(actor)
        engine._run = actor.run.remote()
        try:
            engine._ask("ready")
        except BaseException:
            engine.kill()
            raise
        return engine

    @property
    def actor(self) -> Any:
        """The actor's handle."""
        return self._actor

    @property
    def version(self) -> int:
        """The policy's weight version."""
        return int(self._ask("version"))

    def next_batch(self, n: int | None = None, *, wait_in_pause: bool = False) -> Batch:
        """Waits for a batch; see `Engine.next_batch`. One that did not reach a trainer comes first."""
        batch: Batch = self._ask("next_batch", n, self._received, wait_in_pause)
        self._received = batch.index
        return batch

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Iterates over batches until the prompts end."""
        while True:
            try:
                batch = self.next_batch(n)
            except EndOfPrompts:
                return
            yield batch

    def commit(self, batch: Batch) -> None:
        """See `Engine.commit`."""
        self._ask("commit", batch.index)

    @contextmanager
    def paused(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        grace: float = 5.0,
        release: Collection[ReleaseTag] = (),
        lease: float = 600.0,
    ) -> Generator[RayPause]:
        """A block in which no forward pass of the policy runs; see `Engine.paused`.

        Args:
            mode: As for `Engine.paused`.
            grace: As for `Engine.paused`.
            release: As for `Engine.paused`.
            lease: Seconds after which the pause ends by itself if it is not named: by a call of the `RayPause`, or its
                `keep`. A trainer that dies in it stops production for so long.
        """
        check_positive("lease", lease)
        info: RayPauseInfo = self._ask("pause", mode, grace, tuple(release), lease)
        try:
            yield RayPause(self, info)
        finally:
            self._ask("resume", info.number)

    def save(self, directory: str | PathLike[str], *, keep_last: int = 2) -> str:
        """See `Engine.save`. The directory is one of the actor's node."""
        return str(self._ask("save", fspath(directory), keep_last))

    def evaluate(
        self,
        task: TaskSpec | str,
        *,
        limit: int | None = None,
        sampling: Sampling | None = None,
        on_update: Literal["wait", "cancel", "mark"] = "wait",
        patience: float = 600.0,
    ) -> EvalResult:
        """See `Engine.evaluate`."""
        options = {
            "limit": limit,
            "sampling": sampling,
            "on_update": on_update,
            "patience": patience,
        }
        return cast("EvalResult", self._ask("evaluate", task, options))

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return cast("EngineStatistics", self._ask("statistics"))

    def tree(self) -> EngineTree:
        """See `Engine.tree`."""
        return cast("EngineTree", self._ask("tree"))

    def close(self) -> None:
        """Leaves the engine, waits until it is left, and ends the actor.

        Raises:
            EngineBroken: The engine broke, and no call has said so.
        """
        try:
            self._ask("close")
            if self._run is not None:
                _get(self._run)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the actor at once; what it owns ends with it."""
        with suppress(RayError):
            cast("Any", ray).kill(self._actor)

    def _ask(self, method: str, *args: Any) -> Any:
        return _get(getattr(self._actor, method).remote(*args))

    def ask_in_pause(self, info: RayPauseInfo, what: str, *args: Any) -> None:
        """Calls a method of a pause."""
        self._ask("in_pause", info.number, what, args)

    def keep_pause(self, info: RayPauseInfo) -> None:
        """Renews a pause's lease."""
        self._ask("keep", info.number)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """As `close`; after an error, what that raises goes to the log."""
        try:
            self.close()
        except Exception as error:
            if exc is None:
                raise
            _log.warning("the engine in %r did not end well either: %s", self._actor, error)

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self._actor, self._received)

    def __repr__(self) -> str:
        return f"<RayEngine in {self._actor!r}>"


class RayPause:
    """A pause's calls, for the trainer that is in its block."""

    def __init__(self, engine: RayEngine, info: RayPauseInfo) -> None:
        self._engine = engine
        self.info: RayPauseInfo = info

    @property
    def quiet_seconds(self) -> float:
        """From the call to the controller's confirmation."""
        return self.info.quiet_seconds

    def update_weights(self, source: WeightSource, version: int | None = None) -> None:
        """See `Pause.update_weights`. A state dict goes through Ray's object store."""
        self._engine.ask_in_pause(self.info, "update_weights", source, version)

    def published(self, version: int) -> None:
        """See `Pause.published`."""
        self._engine.ask_in_pause(self.info, "published", version)

    def reload(self, *tags: ReleaseTag) -> None:
        """See `Pause.reload`."""
        self._engine.ask_in_pause(self.info, "reload", *tags)

    def keep(self) -> None:
        """Says that the trainer is alive; its lease begins anew."""
        self._engine.keep_pause(self.info)

    def __repr__(self) -> str:
        return f"<RayPause {self.info.number}, quiet after {self.quiet_seconds:.3f} s>"


def _handle(actor: Any, received: int | None) -> RayEngine:
    return RayEngine(actor, received=received)


def _get(ref: Any) -> Any:
    """Waits for a call; one that is interrupted is cancelled."""
    try:
        return ray.get(ref)
    except Exception as error:
        raise what_failed(error) from None
    except BaseException:
        with suppress(RayError):
            cast("Any", ray).cancel(ref)
        raise
