"""rollnest: prompts in, judged and train-ready groups of samples out, on structured concurrency."""

from __future__ import annotations

from ._attempt import Attempt as Attempt
from ._attempt import FinishReason as FinishReason
from ._options import Capacity as Capacity
from ._options import Limits as Limits
from ._options import Sampling as Sampling
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
from .abc import Capabilities as Capabilities
from .abc import PauseMode as PauseMode
