"""One run, from a policy to a report: how the parts of the demo and the engine fit together."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import torch
from attrs import asdict, frozen
from rich.console import Console
from transformers import PreTrainedModel

from rollnest import (
    AgentLoop,
    AsyncStrategy,
    Batch,
    Capacity,
    Engine,
    EngineStatistics,
    Pause,
    Prompt,
    Sampling,
    SingleTurnLoop,
    TaskSpec,
)
from rollnest.abc import Tokenizer
from rollnest_adapters.transformers import TransformersController

from .evaluation import greedy_accuracy
from .policy import new_policy, warm_start
from .pretrained import EQUALS, EXAMPLES, load_pretrained
from .progress import Display
from .record import Record, StepRecord
from .report import write_report
from .saved import Saved, read, write
from .task import ChainSumJudger, Problems, chain_sums
from .tokenizer import CharTokenizer
from .train import Grpo, Step, train

__all__ = ["Options", "run"]

WARM_STEPS = 400
"""Most supervised steps; a good half of them is needed."""


@frozen(kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        steps: Training steps; `None` is the policy's default.
        seed: Of problems, policy, order and sampling.
        out: Where the report goes.
        backend: Event loop.
        lr: Learning rate; `None` is the policy's default.
        shuffle_rewards: Whether rewards are permuted before training.
        json: Where the figures go as JSON; `None` is nowhere.
        model: A directory with a causal language model, or `"smollm2"`; `None` is the demo's own policy.
        checkpoint: Where policy, optimizer and engine are kept after each step, and where a run goes on from that was
            killed; `None` keeps nothing.
        ray: How many of Ray's actors run the agent loops; `None` runs them beside the engine.
    """

    steps: int | None = None
    seed: int = 0
    out: Path = Path("demo-report.html")
    backend: str = "asyncio"
    lr: float | None = None
    shuffle_rewards: bool = False
    json: Path | None = None
    model: str | None = None
    checkpoint: Path | None = None
    ray: int | None = None


