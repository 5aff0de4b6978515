"""Whatever the tasks are, and whoever runs first: a batch that is asked for comes, or the call says why it can't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import anyio
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from rollnest import (
    AllocationRequest,
    AsyncStrategy,
    Capacity,
    Engine,
    Group,
    ProduceStrategy,
    SyncStrategy,
    TaskSpec,
    by_weight,
)
from rollnest._strategies import Production
from rollnest.errors import EndOfPrompts, Starved, Stuck
from rollnest.testing import Reply, ScriptedController, assert_conserved, virtual_backends

from .helpers import prompts, spec
from .orders import draw_order
from .test_prompt_source import Awaited, Listed


class Never(SyncStrategy):
    """No group starts."""

    def room(self, production: Production) -> int:
        return 0


class UpToTwo(AsyncStrategy):
    """Two groups are live, whatever is asked for."""

    def room(self, production: Production) -> int:
        return max(0, 2 - production.flight - production.ready)


STRATEGIES: Mapping[str, ProduceStrategy] = {
    "sync": SyncStrategy(),
    "drop": SyncStrategy(expired="drop"),
    "never": Never(),
    "up to two": UpToTwo(),
    "ahead": AsyncStrategy(max_staleness=0, lead=1),
    "tail": AsyncStrategy(max_staleness=0, lead=1, expired="tail", tail_batch=3),
    "oversample": AsyncStrategy(max_staleness=1, oversample=0.5, expired="drop"),
}


@frozen(kw_only=True)
class Task:
    """What a task is made of."""

    strategy: str
    prompts: int
    kind: Literal["list", "source", "async source"]
    epochs: int
    kept: int  # one group of so many; 0 keeps none
    starve_after: int

    def spec(self, name: str) -> TaskSpec:
        """The task."""
        items, kept = prompts(self.prompts), self.kept
        options: dict[str, Any] = {"prompts": items, "epochs": self.epochs}
        if self.kind != "list":
            options = {"prompts": (Listed if self.kind == "source" else Awaited)(items)}

        def keep(group: Group) -> bool:
            return kept > 0 and group.visit % kept == 0

        return spec(
            name=name,
            strategy=STRATEGIES[self.strategy],
            keep=keep,
            starve_after=self.starve_after,
            **options,
        )


Step: TypeAlias = tuple[str, int]
"""What the trainer does, and how many groups or seconds."""

tasks = st.builds(
    Task,
    strategy=st.sampled_from(list(STRATEGIES)),
    prompts=st.sampled_from([1, 3, 8, 40]),
    kind=st.sampled_from(["list", "list", "source", "async source"]),
    epochs=st.integers(1, 2),
    kept=st.sampled_from([1, 1, 2, 0]),
    starve_after=st.sampled_from([2, 50]),
)
steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("take"), st.sampled_from([1, 2, 5])),
    st.tuples(st.just("give up"), st.integers(1, 3)),
    st.tuples(st.just("publish"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 3)),
)


def in_turn(request: AllocationRequest) -> dict[str, int]:
    """Gives each batch to one task."""
    names = list(request.weights)
    return {names[request.step % len(names)]: request.groups} if names else {}


@given(
    backend=st.sampled_from([0, 1]),
    order=st.integers(0, 2**16),
    made_of=st.lists(tasks, min_size=1, max_size=3),
    bound=st.sampled_from([None, None, 1, 3]),
    allocated=st.booleans(),
    delays=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=3),
    does=st.lists(steps, min_size=1, max_size=8),
)
@settings(max_examples=80, deadline=None)
def test_a_batch_comes_or_its_call_says_why_it_can_not(
    backend: int,
    order: int,
    made_of: list[Task],
    bound: int | None,
    allocated: bool,
    delays: list[float],
    does: list[Step],
) -> None:
    replies = 0

    def script(_: object) -> Reply:
        nonlocal replies
        replies += 1
        return Reply([5, 0], delay=delays[replies % len(delays)])

    controller = ScriptedController(script)
    engine = Engine(
        controller,
        [task.spec(f"t{number}") for number, task in enumerate(made_of)],
        batch_size=2,
        capacity=Capacity(groups=bound),
        stall_after=None,
        allocate=in_turn if allocated else by_weight,
    )

    async def take(groups: int) -> None:
        try:
            with anyio.fail_after(1000.0):  # nothing here takes so long
                await engine.next_batch(groups)
        except (EndOfPrompts, Starved, Stuck):
            pass

    async def main() -> None:
        async with engine:
            for step, number in does:
                match step:
                    case "take":
                        await take(number)
                    case "give up":
                        with anyio.move_on_after(number):
                            await take(5)
                    case "publish":
                        async with engine.paused() as pause:
                            await pause.update_weights({})
                    case _:
                        await anyio.sleep(number)

    draw_order(str(order))
    name, options = virtual_backends()[backend]()
    anyio.run(main, backend=name, backend_options=options)
    assert_conserved(engine, committed=controller.committed)
    assert engine.statistics().total("flight") == 0
