"""Mistakes on the command line are answered with the usage of the sub-command and a cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_file_that_is_not_there_is_named_with_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "no" / "hosts"
    assert main(["run", "-np", "1", "--hostfile", str(hosts), "true"]) == 2
    assert capsys.readouterr().err == (
        f"hvd-order: there is no file {hosts}; of its path {tmp_path} is there: check the name\n"
    )


@pytest.mark.parametrize(("kind", "package"), [("bash", "shtab"), ("man", "argparse-manpage")])
def test_completion_names_what_is_missing(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("shtab", "argparse_manpage.manpage"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["completion", kind]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


def test_tab_completes_commands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    ask = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        $(complete -p hvd-order | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        echo "${COMPREPLY[@]}"
    """

    def completed(*words: str) -> list[str]:
        command = ["bash", "-c", ask, "bash", str(script), "hvd-order", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()

    assert completed("doc") == ["doctor"]
    assert {"run", "check", "cluster"} <= set(completed(""))
    assert completed("run", "--log-l") == ["--log-level"]


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvd_order", "--version"], capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("hvd-order ")
