"""The program that each process of a `RankPool` runs: take a function, call it, send the answer.

Started as ``rank_worker.py <file descriptor of the pipe>``.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib.util
import operator
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _pytest.assertion.rewrite import rewrite_asserts

import hvd_order.torch as hvd


def main() -> None:
    faulthandler.enable()  # a crash says where
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the pool asks: what are you doing?
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the pool is gone
            return
        if call is None:
            hvd.shutdown()
            return
        pipe.send_bytes(pickle.dumps(_answer(*call)))


def _answer(path: str, module: str, name: str, packed: Any) -> tuple[bool, Any]:
    """(True, result) or (False, (type of the exception, its text, traceback))."""
    try:
        function = operator.attrgetter(name)(_load(path, module))
        args, kwargs = packed
        if not hvd.is_initialized():
            hvd.init()
        return True, function(*args, **kwargs)
    except BaseException as error:
        return False, (type(error).__name__, str(error), traceback.format_exc())


def _load(path: str, module: str) -> ModuleType:
    """The test module at `path` under its name in pytest, whatever pytest made that of."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    source = Path(path).read_bytes()
    tree = ast.parse(source)
    rewrite_asserts(tree, source, path)  # so that a failed one shows its values, as in pytest
    exec(compile(tree, path, "exec"), loaded.__dict__)
    return loaded


if __name__ == "__main__":
    main()
