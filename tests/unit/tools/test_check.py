"""``hvd-order check``: each rule on scripts as users write them, with the mistake and without."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import checked_scripts
from helpers.checked_scripts import HEAD, SHARDED, START, WRAP
from helpers.ranks import REPOSITORY

from hvd_order.base.errors import InvalidUsage
from hvd_order.tools.check.rules import RULES, reference_page
from hvd_order.tools.check.run import check_paths

# Name: (code, script, the line that is meant). Lines of the script carry "# <--" there.
MISTAKES = {
    "clip after step": ("HVD101", HEAD + """
def train_one_epoch(model, optimizer, loader, args):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # <--
"""),
    "clip after a scaler's step": ("HVD101", HEAD + """
for batch in loader:
    scaler.scale(model(batch)).backward()
    scaler.step(self.optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)  # <--
    scaler.update()
"""),
    "zero_grad too late": ("HVD102", HEAD + """
for batch in loader:
    loss = model(batch)
    loss.backward()
    optimizer.zero_grad()  # <--
    optimizer.step()
"""),
    "wrapped twice": ("HVD201", HEAD + START + WRAP + """
optimizer = hvd.DistributedOptimizer(optimizer)  # <--
"""),
    "wrapped twice at once": ("HVD201", HEAD + START + """
hvd.broadcast_parameters(model.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizer))  # <--
"""),
    "scheduler before wrapping": ("HVD202", HEAD + START + """
scheduler = StepLR(optimizer, step_size=1)  # <--
""" + WRAP),
    "scheduler on the inner one": ("HVD202", HEAD + """
def build(model, optimizer):
    hvd.broadcast_parameters(model.state_dict(), 0)
    for group in optimizer.param_groups:
        group["lr"] *= hvd.size()
    distributed = hvd.DistributedOptimizer(optimizer)
    return distributed, optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)  # <--
"""),
    "compiled and run before": ("HVD203", HEAD + START + """
compiled = torch.compile(model)
compiled(example)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # <--
hvd.broadcast_parameters(model.state_dict(), 0)
"""),
    "hook after compile": ("HVD204", HEAD + START + WRAP + """
model.compile()
model.layers[0].register_forward_hook(print)  # <--
"""),
    "hook on the module below compile": ("HVD204", HEAD + """
def prepare(model):
    fast = torch.compile(model, fullgraph=True)
    model.head.register_full_backward_hook(print)  # <--
    return fast
"""),
    "DDP as well": ("HVD205", HEAD + START + """
model = DDP(model)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # <--
hvd.broadcast_parameters(model.state_dict(), 0)
"""),
    "inner step": ("HVD206", HEAD + START + """
distributed = hvd.DistributedOptimizer(optimizer)
hvd.broadcast_parameters(model.state_dict(), 0)
for batch in loader:
    model(batch).backward()
    optimizer.step()  # <--
