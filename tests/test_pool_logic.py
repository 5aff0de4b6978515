"""The parts of a pool that only compute: which server is chosen, how many turns it may have, what all can do."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, evolve
from hypothesis import given
from hypothesis import strategies as st

from rollnest import Capabilities, PauseMode
from rollnest.abc import Health
from rollnest_adapters._pool_capabilities import check_covers, meet
from rollnest_adapters._pool_routing import Sessions, choose
from rollnest_adapters.pool import AdaptiveConcurrency

# Which server is chosen


@define(eq=False)
class Candidate:
    turns: int = 0
    limit: int | None = None
    suspected: bool = False
    chosen_at: int = 0


candidates = st.lists(
    st.builds(
        Candidate,
        turns=st.integers(0, 20),
        limit=st.none() | st.integers(1, 20),
        suspected=st.booleans(),
        chosen_at=st.integers(0, 20),
    ),
    min_size=1,
    max_size=6,
)


def is_free(server: Candidate) -> bool:
    return server.limit is None or server.turns < server.limit


@given(candidates, st.data())
def test_the_choice_keeps_its_rules(servers: list[Candidate], data: st.DataObject) -> None:
    home = data.draw(st.none() | st.sampled_from(servers))
    shunned = data.draw(st.none() | st.sampled_from(servers))
    sticky = data.draw(st.integers(0, 20))
    chosen = choose(servers, home=home, shunned=shunned, sticky=sticky)
    free = [server for server in servers if is_free(server)]
    if chosen is None:
        assert not free
        return
    assert chosen in free
    if chosen.suspected:
        assert all(server.suspected for server in free)
    elif chosen is not home:
        assert chosen is not shunned or all(s.suspected or s is shunned for s in free)
    if home is not None and is_free(home) and not home.suspected and chosen is not home:
        assert home.turns - chosen.turns > sticky


@given(st.integers(1, 6), st.integers(1, 60), st.none() | st.integers(60, 90))
def test_without_ends_turns_are_spread_evenly(count: int, turns: int, limit: int | None) -> None:
    servers = [Candidate(limit=limit) for _ in range(count)]
    for number in range(turns):
        chosen = choose(servers)
        assert chosen is not None
        chosen.turns += 1
        chosen.chosen_at = number + 1
    loads = [server.turns for server in servers]
    assert max(loads) - min(loads) <= 1


def test_servers_of_different_sizes_fill_up_evenly() -> None:
    small, large = Candidate(limit=10), Candidate(limit=40)
    for number in range(25):
        chosen = choose([small, large])
        assert chosen is not None
        chosen.turns += 1
        chosen.chosen_at = number + 1
    assert (small.turns, large.turns) == (5, 20)


def test_sessions_are_forgotten_oldest_first() -> None:
    sessions: Sessions[str] = Sessions(size=3)
    for name in "abc":
        sessions.went(name, "server", well=True)
    sessions.went("a", "server", well=True)
    sessions.went("d", "server", well=True)
    assert [sessions.home(name) for name in "abcd"] == ["server", None, "server", "server"]
    assert len(sessions) == 3


def test_sessions_of_a_server_that_left_are_forgotten() -> None:
    sessions: Sessions[str] = Sessions()
    for session, server in zip("abcd", ("A", "B", "A", "A"), strict=True):
        sessions.went(session, server, well=session != "d")
    sessions.forget("A")
    assert [sessions.home(session) for session in "abcd"] == [None, "B", None, None]
    assert sessions.shunned("d") is None
    assert len(sessions) == 1


def test_a_failure_makes_a_home_shunned_and_one_elsewhere_does_not() -> None:
    sessions: Sessions[str] = Sessions()
    sessions.went("s", "a", well=True)
    sessions.went("s", "b", well=False)
    assert (sessions.home("s"), sessions.shunned("s")) == ("a", None)
    sessions.went("s", "a", well=False)
    assert (sessions.home("s"), sessions.shunned("s")) == (None, "a")
    sessions.went("s", "b", well=True)
    assert (sessions.home("s"), sessions.shunned("s")) == ("b", None)
    assert (sessions.home("?"), sessions.shunned("?")) == (None, None)


# How many turns at once


@st.composite
def policies(draw: st.DrawFn) -> AdaptiveConcurrency:
    least, start, most = sorted(draw(st.tuples(*[st.integers(1, 2000)] * 3)))
    return AdaptiveConcurrency(
        start=start,
        least=least,
        most=most,
        queue=draw(st.floats(0.01, 1)),
        full=draw(st.floats(0.1, 1)),
    )


counts = st.none() | st.integers(0, 3000)
shares = st.none() | st.floats(0, 1)
loads = st.builds(Health, running=counts, waiting=counts, cache=shares)


@given(policies(), st.integers(1, 2000), loads, st.integers(0, 3000))
def test_a_limit_stays_within_its_bounds_and_moves_in_bounded_steps(
    policy: AdaptiveConcurrency, limit: int, load: Health, turns: int
) -> None:
    limit = max(policy.least, min(policy.most, limit))
    after = policy.next(limit, load, turns)
    assert policy.least <= after <= policy.most
    assert limit - (limit + 3) // 4 <= after <= limit + (limit + 7) // 8
    if turns < limit or load.waiting:
        assert after <= limit
    if turns > limit:
        assert after == limit
    if load.waiting is None and load.cache is None:
        assert after == limit


@given(policies(), st.integers(1, 2000), loads, st.integers(0, 3000), st.data())
def test_a_busier_server_never_gets_more(
    policy: AdaptiveConcurrency, limit: int, load: Health, turns: int, data: st.DataObject
) -> None:
    limit = max(policy.least, min(policy.most, limit))
    busier = load
    if load.waiting is not None:
        busier = evolve(busier, waiting=load.waiting + data.draw(st.integers(0, 100)))
    if load.cache is not None:
        busier = evolve(busier, cache=data.draw(st.floats(load.cache, 1)))
    assert policy.next(limit, busier, turns) <= policy.next(limit, load, turns)


@given(policies(), st.integers(1, 2000), loads, st.integers(0, 3000))
def test_what_is_used_more_never_gets_less(
    policy: AdaptiveConcurrency, limit: int, load: Health, turns: int
) -> None:
    limit = max(policy.least, min(policy.most, limit))
    turns = min(turns, limit - 1)
    assert policy.next(limit, load, turns) <= policy.next(limit, load, turns + 1)


@given(st.integers(1, 400), st.integers(1, 400))
def test_under_full_demand_the_limit_finds_what_a_server_can_run(room: int, start: int) -> None:
    policy = AdaptiveConcurrency(start=start, most=500)
    limit = start
    seen: list[int] = []
    for step in range(120):
        load = Health(running=min(limit, room), waiting=max(0, limit - room))
        limit = policy.next(limit, load, limit)
        if step >= 60:
            seen.append(limit)
    assert min(seen) >= 0.75 * room
    assert max(seen) <= 1.25 * room + 1


@given(st.integers(2, 400), st.integers(1, 400))
def test_under_full_demand_the_cache_stays_below_its_end(room: int, start: int) -> None:
    policy = AdaptiveConcurrency(start=start, most=500, full=0.9)
    limit = start
    for step in range(120):
        cache = min(1.0, limit / room)
        after = policy.next(limit, Health(cache=cache), limit)
        if step >= 60:
            assert cache < 0.9 or after < limit or limit == 1
        limit = after
    assert limit >= min(0.4 * room, 1)


def test_a_cut_has_its_effect_before_the_next() -> None:
    policy = AdaptiveConcurrency(start=8)
    load = Health(running=4, waiting=4)
    assert policy.next(8, load, 8) == 6
    assert policy.next(6, load, 8) == 6  # of eight that run for long, four wait still
    assert policy.next(6, Health(running=4, waiting=2), 6) == 4
    assert policy.next(4, Health(running=4, waiting=0), 4) == 5


def test_a_limit_grows_again_after_an_overload() -> None:
    policy = AdaptiveConcurrency(start=100)
    limit = policy.next(100, Health(waiting=40), 100)
    assert limit == 75
    for _ in range(3):
        limit = policy.next(limit, Health(waiting=0), limit)
    assert limit > 100


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"start": 0}, ValueError, "start must be >= 1, got 0"),
        ({"start": True}, TypeError, "start must be an int, got True"),
        ({"start": 2.0}, TypeError, "start must be an int, got 2.0"),
        ({"start": 8, "least": 9}, ValueError, "between least 9 and most 1024, got 8"),
        ({"most": 8}, ValueError, "between least 1 and most 8, got 64"),
        ({"queue": 0}, ValueError, "queue must be > 0 and <= 1, got 0"),
        ({"full": 1.5}, ValueError, "full must be > 0 and <= 1, got 1.5"),
        ({"full": float("nan")}, ValueError, "full must be > 0 and <= 1, got nan"),
        ({"full": "all"}, TypeError, "full must be a number, got 'all'"),
    ],
)
def test_bad_options_of_a_limit(options: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        AdaptiveConcurrency(**options)


# What all can do


def can(**options: Any) -> Capabilities:
    defaults: dict[str, Any] = {"vocab_size": 100, "max_context": 512}
    return Capabilities(**(defaults | options))


def test_a_pool_can_do_what_each_of_its_servers_can() -> None:
    every = meet(
        {
            "a": can(
                max_context=512,
                sampling={"temperature", "top_p", "seed"},
                version_spans=True,
                pause_modes={PauseMode.ABORT, PauseMode.KEEP},
                release_tags={"kv", "weights"},
            ),
            "b": can(
                max_context=256,
                sampling={"temperature", "top_k", "top_p"},
                version_spans=True,
                pause_modes={PauseMode.ABORT, PauseMode.KEEP},
                release_tags={"kv"},
            ),
            "c": can(max_context=1024, sampling={"temperature"}, fixed={"top_p": 0.9}),
        }
    )
    assert every == can(max_context=256, sampling={"temperature"}, fixed={"top_p": 0.9})


def test_servers_that_serve_another_policy_are_no_pool() -> None:
    differing: list[tuple[dict[str, Any], str]] = [
        ({"vocab_size": 99}, "'a' and 'b' differ in vocab_size: 100 and 99"),
        ({"logprobs": "raw"}, "'a' and 'b' differ in logprobs: 'processed' and 'raw'"),
        ({"stop_token_ids": {1}}, r"'a' and 'b' differ in stop_token_ids: \{\} and \{1\}"),
        ({"fixed": {"top_p": 0.9}}, "'a' and 'b' differ in top_p: 1.0 and 0.9"),
    ]
    for options, named in differing:
        with pytest.raises(ValueError, match=named):
            meet({"a": can(), "b": can(**options)})


def test_bug_099_logprobs_of_two_kinds_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="differ in logprobs"):
        meet({"a": can(logprobs="raw"), "b": can(logprobs="processed")})


def test_who_joins_must_do_what_was_promised() -> None:
    pool = can(max_context=256, sampling={"temperature"}, release_tags={"kv"})
    check_covers(pool, "c", can(sampling={"temperature", "seed"}, release_tags={"kv", "weights"}))
    with pytest.raises(
        ValueError, match=r"'c' can't join: the pool has promised release_tags \{kv\}, with it \{\}"
    ):
        check_covers(pool, "c", can(sampling={"temperature"}))
    with pytest.raises(ValueError, match="promised max_context 256, with it 128 would be left"):
        check_covers(pool, "c", evolve(pool, max_context=128))


@given(
    st.lists(
        st.builds(
            can,
            max_context=st.integers(2, 999),
            sampling=st.frozensets(st.sampled_from(["temperature", "seed", "top_k"])),
            version_spans=st.booleans(),
            pause_modes=st.sampled_from([{PauseMode.ABORT}, {PauseMode.ABORT, PauseMode.KEEP}]),
            release_tags=st.frozensets(st.sampled_from(["kv", "weights"])),
        ),
        min_size=1,
        max_size=5,
    ),
    st.randoms(),
)
def test_the_order_of_servers_does_not_matter(servers: list[Capabilities], random: Any) -> None:
    named = dict(zip("abcde", servers, strict=False))
    every = meet(named)
    shuffled = list(named.items())
    random.shuffle(shuffled)
    assert meet(dict(shuffled)) == every
    for name, server in named.items():
        check_covers(every, name, server)
