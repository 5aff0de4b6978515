"""What an entered engine is made of, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from ._admission import Admission
from ._allocation import Allocate, Allocation
from ._attempt import TokenCounters
from ._clock import loop_clock
from ._context import RolloutServices
from ._continuation import check_training
from ._delivery import Delivery
from ._evaluation import Evaluations
from ._eviction import Eviction
from ._gate import Gate
from ._group import GroupRunner
from ._instruments import Instruments
from ._judging import Judging
from ._lag import LagWatch
from ._loops import overrides_generate_group, replays_groups
from ._options import Capacity
from ._outage import Outage
from ._policy import policy_services
from ._prober import Prober
from ._process_judger import main_file
from ._processes import Processes
from ._producer import Producer
from ._sampler import Sampler
from ._scopes import loop_scopes, loop_tasks
from ._slots import Slots
from ._source import SourceSampler
from ._stall import StallWatch
from ._statistics import Reading, read
from ._strategies import is_freshest_first, keeps_partials, max_token_lag, tail_batch
from ._table import EXPIRED_RETRIES, GroupTable, Row
from ._task import TaskSpec
from ._workers import Workers
from .abc import InferenceController, Tokenizer

# Checkpoints are imported by who saves or restores one: `import rollnest` is faster without.
if TYPE_CHECKING:
    from ._saving import Saver

__all__ = ["Hooks", "Parts", "Setup", "assemble"]


@frozen(eq=False, kw_only=True)
class Setup:
    """What an engine is to be made of; see `Engine`.

    Attributes:
        run: Name of the run.
        start_paused: Whether the policy gets its first weights from the trainer.
    """

    controller: InferenceController
    specs: Sequence[TaskSpec]
    batch_size: int | None
    publish_every: int
    tokenizer: Tokenizer | None
    capacity: Capacity
    allocate: Allocate
    outage: float
    stall_after: float | None
    version: int
    start_paused: bool
    seed: int
    run: str
    instruments: Instruments


@frozen(eq=False, kw_only=True)
class Hooks:
    """What the parts tell the engine.

    Attributes:
        settled: A group of a task has ended.
        look: Whoever waits for a batch is to look again.
        stalled: Nothing has ended for so many seconds.
        give_up: The policy's server is down for good, and why.
        break_engine: The engine can't go on: what failed, and how.
    """

    settled: Callable[[str, Row], None]
    look: Callable[[], None]
    stalled: Callable[[float], None]
    give_up: Callable[[Sequence[Exception]], None]
    break_engine: Callable[[str, BaseException], None]


@frozen(eq=False, kw_only=True)
class Parts:
    """What an entered engine is made of."""

    gate: Gate
    outage: Outage
    prober: Prober
    workers: Workers
    processes: Processes
    producers: Mapping[str, Producer]
    counters: Mapping[str, TokenCounters]
    judge_counters: TokenCounters
    delivery: Delivery
    admission: Admission
    eviction: Eviction
    judge_slots: Slots
    tool_slots: Slots
    services: RolloutServices  # of one of the tasks; an evaluation's are made of them
    judging_of: Callable[[TaskSpec], Judging | None]
    evaluations: Evaluations
    lag: LagWatch
    stall: StallWatch
    saver: Saver


def assemble(setup: Setup, hooks: Hooks, *, awaits_weights: bool) -> Parts:
    """Builds everything; the controller is entered, so its capabilities are known.

    Raises:
        UnsupportedSampling: The controller can't honour a task's sampling.
        ValueError: A task needs a tokenizer, and there is none.
    """
    from ._saving import Saver

    capabilities = setup.controller.capabilities
    for spec in setup.specs:
        check_training(spec.sampling, capabilities)
        if spec.sampling.stop and setup.tokenizer is None:
            raise ValueError(f"task {spec.name!r}: stop={spec.sampling.stop!r} needs a tokenizer")
    stop_token_ids = capabilities.stop_token_ids
    if setup.tokenizer is not None:
        stop_token_ids |= setup.tokenizer.stop_token_ids
    clock = loop_clock()
    gate = Gate(
        version=setup.version,
        slots=Slots(setup.capacity.turns),
        clock=clock,
        new_scope=loop_scopes(),
        awaits_weights=awaits_weights,
    )
    outage = Outage(gate, setup.instruments, setup.outage)
    prober = Prober(
        outage,
        gate=gate,
        controller=setup.controller,
        instruments=setup.instruments,
        on_over=hooks.give_up,
    )
    workers = Workers()
    instruments = setup.instruments
    processes = Processes(clock, main_file())
    judge_slots = Slots(setup.capacity.judges, clock, name="judge slot", instruments=instruments)
    tool_slots = Slots(setup.capacity.tools, clock, name="tool slot", instruments=instruments)
    weights = {spec.name: spec.weight for spec in setup.specs}
    allocation = Allocation(weights, setup.allocate)
    admission = Admission(setup.capacity.groups, weights)
    current_task = loop_tasks()
    counters = {spec.name: TokenCounters() for spec in setup.specs}
    judge_counters = TokenCounters()
    producers: dict[str, Producer] = {}
    services_of: dict[str, RolloutServices] = {}

    def share(task: str) -> float | None:
        return delivery.share(task)

    def taken() -> int:
        return delivery.taken(gate.version)

    def judging_of(spec: TaskSpec) -> Judging | None:
        if spec.judger is None:
            return None
        return Judging(
            spec.judger,
            gate=gate,
            slots=judge_slots,
            workers=workers,
            processes=processes,
            limit=spec.limits.judge,
            policy=policy_services(services_of[setup.specs[0].name], judge_counters),
        )

    for spec in setup.specs:
        table = GroupTable(
            spec.name,
            max_staleness=spec.strategy.max_staleness,
            retries=0 if spec.strategy.expired == "drop" else EXPIRED_RETRIES,
            tail_batch=tail_batch(spec.strategy),
            freshest_first=is_freshest_first(spec.strategy),
            restart_whole=overrides_generate_group(spec.loop),
            replays_groups=replays_groups(spec.loop),
            max_token_lag=max_token_lag(spec.strategy),
        )
        services = services_of[spec.name] = RolloutServices(
            task=spec.name,
            controller=setup.controller,
            capabilities=capabilities,
            gate=gate,
            outage=outage,
            tokenizer=setup.tokenizer,
            workers=workers,
            tool_slots=tool_slots,
            counters=counters[spec.name],
            instruments=setup.instruments,
            sampling=spec.sampling,
            partial=keeps_partials(spec.strategy),
            limits=spec.limits,
            max_response_tokens=spec.max_response_tokens,
            max_context=min(spec.max_context or capabilities.max_context, capabilities.max_context),
            check=check_training,
            stop_token_ids=stop_token_ids,
            seed=setup.seed,
            current_task=current_task,
            newest_version=gate.newest_version,
        )
        producers[spec.name] = Producer(
            spec,
            table=table,
            sampler=_sampler(spec, workers, setup.seed),
            gate=gate,
            runner=GroupRunner(
                spec,
                table=table,
                services=services,
                judging=judging_of(spec),
                on_settled=partial(hooks.settled, spec.name),
                on_break=hooks.break_engine,
            ),
            admission=admission,
            share=partial(share, spec.name),
            taken=taken,
            publish_every=setup.publish_every,
            on_idle=hooks.look,
            on_crash=partial(hooks.break_engine, "production failed"),
        )

    def readings() -> dict[str, Reading]:
        return {
            name: read(
                producer.table,
                counters[name],
                producer.runner.produced,
                gate.closed_seconds,
                gate.clock(),
            )
            for name, producer in producers.items()
        }

    def expired(name: str, count: int) -> None:
        setup.instruments.tell("groups_expired", name, count)
        admission.changed(name)

    delivery = Delivery(
        {name: producer.table for name, producer in producers.items()},
        allocation,
        readings,
        is_exhausted=lambda name: producers[name].exhausted,
        on_expired=expired,
        batch_size=setup.batch_size,
    )
    evaluations = Evaluations(gate)
    lag = LagWatch(
        lambda: gate.turns,
        lambda: (
            gate.turns > 0
            or evaluations.on
            or any(producer.table.flight for producer in producers.values())
        ),
        partial(setup.instruments.tell, "loop_lagged"),
    )
    setup.instruments.add(lag)
    return Parts(
        gate=gate,
        outage=outage,
        prober=prober,
        workers=workers,
        processes=processes,
        producers=producers,
        counters=counters,
        judge_counters=judge_counters,
        delivery=delivery,
        admission=admission,
        eviction=Eviction(producer.runner for producer in producers.values()),
        judge_slots=judge_slots,
        tool_slots=tool_slots,
        services=services_of[setup.specs[0].name],
        judging_of=judging_of,
        evaluations=evaluations,
        lag=lag,
        stall=StallWatch(gate, setup.stall_after, hooks.stalled),
        saver=Saver(
            setup.run,
            seed=setup.seed,
            start_paused=setup.start_paused,
            vocab_size=capabilities.vocab_size,
            gate=gate,
            delivery=delivery,
            producers=producers,
            counters=counters,
            workers=workers,
            clock=clock,
        ),
    )


def _sampler(spec: TaskSpec, workers: Workers, seed: int) -> Sampler | SourceSampler:
    if not isinstance(spec.prompts, Sequence):
        return SourceSampler(spec.name, spec.prompts, workers)
    return Sampler(spec.name, spec.prompts, epochs=spec.epochs, shuffle=spec.shuffle, seed=seed)
