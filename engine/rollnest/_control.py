"""The engine's calls of the controller, all but `generate`: one at a time, and none once the engine is left.

A trainer may pause in one task while another leaves the engine. The controller is closed then, whatever the pause still
has to do: the call that is running is cancelled, and every later one raises instead of reaching a closed controller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar, TypeVarTuple

from anyio import CancelScope, Lock

from .abc import InferenceController, PauseMode, ReleaseTag, WeightSource
from .errors import EngineClosed

__all__ = ["Control"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Control:
    """A controller as the engine calls it; see `InferenceController` for the calls.

    Each of them raises `EngineClosed` once the engine's block was left.

    Attributes:
        closed: Whether that is so.
    """

    def __init__(self, controller: InferenceController) -> None:
        self.closed: bool = False
        self._controller = controller
        self._lock = Lock(fast_acquire=True)
        self._running: CancelScope | None = None

    async def abort(self, ids: Collection[str] | None) -> None:
        """See `InferenceController.abort`."""
        await self._call(self._controller.abort, ids)

    async def pause(self, mode: PauseMode) -> None:
        """See `InferenceController.pause`."""
        await self._call(self._controller.pause, mode)

    async def resume(self) -> None:
        """See `InferenceController.resume`."""
        await self._call(self._controller.resume)

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """See `InferenceController.update_weights`."""
        await self._call(self._controller.update_weights, source, version)

    async def version(self) -> int | None:
        """See `InferenceController.version`."""
        return await self._call(self._controller.version)

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """See `InferenceController.release`."""
        await self._call(self._controller.release, tags)

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """See `InferenceController.reload`."""
        await self._call(self._controller.reload, tags)

    async def close(self) -> None:
        """Cancels the call that is running, and returns when it has ended; no other begins.

        Cancellation: no other begins all the same.
        """
        self.closed = True
        if self._running is not None:
            self._running.cancel()
        async with self._lock:
            pass

    def check(self) -> None:
        """Raises `EngineClosed` if the engine's block was left."""
        if self.closed:
            raise EngineClosed("the engine's block was left, and the controller is closed")

    async def _call(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        async with self._lock:
            self.check()
            with CancelScope() as self._running:
                try:
                    return await function(*args)
                finally:
                    self._running = None
        raise EngineClosed("the engine's block was left during a call of the controller")

    def __repr__(self) -> str:
        return f"<Control of {self._controller!r}{', closed' if self.closed else ''}>"
