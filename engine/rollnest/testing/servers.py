"""Servers that misbehave: real HTTP on the loopback interface, in the test's own event loop.

Needs h11, which comes with the `http` extra.
"""

from __future__ import annotations

from ._fake_policy import Decoding as Decoding
from ._fake_policy import FakePolicy as FakePolicy
from ._llamacpp_server import LlamacppServer as LlamacppServer
from ._lmdeploy_server import LmdeployServer as LmdeployServer
from ._loopback import Dropped as Dropped
from ._loopback import Exchange as Exchange
from ._loopback import Handler as Handler
from ._loopback import LoopbackServer as LoopbackServer
from ._loopback import Request as Request
from ._policy_server import Fault as Fault
from ._policy_server import PolicyServer as PolicyServer
from ._policy_server import Refused as Refused
from ._sglang_server import SglangServer as SglangServer
from ._vllm_server import VllmServer as VllmServer

__all__ = [
    "Decoding",
    "Dropped",
    "Exchange",
    "FakePolicy",
    "Fault",
    "Handler",
    "LlamacppServer",
    "LmdeployServer",
    "LoopbackServer",
    "PolicyServer",
    "Refused",
    "Request",
    "SglangServer",
    "VllmServer",
]
