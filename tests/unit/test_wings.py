"""What wings register in the core, and that the core asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvd_order.base.wings import MODULES, Registry

PLACES = {
    "transport": "hvd_order.engine.transport_choice.CHOICES",
    "job service": "hvd_order.launch.services.SERVICES",
    "use of sums": "hvd_order.torch.sums.sum_use.USES",
    "watcher": "hvd_order.engine.account.watchers.WATCHERS",
}


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("what", "name"), MODULES)
def test_the_module_registers_what_the_table_says(what: str, name: str) -> None:
    room, registry = PLACES[what].rsplit(".", 1)
    assert run(f"from {room} import {registry} as r; print(callable(r.find({name!r})))") == "True"


def test_nothing_of_a_wing_is_loaded_before_somebody_asks() -> None:
    program = (
        "import hvd_order.torch, hvd_order.launch.run, sys;"
        "print([m for m in sys.modules if m.startswith(('hvd_order.servers', 'hvd_order.watch'))])"
    )
    assert run(program) == "[]"


def test_an_unknown_name_is_an_error() -> None:
    registry: Registry[int] = Registry("transport")
    with pytest.raises(KeyError):
        registry.find("pigeons")


def test_what_is_registered_is_found_without_the_table() -> None:
    registry: Registry[int] = Registry("nothing of the table")
    registry.register("one", 1)
    assert registry.find("one") == 1
