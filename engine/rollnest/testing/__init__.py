"""The test kit: a scripted policy, virtual time, a recording instrument, and checks of what must always hold.

Everything here is public and used by rollnest's own tests. Hypothesis strategies are in
`rollnest.testing.strategies`, which needs the `testing` extra; this module does not.
"""

from __future__ import annotations

from ._check import check_sample as check_sample
from ._check_loop import LoopReport as LoopReport
from ._check_loop import check_loop as check_loop
from ._clock import VirtualEventLoop as VirtualEventLoop
from ._clock import free_running_threads as free_running_threads
from ._clock import virtual_backends as virtual_backends
from ._conserved import assert_conserved as assert_conserved
from ._recording import RecordingInstrument as RecordingInstrument
from ._scripted import Reply as Reply
from ._scripted import Script as Script
from ._scripted import ScriptedController as ScriptedController
from ._scripted import Stall as Stall
from ._scripted import expected_logprob as expected_logprob
from ._scripted import expected_token as expected_token
from ._steps import StepReport as StepReport
from ._steps import act_at_steps as act_at_steps
from ._steps import cancel_at_step as cancel_at_step
from ._stuck import VirtualTimeStuck as VirtualTimeStuck
