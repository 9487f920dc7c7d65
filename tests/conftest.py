"""What every test process needs, the one that distributes tests among workers included."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Makes DGL importable: pytest-xdist imports the module of every warning that a worker hands on, DGL's among them.
import sylvie_fx  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden texts instead of comparing with them"
    )


def pytest_runtest_setup() -> None:
    """A test that fails draws the same numbers when it is run alone; what should vary is drawn by hypothesis."""
    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Compares a text with the one kept beside the test, in ``golden/<file>.<test>.txt``."""

    def compare(text: object) -> None:
        # Line numbers of the test's own file would change with every edit above them.
        found = re.sub(r"( \| )?\b[\w]+\.py:\d+", "", str(text))
        found = "".join(line.rstrip() + "\n" for line in found.splitlines())
        name = re.sub(r"[^\w\[\]-]+", "_", request.node.name).removeprefix("test_")
        path = Path(request.node.path).parent / "golden" / f"{Path(request.node.path).stem}.{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(found, encoding="utf-8")
        assert path.exists(), f"{path} does not exist: run pytest --update-golden, and read what it writes"
        assert found == path.read_text(encoding="utf-8"), "the program has changed: see pytest --update-golden"

    return compare
