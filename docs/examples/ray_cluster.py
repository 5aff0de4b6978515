"""Everything in Ray's actors: policy, agent loops, engine, and a trainer of two ranks that shares each batch out.

    python docs/examples/ray_cluster.py

On a laptop it starts a small Ray of its own; with `RAY_ADDRESS` it uses that cluster. Put your server in the place of
the scripted policy, and your training step in the place of `step`.
"""

import os
import socket
from collections.abc import Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist

from rollnest import AsyncStrategy, Engine, Group, Prompt, Rollout, Sample, Sampling, TaskSpec
from rollnest.testing import ScriptedController
from rollnest_adapters.ray import RayController, RayEngine, RayLoops, RayOptions, policy_actor

cluster: Any = ray  # Ray's types don't say all that it takes
ranks: Any = dist
STEPS, GROUPS, RANKS = 3, 8, 2
LIGHT = RayOptions(num_cpus=0)  # a real run gives each actor its CPUs


async def solve(rollout: Rollout) -> None:
    """An agent loop: it and its tools run in the actors of `RayLoops`."""
    turn = await rollout.generate()
    rollout.append([await rollout.tool(count, turn.ids.tolist())])
    await rollout.generate()


async def count(ids: list[int]) -> int:
    return 100 + len(ids)


async def judge(sample: Sample) -> float:
    return float(sample.policy_tokens % 2)


def make_engine(policy: Any) -> Engine:
    """Runs in the engine's actor. What it makes there, it owns."""
    prompts = [Prompt(f"p{i}", token_ids=[1 + i, 2, 3]) for i in range(200)]
    task = TaskSpec(
        "count",
        prompts,
        judger=judge,
        loop=RayLoops(solve, workers=2, options=LIGHT),
        group_size=4,
        sampling=Sampling(16),
        strategy=AsyncStrategy(max_staleness=1),
    )
    return Engine(RayController(policy), task, batch_size=GROUPS)


def shares(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """Splits groups by their tokens: the largest first, each to the rank that has the fewest so far."""
    parts: list[list[Group]] = [[] for _ in range(count)]
    tokens = [0] * count
    for group in sorted(groups, key=size, reverse=True):
        rank = tokens.index(min(tokens))
        parts[rank].append(group)
        tokens[rank] += size(group)
    return parts


def size(group: Group) -> int:
    return sum(len(segment) for sample in group.samples for segment in sample.segments)


class Trainer:
    """One rank of the trainer. Only the first one has the engine; the others get their shares from it."""

    def __init__(self, rank: int, port: int, engine: RayEngine | None) -> None:
        address = f"tcp://127.0.0.1:{port}"
        ranks.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
        self.rank = rank
        self.engine = engine
        self.weight = torch.zeros(())

    def train(self) -> list[tuple[int, int]]:
        """Trains a few steps; returns how many groups and tokens each brought to this rank."""
        return [self.step() for _ in range(STEPS)]

    def step(self) -> tuple[int, int]:
        batch = self.engine.next_batch() if self.engine else None
        mine: list[list[Group] | None] = [None]
        ranks.scatter_object_list(mine, shares(batch.groups, RANKS) if batch else None, src=0)
        groups = mine[0] or []
        rewards = [sample.reward or 0.0 for group in groups for sample in group.samples]
        gradient = torch.tensor([sum(rewards), float(len(rewards))])
        ranks.all_reduce(gradient)  # your backward pass
        self.weight = self.weight + gradient[0] / gradient[1]
        trained = torch.ones(())
        ranks.all_reduce(trained)  # every rank has trained its share, or nobody commits
        if self.engine and batch and trained == RANKS:
            self.engine.commit(batch)
            with self.engine.paused() as pause:
                pause.update_weights({"weight": self.weight})
        return len(groups), sum(map(size, groups))


Rank = cluster.remote(num_cpus=0)(Trainer)


def main() -> None:
    cluster.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 4, log_to_driver=False)
    policy = policy_actor(ScriptedController, options=LIGHT)
    with RayEngine.start(lambda: make_engine(policy), options=LIGHT) as engine:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        trainers = [Rank.remote(rank, port, None if rank else engine) for rank in range(RANKS)]
        for rank, steps in enumerate(cluster.get([trainer.train.remote() for trainer in trainers])):
            print(f"rank {rank}: groups and tokens of each step {steps}")
        statistics = engine.statistics()
        print(f"weights v{statistics.version}, {statistics.total('delivered')} groups delivered")


if __name__ == "__main__":
    main()
