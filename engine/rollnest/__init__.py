"""rollnest: prompts in, judged and train-ready groups of samples out, on structured concurrency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._allocation import Allocate as Allocate
from ._allocation import AllocationRequest as AllocationRequest
from ._allocation import by_weight as by_weight
from ._attempt import Attempt as Attempt
from ._attempt import FinishReason as FinishReason
from ._blocking import BlockingEngine as BlockingEngine
from ._blocking import BlockingPause as BlockingPause
from ._codecs import register_codec as register_codec
from ._context import Context as Context
from ._engine import Engine as Engine
from ._judgers import ComposedJudger as ComposedJudger
from ._judgers import RoutedJudger as RoutedJudger
from ._live import LiveGroup as LiveGroup
from ._loops import AgentLoop as AgentLoop
from ._loops import SingleTurnLoop as SingleTurnLoop
from ._loops import ToolLoop as ToolLoop
from ._options import Capacity as Capacity
from ._options import FailurePolicy as FailurePolicy
from ._options import Limits as Limits
from ._options import Sampling as Sampling
from ._pause import Pause as Pause
from ._policy import Policy as Policy
from ._policy import current_policy as current_policy
from ._process_judger import ProcessJudger as ProcessJudger
from ._records import Batch as Batch
from ._records import BatchStatistics as BatchStatistics
from ._records import EvalResult as EvalResult
from ._records import Failure as Failure
from ._records import Group as Group
from ._records import Message as Message
from ._records import Prompt as Prompt
from ._records import Sample as Sample
from ._records import Segment as Segment
from ._records import Status as Status
from ._records import ToolCall as ToolCall
from ._records import Turn as Turn
from ._records import Verdict as Verdict
from ._response import CONTEXT_VERSION as CONTEXT_VERSION
from ._response import Response as Response
from ._rollout import Rollout as Rollout
from ._rollout import tool_key as tool_key
from ._statistics import EngineStatistics as EngineStatistics
from ._statistics import TaskStatistics as TaskStatistics
from ._strategies import AsyncStrategy as AsyncStrategy
from ._strategies import ProduceStrategy as ProduceStrategy
from ._strategies import Production as Production
from ._strategies import SyncStrategy as SyncStrategy
from ._task import TaskSpec as TaskSpec
from ._tools import HermesToolParser as HermesToolParser
from ._tools import Tool as Tool
from ._tools import ToolParser as ToolParser
from ._tree import ConsumerTree as ConsumerTree
from ._tree import EngineTree as EngineTree
from ._tree import GroupTree as GroupTree
from ._tree import HolderTree as HolderTree
from ._tree import PauseTree as PauseTree
from ._tree import SampleTree as SampleTree
from ._tree import SlotsTree as SlotsTree
from ._tree import StallReport as StallReport
from ._tree import TaskTree as TaskTree
from ._tree import Wait as Wait
from ._tree import WaitKind as WaitKind
from .abc import Capabilities as Capabilities
from .abc import PauseMode as PauseMode

# What only checkpoints need is imported when it is asked for: with it, `import rollnest` takes a fifth longer.
if TYPE_CHECKING:
    from ._inspect import CheckpointInfo as CheckpointInfo
    from ._inspect import CheckpointTask as CheckpointTask
    from ._inspect import inspect_checkpoint as inspect_checkpoint
    from ._restore import Restored as Restored

_LATER = {
    "CheckpointInfo": "_inspect",
    "CheckpointTask": "_inspect",
    "Restored": "_restore",
    "inspect_checkpoint": "_inspect",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
