"""Properties of layer 1: the table and its buffer, the sampler, the strategies, the shares, the continuation."""

from __future__ import annotations

from collections import Counter, deque
from math import ceil

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rollnest import AsyncStrategy, Failure, Prompt, Response, Sample, Segment, Status, SyncStrategy
from rollnest._allocation import Allocation
from rollnest._continuation import attempt_seed, tokens_through_stop
from rollnest._sampler import Sampler
from rollnest._strategies import Production
from rollnest._table import GroupTable, Row, RowState

MAX_STALENESS = 2


def sample(row: Row, index: int, status: Status, version: int = 0, tokens: int = 1) -> Sample:
    response = Response()
    response.append_policy([5] * tokens, [-1.0] * tokens, version)
    return Sample(
        task="t",
        prompt=row.prompt,
        visit=row.visit,
        index=index,
        status=status,
        segments=(Segment(memoryview(b"").cast("i"), response.seal()),),
        failure=Failure("loop", "x") if status is Status.FAILED else None,
    )


class TableMachine(RuleBasedStateMachine):
    """Any history of draws, ends, updates and batches keeps I7, I8 and I9."""

    tail_batch: int | None = None
    freshest_first = False

    def __init__(self) -> None:
        super().__init__()
        self.table = GroupTable(
            "t",
            max_staleness=MAX_STALENESS,
            retries=2,
            tail_batch=self.tail_batch,
            freshest_first=self.freshest_first,
        )
        self.version = 0
        self.delivered: list[int] = []
        self.members = 0  # of those that were delivered
        self.made: Counter[str] = Counter()

    flying = Bundle("flying")

    @rule(target=flying)
    def draw(self) -> Row:
        return self.table.draw(Prompt(str(self.table.drawn), token_ids=[1]))

    @rule(target=flying, everything=st.booleans())
    def redraw(self, everything: bool) -> Row | None:
        table, waiting, expired = self.table, self.table.waiting, self.table.waiting_expired
        row = table.redraw(self.version, everything=everything)
        if row is None:
            # Only rows that are held back for a tail batch may be left.
            assert table.waiting == 0 or (not everything and table.waiting < (self.tail_batch or 0))
        elif everything and expired:
            assert table.waiting_expired == expired - 1  # expired ones first
            assert table.waiting == waiting - 1
        if row is not None:
            assert all(s.status is Status.COMPLETED for s in row.kept.values())
            assert all(s.lag(self.version) <= MAX_STALENESS for s in row.kept.values())
        return row

    @rule(
        row=consumes(flying),
        ends=st.lists(
            st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.ABORTED]),
            min_size=2,
            max_size=2,
        ),
        lags=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    )
    def end(self, row: Row | None, ends: list[Status], lags: list[int]) -> None:
        if row is None:
            return
        samples: list[Sample] = []
        for index in range(2):
            if index in row.kept:
                samples.append(row.kept[index])
            else:
                version = max(0, self.version - lags[index])
                samples.append(sample(row, index, ends[index], version, tokens=index + 1))
                self.made["tokens"] += index + 1
        outcome = self.table.settle(row, samples, 1.0)
        statuses = {s.status for s in samples}
        if statuses == {Status.COMPLETED}:
            assert outcome == "ready"
        elif Status.FAILED in statuses:
            assert outcome == "loop"
        else:
            assert outcome == "waiting"

    @rule()
    def update(self) -> None:
        self.version += 1

    @rule(count=st.integers(0, 3))
    def take(self, count: int) -> None:
        self.table.expire(self.version)
        ready = self.table.ready
        rows = self.table.take(count)
        assert len(rows) == min(count, ready)
        oldest = [row.members.oldest_version or 0 for row in rows]
        assert oldest == sorted(oldest, reverse=self.freshest_first)
        for row in rows:
            assert row.state is RowState.READY
            assert all(row is not other for other in self.table.parked)
            assert all(s.status is Status.COMPLETED for s in row.members.samples)
            assert all(s.lag(self.version) <= MAX_STALENESS for s in row.members.samples)  # I9
            self.delivered.append(row.visit)
            self.members += len(row.members)

    @invariant()
    def balanced(self) -> None:
        table = self.table
        table.balance()  # I7
        assert len(set(self.delivered)) == len(self.delivered) == table.delivered  # I8
        assert table.delivered_members == self.members
        held = sum(s.policy_tokens for row in table.parked for s in row.members.samples)
        flying = sum(s.policy_tokens for row in table.flight.values() for s in row.kept.values())
        gone = table.delivered_tokens + table.dropped_tokens
        assert table.expired_tokens <= table.dropped_tokens
        in_tail = [*table.flight.values(), *table.parked]
        assert table.tail == sum(row.in_tail for row in in_tail)
        assert self.made["tokens"] == held + flying + gone


