"""What may judge, and judgers that are made of others.

A composite only says which judgers a prompt needs and how their verdicts become one. It never calls them: the
engine does, each under the rules of any judger (threads, slots, limits). So a part may be sync, and composites nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from attrs import Attribute, field, frozen

from ._checks import check_real, check_text
from ._process_judger import ProcessJudger
from ._records import Prompt, Sample, Verdict
from .abc import BatchJudger, CompositeJudger, Judger, JudgerLike, VerdictLike
from .errors import JudgeError

__all__ = [
    "ComposedJudger",
    "Merge",
    "RoutedJudger",
    "check_judger",
    "is_composite",
    "judges_groups",
    "process_judgers",
]

Merge: TypeAlias = "Callable[[Sample, Mapping[str, Verdict]], VerdictLike]"
"""Makes one verdict of several; called on the event loop, so it must not block."""


def _judgers(value: Mapping[str, JudgerLike]) -> dict[str, JudgerLike]:
    if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"judgers must map names to judgers, got {value!r}")
    return dict(value)


def _check_judgers(_: Any, attribute: Attribute[Any], value: Mapping[str, Any]) -> None:
    if not value:
        raise ValueError(f"{attribute.name} must not be empty")
    for name, judger in value.items():
        check_text(f"a name in {attribute.name}", name)
        check_judger(f"{attribute.name}[{name!r}]", judger)


def _check_merge(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and (not callable(value) or iscoroutinefunction(value)):
        raise TypeError(f"{attribute.name} must be a plain function or None, got {value!r}")


def _check_default(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None:
        check_judger(attribute.name, value)


def _weights(value: Mapping[str, float] | None) -> dict[str, float] | None:
    if not (value is None or isinstance(value, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"weights must map names to numbers, got {value!r}")
    return None if value is None else dict(value)


def _check_weights(judger: ComposedJudger, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    if set(value) != set(judger.judgers):
        raise ValueError(
            f"{attribute.name} must name each judger once, got {sorted(value)} for {sorted(judger.judgers)}"
        )
    for name, weight in value.items():
        check_real(f"{attribute.name}[{name!r}]", weight, -float("inf"))


@frozen(eq=False)
class ComposedJudger:
    """Asks several judgers about each sample; the score is the weighted sum of theirs.

        ComposedJudger({"right": check_answer, "short": brevity}, weights={"right": 1.0, "short": 0.1})

    The verdict's `parts` hold each judger's score by name, unweighted. A part's own parts follow as `"name.part"`, its
    details as `details["name"]`. The judgers of one sample are asked one after the other in this order, and the first
    that fails fails the sample, so the cheap ones come first.

    Attributes:
        judgers: The parts, by name: anything that may judge, composites too.
        weights: What each part's score is multiplied with; 0 only reports the part. `None` is 1 for all.
    """

    judgers: Mapping[str, JudgerLike] = field(converter=_judgers, validator=_check_judgers)
    weights: Mapping[str, float] | None = field(
        default=None, kw_only=True, converter=_weights, validator=_check_weights
    )

    def select(self, prompt: Prompt) -> Mapping[str, JudgerLike]:
        """All judgers, whatever the prompt."""
        return self.judgers

    def combine(self, sample: Sample, verdicts: Mapping[str, Verdict]) -> Verdict:
        """The weighted sum."""
        weights = self.weights or dict.fromkeys(verdicts, 1.0)
        score = sum(weights[name] * verdict.score for name, verdict in verdicts.items())
        return Verdict(score, parts=_parts(verdicts), details=_details(verdicts))


@frozen(eq=False)
class RoutedJudger:
    """Asks the judger of the prompt's `data_source`.

        RoutedJudger({"gsm8k": check_number, "code/*": run_tests}, default=llm_judge)

    A name may be a pattern with `*`, `?` and `[...]`. The exact name goes first, then the first pattern in order that
    fits. With `merge` all that fit are asked, and it makes one verdict of theirs, also where only one fits. A prompt
    that no name fits, or without a `data_source`, goes to `default`.

    Attributes:
        judgers: By data source: anything that may judge, composites too.
        merge: Makes one verdict of all that fit, by name; called on the event loop, so it must not block.
        default: Asked where none fits. `None` fails such samples, naming the source and the known ones.
    """

    judgers: Mapping[str, JudgerLike] = field(converter=_judgers, validator=_check_judgers)
    merge: Merge | None = field(default=None, kw_only=True, validator=_check_merge)
    default: JudgerLike | None = field(default=None, kw_only=True, validator=_check_default)

    def select(self, prompt: Prompt) -> Mapping[str, JudgerLike]:
        """The judgers that a prompt's samples need.

        Raises:
            JudgeError: None fits, and there is no default.
        """
        source = prompt.data_source
        fitting = [] if source is None else self._fitting(source)
        if fitting:
            chosen = fitting[:1] if self.merge is None else fitting
            return {name: self.judgers[name] for name in chosen}
        if self.default is not None:
            return {"default": self.default}
        known = ", ".join(map(repr, self.judgers))
        raise JudgeError(
            f"prompt {prompt.uid!r} has the data_source {source!r}, for which there is no judger; known: {known}"
        )

    def combine(self, sample: Sample, verdicts: Mapping[str, Verdict]) -> VerdictLike:
        """The one verdict as it is, or what `merge` makes of them; the default's is not merged."""
        if self.merge is not None and verdicts.keys() <= self.judgers.keys():
            return self.merge(sample, verdicts)
        (verdict,) = verdicts.values()
        return verdict

    def _fitting(self, source: str) -> list[str]:
        patterns = [name for name in self.judgers if name != source and fnmatchcase(source, name)]
        return [source, *patterns] if source in self.judgers else patterns


def check_judger(name: str, judger: object) -> None:
    """Raises unless this may judge, and what it says of itself makes sense."""
    if not (isinstance(judger, Judger | BatchJudger | CompositeJudger) or callable(judger)):
        raise TypeError(f"{name} must be a Judger, a function of a sample or None, got {judger!r}")
    for flag in ("judges_groups", "uses_policy"):
        said = getattr(judger, flag, False)
        if not isinstance(said, bool):
            raise TypeError(f"{flag} of {name} must be True or False, got {said!r}")
    if getattr(judger, "judges_groups", False) and not isinstance(judger, BatchJudger):
        raise TypeError(f"{name} says judges_groups, but has no batch_judge: {judger!r}")


def process_judgers(judger: object) -> Iterator[ProcessJudger]:
    """Those that run in processes: itself, or parts of our own composites."""
    if isinstance(judger, ProcessJudger):
        yield judger
    elif isinstance(judger, ComposedJudger | RoutedJudger):
        for part in judger.judgers.values():
            yield from process_judgers(part)
        if isinstance(judger, RoutedJudger):
            yield from process_judgers(judger.default)


def is_composite(judger: object) -> bool:
    """Whether it asks others; one that has `judge` or `batch_judge` judges itself."""
    return isinstance(judger, CompositeJudger) and not isinstance(judger, Judger | BatchJudger)


def judges_groups(judger: object) -> bool:
    """Whether it is asked about a whole group at once."""
    if isinstance(judger, ProcessJudger):
        return judger.by_group
    if not isinstance(judger, BatchJudger):
        return False
    return not isinstance(judger, Judger) or bool(getattr(judger, "judges_groups", False))


def _parts(verdicts: Mapping[str, Verdict]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for name, verdict in verdicts.items():
        parts[name] = verdict.score
        parts |= {f"{name}.{inner}": score for inner, score in verdict.parts.items()}
    return parts


def _details(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    return {name: verdict.details for name, verdict in verdicts.items() if verdict.details}
