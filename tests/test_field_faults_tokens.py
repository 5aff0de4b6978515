"""Field faults of tokens, templates, masks and sampling parameters; the numbers are those of the case texts."""

from __future__ import annotations

import pytest
from anyio import create_task_group, sleep

from rollnest import Capabilities, Engine, Message, Prompt, Rollout, Sample, Sampling, Status
from rollnest.abc import Attempt
from rollnest.errors import Starved, UnsupportedSampling
from rollnest.testing import RecordingInstrument, Reply, ScriptedController, check_sample

from .helpers import in_turn, one_batch, spec
from .toy_tokenizer import EOS, ToyTokenizer

pytestmark = pytest.mark.anyio


def ids(*token_ids: int) -> list[Prompt]:
    return [Prompt("p", token_ids=token_ids)]


async def test_bug_001_sampled_ids_are_never_encoded_again() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "tool", "content": "TO"}])
        await rollout.generate()

    tokenizer = ToyTokenizer({10: "a", 11: "b", 30: "ab", 40: "T", 41: "O"})
    assert tokenizer.encode("ab") == [30]
    controller = ScriptedController(in_turn(Reply([10, 11, EOS]), Reply([5, EOS])))
    task = spec(prompts=ids(1, 2), loop=loop, group_size=1)
    batch, _ = await one_batch(controller, task, tokenizer=tokenizer)
    assert controller.prompts[1] == [1, 2, 10, 11, 9, 40, 41]
    (sample,) = batch.samples
    check_sample(sample)
    assert sample.segments[0].ids.tolist() == [10, 11, 9, 40, 41, 5, 9]
    assert sample.turns[0].text == "ab"


@pytest.mark.parametrize("keeps", [True, False])
async def test_bug_002_rewritten_history_is_a_segment_of_its_own(keeps: bool) -> None:
    async def loop(rollout: Rollout) -> None:
        question = list(rollout.prompt.messages or ())
        turn = await rollout.chat(question)
        answer = turn.message if keeps else {"role": "assistant", "content": "a"}
        await rollout.chat([*question, answer, {"role": "tool", "content": "t"}])

    tokenizer = ToyTokenizer({1: "x", 2: "y", 70: "<", 71: ">", 5: "a", 40: "t"})
    controller = ScriptedController(in_turn(Reply([70, 71, 5, EOS]), Reply([6, EOS])))
    task = spec(prompts=["xy"], loop=loop, group_size=1)
    batch, _ = await one_batch(controller, task, tokenizer=tokenizer)
    (sample,) = batch.samples
    check_sample(sample)
    rows = [(s.prompt_ids.tolist(), s.ids.tolist()) for s in sample.segments]
    if keeps:
        assert controller.prompts[1] == [1, 2, 70, 71, 5, 9, 40]
        assert rows == [([1, 2], [70, 71, 5, 9, 40, 6, 9])]
    else:
        assert controller.prompts[1] == [1, 2, 5, 9, 40]
        assert rows == [([1, 2], [70, 71, 5, 9]), ([1, 2, 5, 9, 40], [6, 9])]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_bug_004_a_turn_that_was_cut_gets_its_end_as_context(goes_on: bool) -> None:
    async def loop(rollout: Rollout) -> None:
        turn = await rollout.generate()
        assert turn.finish_reason == "length"
        if goes_on:
            rollout.append_messages([{"role": "tool", "content": "t"}])

    controller = ScriptedController(in_turn(Reply([5, 6, 7, 8])))
    task = spec(prompts=ids(1, 2), loop=loop, group_size=1, sampling=Sampling(2))
    batch, _ = await one_batch(controller, task, tokenizer=ToyTokenizer({40: "t"}))
    (sample,) = batch.samples
    assert (sample.status, sample.finish_reason) == (Status.COMPLETED, "length")
    (segment,) = sample.segments
    assert segment.ids.tolist() == ([5, 6, 9, 40] if goes_on else [5, 6])
    assert segment.mask.tolist() == ([1, 1, 0, 0] if goes_on else [1, 1])


