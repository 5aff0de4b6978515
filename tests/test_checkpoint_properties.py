"""Saved at any scheduler step, once or several times: each visit ends as in a run that nobody interrupts.

With a deterministic policy and judger, and without a bound on staleness, the multiset of visits that were delivered,
dropped or filtered is that of an uninterrupted run, and so are the tokens of what was delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from anyio import CancelScope, sleep
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from rollnest import (
    AsyncStrategy,
    Batch,
    Engine,
    FailurePolicy,
    Group,
    ProduceStrategy,
    Rollout,
    Sample,
    Sampling,
    SyncStrategy,
    TaskSpec,
)
from rollnest.abc import JudgerLike
from rollnest.errors import EndOfPrompts, Starved
from rollnest.testing import (
    RecordingInstrument,
    ScriptedController,
    act_at_steps,
    assert_conserved,
    check_sample,
)

from .helpers import prompts

Ending = tuple[str, str, int, str, tuple[tuple[int, ...], ...]]


@frozen(kw_only=True)
class Setting:
    """What a run is made of."""

    backend: Literal["asyncio", "trio"]
    tasks: int
    prompts: int
    epochs: int
    group_size: int
    redundancy: int
    failing: int  # one rollout in so many fails, by its first token; 0 is none
    filtered: bool
    by_group: bool
    ahead: bool
    policy: Literal["drop", "retry", "shrink"]
    n: int
    steps: Sequence[int] = field(factory=list[int])

    @property
    def is_exact(self) -> bool:
        """Whether which members there are is no question of time."""
        return not self.redundancy

    def specs(self) -> list[TaskSpec]:
        """The tasks."""
        strategy: ProduceStrategy = SyncStrategy(max_staleness=1000)
        if self.ahead:
            strategy = AsyncStrategy(max_staleness=1000, lead=1)
        judger: JudgerLike = _Ranks() if self.by_group else _judge
        return [
            TaskSpec(
                f"t{number}",
                prompts(self.prompts),
                judger=judger,
                loop=self.loop,
                group_size=self.group_size,
                redundancy=self.redundancy,
                epochs=self.epochs,
                sampling=Sampling(3),
                strategy=strategy,
                weight=1.0 + number,
                keep=_keep if self.filtered else None,
                starve_after=10_000,
                failures=FailurePolicy(on_dead_member=self.policy, max_failures_in_a_row=None),
            )
            for number in range(self.tasks)
        ]

    async def loop(self, rollout: Rollout) -> None:
        """Two turns with a tool between them; some fail."""
        turn = await rollout.generate()
        if self.failing and turn.ids[0] % self.failing == 0:
            raise ValueError("this one fails")
        rollout.append([500 + await rollout.tool(_look_up, turn.ids[0] % 5)])
        await rollout.generate(max_tokens=2)


async def _look_up(number: int) -> int:
    await sleep(0.25)
    return number


async def _judge(sample: Sample) -> float:
    await sleep(0.125)
    return float(sum(sample.segments[0].ids) % 3)


class _Ranks:
    """Judges whole groups."""

    judges_groups = True

    async def batch_judge(self, samples: Sequence[Sample]) -> list[float]:
        await sleep(0.125)
        sums = [sum(sample.segments[0].ids) for sample in samples]
        return [float(sorted(sums).index(one)) for one in sums]


def _keep(group: Group) -> bool:
    return int(group.prompt.uid[1:]) % 3 != 0


class Life:
    """An engine from its start until it is saved and ended, or to its end."""

    def __init__(self, setting: Setting, before: Life | None = None) -> None:
        self.setting = setting
        self.controller = ScriptedController(rate=10.0, stream=True, stop_every=10_000)
        self.heard = RecordingInstrument()
        self.engine = Engine(
            self.controller,
            setting.specs(),
            batch_size=setting.n if setting.ahead else None,
            instruments=[self.heard],
        )
        self.batches: list[Batch] = []
        self.state: dict[str, bytearray] | None = None
        self.endings: Counter[Ending] = Counter()
        self.committed = 0
        self.scope: CancelScope | None = None
        self._before = before
        if before is not None:
            assert before.state is not None
            self.engine.load_state_dict(before.state)

    async def run(self) -> None:
        """Takes and commits batches until the prompts end."""
        with CancelScope() as self.scope:
            async with self.engine:
                self.entered = True
                while True:
                    try:
                        batch = await self.engine.next_batch(self.setting.n)
                    except (EndOfPrompts, Starved):
                        break
                    self.batches.append(batch)
                    self.engine.commit(batch)
                if self.state is None:
                    self.note()

    entered = False

    def save_and_end(self) -> None:
        """Saves it as it is, and ends it."""
        if self.entered:
            self.state = self.engine.state_dict()
            self.note()
        assert self.scope is not None
        self.scope.cancel()

    def note(self) -> None:
        """Notes how visits have ended so far, over all lives."""
        before = self._before
        self.endings = Counter() if before is None else before.endings.copy()
        for batch in self.batches:
            assert not batch.again
            for group in batch.groups:
                self.endings[self._ending(group, "delivered")] += 1
        for group, outcome in self.heard.groups:
            if outcome not in ("ready", "waiting"):
                self.endings[self._ending(group, outcome)] += 1
        self.committed = self.controller.committed + (0 if before is None else before.committed)
        assert_conserved(self.engine, committed=self.committed)

    def _ending(self, group: Group, outcome: str) -> Ending:
        tokens: tuple[tuple[int, ...], ...] = ()
        if outcome == "delivered" and self.setting.is_exact:
            tokens = tuple(tuple(s.segments[0].ids) for s in group.samples)
        return group.task, group.prompt.uid, group.visit, outcome, tokens


def live(setting: Setting) -> Counter[Ending]:
    """Runs a task to its end over as many lives as it has steps to be ended at; returns how its visits ended."""
    life: Life | None = None
    for step in [*setting.steps, None]:
        current = Life(setting, life)
        actions = {} if step is None else {step: current.save_and_end}
        report = act_at_steps(current.run, actions, backend=setting.backend)
        assert report.tasks_left == 0
        if not report.acted:
            for batch in current.batches:
                for sample in batch.samples:
                    check_sample(sample)
            return current.endings
        if current.state is not None:
            life = current
    raise AssertionError("the last life has no end")


def settings_of(**fixed: Any) -> st.SearchStrategy[Setting]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "backend": st.sampled_from(["asyncio", "trio"]),
        "tasks": st.integers(1, 2),
        "prompts": st.integers(1, 5),
        "epochs": st.integers(1, 2),
        "group_size": st.integers(1, 3),
        "redundancy": st.sampled_from([0, 0, 0, 1]),
        "failing": st.sampled_from([0, 0, 3, 7]),
        "filtered": st.booleans(),
        "by_group": st.booleans(),
        "ahead": st.booleans(),
        "policy": st.sampled_from(["drop", "retry", "shrink"]),
        "n": st.integers(1, 3),
        "steps": st.lists(st.integers(1, 250), min_size=1, max_size=4),
    }
    built = st.builds(Setting, **{**drawn, **{k: st.just(v) for k, v in fixed.items()}})
    # Who of a group with a spare member fails in time is chance: then two whole runs differ.
    return built.filter(lambda setting: not (setting.redundancy and setting.failing))


@settings(max_examples=120, deadline=None)
@given(settings_of())
def test_visits_end_as_in_a_run_that_nobody_interrupts(setting: Setting) -> None:
    whole = live(evolve(setting, steps=[]))
    assert whole.total() == setting.tasks * setting.prompts * setting.epochs
    assert max(whole.values()) == 1
    assert live(setting) == whole
