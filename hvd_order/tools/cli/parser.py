"""A command line whose mistakes are answered with the right usage and the nearest name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["CommandParser", "nearest"]

# What launchers of others call our options.
_ELSEWHERE = {
    "-n": "-np", "--n": "-np", "--np": "-np", "--nproc-per-node": "-np", "--nproc_per_node": "-np",
    "--num-processes": "-np", "--num_processes": "-np", "--ntasks": "-np", "--host": "-H",
    "--nodelist": "-H", "--machinefile": "-hostfile", "--env-vars": "-x",
}  # fmt: skip


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown options itself, where argparse leaves it to the program's parser, whose usage
    does not show the sub-command's options.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse. No argument stays unknown."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for option in unknown if option.startswith("-")]
            told = ", ".join(map(self._with_nearest, options or unknown))
            self.error(f"unknown {'option' if options else 'argument'}: {told}")
        return parsed, unknown

    def _with_nearest(self, given: str) -> str:
        name = given.partition("=")[0]
        shown = [
            option
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
        ]
        elsewhere = _ELSEWHERE.get(name)
        return f"{given}{nearest(name, shown) if elsewhere not in shown else _mean(elsewhere)}"


def nearest(given: str, known: Iterable[str]) -> str:
    """Returns text that names what was probably meant; empty if nothing is alike."""
    found: Sequence[str] = difflib.get_close_matches(given, list(known), n=1)
    return _mean(found[0]) if found else ""


def _mean(name: str) -> str:
    return f" (do you mean {name}?)"