"""),
    "no broadcast": ("HVD301", HEAD + START + """
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # <--
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""),
    "seeds of their own and no broadcast": ("HVD301", HEAD + """
hvd.init()
torch.manual_seed(42 + hvd.rank())
optimizer = optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer)  # <--
"""),
    "optimizer loaded on one rank": ("HVD302", HEAD + START + """
if hvd.rank() == 0:
    checkpoint = torch.load("last.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])  # <--
""" + WRAP),
    "no device": ("HVD303", HEAD + """
hvd.init()
torch.manual_seed(1)
model = Net().cuda()  # <--
optimizer = hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1 * hvd.size()))
"""),
    "no device, torch.device": ("HVD303", HEAD + """
hvd.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # <--
"""),
    "not sharded": ("HVD401", HEAD + START + WRAP + """
loader = DataLoader(data, batch_size=64, shuffle=True)  # <--
"""),
    "collective on rank 0": ("HVD501", HEAD + """
def log(value):
    if hvd.rank() == 0:
        print(hvd.allreduce(value))  # <--
"""),
    "collective behind a name": ("HVD501", HEAD + """
verbose = 1 if hvd.rank() == 0 else 0
if verbose:
    hvd.barrier()  # <--
"""),
    "collective after an early return": ("HVD501", HEAD + """
def save(model):
    if not is_main_process():
        return
    state = hvd.broadcast_object(model.state_dict())  # <--
"""),
    "collective after some go on": ("HVD501", HEAD + """
for batch in loader:
    loss = step(batch)
    if hvd.rank() != 0:
        continue
    print(hvd.allreduce(loss))  # <--
"""),
    "collective after some stop": ("HVD501", HEAD + """
while True:
    if hvd.rank() == 0:
        break
    hvd.barrier()  # <--
"""),
    "collective in a function": ("HVD501", HEAD + """
class Trainer:
    def average(self, x):
        return hvd.allreduce(x)
    def validate(self):
        return self.average(self.loss())
    def epoch(self):
        if self.rank == 0:
            self.validate()  # <--
"""),
    "a learning rate of each rank's own": ("HVD503", HEAD + """
hvd.init()
torch.cuda.set_device(hvd.local_rank())
model = Net().cuda()
rate = 0.1 if hvd.rank() == 0 else 0.01
optimizer = optim.SGD(model.parameters(), lr=rate * hvd.size())  # <--
""" + WRAP),
    "a learning rate that one rank changes": ("HVD503", HEAD + START + WRAP + """
for group in optimizer.param_groups:
    group["lr"] *= 1.0 + 0.1 * hvd.rank()  # <--
"""),
    "checkpoint of every rank": ("HVD502", HEAD + START + WRAP + """
def save(epoch):
    torch.save(model.state_dict(), f"checkpoint-{epoch}.pt")  # <--
for epoch in range(10):
    save(epoch)
"""),
    "learning rate (note)": ("HVD601", HEAD + """
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.1))  # <--
"""),
    "compiled before (note)": ("HVD602", HEAD + START + """
model = torch.compile(model)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # <--
"""),
}  # fmt: skip

RIGHT = {
    "the usual loop": HEAD + START + WRAP + SHARDED + """
loader = DataLoader(data, batch_size=64, sampler=sampler)
scheduler = StepLR(optimizer, 1)
model = torch.compile(model)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    scheduler.step()
    average = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print(average)
        torch.save(model.state_dict(), "model.pt")
""",
    "accumulation, a scaler and zero_grad behind": HEAD + """
def train(model, optimizer, scaler, loader):
    optimizer.zero_grad()
    for i, batch in enumerate(loader):
        scaler.scale(model(batch)).backward()
        if (i + 1) % 4 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if not torch.isfinite(batch).all():
            optimizer.zero_grad()
            continue
""",
    "a GAN": HEAD + """
def step(real):
    optimizer_d.zero_grad()
    loss_d(real).backward()
    optimizer_d.step()
    loss_g(real).backward()
    optimizer_d.zero_grad()
    optimizer_g.step()
    optimizer_g.zero_grad()
    (loss_a(real) + loss_b(real)).backward()
    optimizer_a.step()
    torch.nn.utils.clip_grad_norm_(b.parameters(), 1.0)
    optimizer_b.step()
""",
    "one of two libraries": HEAD + START + """
if args.ddp:
    model = DDP(model)
else:
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
""",
    "wrapped in one of two ways": HEAD + START + """
if args.fp16:
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
else:
    optimizer = hvd.DistributedOptimizer(optimizer)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if hvd.rank() == 0:
    torch.save(model, "m.pt")
""",
    "two models": HEAD + START + WRAP + """
other = optim.Adam(critic.parameters())
other = hvd.DistributedOptimizer(other, named_parameters=critic.named_parameters())
""",
    "ranks that do different things together": HEAD + """
if hvd.rank() == 0:
    size = hvd.broadcast_object(len(data), root_rank=0)
else:
    size = hvd.broadcast_object(None, root_rank=0)
if hvd.rank() in (0, 1):
    hvd.allreduce(size, process_set=pair)
name = "root" if hvd.rank() == 0 else "other"
weight = hvd.broadcast(weight if hvd.rank() == 0 else zeros, root_rank=0)
if hvd.size() > 1:
    hvd.barrier()
""",
    "files and shards of each rank": HEAD + START + WRAP + """
path = f"shard-{hvd.rank()}.pt"
torch.save(optimizer.state_dict(), path)
mine = data[hvd.rank()::hvd.size()]
loader = DataLoader(mine, batch_size=64, shuffle=True)
buffer = io.BytesIO()
torch.save(model, buffer)
def save_checkpoint():
    torch.save(model.state_dict(), "m.pt")
if hvd.local_rank() == 0:
    save_checkpoint()
""",
    "elastic": HEAD + START + """
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, epoch=0)
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, sampler=sampler)
@hvd.elastic.run
def train(state):
    state.commit()
""",
    "a device by its number": HEAD + """
hvd.init()
device = torch.device("cuda", hvd.local_rank())
model = Net().to(f"cuda:{hvd.local_rank()}")
""",
    "one process on one GPU, without hvd": """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(data, shuffle=True)
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.save(model, "m.pt")
""",
}  # fmt: skip


