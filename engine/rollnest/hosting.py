"""Agent loops that run elsewhere: what an adapter needs that starts the places where they run, and reaches them.

`HostedLoop` is the engine's side and `LoopHost` the other. Between them go messages, which can be pickled, in order,
both ways. An adapter subclasses the first, makes a `Host` for each place, and carries the messages:

    class MyLoops(HostedLoop):
        ...  # self.join(Host(name, send)); host.receive(message) for what comes back; self.lose(host, why)

    async with LoopHost(loop, send) as host:  # there
        ...  # host.receive(message) for what comes

Whoever only wants to use one reads `rollnest_adapters.ray`.
"""

from __future__ import annotations

from ._host import LoopHost as LoopHost
from ._host_messages import Begin as Begin
from ._host_messages import BeginGroup as BeginGroup
from ._host_messages import End as End
from ._host_messages import Ended as Ended
from ._host_messages import FromHost as FromHost
from ._host_messages import Prepare as Prepare
from ._host_messages import ToHost as ToHost
from ._host_messages import holds_users_objects as holds_users_objects
from ._hosted_loop import HostedLoop as HostedLoop
from ._sessions import Host as Host

__all__ = [
    "Begin",
    "BeginGroup",
    "End",
    "Ended",
    "FromHost",
    "Host",
    "HostedLoop",
    "LoopHost",
    "Prepare",
    "ToHost",
    "holds_users_objects",
]
