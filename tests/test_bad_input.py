"""Every row of the table of bad input, and that the docs' page is what the table gives."""

from __future__ import annotations

import pytest

from .bad_input import PAGE, Case, cases, page

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case) -> None:
    outcome = case.run()
    assert outcome.error == case.error, outcome
    assert outcome.status == case.status, outcome
    assert outcome.ledger == case.ledger, outcome
    for word in case.named:
        assert word in outcome.message, outcome


def test_the_docs_page_is_current() -> None:
    made = page([(case, case.run()) for case in cases()])
    assert PAGE.read_text(encoding="utf-8") == made, "run `python -m tests.bad_input`"