MISTAKES |= {name: (code, script) for name, (code, script, _) in checked_scripts.MENDED.items()}
RIGHT |= checked_scripts.RIGHT


def check(folder: Path, source: str, **options: list[str]) -> list[tuple[str, int]]:
    script = folder / "train.py"
    script.write_text(source)
    return [(one.code, one.line) for one in check_paths([script], **options).findings]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_at_its_line_and_nothing_else_is(tmp_path: Path, name: str) -> None:
    code, source = MISTAKES[name]
    (line,) = [n for n, text in enumerate(source.splitlines(), 1) if text.endswith("# <--")]
    assert check(tmp_path, source) == [(code, line)]
    for old, new in (  # the same for other ways to import
        ("import horovod.torch as hvd", "from hvd_order import torch as hvd"),
        ("import horovod.torch as hvd", "import hvd_order.torch as hvd"),
    ):
        assert check(tmp_path, source.replace(old, new)) == [(code, line)]
    whole = source.replace("import horovod.torch as hvd", "import horovod.torch")
    assert check(tmp_path, whole.replace("hvd.", "horovod.torch.")) == [(code, line)]


@pytest.mark.parametrize("name", checked_scripts.MENDED)
def test_the_cure_silences_the_rule(tmp_path: Path, name: str) -> None:
    code, source, mended = checked_scripts.MENDED[name]
    changed = source
    for old, new in mended:
        assert old in changed
        changed = changed.replace(old, new)
    assert check(tmp_path, changed) == [], code


def test_every_rule_has_a_mistake() -> None:
    assert {code for code, _ in MISTAKES.values()} | {"HVD001"} == set(RULES)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_reported(tmp_path: Path, name: str) -> None:
    assert check(tmp_path, RIGHT[name]) == []


def test_our_own_programs_are_quiet() -> None:
    folders = [
        REPOSITORY / name for name in ("examples", "benchmarks", "hvd_order", "tests/parity")
    ]
    found = check_paths(folders).findings
    # Benchmarks and the demo compare with others at one learning rate.
    compare = [one for one in found if one.code == "HVD601" and "examples" not in one.path]
    assert [str(one) for one in found if one not in compare] == []


def test_any_file_that_python_reads_is_read(tmp_path: Path) -> None:
    (tmp_path / "mark.py").write_text("x = 1\n", encoding="utf-8-sig")
    (tmp_path / "latin.py").write_text("# coding: latin-1\nx = 'ä'\n", encoding="latin-1")
    assert check_paths([tmp_path]).findings == []


def test_what_cannot_be_read_stops_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "null.py").write_text("x = 1\0\n")
    (tmp_path / "long.py").write_text("x = " + " + ".join(["f()"] * 5000) + "\n")
    name = "clip after step"
    (tmp_path / "train.py").write_text(MISTAKES[name][1])
    found = check_paths([tmp_path]).findings
    assert [one.code for one in found] == ["HVD001", "HVD001", MISTAKES[name][0]]


