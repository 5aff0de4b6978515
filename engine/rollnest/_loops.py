"""Agent loops: how one sample is generated. A loop is an `AgentLoop`, or just an async function of a rollout."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable, iscoroutinefunction
from typing import TypeAlias

from ._checks import check_whole
from ._live import LiveGroup
from ._records import Message, Prompt, ToolCall
from ._rollout import Rollout
from ._tools import HermesToolParser, Tool, ToolParser, checked_call
from .errors import LoopError, ToolError

__all__ = [
    "AgentLoop",
    "ElsewhereLoop",
    "LoopFunction",
    "SingleTurnLoop",
    "ToolLoop",
    "as_loop",
    "overrides_generate_group",
    "replays_groups",
]

LoopFunction: TypeAlias = "Callable[[Rollout], Awaitable[None]]"
"""An async function that generates one sample."""


class AgentLoop(ABC):
    """How one sample is generated.

    Attributes:
        tools: Tool schemas for the chat template, for prompts that bring none of their own.
        replayable: Whether an overridden `generate_group` may run again from the top, given what its rollouts had,
            when its group was cut; else the group begins anew as a whole.
    """

    tools: Sequence[Message] | None = None
    replayable: bool = False

    @abstractmethod
    async def generate_sample(self, rollout: Rollout) -> None:
        """Generates one sample: generates turns, appends what comes between, and returns.

        An error fails this sample only. What was generated is judged after it returns.
        """

    async def generate_group(self, group: LiveGroup) -> None:
        """Generates all samples of a group; override it where they have something to do with each other.

        By default they run side by side, each judged as soon as it is there. An overridden one may share an
        environment, run them one after the other, look at their verdicts, resample and drop; see `LiveGroup`. An error
        fails the members that have not ended yet. The engine doesn't know what the members share, so such a group is
        generated again as a whole where others keep members that are still good.

        A loop whose `replayable` is true says that what it does follows from its group alone: from turns, results of
        tools, verdicts, draws. A group of it that was cut goes on: this function runs again from the top, and all of
        that is given to it again.
        """
        await group.each(group.run)

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027  (nothing to be said by default)
        """Raises if it can't be used with such a prompt; asked about a task's first one, when the task is described."""


class SingleTurnLoop(AgentLoop):
    """One prompt, one turn."""

    async def generate_sample(self, rollout: Rollout) -> None:
        """See `AgentLoop.generate_sample`."""
        await rollout.generate()

    def __repr__(self) -> str:
        return "SingleTurnLoop()"


class ToolLoop(AgentLoop):
    """Turns and tool calls until the model calls no tool any more.

    Tool calls are read from the turn's text; their results go back as tool messages, which are never trained. What the
    model got wrong (malformed JSON, an unknown tool, bad arguments) and what a tool got wrong (it raised, it ran out of
    time) is told to the model, not made a failure.

    The sample ends with the turn that calls no tool or that the cap cut, or as `"max_turns"`.

    Args:
        tools: Functions, or `Tool` objects. Sync ones run in worker threads.
        parser: Reads calls from text.
        max_turns: Most turns of the model.

    Raises:
        ValueError: `max_turns` is below 1, or two tools have one name.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., object]],
        *,
        parser: ToolParser | None = None,
        max_turns: int = 8,
    ) -> None:
        check_whole("max_turns", max_turns, 1)
        made = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self._tools: dict[str, Tool] = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            raise ValueError(f"tools holds two tools of one name: {[tool.name for tool in made]}")
        self.tools: Sequence[Message] | None = [tool.schema for tool in made]
        self._parser = parser if parser is not None else HermesToolParser()
        self._max_turns = max_turns

    async def generate_sample(self, rollout: Rollout) -> None:
        """See `AgentLoop.generate_sample`."""
        for number in range(1, self._max_turns + 1):
            turn = await rollout.generate()
            if turn.text is None:
                raise LoopError("ToolLoop needs the engine to have a tokenizer")
            calls = self._parser.parse(turn.text)
            if turn.finish_reason != "stop" or not calls:
                return
            if number == self._max_turns:
                break
            results = [
                await self._call(rollout, checked_call(c, self._tools.values())) for c in calls
            ]
            rollout.append_messages(results)
            if rollout.done:
                return  # the results used up the budget
        rollout.finish("max_turns")

    async def _call(self, rollout: Rollout, call: ToolCall) -> Message:
        """Makes one call, and returns the one message that answers it."""
        if call.error is not None:
            return _tool_message(call.name, f"error: {call.error}")
        tool = self._tools[call.name]
        function = tool.function

        # What the model is told is what is recorded, so a tool may return anything.
        async def run(arguments: Mapping[str, object]) -> str:
            return _as_text(await function(**arguments))

        def run_in_thread(arguments: Mapping[str, object]) -> object:
            answer = function(**arguments)
            return _awaited(answer) if isawaitable(answer) else _as_text(answer)

        run_in_thread.__name__ = run.__name__ = call.name
        try:
            answer = await rollout.tool(
                run if iscoroutinefunction(function) else run_in_thread,
                call.arguments or {},
                replay=tool.replay,
                on_unknown=tool.on_unknown,
            )
        except ToolError as error:
            return _tool_message(call.name, f"error: {error}")
        return _tool_message(call.name, str(answer))

    def __repr__(self) -> str:
        return f"ToolLoop({list(self._tools)}, max_turns={self._max_turns})"


def _tool_message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}


async def _awaited(answer: Awaitable[object]) -> str:
    return _as_text(await answer)


def _as_text(answer: object) -> str:
    if isinstance(answer, str):
        return str(answer)
    try:
        return json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(answer)


class ElsewhereLoop(AgentLoop):
    """An agent loop that has another one run elsewhere.

    Attributes:
        loop: That one.
    """

    loop: AgentLoop


class _FunctionLoop(AgentLoop):
    def __init__(self, function: LoopFunction) -> None:
        self._function = function

    async def generate_sample(self, rollout: Rollout) -> None:
        await self._function(rollout)

    def __repr__(self) -> str:
        return f"<loop {getattr(self._function, '__qualname__', self._function)}>"


def overrides_generate_group(loop: AgentLoop) -> bool:
    """Whether a loop generates its groups itself, here or elsewhere."""
    if isinstance(loop, ElsewhereLoop):
        loop = loop.loop
    return type(loop).generate_group is not AgentLoop.generate_group


def replays_groups(loop: AgentLoop) -> bool:
    """Whether a loop generates its groups itself, and can be replayed."""
    return loop.replayable and overrides_generate_group(loop)


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
