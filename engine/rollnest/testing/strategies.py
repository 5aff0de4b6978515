"""Hypothesis strategies for the engine's records: whatever they draw keeps every invariant.

Needs the `testing` extra.

    @given(batches())
    def test_packing_keeps_every_token(batch: Batch) -> None: ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from hypothesis import strategies as st

from rollnest._options import Sampling
from rollnest._records import (
    Batch,
    BatchStatistics,
    Failure,
    Group,
    Prompt,
    Sample,
    Segment,
    Status,
    Turn,
    Verdict,
)
from rollnest._response import Response, token_column

__all__ = [
    "batches",
    "groups",
    "prompts",
    "responses",
    "samples",
    "samplings",
    "segments",
    "token_ids",
    "verdicts",
]

_MAX_VERSION = 4


def token_ids(
    *, min_size: int = 0, max_size: int = 8, vocab_size: int = 100
) -> st.SearchStrategy[list[int]]:
    """Draws token ids."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=min_size, max_size=max_size)


def _logprobs(size: int) -> st.SearchStrategy[list[float]]:
    # Of 32 bits, so that what goes in comes out.
    return st.lists(st.floats(-50, 0, width=32), min_size=size, max_size=size)


@st.composite
def _runs(
    draw: st.DrawFn, *, min_policy_tokens: int, max_tokens: int, vocab_size: int
) -> tuple[Response, list[tuple[int, int]]]:
    """Draws a sealed response, and where each turn of the policy starts and stops."""
    response = Response()
    turns: list[tuple[int, int]] = []
    version = draw(st.integers(0, _MAX_VERSION))
    while (room := max_tokens - len(response)) > 0 and draw(st.booleans()):
        if draw(st.booleans()):
            context = token_ids(min_size=1, max_size=min(room, 6), vocab_size=vocab_size)
            response.append_context(draw(context))
            continue
        start = len(response)
        # A turn may have been paused, and gone on with newer weights.
        for _ in range(draw(st.integers(1, 2))):
            room = max_tokens - len(response)
            ids = draw(
                token_ids(min_size=min(room, 1), max_size=min(room, 6), vocab_size=vocab_size)
            )
            response.append_policy(ids, draw(_logprobs(len(ids))), version)
            version = draw(st.integers(version, _MAX_VERSION))
        turns.append((start, len(response)))
    missing = min_policy_tokens - response.policy_tokens
    if missing > 0:
        start = len(response)
        ids = draw(token_ids(min_size=missing, max_size=missing, vocab_size=vocab_size))
        response.append_policy(ids, draw(_logprobs(missing)), version)
        turns.append((start, len(response)))
    return response.seal(), turns


def responses(
    *, min_policy_tokens: int = 0, max_tokens: int = 24, vocab_size: int = 100
) -> st.SearchStrategy[Response]:
    """Draws sealed responses: turns of the policy, of one or two versions each, with context anywhere between.

    Args:
        min_policy_tokens: Fewest tokens of the policy; they may go beyond `max_tokens`.
        max_tokens: Most tokens.
        vocab_size: Ids are below it.
    """
    runs = _runs(min_policy_tokens=min_policy_tokens, max_tokens=max_tokens, vocab_size=vocab_size)
    return runs.map(lambda drawn: drawn[0])


