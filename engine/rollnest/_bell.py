"""A wake-up without content: one waiter, any number of ringers, nothing lost if it is rung early."""

from __future__ import annotations

from types import TracebackType

from anyio import ClosedResourceError, WouldBlock, create_memory_object_stream

__all__ = ["Bell"]


class Bell:
    """A memory-object stream of capacity one: full means already rung.

    The waiter looks at the table, else waits, then looks again; so a wake-up that a cancellation swallows
    costs nothing. Close it where it was made: it is a context manager.
    """

    def __init__(self) -> None:
        self._send, self._receive = create_memory_object_stream[None](1)

    def ring(self) -> None:
        """Wakes the waiter, now or when it next waits."""
        try:
            self._send.send_nowait(None)
        except (WouldBlock, ClosedResourceError):
            pass  # rung already, or nobody waits any more

    async def wait(self) -> None:
        """Waits until it is rung; a ring since the last wait counts."""
        await self._receive.receive()

    def __enter__(self) -> Bell:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._send.close()
        self._receive.close()
