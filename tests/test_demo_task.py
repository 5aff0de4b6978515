"""The demo's task: disjoint problems, a judger without partial credit, a tokenizer that loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollnest import Prompt, Sample, Status
from rollnest_adapters.demo.policy import new_policy
from rollnest_adapters.demo.task import SEPARATOR, Problem, Problems, chain_sums, worked_out
from rollnest_adapters.demo.tokenizer import CHARACTERS, CharTokenizer


@pytest.fixture(scope="module")
def problems() -> Problems:
    return chain_sums(seed=0)


def test_parts_are_disjoint_by_content(problems: Problems) -> None:
    parts = [
        [problem.question for problem in part]
        for part in (problems.train, problems.probe, problems.held_out)
    ]
    everything = [question for part in parts for question in part]
    assert len(everything) == len(set(everything)) > 4000
    assert all(len(part) >= 256 for part in parts)


def test_problems_have_both_operators_and_negative_results(problems: Problems) -> None:
    assert any(" + " in p.question for p in problems.held_out)
    assert any(p.entry["answer"].startswith("-") for p in problems.held_out)


def test_another_seed_gives_another_split(problems: Problems) -> None:
    again, other = chain_sums(seed=0), chain_sums(seed=1)
    assert [p.question for p in again.held_out] == [p.question for p in problems.held_out]
    assert [p.question for p in other.held_out] != [p.question for p in problems.held_out]


@pytest.mark.parametrize(
    ("question", "working"),
    [
        ("34 + 58 =", "4+8:2c3+5:9.;92"),
        ("99 + 99 =", "9+9:8c9+9:9c;198"),
        ("43 - 27 =", "3-7:6c4-2:1.;16"),
        ("27 - 43 =", "3-7:6c4-2:1.;-16"),
        ("5 - 5 =", "5-5:0.;0"),
        ("0 + 0 =", "0+0:0.;0"),
    ],
)
def test_working_goes_column_by_column(question: str, working: str) -> None:
    assert worked_out(question) == working


def test_every_working_is_judged_right_and_fits_the_policy(problems: Problems) -> None:
    for problem in (*problems.train, *problems.held_out):
        working = worked_out(problem.question)
        assert problems.judger.score(working, problem.entry) == 1.0
        assert len(working) < 28
        assert set(problem.question + working) <= set(CHARACTERS)


def of(problems: Problems, question: str, result: int) -> Problem:
    entry = {**problems.held_out[0].entry, "question": question, "answer": str(result)}
    return Problem(question, entry)


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "92",  # no separator: nothing was worked out
        ";",
        "92;",
        ";192",
        ";9292",
        ";92 or 29",
        ";the result is 92",
        "92;29",
        ";92;",
        ";-92",
        ";9",
    ],
)
def test_junk_gets_nothing(problems: Problems, junk: str) -> None:
    assert problems.judger.score(junk, of(problems, "34 + 58 =", 92).entry) == 0.0


def test_the_function_of_the_library_alone_gives_part_of_the_credit(problems: Problems) -> None:
    # Why the judger asks for exactly 1.0.
    dataset = problems.judger._dataset
    assert 0 < dataset.score_answer("192", dict(of(problems, "34 + 58 =", 92).entry)) < 1


def test_the_judger_reads_text_and_label_of_a_sample(problems: Problems) -> None:
    problem = of(problems, "34 + 58 =", 92)
    failed = Sample(
        task="t", prompt=problem.prompt(), visit=0, index=0, status=Status.ABORTED
    )  # it has no text
    assert problems.judger.judge(failed) == 0.0
    assert problem.prompt().label is problem.entry


def test_another_separator(problems: Problems) -> None:
    judger = problems.judger.with_separator("=")
    entry = of(problems, "34 + 58 =", 92).entry
    assert judger.score("34 + 58 = 92", entry) == 1.0
    assert judger.score("34 + 58 = 92.", entry) == 1.0  # a trailing point is tolerated
    assert judger.score("it is 92", entry) == 0.0


@given(st.text(alphabet=CHARACTERS))
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    assert all(2 <= i < tokenizer.vocab_size for i in ids)


def test_tokenizer_renders_the_question_as_it_is() -> None:
    tokenizer = CharTokenizer()
    prompt = Prompt("p", messages=[{"role": "user", "content": "3 + 4 ="}])
    assert tokenizer.render(prompt.messages or ()) == tokenizer.encode("3 + 4 =")
    assert tokenizer.decode([0, *tokenizer.encode("7"), 1, 0]) == "7"


def test_tokenizer_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"'x'.*vocabulary"):
        CharTokenizer().encode("3x4")


def test_the_policy_depends_on_its_seed_only() -> None:
    one, same, other = (new_policy(seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert one.equal(same)
    assert not one.equal(other)


def test_separator_is_one_token() -> None:
    assert len(CharTokenizer().encode(SEPARATOR)) == 1
