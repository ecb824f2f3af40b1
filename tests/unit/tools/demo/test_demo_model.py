"""The demo's model and text: shapes, causality, and the same batches on every run."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hvd_order.base.errors import InvalidUsage  # noqa: E402
from hvd_order.tools.demo.corpus import (  # noqa: E402
    Batches,
    load_corpus,
    shard,
    standard_library_files,
)
from hvd_order.tools.demo.gpt import Gpt, GptConfig  # noqa: E402

SMALL = GptConfig(vocabulary=17, context=8, layers=2, heads=2, width=16)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder that looks like a standard library: 40 modules, tests and installed packages."""
    for number in range(40):
        package = tmp_path / f"package{number % 3}"
        package.mkdir(exist_ok=True)
        (package / f"module{number}.py").write_text(f"value = {number}\n" * 10)
    for left_out in ("test", "site-packages"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "other.py").write_text("secret = 1\n")
    return tmp_path


@pytest.mark.parametrize("changed", range(8))
def test_later_tokens_do_not_reach_earlier_scores(changed: int) -> None:
    torch.manual_seed(1)
    model = Gpt(SMALL)
    tokens = torch.randint(0, 17, (2, 8))
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 17
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_too_long_a_sequence_and_odd_heads_are_named() -> None:
    with pytest.raises(InvalidUsage, match="9 tokens, the model's context is 8"):
        Gpt(SMALL)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(InvalidUsage, match="width 10 is not a multiple of 4 heads"):
        GptConfig(width=10, heads=4)


def test_text_leaves_out_tests_and_installed_packages(library: Path) -> None:
    names = [path.relative_to(library).as_posix() for path in standard_library_files(library)]
    assert names == sorted(names)
    assert not any("other.py" in name for name in names)


def test_no_file_is_both_trained_on_and_validated(library: Path) -> None:
    corpus = load_corpus(library)
    train, validation = (
        {line for line in bytes(part.tolist()).decode().splitlines() if line}
        for part in (corpus.train, corpus.validation)
    )
    assert len(train) == 38
    assert len(validation) == 2
    assert train.isdisjoint(validation)


def test_too_little_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(InvalidUsage, match=r"at least 20 Python source files below .*, found 1"):
        load_corpus(tmp_path)
    with pytest.raises(InvalidUsage, match="needs 33 bytes of text, got 20"):
        Batches(torch.zeros(20, dtype=torch.uint8), context=8, batch=4, seed=0)


def test_uneven_batch_is_named() -> None:
    with pytest.raises(InvalidUsage, match="5 sequences cannot be shared evenly by 2 ranks"):
        shard(range(5), 0, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_together_read_the_whole_batch(size: int) -> None:
    text = torch.arange(250, dtype=torch.uint8)
    whole = Batches(text, context=8, batch=4, seed=3)
    for step in (0, 1, 20):  # 31 sequences make 7 batches an epoch: step 20 is in the third
        inputs, targets = whole.take(step, rank=0, size=1)
        parts = [
            Batches(text, context=8, batch=4, seed=3).take(step, rank=rank, size=size)
            for rank in range(size)
        ]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
        assert torch.equal(inputs + 1, targets)  # the target of a token is the one that follows


def test_an_epoch_reads_no_sequence_twice() -> None:
    batches = Batches(torch.zeros(250, dtype=torch.uint8), context=8, batch=4, seed=3)
    epoch = [row for step in range(7) for row in batches.rows(step)]
    assert len(set(epoch)) == len(epoch) == 28
    assert batches.rows(7) != batches.rows(0)
    assert [row for step in range(7) for row in batches.rows(step)] == epoch
