"""The examples for libraries that train, each on two ranks as its first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launching import launcher, launcher_environment
from helpers.ranks import REPOSITORY

# All libraries of the examples are installed together: make test-third-party.
nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

EXAMPLES = REPOSITORY / "examples"
pytestmark = pytest.mark.timeout(400)
# Here PyTorch and torchvision may be of different builds.
BEGIN = "import helpers.environments.torchvision_operators"


def finished(command: list[str], folder: Path) -> str:
    env = launcher_environment({"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"})
    env["PYTHONPATH"] += os.pathsep + str(REPOSITORY / "tests")
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "name", ["keras_fit", "lightning_fit", "transformers_trainer", "ray_train"]
)
def test_an_example_trains_on_two_ranks(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    command = re.search(r"^(.*)python examples/\w+\.py$", script.read_text("utf-8"), re.MULTILINE)
    assert command is not None
    program = f"{BEGIN}; import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    if name in ("keras_fit", "ray_train"):  # no torchvision
        ranks = [sys.executable, str(script)]
    else:
        ranks = [sys.executable, "-c", program]
    start = launcher("-np", "2", "--no-prefix") if command[1] == "hvd-order run -np 2 " else []
    said = finished([*start, *ranks], tmp_path)
    (result,) = re.findall(r"2 ranks, (accuracy|loss) ([\d.]+)$", said, re.MULTILINE)
    assert float(result[1]) > 0.9 if result[0] == "accuracy" else float(result[1]) < 0.5, said


def test_the_notebook_trains_and_shows_what_ranks_print() -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    env = launcher_environment()
    del env["PYTEST_CURRENT_TEST"]  # with it, a kernel does not show what other processes write
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(env=env)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = "".join(output.get("text", "") for output in code[1].outputs)
    assert sorted(re.findall(r"\[\d\] rank \d has ended", printed)) == [
        "[0] rank 0 has ended",
        "[1] rank 1 has ended",
    ]
    assert code[2].outputs[0]["data"]["text/plain"] == "True"
