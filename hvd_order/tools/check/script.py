"""A parsed script: the meaning of its names, and which of them depend on the rank."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

__all__ = ["COLLECTIVES", "Function", "Script", "argument", "looks_like_optimizer", "text_of"]

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Longest first. The rules call these modules ``hvd``, regardless of their alias.
_HVD = re.compile(
    r"^(horovod|hvd_order|hvd_order\.horovod)\.torch(\.(mpi_ops|functions|optimizer))?(?=\.|$)"
)
_OPTIMIZER = re.compile(r"optim|(^|_)opt(_|\d|s?$)")
_RANK_NAME = re.compile(
    r"^is_(main|master|chief|primary|root|rank_?0|rank_zero)(_process|_rank|_worker)?$"
    r"|^(main|master|chief|primary)_(process|rank|worker)$"
    r"|^(local_|global_|world_|hvd_|my_|node_)?rank$|^rank_?(0|zero)(_only)?$"
)
_GPU_NAME = re.compile(r"^(local_)?(gpu|device)(_id|_idx|_index|_num)?$")
_RANK_VARIABLE = re.compile(r"(^|_)RANK$|^SLURM_(PROCID|LOCALID)$")  # of the environment
_RANK_CALLS = {"hvd.rank", "hvd.local_rank", "hvd.cross_rank", "torch.distributed.get_rank"}
_CONVERSIONS = ("int", "bool", "str")
_PLAIN = (
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce",
    "grouped_allgather", "grouped_reducescatter",
)  # fmt: skip
COLLECTIVES = frozenset(
    f"hvd.{name}"
    for name in (
        *(
            form
            for name in _PLAIN
            for form in (name, f"{name}_", f"{name}_async", f"{name}_async_")
        ),
        "sparse_allreduce_async",
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "barrier",
        "join",
    )
)
"""Functions that every rank has to call."""


def text_of(node: ast.AST) -> str:
    """The source of a node in one spelling: the key by which rules know variables."""
    if isinstance(node, ast.Name):
        return node.id
    known: str | None = getattr(node, "hvd_order_text", None)  # the rules ask often
    if known is None:
        known = ast.unparse(node)
        setattr(node, "hvd_order_text", known)  # noqa: B010 - nodes declare no such attribute
    return known


def argument(call: ast.Call, position: int | None, name: str) -> ast.expr | None:
    """An argument of a call, by place or by name."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is None or position >= len(call.args):
        return None
    return call.args[position]


def _is_rank_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(_RANK_VARIABLE.search(str(node.value)))


def _asks_whether_set(test: ast.Compare) -> bool:
    """``rank is not None``, ``local_rank != -1``, ``rank >= 0``: the same on every rank."""
    (compared, *more), (operator, *_) = test.comparators, test.ops
    value = ast.unparse(compared)
    if more:
        return False
    return value in ("None", "-1") or (value == "0" and isinstance(operator, ast.GtE | ast.Lt))


def looks_like_optimizer(text: str) -> bool:
    """Whether a variable is an optimizer, judging by its name: ``optimizer``, ``self.opt_d``..."""
    name = text.split("[")[0].rpartition(".")[2].lower()
    return bool(_OPTIMIZER.search(name)) and "sched" not in name and "option" not in name