@frozen(kw_only=True, eq=False)
class _Setup:
    """A policy and what it is to learn."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    judger: ChainSumJudger
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    max_tokens: int
    steps: int
    rate: float
    groups: int
    group_size: int
    turns: int
    micro_batch: int | None = None


def run(options: Options, console: Console) -> Record:
    """Runs the demo and writes its files.

    Raises:
        OSError: A file can't be written; found out before anything runs.
        ModelError: The model can't be used.
        CheckpointError: The checkpoint can't be used, or is of a run with other options.
    """
    display = Display(console)
    for path in filter(None, (options.out, options.json)):
        _check_writable(path)
    # The small policy's layers are too small to share: a second thread costs more than it brings where anybody else
    # wants the cores.
    with _threads(1 if options.model is None else torch.get_num_threads()), _cluster(options):
        record = _run(options, display)
    _finish(record, options, display)
    return record


def _run(options: Options, display: Display) -> Record:
    clock = _Clock()
    cast("Any", torch).manual_seed(options.seed)
    saved = None if options.checkpoint is None else read(options.checkpoint)
    with clock.part("start"):
        make = _small if options.model is None else _large
        setup = make(options, display, is_fresh=saved is None)
    accuracy = partial(
        greedy_accuracy, setup.model, setup.tokenizer, setup.held_out, setup.judger,
        max_tokens=setup.max_tokens,
    )  # fmt: skip
    asked = {
        "seed": options.seed,
        "steps": setup.steps,
        "lr": setup.rate,
        "shuffle_rewards": options.shuffle_rewards,
        "model": options.model,
    }
    if saved is None:
        with clock.part("evaluation"):
            before = accuracy()
        display.say(f"held-out accuracy before: {before:.1%} of {len(setup.held_out)}")
    else:
        assert options.checkpoint is not None
        saved.check(asked, options.checkpoint)
        clock.add(saved.seconds)
        before = saved.accuracy_before
        display.say(f"goes on after step {len(saved.steps)}: {options.checkpoint}")
    keeper = _Keeper(options.checkpoint, asked, before, clock, saved)
    with clock.part("training"):
        learn = partial(_learn, setup, options, display, keeper)
        steps, statistics, committed, late = anyio.run(learn, backend=options.backend)
    with clock.part("evaluation"):
        after = accuracy()
    given = asdict(options, value_serializer=_plain)
    return Record(
        options={**given, "steps": setup.steps, "lr": setup.rate},
        accuracy_before=before,
        accuracy_after=after,
        steps=steps,
        statistics=statistics,
        controller_committed=committed,
        controller_late=late,
        seconds=clock.parts,
    )


class _Keeper:
    """Keeps a run after each of its steps.

    Attributes:
        saved: What an earlier run has kept, to go on from.
    """

    def __init__(
        self,
        directory: Path | None,
        asked: Mapping[str, Any],
        accuracy_before: float,
        clock: _Clock,
        saved: Saved | None,
    ) -> None:
        self.saved = saved
        self._directory = directory
        self._asked = asked
        self._accuracy_before = accuracy_before
        self._clock = clock

    @property
    def steps(self) -> list[StepRecord]:
        """The steps of earlier runs."""
        return [] if self.saved is None else list(self.saved.steps)

    def committed(self, controller: TransformersController) -> int:
        """Tokens that controllers have committed, those of earlier runs too."""
        return controller.tokens_committed + (0 if self.saved is None else self.saved.committed)

    def late(self, controller: TransformersController) -> int:
        """Tokens that came too late, those of earlier runs too."""
        return controller.tokens_late + (0 if self.saved is None else self.saved.late)

    def saving(
        self,
        engine: Engine,
        trainer: Grpo,
        controller: TransformersController,
        steps: Sequence[StepRecord],
    ) -> Callable[[], Awaitable[None]] | None:
        """Returns what keeps a run as it is now; `None` if that isn't asked for."""
        directory = self._directory
        if directory is None:
            return None

        async def save() -> None:
            # One step of the event loop: what trainer, engine and controller say is of one moment.
            saved = Saved(
                asked=self._asked,
                trainer=trainer.state_dict(),
                engine=engine.state_dict(),
                version=engine.version,
                steps=list(steps),
                accuracy_before=self._accuracy_before,
                seconds=self._clock.so_far("training"),
                committed=self.committed(controller),
                late=self.late(controller),
            )
            await anyio.to_thread.run_sync(write, directory, saved)

        return save


async def _learn(
    setup: _Setup, options: Options, display: Display, keeper: _Keeper
) -> tuple[list[StepRecord], EngineStatistics, int, int]:
    """Builds controller, task, trainer and engine, and trains."""
    saved, steps = keeper.saved, keeper.steps
    task = TaskSpec(
        "chain_sum",
        setup.train,
        judger=setup.judger,
        loop=_loop(options),
        group_size=setup.group_size,
        sampling=Sampling(setup.max_tokens),
        strategy=AsyncStrategy(max_staleness=1, lead=1),
    )
    trainer = Grpo(
        setup.model,
        steps=setup.steps,
        rate=setup.rate,
        shuffle=random.Random(options.seed) if options.shuffle_rewards else None,
        micro_batch=setup.micro_batch,
    )
    if saved is not None:
        trainer.load_state_dict(saved.trainer)
        cast("Any", setup.model).load_state_dict(trainer.model.state_dict())
    controller = TransformersController(
        setup.model,
        max_requests=setup.turns,
        seed=options.seed + len(steps),  # what comes now is not drawn as the beginning was
        version=0 if saved is None else saved.version,
    )
    engine = Engine(
        controller,
        task,
        batch_size=setup.groups,
        tokenizer=setup.tokenizer,
        capacity=Capacity(turns=setup.turns),
        seed=options.seed,
    )
    if saved is not None:
        engine.load_state_dict(saved.engine)
    with display.bar("GRPO", setup.steps) as bar:
        for step in steps:
            display.step(bar, step)

        def keep(batch: Batch, pause: Pause, step: Step) -> None:
            steps.append(StepRecord.of(batch, pause, step))
            display.step(bar, steps[-1])

        async with engine:
            await train(
                engine,
                trainer,
                steps=setup.steps,
                on_step=keep,
                done=len(steps),
                save=keeper.saving(engine, trainer, controller, steps),
            )
    return steps, engine.statistics(), keeper.committed(controller), keeper.late(controller)


