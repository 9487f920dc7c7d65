"""Tries every case and writes docs/coverage.md: python tests/coverage/table.py [framework or part of a name]."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from coverage_cases import Case
from coverage_text import document, shorten

import sylvie_fx
from sylvie_fx.ir.errors import CommError, KernelError, SylvieError, VerifyError

PARTS = 3


@dataclass(frozen=True)
class Row:
    """What came of a case."""

    case: Case
    status: str
    text: str
    seconds: float


def cases() -> list[Case]:
    """All cases of the frameworks that are installed."""
    import cases_torch
    import cases_torch_rows  # noqa: F401  (adds its cases)
    import cases_torch_sparse  # noqa: F401  (adds its cases)

    found: list[Case] = list(cases_torch.CASES)
    if importlib.util.find_spec("torch_geometric"):
        import cases_pyg
        import cases_pyg_models

        found += cases_pyg.CASES + cases_pyg_models.CASES
    if importlib.util.find_spec("dgl"):
        import cases_dgl
        import cases_dgl_models

        found += cases_dgl.CASES + cases_dgl_models.CASES
    return found


def attempt(case: Case) -> Row:
    """Compare one case on three simulated ranks with one device, in train mode and double precision."""
    start = time.perf_counter()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        model, data = case.build()
        model = model.double().train()
        report = sylvie_fx.verify(
            model, *data, parts=PARTS, partition="random", steps=case.steps, tolerance=case.tolerance, kinds=case.kinds,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05),
        )  # fmt: skip
        if report.refused is not None:
            status, text = "refused", report.refused
        elif report.exact:
            status, text = (
                "exact",
                f"{report.largest:.0e}" + (f" (tolerance {case.tolerance})" if case.tolerance else ""),
            )
        else:
            worst = max(report.per_tensor, key=lambda k: report.per_tensor[k])
            status, text = "fails", f"{worst} differs by {report.largest:.1e}"
    except Exception as error:  # a row of the table, whatever the reason
        # Faults of sylvie_fx, and of a rank, are no refusals of the model.
        fails = isinstance(error, (CommError, KernelError, VerifyError)) or not isinstance(error, SylvieError)
        status, text = "fails" if fails else "refused", f"{type(error).__name__}: {error}"
    finally:
        torch.set_default_dtype(default)
    return Row(case, status, text, time.perf_counter() - start)


def main() -> int:
    """Try the cases; write the table where all of them were tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filter", nargs="*", help="only cases that contain one of these")
    parser.add_argument("--failures", action="store_true", help="print only what is not exact")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in cases():
        if options.filter and not any(f in str(case) for f in options.filter):
            continue
        row = attempt(case)
        rows.append(row)
        if not options.failures or row.status != "exact":
            sys.stdout.write(f"{row.status:<8} {row.seconds:5.1f} s  {row.case}  {shorten(row.text)[:400]}\n")
            sys.stdout.flush()
    counted = {s: sum(r.status == s for r in rows) for s in ("exact", "refused", "fails")}
    sys.stdout.write(f"{counted}\n")
    if not options.filter:
        path = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
        path.write_text(document(rows), encoding="utf-8")
    return 1 if counted["fails"] else 0


if __name__ == "__main__":
    sys.exit(main())
