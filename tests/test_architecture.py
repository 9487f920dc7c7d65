"""The arrows between the parts of the package, its packaging, and the guards of its three outer folders."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
OUTER = ("passes", "runtime", "kernels")

#: What each part may import of the others. Modules directly under sylvie_fx (api, verify, cli, …) may import all.
ARROWS = {
    "ir": set(),
    "capture": {"ir", "graphs"},
    "passes": {"ir"},
    "graphs": {"ir"},
    "kernels": {"ir"},
    "runtime": {"ir", "graphs", "kernels"},
    "report": {"ir"},
}

#: Parts that join the compiler and the machine, as the modules directly under sylvie_fx do: they may import all.
JOINTS = {"sharding"}

#: Modules directly under sylvie_fx that import nothing else of ours, and that an adapter may therefore use.
LEAVES = {"dgl", "dgl_import"}


def folder_of(part: str) -> Path:
    return ROOT / part if part in OUTER else ROOT / "sylvie_fx" / part


def imported_parts(path: Path, package: str) -> dict[str, int]:
    """First-level names under sylvie_fx that a file imports, with the line; anywhere in the file."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *base.split(".")]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "sylvie_fx" else [base]
        for name in names:
            if name == "sylvie_fx" or name.startswith("sylvie_fx."):
                part = name.split(".")[1] if "." in name else "(the whole package)"
                found.setdefault(part, getattr(node, "lineno", 0))
    return found


@pytest.mark.parametrize("part", list(ARROWS))
def test_arrows(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports sylvie_fx.{name}"
        for path in sorted(folder_of(part).rglob("*.py"))
        for name, line in imported_parts(path, f"sylvie_fx.{part}").items()
        if name != part and name not in ARROWS[part] | LEAVES
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_nothing_of_ours(leaf: str) -> None:
    assert set(imported_parts(ROOT / "sylvie_fx" / f"{leaf}.py", "sylvie_fx")) <= LEAVES


def test_every_part_has_its_arrows() -> None:
    parts = {path.parent.name for path in (ROOT / "sylvie_fx").glob("*/__init__.py")}
    assert parts | set(OUTER) == set(ARROWS) | JOINTS


@pytest.mark.parametrize("module", ["dgl", "torch_geometric"])
def test_frameworks_are_imported_inside_adapters_only(module: str) -> None:
    """At module level nobody may need DGL or PyG: without them the rest has to work."""
    allowed = {ROOT / "sylvie_fx" / "dgl.py"}
    wrong = []
    for path in sorted([*(ROOT / "sylvie_fx").rglob("*.py"), *(p for o in OUTER for p in (ROOT / o).rglob("*.py"))]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if path not in allowed and any(name.split(".")[0] == module for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_every_nested_package_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("sylvie_fx", *OUTER)
        for path in (ROOT / top).rglob("__init__.py")
    }
    found = {f"sylvie_fx.{name}" if name.split(".")[0] in OUTER else name for name in found}
    assert set(setuptools["packages"]) == found
    assert {f"sylvie_fx.{name}" for name in OUTER} < set(setuptools["package-dir"])


@pytest.mark.parametrize("name", OUTER)
def test_outer_folders_are_not_packages_of_their_own(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert f"import sylvie_fx.{name}" in result.stderr


@pytest.mark.parametrize("name", OUTER)
def test_links_lead_to_the_outer_folders(name: str) -> None:
    assert (ROOT / "sylvie_fx" / name).resolve() == ROOT / name


def test_importing_the_package_is_silent_and_loads_no_framework() -> None:
    code = "import sys, sylvie_fx; print([m for m in ('dgl', 'torch_geometric', 'sklearn') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert result.stderr == ""
