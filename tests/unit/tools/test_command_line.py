"""Mistakes on the command line are answered with the usage of the sub-command and a cure."""

from __future__ import annotations

import pytest

from hvd_order.tools.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "usage", "cure"),
    [
        ("run --nproc-per-node 2 python x.py", "run -np N", "--nproc-per-node (do you mean -np?)"),
        ("run -np 2 --tiemline-filename=t.json python x.py", "run -np N",
         "--tiemline-filename=t.json (do you mean --timeline-filename?)"),
        ("cluster run --polcy fifo synthetic", "cluster run", "--polcy (do you mean --policy?)"),
        ("predict profile.json --xyz", "predict", "unknown option: --xyz"),
    ],
)  # fmt: skip
def test_an_unknown_option(
    arguments: str, usage: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert f"usage: hvd-order {usage}" in told
    assert cure in told


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "-np", "2"]) == 2
    assert "there is no command 'rnu' (do you mean run?)" in capsys.readouterr().err
