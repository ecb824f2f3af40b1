"""`make results`: pages, tables and pictures from benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results_page.documents import FOLDER, Documents
from benchmarks.results_page.page import history_with_block, page, runs_page
from benchmarks.results_page.pictures import over_optimum, timelines
from benchmarks.results_page.readme_table import readme_with_table
from benchmarks.results_page.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "RESULTS.md"
README = ROOT / "README.md"

HISTORY = ROOT / "benchmarks" / "HISTORY.md"
RUNS = FOLDER / "RUNS.md"
PICTURES = {"over_optimum.png": over_optimum.draw, "timelines.png": timelines.draw}


def pages() -> dict[Path, str]:
    """What each file that is made here has to be, from the data and the pictures on file."""
    documents = Documents.read()
    pictures = [f"results/{name}" for name in PICTURES if (FOLDER / name).exists()]
    return {
        PAGE: page(documents, TARGETS, pictures),
        RUNS: runs_page(documents),
        HISTORY: history_with_block(HISTORY.read_text("utf-8"), documents, TARGETS),
        README: readme_with_table(README.read_text("utf-8"), documents),
    }


def main() -> None:
    documents = Documents.read()
    for name, draw in PICTURES.items():
        if draw(documents, FOLDER / name):
            print(f"benchmarks/results/{name}")
        else:
            (FOLDER / name).unlink(missing_ok=True)
    for path, text in pages().items():
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
