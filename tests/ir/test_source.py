from __future__ import annotations

import json
import os
from pathlib import Path

import torch

import sylvie_fx
from sylvie_fx.ir.source import is_ours, user_line


def frame(file: object, line: int = 3) -> str:
    return f'  File "{file}", line {line}, in forward\n    pass\n'


PACKAGE = Path(sylvie_fx.__file__).parent
TORCH = Path(torch.__file__).parent


def test_the_innermost_line_that_is_the_users() -> None:
    trace = frame("train.py", 1) + frame("model.py", 2) + frame(PACKAGE / "api.py") + frame(TORCH / "nn" / "linear.py")
    assert user_line(trace) == "model.py:2"


def test_a_script_in_a_checkout_of_the_same_name_is_the_users(tmp_path: Path) -> None:
    for folder in ("sylvie_fx", "torch", "dgl"):
        script = tmp_path / folder / "examples" / "train.py"
        assert user_line(frame(PACKAGE / "api.py") + frame(script, 9)) == f"{script}:9"
    beside = PACKAGE.parent / "examples" / "pyg_gat.py"
    assert user_line(frame(beside, 4)) == f"{beside}:4"


def test_python_and_generated_code_are_nobodys() -> None:
    trace = (
        frame("model.py", 2)
        + frame(json.__file__)
        + frame("<string>")
        + frame(os.path.join("tmp", "torch_geometric.nn.x.py"))
    )
    assert user_line(trace) == "model.py:2"


def test_without_a_users_line_a_librarys_or_the_innermost() -> None:
    assert user_line(frame(PACKAGE / "api.py", 1) + frame(TORCH / "x.py", 2)) == f"{TORCH / 'x.py'}:2"
    assert user_line(None) == user_line("") == ""


def test_ours() -> None:
    assert is_ours(str(PACKAGE / "passes" / "base.py"))
    assert is_ours(str((PACKAGE / "passes").resolve() / "base.py"))
    assert not is_ours(str(PACKAGE.parent / "examples" / "dgl_gcn.py"))
