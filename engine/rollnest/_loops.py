"""Agent loops: how one sample is generated. A loop is an `AgentLoop`, or just an async function of a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from typing import TypeAlias

from ._records import Message
from ._rollout import Rollout

__all__ = ["AgentLoop", "LoopFunction", "SingleTurnLoop", "as_loop"]

LoopFunction: TypeAlias = "Callable[[Rollout], Awaitable[None]]"
"""An async function that generates one sample."""


class AgentLoop(ABC):
    """How one sample is generated.

    Attributes:
        tools: Tool schemas for the chat template, for prompts that bring none of their own.
    """

    tools: Sequence[Message] | None = None

    @abstractmethod
    async def generate_sample(self, rollout: Rollout) -> None:
        """Generates one sample: generates turns, appends what comes between, and returns.

        An error fails this sample only. What was generated is judged after it returns.
        """


class SingleTurnLoop(AgentLoop):
    """One prompt, one turn."""

    async def generate_sample(self, rollout: Rollout) -> None:
        """See `AgentLoop.generate_sample`."""
        await rollout.generate()

    def __repr__(self) -> str:
        return "SingleTurnLoop()"


class _FunctionLoop(AgentLoop):
    def __init__(self, function: LoopFunction) -> None:
        self._function = function

    async def generate_sample(self, rollout: Rollout) -> None:
        await self._function(rollout)

    def __repr__(self) -> str:
        return f"<loop {getattr(self._function, '__qualname__', self._function)}>"


def as_loop(loop: AgentLoop | LoopFunction) -> AgentLoop:
    """Returns a loop as an `AgentLoop`.

    Raises:
        TypeError: It is neither one nor an async function.
    """
    if isinstance(loop, AgentLoop):
        return loop
    if iscoroutinefunction(loop) or iscoroutinefunction(getattr(loop, "__call__", None)):  # noqa: B004
        return _FunctionLoop(loop)
    raise TypeError(f"loop must be an AgentLoop or an async function of a rollout, got {loop!r}")
