"""A controller that costs nothing, so that what is measured is the engine."""

from __future__ import annotations

from collections.abc import Collection

from anyio import Event
from anyio.lowlevel import checkpoint

from rollnest import Attempt, Capabilities, PauseMode
from rollnest.abc import WeightSource

__all__ = ["IDS", "LOGPROBS", "InstantController", "ParkingController"]

IDS = [5] * 16
LOGPROBS = [-1.0] * 16


class InstantController:
    """Answers every attempt at once with 16 tokens."""

    capabilities = Capabilities(vocab_size=100, max_context=100_000)

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


class ParkingController(InstantController):
    """Never answers, until it is asked to abort: then every attempt returns at once with 16 tokens.

    Attributes:
        open: Attempts that wait, by id.
    """

    def __init__(self) -> None:
        self.open: dict[str, Event] = {}

    async def generate(self, attempt: Attempt) -> None:
        """Waits for the abort."""
        self.open[attempt.id] = aborted = Event()
        try:
            await aborted.wait()
        finally:
            del self.open[attempt.id]
        attempt.commit(IDS, LOGPROBS)
        attempt.finish("abort")

    async def abort(self, ids: Collection[str] | None) -> None:
        """Lets them return."""
        for aborted in list(self.open.values()):
            aborted.set()
