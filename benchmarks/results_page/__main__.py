"""Makes RESULTS.md, its pictures and the README's table from benchmarks/results: `make results`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results_page.documents import FOLDER, Documents
from benchmarks.results_page.page import page
from benchmarks.results_page.pictures import (
    over_optimum,
    prediction,
    server_load,
    throughput,
    timelines,
)
from benchmarks.results_page.readme_table import readme_with_table
from benchmarks.results_page.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "RESULTS.md"
README = ROOT / "README.md"

PICTURES = (
    ("side_by_side", "over_optimum.png", over_optimum.draw),
    ("side_by_side", "timelines.png", timelines.draw),
    ("simulate", "prediction.png", prediction.draw),
    ("prediction", "throughput.png", throughput.draw),
    ("parameter_server", "server_load.png", server_load.draw_elastic),
    ("parameter_server", "rebalance.png", server_load.draw_rebalance),
)


def pictures_on_file(folder: Path = FOLDER) -> dict[str, list[str]]:
    """By benchmark, the pictures that exist, relative to the page."""
    found: dict[str, list[str]] = {}
    for benchmark, name, _ in PICTURES:
        if (folder / name).exists():
            found.setdefault(benchmark, []).append(f"results/{name}")
    return found


def main() -> None:
    documents = Documents.read()
    for _, name, draw in PICTURES:
        if draw(documents, FOLDER / name):
            print(f"benchmarks/results/{name}")
        else:
            (FOLDER / name).unlink(missing_ok=True)
    PAGE.write_text(page(documents, TARGETS, pictures_on_file()), "utf-8")
    README.write_text(readme_with_table(README.read_text("utf-8"), documents), "utf-8")
    print("benchmarks/RESULTS.md, README.md")


if __name__ == "__main__":
    main()
