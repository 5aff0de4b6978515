"""rollnest: prompts in, judged and train-ready groups of samples out, on structured concurrency."""

from __future__ import annotations

from ._attempt import Attempt as Attempt
from ._attempt import FinishReason as FinishReason
from ._blocking import BlockingEngine as BlockingEngine
from ._blocking import BlockingPause as BlockingPause
from ._context import Context as Context
from ._engine import Engine as Engine
from ._loops import AgentLoop as AgentLoop
from ._loops import SingleTurnLoop as SingleTurnLoop
from ._loops import ToolLoop as ToolLoop
from ._options import Capacity as Capacity
from ._options import Limits as Limits
from ._options import Sampling as Sampling
from ._pause import Pause as Pause
from ._records import Batch as Batch
from ._records import BatchStatistics as BatchStatistics
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
from .abc import Capabilities as Capabilities
from .abc import PauseMode as PauseMode
