"""Captures of threads that share nothing do not see one another's patches."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir.errors import SylvieError

THREADS = 4


class Slow(nn.Module):
    """Sleeps in forward, so that captures of several threads would overlap; counts those that run at one time."""

    running: tuple[list[int], list[int]] = ([], [])  # as many entries as captures run; the largest numbers of them

    def __init__(self, width: int, refused: bool = False) -> None:
        super().__init__()
        self.lin, self.refused = nn.Linear(4, width), refused

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        now, most = self.running
        now.append(1)
        try:
            most.append(len(now))
            time.sleep(0.05)
            h = self.lin(x)
            if self.refused:
                return float(h.detach().sum())
            return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        finally:
            now.pop()


def test_one_thread_captures_at_a_time() -> None:
    x, edges = torch.randn(9, 4), torch.randint(0, 9, (2, 20))
    kept = nn.Module.__setattr__, nn.Module.__dict__.get("__getattribute__")
    models = [Slow(3 + number) for number in range(THREADS)]
    expected, found = [model(x, edges) for model in models], [torch.empty(0)] * THREADS
    raised: list[BaseException] = []
    Slow.running[1].clear()

    def work(number: int) -> None:
        try:
            net = sylvie_fx.distribute(models[number])
            with torch.inference_mode(number % 2 == 1):
                found[number] = net(*net.shard(x, edges)).full()
            refused = sylvie_fx.distribute(Slow(2, refused=True))
            given = refused.shard(x, edges)
            with pytest.raises(SylvieError):
                refused(*given)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not raised, raised
    assert max(Slow.running[1]) == 1
    assert (nn.Module.__setattr__, nn.Module.__dict__.get("__getattribute__")) == kept
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach())
