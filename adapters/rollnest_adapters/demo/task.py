"""Sums of two numbers, from reasoning-gym's `chain_sum`: the problems, how they are worked out, and the judger.

Held-out problems differ from training problems by content, not by index: duplicates are removed before the split.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import reasoning_gym  # pyright: ignore[reportMissingTypeStubs]
from attrs import field, frozen

from rollnest import Message, Prompt, Sample

__all__ = ["SEPARATOR", "ChainSumJudger", "Problem", "Problems", "chain_sums", "worked_out"]

SEPARATOR = ";"
"""Stands between the working and the result."""

_HELD_OUT = 512
_PROBE = 256


class _Dataset(Protocol):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


@frozen
class Problem:
    """One sum.

    Attributes:
        question: What is asked: `34 + 58 =`.
        entry: reasoning-gym's entry of it, which its `score_answer` takes.
    """

    question: str
    entry: Mapping[str, Any] = field(repr=False, eq=False)

    def prompt(self, examples: Sequence[Message] = ()) -> Prompt:
        """Returns the prompt for the engine: the question, after chat messages that show what is wanted."""
        question = {"role": "user", "content": self.question}
        return Prompt(self.question, messages=[*examples, question], label=self.entry)


@frozen
class Problems:
    """Problems without a duplicate, split.

    Attributes:
        train: For the supervised start and for reinforcement learning.
        probe: Tells the supervised start when to stop.
        held_out: Only ever evaluated, before and after.
        judger: Scores answers to any of them.
    """

    train: Sequence[Problem] = field(repr=False)
    probe: Sequence[Problem] = field(repr=False)
    held_out: Sequence[Problem] = field(repr=False)
    judger: ChainSumJudger


class ChainSumJudger:
    """1.0 where reasoning-gym gives the full score to the text after the last separator, else 0.0.

    `score_answer` itself gives part of the credit to any text that holds the result somewhere.
    """

    def __init__(self, dataset: _Dataset, separator: str = SEPARATOR) -> None:
        self._dataset = dataset
        self._separator = separator

    def judge(self, sample: Sample) -> float:
        """Scores what the policy wrote."""
        return self.score(sample.text, sample.prompt.label)

    def score(self, text: str, entry: Mapping[str, Any]) -> float:
        """Scores an answer to the problem with this entry."""
        _, separator, result = text.rpartition(self._separator)
        return float(bool(separator) and self._dataset.score_answer(result, dict(entry)) == 1.0)

    def with_separator(self, separator: str) -> ChainSumJudger:
        """Returns a judger that looks for another separator."""
        return ChainSumJudger(self._dataset, separator)


def chain_sums(*, seed: int, size: int = 12_000) -> Problems:
    """Draws sums and differences of two numbers with one or two digits.

    Args:
        seed: Decides which problems there are and how they are split.
        size: How many are drawn; about half of them are duplicates.
    """
    dataset: Any = cast("Any", reasoning_gym).create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=size, seed=seed
    )
    problems: dict[str, Problem] = {}
    for entry in cast("Sequence[Mapping[str, Any]]", dataset):
        question = entry["question"].rpartition(": ")[2]
        problems.setdefault(question, Problem(question, entry))
    shuffled = list(problems.values())
    random.Random(seed).shuffle(shuffled)
    held_out, rest = shuffled[:_HELD_OUT], shuffled[_HELD_OUT:]
    return Problems(
        train=rest[_PROBE:], probe=rest[:_PROBE], held_out=held_out, judger=ChainSumJudger(dataset)
    )


def worked_out(question: str) -> str:
    """Works a sum out, column by column from the right: `34 + 58 =` gives `4+8:2c3+5:9.;92`.

    Each column ends with `c` if it carries (or borrows) and with `.` if not. A negative difference is worked out the
    other way round, and gets its sign in the result.
    """
    left, operator, right, _ = question.split()
    a, b = int(left), int(right)
    result = a + b if operator == "+" else a - b
    if operator == "-" and a < b:
        a, b = b, a
    columns: list[str] = []
    carry = 0
    while a or b or not columns:
        (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
        total = x + y + carry if operator == "+" else x - y - carry
        carry = int(not 0 <= total <= 9)
        columns.append(f"{x}{operator}{y}:{total % 10}{'c' if carry else '.'}")
    return "".join(columns) + SEPARATOR + str(result)
