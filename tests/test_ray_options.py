"""Where actors run, and with what: what is said reaches Ray as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import anyio
import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollnest_adapters.ray import RayController, RayOptions, call, policy_actor
from tests.ray_actors import HANG
from tests.ray_policies import ScriptedHost, scripted


def test_only_what_is_said_is_passed_on() -> None:
    assert RayOptions().given() == {}
    assert RayOptions(name="judge", num_cpus=0).given(number=3, num_cpus=1, max_restarts=0) == {
        "name": "judge-3",
        "num_cpus": 0,
        "max_restarts": 0,
    }
    environment = {"env_vars": {"A": "1"}}
    options = RayOptions(resources={"disk": 1}, runtime_env=environment)
    environment.clear()
    assert options.given() == {
        "resources": {"disk": 1},
        "runtime_env": {"env_vars": {"A": "1"}},
    }


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"num_cpus": -1}, ValueError, "num_cpus must be > 0 and finite, got -1"),
        ({"num_gpus": "one"}, TypeError, "num_gpus must be a number, got 'one'"),
        ({"memory": float("inf")}, ValueError, "memory must be > 0 and finite, got inf"),
        ({"max_restarts": -2}, ValueError, "max_restarts must be >= -1, got -2"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts must be an int, got 1.5"),
        ({"lifetime": "long"}, ValueError, "lifetime must be 'detached' or None, got 'long'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        RayOptions(**options)


class PlacedHost(ScriptedHost):
    """Tells where it is."""

    async def place(self) -> tuple[str | None, str | None]:
        group = ray.util.get_current_placement_group()
        return os.environ.get("ROLLNEST_PLACE"), None if group is None else group.id.hex()


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_name_an_environment_and_a_placement_group_are_respected() -> None:
    group = placement_group([{"CPU": 0.5}])
    ray.get(group.ready(), timeout=HANG)
    options = RayOptions(
        num_cpus=0.5,
        name="policy",
        namespace="trial",
        runtime_env={"env_vars": {"ROLLNEST_PLACE": "here"}},
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
    )
    made = policy_actor(scripted(), host=PlacedHost, options=options)

    async def ask() -> None:
        with anyio.fail_after(HANG):
            async with RayController(ray.get_actor("policy", namespace="trial")) as controller:
                assert (await controller.health()).running == 0
            assert await call(made.place) == ("here", group.id.hex())

    try:
        anyio.run(ask, backend="trio")
    finally:
        ray.kill(made)
        remove_placement_group(group)


def test_the_adapters_are_imported_without_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; "
        "import rollnest_adapters, rollnest_adapters.pool, rollnest_adapters.judgers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
