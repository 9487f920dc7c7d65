"""``import dgl`` after ``import sylvie_fx``, in a fresh interpreter each."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("sylvie_fx.dgl", exc_type=ImportError)
pytestmark = pytest.mark.dgl


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shim_is_lazy_and_leaves_nothing_behind() -> None:
    out = run(
        """
        import sys
        from sylvie_fx.dgl_import import install_import_shim
        install_import_shim()
        install_import_shim()
        finders = len(sys.meta_path)
        assert "dgl" not in sys.modules
        before = set(sys.modules)
        import dgl, dgl.nn.pytorch, torch
        assert len(sys.meta_path) == finders - 1
        assert type(dgl.__spec__.loader).__module__.startswith("_frozen_importlib")
        lent = [m for m in ("pandas", "pydantic", "yaml", "setuptools.extern") if m in sys.modules]
        for name in lent:
            assert sys.modules[name].__spec__.origin is not None, name
        graph = dgl.rand_graph(5, 9)
        print(dgl.nn.pytorch.GraphConv(3, 2, allow_zero_in_degree=True)(graph, torch.ones(5, 3)).shape)
        """
    )
    assert "torch.Size([5, 2])" in out


def test_module_of_its_own_imports_dgl() -> None:
    assert "True" in run("import sylvie_fx.dgl, dgl; print(sylvie_fx.dgl.dgl is dgl)")


def test_graphbolt_says_why_it_is_missing() -> None:
    out = run(
        """
        from sylvie_fx.dgl import dgl
        if hasattr(dgl, "graphbolt") and not hasattr(dgl.graphbolt, "__file__"):
            try:
                dgl.graphbolt.ItemSet([1])
            except ImportError as error:
                print(error)
        else:
            print("no build for this version")
        """
    )
    assert "no build for this version" in out


def test_installed_optional_modules_are_used_as_they_are(tmp_path: object) -> None:
    out = run(
        f"""
        import pathlib, sys
        folder = pathlib.Path({str(tmp_path)!r})
        (folder / "yaml.py").write_text("real = True")
        sys.path.insert(0, str(folder))
        from sylvie_fx.dgl import dgl
        import yaml
        print(yaml.real)
        """
    )
    assert "True" in out
