"""The result files that the page is made from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner.records.schema import problems

FOLDER = Path(__file__).resolve().parents[1] / "results"


class InvalidResult(ValueError):  # noqa: N818  (says what it is)
    """A file of the results folder is no result file."""


@dataclass(frozen=True)
class Document:
    """A result file: its name without folder, and its content (`common.schema`)."""

    name: str
    content: dict[str, Any]

    @property
    def raw(self) -> dict[str, Any]:
        raw: dict[str, Any] = self.content["raw"]
        return raw

    @property
    def commit(self) -> str:
        """The short hash, with a note where sources differed from it."""
        commit = str(self.content["commit"])[:7]
        return f"{commit} with changes" if self.content["dirty"] else commit


def is_by_hand(document: Document) -> bool:
    """Whether a side-by-side run had slices set by hand; then it stands for no user's."""
    return any(
        "HVD_ORDER_SLICE_BYTES" in each for each in document.content["settings"].get("env") or ()
    )


class Documents:
    """All result files, the newest first."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = sorted(
            documents, key=lambda one: (one.content["date"], one.name), reverse=True
        )

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Documents:
        """Reads a folder.

        Raises:
            InvalidResult: a file is no result file; the text says why.
        """
        documents = []
        for path in sorted(folder.glob("*.json")):
            content = json.loads(path.read_text("utf-8"))
            if found := problems(content):
                raise InvalidResult(f"{path.name}: {'; '.join(found)}")
            documents.append(Document(path.name, content))
        return cls(documents)

    def of(self, benchmark: str, *parts: str) -> Iterator[Document]:
        """The benchmark's files whose raw data has these parts."""
        for document in self._documents:
            if document.content["benchmark"] == benchmark and all(
                part in document.raw for part in parts
            ):
                yield document

    def all(self) -> list[Document]:
        return list(self._documents)