def segments(
    *, min_policy_tokens: int = 0, max_tokens: int = 24, vocab_size: int = 100
) -> st.SearchStrategy[Segment]:
    """Draws segments: a prompt of at least one token, and a response as `responses` draws it."""
    return st.builds(
        Segment,
        token_ids(min_size=1, vocab_size=vocab_size).map(_view),
        responses(
            min_policy_tokens=min_policy_tokens, max_tokens=max_tokens, vocab_size=vocab_size
        ),
    )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Draws prompts: of messages, of token ids, or of both."""
    kind = draw(st.sampled_from(["messages", "ids", "both"]))
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user"]), "content": st.text(max_size=12)}
    )
    return Prompt(
        draw(st.text(min_size=1, max_size=8).filter(str.strip)),
        messages=None if kind == "ids" else draw(st.lists(message, min_size=1, max_size=3)),
        token_ids=None if kind == "messages" else draw(token_ids(min_size=1)),
        label=draw(st.none() | st.text(max_size=8) | st.integers()),
        data_source=draw(st.none() | st.sampled_from(["maths", "code"])),
    )


@st.composite
def samplings(draw: st.DrawFn, *, max_tokens: int = 64, training: bool = True) -> Sampling:
    """Draws sampling parameters.

    Args:
        draw: Hypothesis gives it.
        max_tokens: Largest cap of a turn.
        training: Whether a task may train with them, so that the temperature is above 0.
    """
    cap = draw(st.integers(1, max_tokens))
    return Sampling(
        cap,
        min_tokens=draw(st.integers(0, cap)),
        temperature=draw(st.floats(0.1 if training else 0.0, 2.0)),
        top_p=draw(st.floats(0.1, 1.0)),
        top_k=draw(st.none() | st.integers(1, 50)),
        min_p=draw(st.none() | st.floats(0.0, 1.0)),
        stop=draw(st.lists(st.sampled_from(["\nQ:", "###", "END"]), max_size=2, unique=True)),
        stop_token_ids=draw(token_ids(max_size=2)),
        seed=draw(_SEEDS),
    )


_DERIVED: tuple[Literal["derived"], ...] = ("derived",)
_SEEDS = st.none() | st.sampled_from(_DERIVED) | st.integers(0, 2**32)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Draws verdicts; equal scores are common, as they are in groups."""
    score = draw(st.sampled_from([0.0, 1.0]) | st.floats(-10, 10))
    parts = st.dictionaries(st.sampled_from(["format", "answer"]), st.floats(-1, 1))
    return Verdict(score, parts=draw(parts))


@st.composite
def samples(
    draw: st.DrawFn,
    *,
    status: Status | None = None,
    judged: bool | None = None,
    task: str = "task",
    prompt: Prompt | None = None,
    visit: int = 0,
    index: int = 0,
    max_tokens: int = 24,
    vocab_size: int = 100,
) -> Sample:
    """Draws samples of one or two segments.

    Args:
        draw: Hypothesis gives it.
        status: How they ended; `None` is any way.
        judged: Whether completed and filtered ones have a verdict; `None` is either.
        task: Name of the task.
        prompt: What was asked; `None` is any.
        visit: The prompt's visit.
        index: Place in the group.
        max_tokens: Most tokens of a response.
        vocab_size: Ids are below it.
    """
    ended: Status = draw(st.sampled_from(list(Status))) if status is None else status
    contexts: list[Segment] = []
    turns: list[Turn] = []
    # A sample that was never started has none.
    for number in range(0 if ended is Status.INIT else draw(st.integers(1, 2))):
        needed = 1 if ended in _ANSWERED and number == 0 else 0
        drawn = _runs(min_policy_tokens=needed, max_tokens=max_tokens, vocab_size=vocab_size)
        response, runs = draw(drawn)
        ids = draw(token_ids(min_size=1, vocab_size=vocab_size))
        contexts.append(Segment(_view(ids), response))
        turns += [
            Turn(
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                text=draw(st.text(max_size=8)),
                segment=number,
                start=start,
                stop=stop,
                attempts=draw(st.integers(1, 3)),
                response=response,
            )
            for start, stop in runs
        ]
    failure = draw(_FAILURES) if ended is Status.FAILED else None
    if judged is None:
        judged = draw(st.booleans())
    return Sample(
        task=task,
        prompt=draw(prompts()) if prompt is None else prompt,
        visit=visit,
        index=index,
        status=ended,
        segments=tuple(contexts),
        turns=tuple(turns),
        finish_reason=turns[-1].finish_reason if turns else None,
        verdict=draw(verdicts()) if judged and ended in _ANSWERED else None,
        failure=failure,
        sampling=Sampling(max_tokens),
        generate_seconds=draw(st.floats(0, 100)),
    )


