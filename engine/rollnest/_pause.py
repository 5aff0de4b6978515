"""Pausing: from an open gate to a policy that nobody uses, and back, whatever happens in between.

The order, and why: the gate closes first, in the step in which `paused` is entered, so no turn can start any
more. Then the server is asked to abort, again and again by id, because a request in transit is missed by an
abort-all. What is still open after `grace` is cut; it keeps what it received. Only then the controller is asked
to pause, and only its confirmation lets the block begin (I10).

On the way out the weights decide: known ones let production go on, unknown ones break the engine, and the gate
stays closed for ever. What was released is reloaded first: the weights, because an update needs them, then the cache. A
cancellation or an error that leaves the block is never replaced by one of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from types import TracebackType

from anyio import (
    current_time,
    fail_after,
    get_cancelled_exc_class,
    get_current_task,
    move_on_after,
    sleep,
    sleep_forever,
)
from anyio.lowlevel import checkpoint

from ._checks import check_real, check_whole
from ._control import Control
from ._eviction import Eviction
from ._gate import Gate
from ._instruments import Instruments
from ._tree import PauseTree
from .abc import PauseMode, ReleaseTag, WeightSource
from .errors import (
    EngineBusy,
    EngineClosed,
    InferenceError,
    PauseFailed,
    WeightsState,
    WeightUpdateFailed,
    describe,
)

__all__ = ["Pause", "PauseContext"]

_log = logging.getLogger("rollnest")

_RELOAD_ORDER: tuple[ReleaseTag, ...] = ("weights", "kv")

_FIRST_AGAIN = 0.05  # seconds until a control call is sent again; doubled each time


class Pause:
    """What can be done while the policy is paused.

    Attributes:
        quiet_seconds: From entering `paused` to the controller's confirmation.
        turns_in_flight: Turns that were at the server when the gate closed.
        open: Whether the block is on.
        weights: What the policy holds, against when the block began.
        moved: Version that the trainer has published and the controller was not told of yet.
        released: What the controller has given the memory back of, and not taken again yet.
    """

    def __init__(
        self,
        gate: Gate,
        controller: Control,
        control_timeout: float,
        instruments: Instruments,
    ) -> None:
        self._gate = gate
        self._instruments = instruments
        self._control_timeout = control_timeout
        self._controller = controller
        self.open = False
        self.weights: WeightsState = WeightsState.OLD
        self.moved: int | None = None
        self.released: set[ReleaseTag] = set()
        self.quiet_seconds: float = 0.0
        self.turns_in_flight: int = len(gate.in_flight)

    async def update_weights(self, source: WeightSource, version: int | None = None) -> None:
        """Loads new weights into the policy.

        Args:
            source: A state dict, a directory, or an async callable that moves them itself.
            version: Their version, above the present one; `None` is the next. The first weights of an engine with
                `start_paused` have the version that it waits for, or a later one; `None` is that version.

        If the weights are released they are reloaded first.

        Raises:
            ValueError: The version does not rise.
            InferenceError: Released weights could not be reloaded; nothing has changed.
            EngineBusy: The block is not on.
            EngineClosed: The engine's block was left meanwhile.
            WeightUpdateFailed: They did not load, or the server reports another version afterwards.

        Cancellation: nobody knows then what the policy holds, so leaving the block breaks the engine.
        """
        version = self._next(version)
        if "weights" in self.released:
            await self.reload("weights")
        before, self.weights = self.weights, WeightsState.UNKNOWN
        try:
            await self._controller.update_weights(source, version)
            with fail_after(self._control_timeout):
                reported = await self._controller.version()
        except WeightUpdateFailed as error:
            # Old means: as before this call, which may have been an earlier call's new weights.
            self.weights = before if error.weights is WeightsState.OLD else error.weights
            if error.weights is WeightsState.NEW:
                self._gate.version = version
                self.moved = None  # the server has newer ones than were published before
                self._instruments.tell("weights_updated", version)
            raise
        if reported is not None and reported != version:
            raise WeightUpdateFailed(
                f"the server reports version {reported} after an update to {version}",
                weights=WeightsState.UNKNOWN,
            )
        self._gate.adopt(version)
        self.weights = WeightsState.NEW
        self.moved = None
        self._instruments.tell("weights_updated", version)

    def published(self, version: int) -> None:
        """Says that the trainer has moved new weights into the policy itself.

        The controller is told when the block is left, before it resumes: it drops what it cached under older weights,
        and its server's own label follows. If it can't, the engine breaks.

        Raises:
            ValueError: The version does not rise.
            EngineBusy: The weights are released: `reload("weights")` comes first. Or the block is not on.
        """
        version = self._next(version)
        if "weights" in self.released:
            raise EngineBusy(
                'the weights are released, so nobody can have moved them: await pause.reload("weights") first'
            )
        self._gate.adopt(version)
        self.moved = version
        self.weights = WeightsState.NEW
        self._instruments.tell("weights_updated", version)

    async def reload(self, *tags: ReleaseTag) -> None:
        """Takes memory again that `paused(release=)` has given back; what is left is reloaded when the block is left.

        Args:
            tags: `"weights"`, `"kv"`; those that were reloaded before are ignored.

        Raises:
            ValueError: A tag is unknown, or there is none.
            InferenceError: The controller could not, or took over `control_timeout` seconds. It is tried again when
                the block is left.
            EngineBusy: The block is not on.
            EngineClosed: The engine's block was left meanwhile.

        Cancellation: it is asked for again when the block is left.
        """
        self._check_open()
        if not tags or not set(tags) <= set(_RELOAD_ORDER):
            raise ValueError(f"reload() takes 'weights' and 'kv', got {tags!r}")
        await checkpoint()
        try:
            with fail_after(self._control_timeout):
                await self.take_back(tags)
        except TimeoutError as error:
            raise InferenceError(
                f"the controller did not reload {', '.join(tags)} within {self._control_timeout} s",
                retryable=True,
            ) from error

    async def take_back(self, tags: Collection[ReleaseTag]) -> None:
        """Reloads those tags that are released; the weights first."""
        for tag in _RELOAD_ORDER:
            if tag in tags and tag in self.released:
                await self._controller.reload((tag,))
                self.released.discard(tag)

    def _check_open(self) -> None:
        if not self.open:
            raise EngineBusy("weights can only change inside the paused() block")
        self._controller.check()

    def _next(self, version: int | None) -> int:
        self._check_open()
        gate = self._gate
        least = gate.version if gate.awaits_weights else gate.version + 1
        if version is None:
            return least
        check_whole("version", version, 0)
        if version < least:
            if gate.awaits_weights:
                raise ValueError(
                    f"version must be >= {least}, which the engine waits for: {version}"
                )
            raise ValueError(f"version must rise: {version} after {gate.version}")
        return version

    def __repr__(self) -> str:
        state = f"quiet after {self.quiet_seconds * 1e3:.1f} ms" if self.open else "over"
        return f"<Pause {state}, v{self._gate.version}, weights {self.weights.value}>"


async def _moved_already() -> None:
    await checkpoint()


class PauseContext:
    """`async with engine.paused() as pause`."""

    def __init__(
        self,
        mode: PauseMode,
        grace: float,
        *,
        gate: Gate,
        eviction: Eviction,
        controller: Control,
        control_timeout: float,
        instruments: Instruments,
        claim: Callable[[PauseContext], None],
        release: Callable[[], None],
        give_way: Callable[[], Awaitable[None]],
        updated: Callable[[int], None],
        break_engine: Callable[[str, BaseException], None],
        check: Callable[[], object],
        give_back: Collection[ReleaseTag] = (),
    ) -> None:
        if not isinstance(mode, PauseMode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"mode must be a PauseMode, got {mode!r}")
        check_real("grace", grace, 0)
        self._mode = mode
        self._grace = grace
        self._gate = gate
        self._eviction = eviction
        self._controller = controller
        self._control_timeout = control_timeout
        self._instruments = instruments
        self._claim = claim
        self._release = release
        self._give_way = give_way
        self._updated = updated
        self._break_engine = break_engine
        self._check = check
        self._give_back = tuple(give_back)
        self._pause = Pause(gate, controller, control_timeout, instruments)
        self._entered = False
        self._phase = "quiet"
        self._by = ""

    async def __aenter__(self) -> Pause:
        self._claim(self)
        self._by = get_current_task().name or "a task without a name"
        try:
            await self._give_way()  # without an await, unless an evaluation is to be waited for
        except BaseException:
            self._release()
            raise
        started = current_time()
        self._pause = pause = Pause(
            self._gate, self._controller, self._control_timeout, self._instruments
        )
        self._gate.close()
        self._instruments.tell("gate_closed", pause.turns_in_flight)
        try:
            by = started + self._grace + self._control_timeout
            if self._mode is not PauseMode.KEEP:
                await self._quiet()
            self._phase = "confirm"
            await self._confirm(by=by)
            if self._mode is PauseMode.EVICT:
                self._phase = "evict"
                await self._evict(judgers_by=started + self._grace, by=by)
            if self._give_back:
                self._phase = "release"
                await self._release_memory(by=by)
            await checkpoint()
            self._controller.check()
        except BaseException as error:
            # Nothing was changed: the old weights serve on, whatever kept the pause from coming about.
            await self._leave(error)
            if isinstance(error, PauseFailed):
                self._instruments.tell("pause_failed", error)
            raise
        pause.quiet_seconds = current_time() - started
        pause.open = self._entered = True
        self._phase = "body"
        self._instruments.tell("paused", pause.quiet_seconds)
        return pause

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pause = self._pause
        if not self._entered:
            raise RuntimeError("the paused() block is left without having been entered")
        pause.open = self._entered = False
        if pause.weights is WeightsState.UNKNOWN:
            cause = exc if exc is not None else RuntimeError("an update of the weights failed")
            self._break_engine("nobody knows which weights the policy holds", cause)
            self._release()
            if exc is None:
                self._check()
            return
        await self._leave(exc)

    def tree(self, now: float) -> PauseTree:
        """Where it stands."""
        return PauseTree(
            mode=self._mode.name,
            phase=self._phase,
            by=self._by,
            seconds=now - self._gate.closed_since,
            turns_in_flight=len(self._gate.in_flight),
        )

    async def _quiet(self) -> None:
        """Brings the turns in flight to rest: within `grace`, and `WAIT` within half a `control_timeout` more."""
        gate, patience = self._gate, self._grace
        if self._mode is PauseMode.WAIT:
            with move_on_after(self._grace), gate.until_quiet():
                await sleep_forever()
            patience = self._control_timeout / 2
        if gate.in_flight:
            with move_on_after(patience), gate.until_quiet():
                await self._abort(None)
                again = _FIRST_AGAIN
                while True:
                    await sleep(again)
                    await self._abort([attempt.id for attempt in gate.in_flight])
                    again *= 2

    async def _abort(self, ids: list[str] | None) -> None:
        try:
            await self._controller.abort(ids)
        except Exception:
            # Asked again soon, and cut after `grace`: whether the server stops is for pause() to confirm.
            _log.warning("the controller's abort() failed", exc_info=True)

    async def _confirm(self, *, by: float) -> None:
        """Cuts what is in flight, but for `KEEP`, and has the controller confirm; within one `control_timeout`."""
        gate, keep = self._gate, self._mode is PauseMode.KEEP
        if not keep:
            gate.cut()
        try:
            with fail_after(min(self._control_timeout, by - current_time())):
                if not keep:
                    with gate.until_quiet():
                        await sleep_forever()
                await self._controller.pause(PauseMode.KEEP if keep else PauseMode.ABORT)
        except TimeoutError as error:
            late = (
                f"{len(gate.in_flight)} turns did not end after they were cancelled"
                if gate.in_flight and not keep
                else "the controller did not confirm the pause"
            )
            raise PauseFailed(f"{late} within {self._control_timeout} s") from error
        except EngineClosed:
            raise
        except Exception as error:
            raise PauseFailed(f"the controller did not pause: {describe(error)}") from error

    async def _release_memory(self, *, by: float) -> None:
        """Has the controller give memory back; what it has done when it fails is not known, so all is reloaded."""
        self._pause.released.update(self._give_back)
        named = ", ".join(self._give_back)
        try:
            with fail_after(min(self._control_timeout, by - current_time())):
                await self._controller.release(self._give_back)
        except TimeoutError as error:
            raise PauseFailed(
                f"the controller did not release {named} within {self._control_timeout} s"
            ) from error
        except EngineClosed:
            raise
        except Exception as error:
            raise PauseFailed(
                f"the controller did not release {named}: {describe(error)}"
            ) from error

    async def _evict(self, *, judgers_by: float, by: float) -> None:
        """Ends all groups: those that are being judged once that is done, or their time is over."""
        eviction = self._eviction
        with eviction.begin():
            with move_on_after(judgers_by - current_time()), eviction.until_settled():
                await sleep_forever()
            if not eviction.live:
                return
            eviction.hurry()
            try:
                with fail_after(by - current_time()), eviction.until_settled():
                    await sleep_forever()
            except TimeoutError as error:
                raise PauseFailed(
                    f"{eviction.live} groups did not end within {by - judgers_by} s after they were cancelled"
                ) from error

    async def _leave(self, leaving: BaseException | None) -> None:
        """Lets production go on; a controller that can't breaks the engine."""
        known = False
        self._phase = "leaving"
        try:
            try:
                failure = await self._resume()
            except get_cancelled_exc_class():
                # Only asyncio's own task.cancel() gets through the shield. Whether the controller was asked is not
                # known then; asking twice does no harm.
                failure = await self._resume()
                known = True
                self._go_on(failure)
                raise
            known = True
            self._go_on(failure)
            if leaving is None:
                self._check()
        finally:
            if not known:
                self._go_on(RuntimeError("cancelled again and again"))
            self._release()

    def _go_on(self, failure: Exception | None) -> None:
        if isinstance(failure, EngineClosed):
            return  # nothing goes on
        if failure is not None and self._gate.barred and not self._pause.released:
            # The server is down, which a pause does not change: the probe finds out when it answers.
            _log.warning("the controller did not resume in an outage: %s", describe(failure))
            failure = None
        if failure is None:
            self._updated(self._gate.version)
            self._gate.open()
            if not self._gate.closed:
                self._instruments.tell("gate_opened", self._gate.version)
        else:
            what = "reload" if self._pause.released else "resume"
            self._break_engine(f"the controller did not {what}", failure)

    async def _resume(self) -> Exception | None:
        """Has the controller go on, whatever is being cancelled: reload, hear of published weights, resume."""
        pause = self._pause
        steps: list[Callable[[], Awaitable[None]]] = [self._controller.resume]
        if "kv" in pause.released:
            steps.append(partial(pause.take_back, _RELOAD_ORDER[1:]))
        if pause.moved is not None:
            steps.append(self._tell_moved)
        if "weights" in pause.released:
            steps.append(partial(pause.take_back, _RELOAD_ORDER[:1]))
        for step in reversed(steps):
            failure = await self._insist(step)
            if failure is not None:
                return failure
        return None

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> Exception | None:
        """Asks again and again, within `control_timeout`."""
        failure: Exception = TimeoutError(f"no answer within {self._control_timeout} s")
        with move_on_after(self._control_timeout, shield=True):
            again = _FIRST_AGAIN
            while True:
                try:
                    await call()
                except EngineClosed as error:
                    return error
                except Exception as error:
                    failure = error
                    await sleep(again)
                    again *= 2
                else:
                    return None
        return failure

    async def _tell_moved(self) -> None:
        """Tells the controller of weights that the trainer has moved itself."""
        moved = self._pause.moved
        if moved is None:
            return
        await self._controller.update_weights(_moved_already, moved)
        reported = await self._controller.version()
        if reported is not None and reported != moved:
            raise WeightUpdateFailed(
                f"the server reports version {reported}, but {moved} was published",
                weights=WeightsState.UNKNOWN,
            )
        self._pause.moved = None