class TailTableMachine(TableMachine):
    """The same with tail batches."""

    tail_batch = 3


class FreshestTableMachine(TableMachine):
    """The same with the freshest first."""

    freshest_first = True


TestTable = TableMachine.TestCase
TestTailTable = TailTableMachine.TestCase
TestFreshestTable = FreshestTableMachine.TestCase
for case in (TestTable, TestTailTable, TestFreshestTable):
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
del case  # it would be collected once more


def test_bug_079_what_expires_again_and_again_is_dropped_and_released() -> None:
    table = GroupTable("t", max_staleness=0, retries=3)
    for visit in range(100):
        table.draw(Prompt(str(visit), token_ids=[1]))
    for version in range(1, 20):
        for row in list(table.flight.values()):
            table.settle(row, [sample(row, 0, Status.COMPLETED, version - 1)], 0.0)
        assert table.expire(version) in (0, 100)
        while table.redraw(version) is not None:
            pass
    assert table.dropped == {"expired": 100}
    assert (table.ready, table.waiting, len(table.flight)) == (0, 0, 0)
    table.balance()


@given(
    count=st.integers(1, 30),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
)
def test_each_prompt_is_drawn_once_per_epoch(
    count: int, epochs: int, seed: int, shuffle: bool
) -> None:
    prompts = [Prompt(str(i), token_ids=[1]) for i in range(count)]
    sampler = Sampler("t", prompts, epochs=epochs, shuffle=shuffle, seed=seed)
    drawn = []
    for number in range(count * epochs):
        assert sampler.position == divmod(number, count)
        prompt = sampler.draw()
        assert prompt is not None
        drawn.append(prompt.uid)
    assert sampler.exhausted
    assert sampler.draw() is None
    for epoch in range(epochs):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert sorted(part, key=int) == [p.uid for p in prompts]
        if not shuffle:
            assert part == [p.uid for p in prompts]


@given(
    lacking=st.integers(0, 50),
    flight=st.integers(0, 50),
    ready=st.integers(0, 50),
    share=st.floats(0, 50),
    staleness=st.integers(0, 4),
)
def test_what_is_lacking_is_always_admitted(
    lacking: int, flight: int, ready: int, share: float, staleness: int
) -> None:
    production = Production(lacking, flight, ready, share)
    assert SyncStrategy().room(production) == max(0, lacking - flight)
    room = AsyncStrategy(max_staleness=staleness).room(production)
    assert flight + room >= lacking
    bound = max(ceil((1 + staleness) * share) - ready, lacking)
    assert room == 0 or flight + room <= bound


@given(
    lacking=st.integers(0, 50),
    flight=st.integers(0, 50),
    ready=st.integers(0, 50),
    share=st.floats(0, 50),
    tail=st.integers(0, 50),
    every=st.integers(1, 5),
    taken=st.integers(0, 9),
    staleness=st.integers(0, 4),
    lead=st.none() | st.floats(0, 5),
    oversample=st.floats(0, 2),
)
def test_admission_never_exceeds_its_bound_and_never_starves_a_waiting_next_batch(
    lacking: int,
    flight: int,
    ready: int,
    share: float,
    tail: int,
    every: int,
    taken: int,
    staleness: int,
    lead: float | None,
    oversample: float,
) -> None:
    strategy = AsyncStrategy(max_staleness=staleness, lead=lead, oversample=oversample)
    production = Production(lacking, flight, ready, share, tail, every, taken)
    room = strategy.room(production)
    assert room >= 0
    assert flight + room >= lacking
    batches = (1 + staleness) * every - 1 if lead is None else 1 + lead
    most = ceil(batches * share) + (0 if tail else ceil(oversample * share))
    assert room == 0 or flight + room <= max(most - ready, lacking)
    # A batch that is taken makes room for no more than a batch.
    after = strategy.room(evolve(production, taken=taken + 1))
    assert after <= room


