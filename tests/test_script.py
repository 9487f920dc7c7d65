from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sylvie_fx.ir.errors import OptionError
from sylvie_fx.script import load_script


def written(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(f"import torch\nfrom dataclasses import dataclass\n{text}")
    return path


def test_built_without_main(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("SIZE = 3\n")
    text = """
from beside import SIZE

@dataclass
class Data:
    x: torch.Tensor

def build():
    return torch.nn.Linear(SIZE, 1), (torch.ones(2, SIZE),), torch.sum

if __name__ == "__main__":
    raise SystemExit
"""
    model, data, loss = load_script(written(tmp_path, text))
    assert loss is torch.sum
    assert model(*data).shape == (2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no function build\(\)"),
        ("build = 3", r"has no function build\(\)"),
        ("def build(): return None", "returns a NoneType"),
        ("def build(): return torch.nn.Linear(1, 1), ()", "returns a tuple of 2"),
        ("def build(): return 1, (), None", "returns a int as its model"),
        ("def build(): return torch.nn.Linear(1, 1), [], None", "returns a list as its data"),
        ("def build(): return torch.nn.Linear(1, 1), (), 'mse'", "returns a str as its loss"),
    ],
)
def test_scripts_that_do_not_keep_the_convention(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_script(written(tmp_path, text))


def test_no_such_script(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no script"):
        load_script(tmp_path / "none.py")


def test_errors_of_the_script_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load_script(written(tmp_path, "def build(): return 1 / 0"))