class Script:
    """One file, parsed.

    Attributes:
        path: the file.
        text: its text, and `lines` the same.
        tree: its syntax tree.

    Raises:
        SyntaxError, ValueError: the file is not valid Python.
        OSError, UnicodeDecodeError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with tokenize.open(path) as file:  # knows of coding lines and byte order marks
            source = file.read()
        self.path = path
        self.text = source
        self.lines = source.splitlines()
        self.tree = ast.parse(source, str(path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, from top to bottom."""
        found = [node for node in self.nodes if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, nested ones included."""
        return [n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def imports(self) -> dict[str, str]:
        """Maps local names to imported objects, for imports anywhere in the file."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for name in node.names:
                    first = name.name.partition(".")[0]
                    found[name.asname or first] = name.name if name.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    found[name.asname or name.name] = f"{node.module}.{name.name}"
        return found

    @cached_property
    def uses_hvd(self) -> bool:
        """Whether the script uses Horovod's interface, ours or Horovod's own."""
        return any(_HVD.match(meaning) for meaning in self.imports.values()) or any(
            isinstance(node, ast.Import) and any(_HVD.match(name.name) for name in node.names)
            for node in self.nodes
        )

    @cached_property
    def imports_hvd(self) -> bool:
        """Whether it imports hvd_order or Horovod, for any framework."""
        return any(
            (name or "").partition(".")[0] in ("hvd_order", "horovod")
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                         [alias.name for alias in node.names])
        )  # fmt: skip

    def meaning(self, node: ast.expr) -> str:
        """Full name of a dotted name, ``hvd.allreduce`` or ``torch.compile``; else ""."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return ""
        return _HVD.sub("hvd", ".".join([self.imports[node.id], *reversed(parts)]))

    def called(self, call: ast.Call) -> str:
        """`meaning` of the called function."""
        return self.meaning(call.func)

    @cached_property
    def called_names(self) -> set[str]:
        """Last parts of the names of all called functions."""
        functions = [call.func for call in self.calls]
        return {f.attr if isinstance(f, ast.Attribute) else text_of(f) for f in functions}

    def calls_of(self, *names: str) -> list[ast.Call]:
        """The calls whose `meaning` is one of `names`."""
        return [call for call in self.calls if self.called(call) in names]

    # --- which ranks ---------------------------------------------------------------------------

    @cached_property
    def _rank_variables(self) -> set[str]:
        """Variables that hold a rank, or whether this is a certain rank."""
        found: set[str] = set()
        assignments = [
            (text_of(target), node.value)
            for node in self.nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
        ]
        for _ in range(3):  # names of names of names
            found |= {name for name, value in assignments if self._tells_ranks(value, found)}
        return found

    def tells_ranks(self, test: ast.expr) -> bool:
        """Whether a condition holds on some ranks only."""
        return self._tells_ranks(test, self._rank_variables)

    def _tells_ranks(self, node: ast.expr, variables: set[str]) -> bool:
        if isinstance(node, ast.BoolOp):
            return any(self._tells_ranks(value, variables) for value in node.values)
        if isinstance(node, ast.UnaryOp):
            return self._tells_ranks(node.operand, variables)
        if isinstance(node, ast.Compare):
            return not _asks_whether_set(node) and any(
                self._tells_ranks(side, variables) or self._is_numbered_gpu(node, side)
                for side in (node.left, *node.comparators)
            )
        if isinstance(node, ast.BinOp):
            return self._tells_ranks(node.left, variables)
        if isinstance(node, ast.IfExp):
            return self._tells_ranks(node.test, variables)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else text_of(node.func)
            if name in _CONVERSIONS and node.args:
                return self._tells_ranks(node.args[0], variables)
            if self.called(node) in ("os.getenv", "os.environ.get") and node.args:
                return _is_rank_variable(node.args[0])
            return self.called(node) in _RANK_CALLS or bool(_RANK_NAME.match(name))
        if isinstance(node, ast.Subscript):
            return self.meaning(node.value) == "os.environ" and _is_rank_variable(node.slice)
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            return text_of(node) in variables or bool(_RANK_NAME.match(name))
        return False

    @staticmethod
    def _is_numbered_gpu(test: ast.Compare, side: ast.expr) -> bool:
        """Whether ``gpu == 0`` chooses a rank by its device: no other use of such a name does."""
        name = side.attr if isinstance(side, ast.Attribute) else text_of(side)
        numbers = [n.value for n in (test.left, *test.comparators) if isinstance(n, ast.Constant)]
        return bool(_GPU_NAME.match(name)) and any(type(value) is int for value in numbers)

    def depends_on_rank(self, node: ast.AST) -> bool:
        """Whether a rank occurs anywhere in an expression, or in what its variables were set to."""
        return self._depends_on_rank(node, self._rank_dependent)

    @cached_property
    def _rank_dependent(self) -> set[str]:
        found: set[str] = set()
        for _ in range(3):
            for node in self.nodes:
                if isinstance(node, ast.Assign) and self._depends_on_rank(node.value, found):
                    found |= {text_of(target) for target in node.targets}
        return found

    def _depends_on_rank(self, node: ast.AST, variables: set[str]) -> bool:
        return any(
            self._tells_ranks(part, self._rank_variables)
            or (not isinstance(part, ast.Call) and text_of(part) in variables)
            for part in ast.walk(node)
            if isinstance(part, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
        )

    # --- variables -----------------------------------------------------------------------------

    def names_from(self, source: Callable[[ast.expr], bool]) -> set[str]:
        """Variables that are computed from such expressions, directly or through others."""
        found: set[str] = set()
        for _ in range(3):
            for node in self.nodes:
                value = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
                if not isinstance(node, ast.Assign | ast.For) or value is None:
                    continue
                if source(value) or self.mentions(value, found):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    found |= {
                        text_of(part)
                        for target in targets
                        for part in ast.walk(target)
                        if isinstance(part, ast.Name | ast.Attribute)
                    }
        return found

    @staticmethod
    def mentions(node: ast.AST, names: set[str]) -> bool:
        """Whether an expression has one of these variables in it."""
        return any(
            text_of(part) in names
            for part in ast.walk(node)
            if isinstance(part, ast.Name | ast.Attribute)
        )

    # --- other files ---------------------------------------------------------------------------

    @cached_property
    def local_modules(self) -> set[Path]:
        """Files beside this one that it imports, resolved."""
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names |= {module, *(f"{module}.{name.name}".strip(".") for name in node.names)}
        files = {self.path.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names}
        return {file.resolve() for file in files if file.is_file()}