def _loop(options: Options) -> AgentLoop:
    if options.ray is None:
        return SingleTurnLoop()
    from rollnest_adapters.ray import RayLoops, RayOptions

    return RayLoops(SingleTurnLoop(), options.ray, options=RayOptions(num_cpus=0))


@contextmanager
def _cluster(options: Options) -> Generator[None]:
    """A Ray of the demo's own while the block runs, if it needs one and there is none."""
    if options.ray is None:
        yield
        return
    import ray

    cluster: Any = ray
    if cluster.is_initialized():
        yield
        return
    cluster.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        cluster.shutdown()


def _small(options: Options, display: Display, *, is_fresh: bool) -> _Setup:
    """The demo's own policy, after a short supervised start unless its weights come from a checkpoint."""
    problems = chain_sums(seed=options.seed)
    asked = {problem.question for problem in problems.held_out}
    if not asked.isdisjoint(p.question for p in (*problems.train, *problems.probe)):
        raise RuntimeError("a held-out problem is among the training problems")
    model, tokenizer = new_policy(seed=options.seed), CharTokenizer()
    if is_fresh:
        _warm_up(options, display, problems, model, tokenizer)
    return _Setup(
        model=model,
        tokenizer=tokenizer,
        judger=problems.judger,
        train=[problem.prompt() for problem in problems.train],
        held_out=[problem.prompt() for problem in problems.held_out],
        max_tokens=28,
        steps=160 if options.steps is None else options.steps,
        rate=3e-4 if options.lr is None else options.lr,
        groups=16,
        group_size=8,
        turns=64,
    )


def _warm_up(
    options: Options,
    display: Display,
    problems: Problems,
    model: PreTrainedModel,
    tokenizer: CharTokenizer,
) -> None:
    with display.bar("warm start", WARM_STEPS) as bar:
        taken = warm_start(
            model,
            tokenizer,
            problems.train,
            probe=problems.probe,
            judger=problems.judger,
            target=0.35,
            max_steps=WARM_STEPS,
            seed=options.seed,
            on_step=lambda step, share: bar.advance(f"solves {share:.0%} of the probe", 10),
        )
    display.say(f"{taken} supervised steps on {len(problems.train)} problems")


def _large(options: Options, display: Display, *, is_fresh: bool) -> _Setup:
    """Somebody's model: a few steps, and no promise that it learns."""
    assert options.model is not None
    problems = chain_sums(seed=options.seed)
    display.say(f"loading {options.model}")
    model, tokenizer = load_pretrained(options.model)
    return _Setup(
        model=model,
        tokenizer=tokenizer,
        judger=problems.judger.with_separator(EQUALS),
        train=[problem.prompt(EXAMPLES) for problem in problems.train],
        held_out=[problem.prompt(EXAMPLES) for problem in problems.held_out[:16]],
        max_tokens=24,
        steps=4 if options.steps is None else options.steps,
        rate=1e-6 if options.lr is None else options.lr,
        groups=2,
        group_size=4,
        turns=8,
        micro_batch=4,
    )


def _finish(record: Record, options: Options, display: Display) -> None:
    if options.model is not None:
        display.completions([one for step in record.steps for one in step.completions])
    display.summary(record)
    write_report(options.out, record)
    display.say(f"report: {options.out}")
    if options.json is not None:
        options.json.write_text(json.dumps(record.figures(), indent=2), encoding="utf-8")
        display.say(f"figures: {options.json}")


def _check_writable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()


def _plain(_: Any, __: Any, value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@contextmanager
def _threads(count: int) -> Generator[None]:
    """Lets torch use that many threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Clock:
    """Adds up how long each part takes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.parts: dict[str, float] = {}
        self._now = now
        self._began = 0.0

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Times the block."""
        began = self._began = self._now()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + self._now() - began

    def add(self, parts: Mapping[str, float]) -> None:
        """Adds what an earlier run took."""
        for name, seconds in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds

    def so_far(self, name: str) -> dict[str, float]:
        """All parts, with the one that is on now."""
        return {**self.parts, name: self.parts.get(name, 0.0) + self._now() - self._began}
