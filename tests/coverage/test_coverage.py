"""Every case of the coverage table has the status that the table of cases records."""

from __future__ import annotations

import pytest
from coverage_cases import Case
from table import attempt, cases

CASES = cases()


@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=str)
def test_status(case: Case) -> None:
    row = attempt(case)
    if case.refusal is None:
        assert row.status == "exact", row.text
    else:
        assert row.status == "refused", row.text
        assert case.refusal in row.text


def test_names_are_unique() -> None:
    assert len({str(c) for c in CASES}) == len(CASES)


@pytest.mark.parametrize("framework", sorted({c.framework for c in CASES} - {"torch"}))
def test_nine_in_ten_are_exact(framework: str) -> None:
    own = [c for c in CASES if c.framework == framework]
    assert sum(c.refusal is None for c in own) >= 0.9 * len(own)
