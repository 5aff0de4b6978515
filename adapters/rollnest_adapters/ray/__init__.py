"""Policies and judgers in Ray's actors; needs the extra `ray`.

Nothing here calls `ray.init`: the cluster is yours, and so is how it is reached.
"""

from __future__ import annotations

from ._bridge import RayStream as RayStream
from ._bridge import call as call
from ._bridge import check_initialized as check_initialized
from ._bridge import result as result
from ._bridge import stream as stream
from ._controller import RayController as RayController
from ._controller import RayMethods as RayMethods
from ._engine import RayEngine as RayEngine
from ._engine import RayPause as RayPause
from ._engine_host import RayEngineState as RayEngineState
from ._engine_host import RayPauseInfo as RayPauseInfo
from ._failures import RayCallFailed as RayCallFailed
from ._host import PolicyHost as PolicyHost
from ._host import policy_actor as policy_actor
from ._judgers import RayJudgers as RayJudgers
from ._loop_actor import RayLoopState as RayLoopState
from ._loops import RayLoops as RayLoops
from ._options import RayOptions as RayOptions
from ._wire import GenerateReply as GenerateReply
from ._wire import GenerateRequest as GenerateRequest
from ._wire import PolicyDescription as PolicyDescription
