"""What a pool gives its servers, in seconds."""

from __future__ import annotations

from attrs import field, frozen

from ._checks import positive

__all__ = ["Times"]


@frozen(kw_only=True)
class Times:
    """See `ControllerPool`."""

    check_every: float = field(validator=positive())
    check_timeout: float = field(validator=positive())
    control_timeout: float = field(validator=positive())
    abort_timeout: float = field(validator=positive())
    update_timeout: float = field(validator=positive())
    backoff: float = field(validator=positive())
    max_backoff: float = field(validator=positive())