def test_a_method_is_not_taken_for_one_of_another_class(tmp_path: Path) -> None:
    script = (
        HEAD
        + START
        + WRAP
        + SHARDED
        + """
class Mean:
    def update(self, value):
        self.sum += hvd.allreduce(value)

def train(epoch):
    hvd.barrier()

mean = Mean()
if hvd.rank() == 0:
    bar.update(1)
    model.train()
    mean.update(loss)  # this waits for the others in vain
"""
    )
    (tmp_path / "train.py").write_text(script)
    line = 1 + script[: script.index("# this waits")].count("\n")
    assert [(one.code, one.line) for one in check_paths([tmp_path]).findings] == [("HVD501", line)]


def test_a_mistake_of_one_file_is_no_mistake_when_another_has_it(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        HEAD
        + """
def wrap(optimizer):
    return hvd.DistributedOptimizer(optimizer)
"""
    )
    main = tmp_path / "main.py"
    main.write_text(
        HEAD
        + """
from trainer import wrap
hvd.init()
lr = 0.1 * hvd.size()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""
    )
    assert [one.code for one in check_paths([trainer]).findings] == ["HVD301", "HVD601"]
    assert check_paths([trainer, main]).findings == []
    assert check_paths([tmp_path]).findings == []
    main.write_text("import trainer\nhvd.init()\n")
    assert [one.path for one in check_paths([tmp_path]).findings] == [str(trainer)] * 2


def test_comments_and_options_choose(tmp_path: Path) -> None:
    source = (
        HEAD
        + START
        + """
loader = DataLoader(
    data, shuffle=True)
hvd.DistributedOptimizer(optimizer)
torch.save(model, "a")
"""
    )
    assert {code for code, _ in check(tmp_path, source)} == {"HVD401", "HVD301", "HVD502"}
    assert {code for code, _ in check(tmp_path, source, select=["HVD3", "HVD502"])} == {
        "HVD301",
        "HVD502",
    }
    assert {code for code, _ in check(tmp_path, source, ignore=["HVD3"])} == {"HVD401", "HVD502"}
    source = source.replace("shuffle=True)", "shuffle=True)  # hvd-order: ignore[HVD401]")
    source = source.replace('"a")', '"a")  # hvd-order: ignore')
    assert {code for code, _ in check(tmp_path, source)} == {"HVD301"}
    source = source.replace("ignore[HVD401]", "ignore[HVD402, HVD101]")
    assert {code for code, _ in check(tmp_path, source)} == {"HVD301", "HVD401"}
    with pytest.raises(InvalidUsage, match="no rule has the code 'HVD9'; there are HVD001, HVD101"):
        check(tmp_path, source, select=["HVD9"])


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + "if hvd.rank() == 0:\n    hvd.barrier()\n")
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hvd_order.tools.cli", "check", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=REPOSITORY,
        )

    done = command(script, broken)
    assert done.returncode == 1
    assert done.stdout == textwrap.dedent(f"""\
        {broken}:1:7: HVD001 this is no Python that can be read: invalid syntax (correct the syntax)
        {script}:11:5: HVD501 hvd.barrier is reached by some ranks only; they wait for the others \
in vain (call it on every rank, and keep only its result or output to one)
        2 files, 2 mistakes
        """)
    note = MISTAKES["learning rate (note)"][1]
    script.write_text(note)
    done = command(script)
    assert done.returncode == 0
    assert "HVD601 note: the learning rate" in done.stdout
    assert done.stdout.endswith("\n1 file, 1 note\n")
    broken.write_text("x = 1\n")
    script.write_text("import hvd_order.torch\n")
    assert command(tmp_path).stdout == "2 files, nothing found; 1 does not use hvd_order\n"
    assert command(broken).stdout == "1 file, nothing found; it does not use hvd_order\n"
    done = command(tmp_path / "nothing.py")
    assert done.returncode == 2
    assert done.stderr == f"hvd-order: there is no file or folder {tmp_path / 'nothing.py'}\n"


def test_the_page_in_docs_is_up_to_date() -> None:
    page = (REPOSITORY / "docs/guides/check.md").read_text(encoding="utf-8")
    assert page == reference_page(), (
        "run: python -m hvd_order.tools.check.rules > docs/guides/check.md"
    )
