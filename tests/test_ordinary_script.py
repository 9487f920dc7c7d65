"""A script with the lines that people write around a model prints the same on every number of processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import copy
import os
import torch, torch.nn.functional as F
from sklearn.metrics import f1_score
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv
import sylvie_fx

torch.manual_seed(0)
data = Data(x=torch.randn(60, 8), edge_index=torch.randint(0, 60, (2, 240)), y=torch.randint(0, 3, (60,)),
            train_mask=torch.rand(60) < 0.5, val_mask=torch.rand(60) < 0.2)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(8, 16, cached=True), GATConv(16, 3)

    def forward(self, data):
        x = F.dropout(F.relu(self.conv1(data.x, data.edge_index)), p=0.5, training=self.training)
        return F.log_softmax(self.conv2(x, data.edge_index), dim=1)

model = Net()
optimizer = torch.optim.Adam([dict(params=model.conv1.parameters(), weight_decay=5e-4),
                              dict(params=model.conv2.parameters())], lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
model = sylvie_fx.distribute(model)
data = model.shard(data)
criterion, best = torch.nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 1.0])), -1.0
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    loss = criterion(model(data)[data.train_mask], data.y[data.train_mask])
    loss = loss + 1e-3 * sum(p.norm() for p in model.parameters())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        out = model(data)
        pred = out.argmax(dim=-1)
        accuracy = int((pred[data.val_mask] == data.y[data.val_mask]).sum()) / int(data.val_mask.sum())
    if accuracy > best:
        best, state = accuracy, copy.deepcopy(model.state_dict())
model.load_state_dict(state)
score = f1_score(data.y[data.val_mask].full().numpy(), pred[data.val_mask].full().numpy(), average="macro")
line = ["RESULT", loss.item(), norm.item(), accuracy, best, score, model(data).detach().sum().item()]
os.write(1, (" ".join(map(str, line)) + chr(10)).encode())  # at once: three processes write into one pipe
"""


@pytest.mark.dist
@pytest.mark.pyg
def test_same_numbers_on_one_and_three_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    expected: list[float] | None = None
    for processes in (1, 3):
        command = [sys.executable, "-m", "sylvie_fx", "run", "-n", str(processes), str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        lines = re.findall(r"RESULT (.*)", done.stdout)
        assert len(lines) == processes, done.stdout + done.stderr
        for line in lines:
            found = [float(word) for word in line.split()]
            expected = expected or found
            assert found == pytest.approx(expected, rel=2e-5)
