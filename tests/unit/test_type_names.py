"""One word, one meaning: a name of a type belongs to one class of the package and its C++ core."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CPP = re.compile(
    r"^\s*(?:template\s*<[^>]*>\s*)?(?:enum\s+)?(?:class|struct)\s+(\w+)(?:\s+final)?\s*"
    r"(?::[^:;{][^;{]*)?\{",
    re.MULTILINE,
)

# What C++ throws or records arrives in Python as an object of the same name: one class.
TRANSLATED = {
    "BrokenInvariant", "InvalidUsage", "PeerLost", "ReceivedTimes", "TransferTimeout",
    "UpdateTimes",
}  # fmt: skip

# Horovod's API has each of them for PyTorch and for TensorFlow, under these names.
HOROVOD = {
    "BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "ProcessSet",
}  # fmt: skip


def type_names() -> dict[str, set[str]]:
    """Files that define a type, by its name without a leading underscore."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "hvd_order").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].add(str(path.relative_to(ROOT)))
    for path in (ROOT / "csrc").rglob("*.h"):
        for match in _CPP.finditer(path.read_text(encoding="utf-8")):
            found[match[1]].add(str(path.relative_to(ROOT)))
    return found


def test_a_name_of_a_type_has_one_class() -> None:
    double = {name: files for name, files in type_names().items() if len(files) > 1}
    listing = "\n".join(f"{name}: {', '.join(sorted(files))}" for name, files in double.items())
    allowed = TRANSLATED | HOROVOD
    assert double.keys() <= allowed, f"types of one name; rename one:\n{listing}"
    assert double.keys() >= allowed, f"no longer double: {sorted(allowed - double.keys())}"
