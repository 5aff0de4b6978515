"""Where actors are to run, and with what; passed on to Ray as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from rollnest_adapters._checks import check_positive, check_whole

__all__ = ["RayOptions"]


def _plain(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else dict(value)


@frozen(kw_only=True)
class RayOptions:
    """What an actor is made with: `Actor.options(...)`. What is `None` is left to Ray, or to who makes the actor.

    Attributes:
        num_cpus: CPUs that the actor holds; 0 holds none, which suits actors that wait.
        num_gpus: GPUs that it holds; fractions share one.
        memory: Bytes that it reserves.
        resources: Custom resources, by name.
        accelerator_type: The kind of GPU or TPU that its node must have.
        label_selector: Labels that its node must have.
        scheduling_strategy: `"SPREAD"`, `"DEFAULT"`, or one of `ray.util.scheduling_strategies`: a placement group's
            bundle, a node.
        runtime_env: Its environment: `pip`, `working_dir`, `env_vars`, and so on.
        name: Its name in the namespace. Of several actors each has its number after it.
        namespace: The namespace of the name.
        lifetime: `"detached"` lets it live on without this process.
        max_restarts: How often Ray restarts it when it dies; -1 is always.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: float | None = None
    resources: Mapping[str, float] | None = field(default=None, converter=_plain)
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | None = field(default=None, converter=_plain)
    scheduling_strategy: Any = None
    runtime_env: Mapping[str, Any] | None = field(default=None, converter=_plain)
    name: str | None = None
    namespace: str | None = None
    lifetime: str | None = None
    max_restarts: int | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus", "memory"):
            value: Any = getattr(self, name)
            if value is not None and value != 0:
                check_positive(name, value)
        if self.lifetime not in (None, "detached", "non_detached"):
            raise ValueError(f"lifetime must be 'detached' or None, got {self.lifetime!r}")
        if self.max_restarts is not None:
            check_whole("max_restarts", self.max_restarts, -1)

    def given(self, *, number: int | None = None, **defaults: Any) -> dict[str, Any]:
        """Returns keyword arguments for `Actor.options`.

        Args:
            number: The actor's number among several, appended to the name.
            defaults: What is taken where nothing is said.
        """
        said = {
            attribute.name: getattr(self, attribute.name)
            for attribute in fields(type(self))
            if getattr(self, attribute.name) is not None
        }
        if number is not None and "name" in said:
            said["name"] = f"{said['name']}-{number}"
        return defaults | said
