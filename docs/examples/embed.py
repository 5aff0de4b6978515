from random import randint

from rollnest import Batch, Engine, Prompt, Sample, TaskSpec
from rollnest.testing import Reply, ScriptedController

policy = ScriptedController(lambda attempt: Reply([randint(1, 9)]))  # a guess: put your model here
prompts = [Prompt(f"{n} + 1", token_ids=[n, 1], label=n + 1) for n in range(1, 9)]


def judge(sample: Sample) -> float:
    return float(sample.turns[0].ids[0] == sample.prompt.label)


def train(batch: Batch) -> dict[str, float]:  # one step of your trainer, which returns new weights
    return {"bias": batch.statistics.reward_mean or 0.0}


with Engine(policy, TaskSpec("sums", prompts, judger=judge, epochs=2)).blocking() as engine:
    for batch in engine.batches(4):
        with engine.paused() as pause:
            pause.update_weights(train(batch))
