"""Servers that misbehave: real HTTP on the loopback interface, in the test's own event loop.

Needs h11, which comes with the `http` extra.
"""

from __future__ import annotations

from ._loopback import Dropped as Dropped
from ._loopback import Exchange as Exchange
from ._loopback import Handler as Handler
from ._loopback import LoopbackServer as LoopbackServer
from ._loopback import Request as Request

__all__ = ["Dropped", "Exchange", "Handler", "LoopbackServer", "Request"]
