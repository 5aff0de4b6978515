"""What a user says about one data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any, TypeAlias, cast

from attrs import Attribute, Factory, field, frozen
from attrs.validators import instance_of, is_callable, optional

from ._checks import real, text, whole
from ._judgers import check_judger, process_judgers
from ._loops import AgentLoop, SingleTurnLoop, as_loop, overrides_generate_group
from ._options import FailurePolicy, Limits, Sampling
from ._process_judger import pack
from ._records import Group, Message, Prompt, Sample
from ._strategies import ProduceStrategy, SyncStrategy
from .abc import JudgerLike, PromptSource

__all__ = ["PromptLike", "TaskSpec", "as_prompt"]

PromptLike: TypeAlias = "Prompt | str | Sequence[Message]"
"""A `Prompt`, the text of one user message, or chat messages."""


def _prompts(value: Sequence[PromptLike] | PromptSource) -> tuple[Prompt, ...] | PromptSource:
    if hasattr(value, "draw"):
        return cast("PromptSource", value)
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"prompts must be a sequence of prompts or a PromptSource, got {value!r}")
    return tuple(as_prompt(item, index, f"prompts[{index}]") for index, item in enumerate(value))


def as_prompt(item: object, number: int, what: str) -> Prompt:
    """Returns what a user gave as a prompt; text and messages are named by their number.

    Raises:
        TypeError: It is neither; `what` names it.
    """
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        item = [{"role": "user", "content": item}]
    elif isinstance(item, Mapping) or not isinstance(item, Iterable):
        raise TypeError(f"{what} must be a Prompt, a string or messages, got {item!r}")
    return Prompt(str(number), messages=cast("Iterable[Message]", item))


def _check_source(name: str, source: PromptSource) -> None:
    missing = [
        method
        for method in ("draw", "state_dict", "load_state_dict")
        if not callable(getattr(source, method, None))
    ]
    if missing:
        raise TypeError(f"{name} must be a PromptSource, got {source!r} without {missing[0]}()")
    if iscoroutinefunction(getattr(source, "report", None)):
        raise TypeError(f"{name}.report must be a plain function, got a coroutine function")


def _check_prompts(
    _: Any, attribute: Attribute[Any], value: tuple[Prompt, ...] | PromptSource
) -> None:
    if not isinstance(value, tuple):
        _check_source(attribute.name, value)
        return
    if not value:
        raise ValueError(f"{attribute.name} must not be empty")
    seen: set[str] = set()
    for prompt in value:
        if prompt.uid in seen:
            raise ValueError(f"{attribute.name} holds two prompts with the uid {prompt.uid!r}")
        seen.add(prompt.uid)


def _check_judger(spec: TaskSpec, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    check_judger(attribute.name, value)
    if any(process_judgers(value)) and isinstance(spec.prompts, Sequence):
        # One stands for all: pickling every prompt twice would take as long as the rest of the building.
        pack("prompts[0], whose samples are judged in processes,", spec.prompts[0])


def _check_strategy(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not all(
        hasattr(value, name)
        for name in (
            "room",
            "max_staleness",
            "expired",
            "needs_batch_size",
        )
    ):
        raise TypeError(f"{attribute.name} must be a ProduceStrategy, got {value!r}")


def _check_training_sampling(_: Any, attribute: Attribute[Any], value: Sampling) -> None:
    if value.temperature == 0:
        raise ValueError(
            f"{attribute.name}.temperature must be > 0 to train, got 0 (greedy is for evaluation)"
        )


@frozen(eq=False)
class TaskSpec:
    """One data source: prompts, how they are answered, how the answers are judged.

    Attributes:
        name: Unique in the engine.
        prompts: What to answer: `Prompt` objects, strings (one user message each) or message lists; or a
            `PromptSource`, which draws them.
        judger: Turns a completed sample into a verdict; `None` leaves samples unscored.
        loop: How one sample is generated.
        group_size: Samples of each prompt visit.
        redundancy: Samples started on top in each group. The first `group_size` that complete, and are judged if each
            is judged by itself, are kept, the others cancelled; a failed one is made up for by one of these first.
        epochs: How often each prompt of a sequence is visited; `None` is endlessly.
        shuffle: Whether each epoch of a sequence has a seeded order of its own.
        sampling: How the policy samples.
        max_response_tokens: Most tokens of a response, sampled and appended; `None` is what the context holds.
        max_context: Most tokens of prompt and response; `None` is the controller's.
        strategy: How many groups to start.
        weight: Share of each batch, relative to the other tasks' weights; 0 switches the task off.
        refine: Returns those of a group's samples that are to be trained, in the order that they are to have. Asked
            before `keep`, in the same way: once every member has completed and is judged, on the event loop. Who is
            left out is counted as `"refined"`.
        keep: Says whether a group is worth training; dynamic sampling. Asked once every member has completed, on the
            event loop, so keep it short; a group it does not keep is dropped as `"filtered"`, and another drawn.
        starve_after: After that many batch shares of unusable groups in a row, `next_batch` raises `Starved`.
        failures: What a dead member does to its group, and when the engine gives up.
        limits: How long things may take.
    """

    name: str = field(validator=text)
    prompts: Sequence[Prompt] | PromptSource = field(
        converter=_prompts, validator=_check_prompts, repr=False
    )
    judger: JudgerLike | None = field(kw_only=True, validator=_check_judger)
    loop: AgentLoop = field(default=Factory(SingleTurnLoop), kw_only=True, converter=as_loop)
    group_size: int = field(default=8, kw_only=True, validator=whole(1))
    redundancy: int = field(default=0, kw_only=True, validator=whole(0))
    epochs: int | None = field(default=None, kw_only=True, validator=whole(1, optional=True))
    shuffle: bool = field(default=True, kw_only=True, validator=instance_of(bool))
    sampling: Sampling = field(
        default=Sampling(1024),
        kw_only=True,
        validator=[instance_of(Sampling), _check_training_sampling],
    )
    max_response_tokens: int | None = field(
        default=None, kw_only=True, validator=whole(1, optional=True)
    )
    max_context: int | None = field(default=None, kw_only=True, validator=whole(2, optional=True))
    strategy: ProduceStrategy = field(
        default=SyncStrategy(), kw_only=True, validator=_check_strategy
    )
    weight: float = field(default=1.0, kw_only=True, validator=real(0))
    refine: Callable[[Group], Iterable[Sample] | Group] | None = field(
        default=None, kw_only=True, validator=optional(is_callable())
    )
    keep: Callable[[Group], bool] | None = field(
        default=None, kw_only=True, validator=optional(is_callable())
    )
    starve_after: int = field(default=10, kw_only=True, validator=whole(1))
    failures: FailurePolicy = field(
        default=FailurePolicy(), kw_only=True, validator=instance_of(FailurePolicy)
    )
    limits: Limits = field(default=Limits(), kw_only=True, validator=instance_of(Limits))

    def __attrs_post_init__(self) -> None:
        least = self.failures.least(self.group_size)
        if least > self.group_size:
            raise ValueError(
                f"failures.min_members must be <= group_size {self.group_size}, got {least}"
            )
        replayable: Any = self.loop.replayable
        if replayable not in (True, False):
            raise TypeError(f"loop.replayable must be a bool, got {replayable!r}")
        if self.redundancy and overrides_generate_group(self.loop):
            raise ValueError(
                f"redundancy must be 0 for a loop that overrides generate_group and can resample itself, "
                f"got {self.redundancy} and {self.loop!r}"
            )
        if isinstance(self.prompts, Sequence):
            self.loop.check_prompt(self.prompts[0])
        if self.epochs is not None and not isinstance(self.prompts, Sequence):
            raise ValueError(
                f"epochs must be None where prompts is a PromptSource, got {self.epochs}: a source ends by itself"
            )


def check_tasks(
    tasks: TaskSpec | Sequence[TaskSpec], batch_size: int | None
) -> tuple[TaskSpec, ...]:
    """Returns an engine's tasks, if they can go together.

    Raises:
        ValueError: They can't, or there is none.
        TypeError: One is no `TaskSpec`.
    """
    specs = (tasks,) if isinstance(tasks, TaskSpec) else tuple(tasks)
    if not specs:
        raise ValueError(f"tasks must hold at least one TaskSpec, got {tasks!r}")
    seen: set[str] = set()
    for spec in specs:
        if not isinstance(spec, TaskSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"tasks must be TaskSpec objects, got {spec!r}")
        if spec.name in seen:
            raise ValueError(f"tasks holds two tasks named {spec.name!r}")
        seen.add(spec.name)
        if spec.strategy.needs_batch_size and batch_size is None:
            raise ValueError(
                f"batch_size is required: task {spec.name!r} runs ahead with {spec.strategy!r}"
            )
    _check_sources(specs)
    if not any(spec.weight for spec in specs):
        raise ValueError("weight is 0 for every task; at least one must be above 0")
    return specs


def _check_sources(specs: Sequence[TaskSpec]) -> None:
    users: dict[int, str] = {}
    for spec in specs:
        if not isinstance(spec.prompts, Sequence):
            other = users.setdefault(id(spec.prompts), spec.name)
            if other != spec.name:
                raise ValueError(
                    f"prompts of task {spec.name!r} is the source of task {other!r} too; give each its own"
                )


def check_token_ids(specs: Sequence[TaskSpec]) -> None:
    """Raises unless every prompt that is known has token ids: what is needed without a tokenizer."""
    for spec in specs:
        # What a source will give is not known yet: its prompts fail one by one.
        for prompt in spec.prompts if isinstance(spec.prompts, Sequence) else ():
            if prompt.token_ids is None:
                raise ValueError(
                    f"tokenizer is required: prompt {prompt.uid!r} of task {spec.name!r} has messages only"
                )