@given(
    share=st.integers(1, 6),
    every=st.integers(1, 4),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 30),
)
def test_by_the_default_lead_what_is_started_is_taken_in_time(
    share: int, every: int, staleness: int, steps: int
) -> None:
    """A policy that makes everything at once, and a trainer that takes the oldest first."""
    strategy, line, version, taken = AsyncStrategy(max_staleness=staleness), deque[int](), 0, 0
    for step in range(1, steps + 1):
        lacking = max(0, share - len(line))
        line.extend([version] * lacking)  # it waits
        batch = [line.popleft() for _ in range(share)]
        taken += 1
        assert version - min(batch) <= staleness
        # It trains; meanwhile the policy runs ahead.
        production = Production(0, 0, len(line), share, 0, every, taken)
        line.extend([version] * strategy.room(production))
        if step % every == 0:
            version, taken = version + 1, 0
    # All of the bound is used: one more group would be taken too late.
    if steps > (staleness + 1) * every and staleness:
        assert len(line) >= share * staleness * every


@given(
    weights=st.lists(st.floats(0, 10).map(lambda w: round(w, 3)), min_size=1, max_size=5),
    batches=st.lists(st.integers(1, 20), min_size=1, max_size=30),
)
def test_shares_sum_up_and_follow_the_weights_in_the_long_run(
    weights: list[float], batches: list[int]
) -> None:
    names = {f"t{i}": w for i, w in enumerate(weights)}
    if not any(weights):
        return
    allocation = Allocation(names)
    served: Counter[str] = Counter()
    for groups in batches:
        plan = allocation.plan(groups, set(names))
        assert allocation.plan(groups, set(names)) == plan
        assert sum(plan.groups.values()) == groups
        assert all(n >= 0 for n in plan.groups.values())
        allocation.settle(plan)
        served.update(plan.groups)
    for name, weight in names.items():
        exact = sum(batches) * weight / sum(weights)
        assert abs(served[name] - exact) < len(names)
        if weight == 0:
            assert served[name] == 0


@pytest.mark.parametrize(
    ("weights", "batch", "steps", "expected"),
    [([1 / 3, 2 / 3], 4, 3, [4, 8]), ([0.1, 0.9], 2, 10, [2, 18]), ([1, 2, 0], 7, 1, [2, 5, 0])],
)
def test_bug_105_a_small_weight_is_served_in_the_long_run(
    weights: list[float], batch: int, steps: int, expected: list[int]
) -> None:
    names = [f"t{i}" for i in range(len(weights))]
    allocation = Allocation(dict(zip(names, weights, strict=True)))
    served: Counter[str] = Counter()
    for _ in range(steps):
        plan = allocation.plan(batch, set(names))
        assert sum(plan.groups.values()) == batch
        allocation.settle(plan)
        served.update(plan.groups)
    assert [served[name] for name in names] == expected


def test_bug_107_the_default_mix_is_equal_shares() -> None:
    allocation = Allocation({"a": 1.0, "b": 1.0})
    assert allocation.plan(10, {"a", "b"}).groups == {"a": 5, "b": 5}


@given(
    pieces=st.lists(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=12),
    seam=st.data(),
    stop=st.text("abc", min_size=2, max_size=4),
)
def test_a_stop_string_across_the_seam_takes_the_fewest_tokens(
    pieces: list[str], seam: st.DataObject, stop: str
) -> None:
    at = seam.draw(st.integers(1, len(pieces) - 1))
    if stop in "".join(pieces[:at]):
        return  # the server would have stopped before
    ids = list(range(len(pieces)))
    found = tokens_through_stop(ids, at, [stop], lambda some: "".join(pieces[i] for i in some))
    whole = [n for n in range(at + 1, len(pieces) + 1) if stop in "".join(pieces[:n])]
    assert found == (whole[0] if whole else None)


@given(st.integers(0, 2**40), st.text(max_size=20), st.integers(1, 5))
def test_attempt_seeds_fit_and_differ(base: int, uid: str, number: int) -> None:
    seed = attempt_seed(base, uid, number)
    assert 0 <= seed < 2**31
    assert seed == attempt_seed(base, uid, number)
    assert seed != attempt_seed(base, uid, number + 1)
