"""The page ``docs/config.md``, from the knobs."""

from __future__ import annotations

from hvd_order.base.config.settings import KNOBS

__all__ = ["reference_page"]


def reference_page() -> str:
    """The text of ``docs/config.md``."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `python -m hvd_order.base.config > docs/config.md`; "
        "edit hvd_order/base/config/settings.py. -->",
        "",
        "Environment variables are read once, in `init()`. All ranks need the same values, which",
        "`init()` compares, but for those marked with *.",
        "Sizes accept `B`, `KB`, `MB`, `GB` (powers of 1000) and `KiB`, `MiB`, `GiB` (of 1024).",
        "",
        "| variable | accepts | default | what it does |",
        "| --- | --- | --- | --- |",
    ]
    for knob in KNOBS:
        name = f"`{knob.env}`" + (f" (also `{knob.also}`)" if knob.also else "")
        name += " *" if knob.may_differ else ""
        default = f"`{knob.default}`" if knob.default else "not set"
        lines.append(f"| {name} | {knob.kind} | {default} | {knob.help} |")
    return "\n".join(lines) + "\n"