_ANSWERED = (Status.COMPLETED, Status.FILTERED)
_FAILURES = st.builds(
    Failure,
    st.sampled_from(["inference", "loop", "tool", "judge", "data"]),
    st.sampled_from(["ValueError: no", "the server left"]),
)


@st.composite
def groups(
    draw: st.DrawFn,
    *,
    status: Status | None = Status.COMPLETED,
    judged: bool | None = True,
    min_size: int = 1,
    max_size: int = 4,
    task: str = "task",
    visit: int | None = None,
    max_tokens: int = 24,
    vocab_size: int = 100,
) -> Group:
    """Draws groups: by default as a trainer gets them, completed and judged.

    Args:
        draw: Hypothesis gives it.
        status: How all members ended; `None` is any way, each its own.
        judged: Whether completed and filtered members have verdicts; `None` is either.
        min_size: Fewest members.
        max_size: Most members.
        task: Name of the task.
        visit: The prompt's visit; `None` is any.
        max_tokens: Most tokens of a response.
        vocab_size: Ids are below it.
    """
    prompt = draw(prompts())
    if visit is None:
        visit = draw(st.integers(0, 1000))
    members = [
        draw(
            samples(
                status=status,
                judged=judged,
                task=task,
                prompt=prompt,
                visit=visit,
                index=index,
                max_tokens=max_tokens,
                vocab_size=vocab_size,
            )
        )
        for index in range(draw(st.integers(min_size, max_size)))
    ]
    return Group(task=task, prompt=prompt, visit=visit, samples=tuple(members))


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    tasks: Sequence[str] = ("task",),
    min_size: int = 1,
    max_size: int = 3,
    min_group_size: int = 1,
    max_group_size: int = 4,
    judged: bool | None = True,
    max_tokens: int = 24,
    vocab_size: int = 100,
) -> Batch:
    """Draws batches of completed groups, each of one of the tasks, no visit twice.

    Their statistics describe the groups; what a running engine would count besides is 0.

    Args:
        draw: Hypothesis gives it.
        tasks: Names of the tasks.
        min_size: Fewest groups.
        max_size: Most groups.
        min_group_size: Fewest members of a group.
        max_group_size: Most members of a group.
        judged: Whether the members have verdicts; `None` is either, each its own.
        max_tokens: Most tokens of a response.
        vocab_size: Ids are below it.
    """
    members = [
        draw(
            groups(
                task=draw(st.sampled_from(tasks)),
                visit=visit,
                judged=judged,
                min_size=min_group_size,
                max_size=max_group_size,
                max_tokens=max_tokens,
                vocab_size=vocab_size,
            )
        )
        for visit in range(draw(st.integers(min_size, max_size)))
    ]
    version = draw(st.integers(_MAX_VERSION, _MAX_VERSION + 3))
    by_task = {task: [g for g in members if g.task == task] for task in tasks}
    return Batch(
        index=draw(st.integers(1, 1000)),
        version=version,
        groups=tuple(members),
        tasks={task: _statistics(of_task, version) for task, of_task in by_task.items()},
        statistics=_statistics(members, version),
        short=draw(st.booleans()),
    )


def _statistics(members: Sequence[Group], version: int) -> BatchStatistics:
    drawn = [sample for group in members for sample in group.samples]
    lengths = [sum(len(segment) for segment in sample.segments) for sample in drawn]
    sampled = sum(sample.policy_tokens for sample in drawn)
    rewards = [sample.reward for sample in drawn if sample.reward is not None]
    return BatchStatistics(
        groups=len(members),
        samples=len(drawn),
        policy_tokens=sampled,
        context_tokens=sum(lengths) - sampled,
        longest_response=max(lengths, default=0),
        truncated=sum(sample.truncated for sample in drawn),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        unscored=len(drawn) - len(rewards),
        lag_histogram=dict(Counter(sample.lag(version) for sample in drawn)),
    )


def _view(ids: list[int]) -> memoryview[int]:
    return memoryview(token_column(ids)).toreadonly()