async def test_bug_007_any_stop_id_ends_a_turn_and_history_keeps_it() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "tool", "content": "t"}])
        await rollout.generate()

    controller = ScriptedController(in_turn(Reply([5, 0]), Reply([6, EOS])))
    tokenizer = ToyTokenizer({40: "t"}, stops=(EOS, 0))
    task = spec(prompts=ids(1), loop=loop, group_size=1)
    batch, _ = await one_batch(controller, task, tokenizer=tokenizer)
    (segment,) = next(batch.samples).segments
    assert segment.ids.tolist() == [5, 0, 40, 6, 9]
    assert segment.mask.tolist() == [1, 1, 0, 1, 1]


async def test_bug_008_a_pause_inside_a_character() -> None:
    seen: list[str] = []

    async def judge(sample: Sample) -> float:
        seen.append(sample.text)
        return 1.0

    tokenizer = ToyTokenizer({80: b"\xc3", 81: b"\xa9"})
    assert tokenizer.decode([80]) == tokenizer.decode([81]) == "\ufffd"
    controller = ScriptedController(in_turn(Reply([80, 81, EOS], delay=3.0), Reply([81, EOS])))
    task = spec(prompts=ids(1), judger=judge, group_size=1)
    async with (
        Engine(controller, task, tokenizer=tokenizer) as engine,
        create_task_group() as group,
    ):
        group.start_soon(engine.next_batch, 1)
        await sleep(1.5)
        async with engine.paused():
            assert engine.statistics().total("tokens_in_records") == 1
    assert controller.prompts == [[1], [1, 80]]
    assert seen == ["é"]


async def test_bug_008_two_halves_and_three_logprobs() -> None:
    tokenizer = ToyTokenizer({80: b"\xc3", 81: b"\xa9"})
    controller = ScriptedController(in_turn(Reply([80, 81, EOS])))
    batch, _ = await one_batch(controller, spec(prompts=ids(1), group_size=1), tokenizer=tokenizer)
    (sample,) = batch.samples
    assert sample.text == "é"
    assert len(sample.segments[0].logprobs) == 3


async def test_bug_010_the_third_request_holds_everything_before_it() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append([40])
        await rollout.generate()
        rollout.append([41])
        await rollout.generate()

    controller = ScriptedController(in_turn(Reply([5]), Reply([6]), Reply([7])))
    batch, _ = await one_batch(controller, spec(prompts=ids(1), loop=loop, group_size=1))
    assert controller.prompts == [[1], [1, 5, 40], [1, 5, 40, 6, 41]]
    (segment,) = next(batch.samples).segments
    assert segment.ids.tolist() == [5, 40, 6, 41, 7]
    assert segment.mask.tolist() == [1, 0, 1, 0, 1]
    assert segment.response.policy_tokens == 3


async def test_bug_011_a_prompt_that_does_not_fit_is_never_cut() -> None:
    controller = ScriptedController(max_context=6)
    recording = RecordingInstrument()
    task = spec(prompts=ids(*range(1, 9)), group_size=1, starve_after=1)
    async with Engine(controller, task, instruments=[recording]) as engine:
        with pytest.raises(Starved, match="8 tokens and leaves no room in a context of 6"):
            await engine.next_batch(1)
    assert controller.prompts == []
    sample = recording.samples[0]
    assert sample.status is Status.FAILED
    assert sample.failure is not None
    assert sample.failure.kind == "data"
    assert sample.policy_tokens == 0


async def test_bug_014_only_what_the_server_returned_is_trained() -> None:
    async def loop(rollout: Rollout) -> None:
        await rollout.generate()
        rollout.append_messages([{"role": "tool", "content": "t"}])
        await rollout.generate()

    tokenizer = ToyTokenizer({2: "q", 40: "t"}, header=[3, 4], after_stop=[10])
    controller = ScriptedController(in_turn(Reply([5, EOS]), Reply([6, EOS])))
    task = spec(prompts=["q"], loop=loop, group_size=1)
    batch, _ = await one_batch(controller, task, tokenizer=tokenizer)
    (segment,) = next(batch.samples).segments
    assert segment.prompt_ids.tolist() == [2, 3, 4]
    assert segment.ids.tolist() == [5, 9, 10, 40, 3, 4, 6, 9]
    assert segment.mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1]


