"""Policies and judgers in Ray's actors; needs the extra `ray`.

Nothing here calls `ray.init`: the cluster is yours, and so is how it is reached.
"""

from __future__ import annotations

from ._bridge import RayStream as RayStream
from ._bridge import call as call
from ._bridge import check_initialized as check_initialized
from ._bridge import result as result
from ._bridge import stream as stream
from ._failures import RayCallFailed as RayCallFailed
from ._options import RayOptions as RayOptions
