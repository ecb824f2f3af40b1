"""A language model's training script, with one changed import and one wrapped optimizer.

It clips by global norm, accumulates, scales the loss, follows a cosine schedule, and resumes from a
checkpoint on another number of ranks. The loss of every step equals that of one process, also with
sharded optimizer state.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.ranks import run_script

TRAIN = """
import json, os, sys
import torch
import hvd_order.torch as hvd
from torch import nn

FOLDER, BEGIN, END, SHARDED = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
BATCH, PASSES, LENGTH, WORDS, WIDTH = 12, 2, 9, 31, 24

hvd.init()
torch.manual_seed(7)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, words):
        return self.head(self.layers(self.embedding(words), mask=self.mask, is_causal=True))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES,
    sharded=bool(SHARDED),
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
checkpoint = os.path.join(FOLDER, "checkpoint.pt")


def resume():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    scaler.load_state_dict(state["scaler"])


if BEGIN:
    resume()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

losses, norms = [], []
for step in range(BEGIN, END):
    numbers = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (PASSES, BATCH, LENGTH + 1), generator=numbers)
    mine = words[:, hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    total = 0.0
    for part in mine:
        logits = model(part[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / PASSES
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    losses.append(hvd.allreduce(torch.tensor(total)).item())
state = {
    "model": model.state_dict(), "optimizer": optimizer.state_dict(),
    "schedule": schedule.state_dict(), "scaler": scaler.state_dict(),
}
if hvd.rank() == 0:
    torch.save(state, checkpoint)
    report = str(getattr(optimizer, "overlap_report", str)())
    with open(os.path.join(FOLDER, f"{BEGIN}.json"), "w") as file:
        json.dump({"losses": losses, "norms": norms, "overlap": report}, file)
hvd.shutdown()
"""


def run(
    folder: Path, parts: list[tuple[int, int, int]], sharded: bool = False
) -> tuple[list[float], list[float], str]:
    """Runs (ranks, first step, end); returns all losses and norms, and the last report."""
    folder.mkdir()
    losses: list[float] = []
    norms: list[float] = []
    overlap = ""
    for ranks, begin, end in parts:
        arguments = [str(folder), str(begin), str(end), str(int(sharded))]
        script = f"import sys; sys.argv[1:] = {arguments!r}\n" + TRAIN
        for ended in run_script(ranks, script, env={"HVD_ORDER_TUNE": "0"}, timeout=120):
            assert ended.returncode == 0, ended.stderr
        said = json.loads((folder / f"{begin}.json").read_text())
        losses += said["losses"]
        norms += said["norms"]
        overlap = said["overlap"]
    return losses, norms, overlap


@pytest.mark.timeout(300)
def test_equals_one_process(tmp_path: Path) -> None:
    losses, norms, _ = run(tmp_path / "alone", [(1, 0, 24)])
    assert max(norms) > 0.5  # it clips
    assert losses[-1] < losses[0]
    for sharded in (False, True):
        ours, our_norms, overlap = run(tmp_path / f"{sharded}", [(2, 0, 12), (3, 12, 24)], sharded)
        assert ours == pytest.approx(losses, rel=2e-5)
        assert our_norms == pytest.approx(norms, rel=2e-4)
        assert "all 25 parameters" in overlap, overlap
