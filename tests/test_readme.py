"""The Python code in the README and in docs/ runs, block by block in one namespace for each file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sylvie_fx.ir import rules

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.pyg
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_code_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))  # what a document registers ends with it
    text = file.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": __name__}
    for found in BLOCK.finditer(text):
        lines_before = text[: found.start(1)].count("\n")
        # Padded, so that a traceback and source lines name the line of the document.
        exec(compile("\n" * lines_before + found[1], str(file), "exec"), namespace)


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\b((?:docs|examples|tests|benchmarks)/[\w./]+\.(?:md|py))", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