async def test_bug_018_a_turn_shared_by_two_branches_is_trained_once() -> None:
    async def loop(rollout: Rollout) -> None:
        root = await rollout.generate()
        branch = rollout.segment([1, *root.ids])
        await rollout.generate()
        await branch.generate()

    controller = ScriptedController(in_turn(Reply([5, 6]), Reply([7]), Reply([8])))
    batch, _ = await one_batch(controller, spec(prompts=ids(1), loop=loop, group_size=1))
    (sample,) = batch.samples
    rows = [(s.prompt_ids.tolist(), s.ids.tolist(), s.mask.tolist()) for s in sample.segments]
    assert rows == [([1], [5, 6, 7], [1, 1, 1]), ([1, 5, 6], [8], [1])]
    assert sample.policy_tokens == batch.statistics.policy_tokens == 4
    assert controller.prompts[2] == [1, 5, 6]


async def test_bug_102_sub_agents_have_a_row_each_and_are_one_sample() -> None:
    async def agent(rollout: Rollout, question: str, then: str) -> None:
        messages: list[Message] = [{"role": "user", "content": question}]
        turn = await rollout.chat(messages)
        await sleep(0.5)
        await rollout.chat([*messages, turn.message, {"role": "tool", "content": then}])

    async def loop(rollout: Rollout) -> None:
        async with create_task_group() as group:
            group.start_soon(agent, rollout, "p", "t")
            group.start_soon(agent, rollout, "c", "u")

    answers = {(1,): 5, (2,): 6, (1, 5, 9, 40): 7, (2, 6, 9, 41): 8}
    pieces = {1: "p", 2: "c", 40: "t", 41: "u", 5: "a", 6: "b"}

    def script(attempt: Attempt) -> Reply:
        return Reply([answers[tuple(attempt.prompt_ids.tolist())], EOS], delay=1.0)

    task = spec(prompts=["p"], loop=loop, group_size=1)
    batch, _ = await one_batch(ScriptedController(script), task, tokenizer=ToyTokenizer(pieces))
    assert len(batch.groups[0]) == 1
    (sample,) = batch.samples
    check_sample(sample)
    rows = sorted((s.prompt_ids.tolist(), s.ids.tolist()) for s in sample.segments)
    assert rows == [([1], [5, 9, 40, 7, 9]), ([2], [6, 9, 41, 8, 9])]


async def test_bug_099_a_sample_says_how_it_was_sampled() -> None:
    raw = Capabilities(vocab_size=100, max_context=50, logprobs="raw", sampling={"temperature"})
    half = spec(sampling=Sampling(8, temperature=0.5))
    with pytest.raises(UnsupportedSampling, match=r"raw logprobs.*temperature=0\.5"):
        async with Engine(ScriptedController(capabilities=raw), half):
            pytest.fail("entered")
    batch, _ = await one_batch(ScriptedController(), half)
    for sample in batch.samples:
        assert sample.logprobs_mode == "processed"
        assert sample.sampling is not None
        assert sample.sampling.temperature == 0.5


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0])
def test_bug_100_greedy_sampling_is_no_training(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        spec(sampling=Sampling(8, temperature=temperature))


@pytest.mark.parametrize(("prompt", "cap"), [(3, 5), (18, 2)])
async def test_bug_101_the_default_cap_is_the_response_limit(prompt: int, cap: int) -> None:
    caps: list[int] = []

    def script(attempt: Attempt) -> Reply:
        caps.append(attempt.max_tokens)
        return Reply([5] * 30)

    task = spec(prompts=ids(*[2] * prompt), group_size=1, max_response_tokens=5)
    await one_batch(ScriptedController(script, max_context=20), task)
    assert set(caps) == {cap}
