"""All faults that a campaign draws from.

A new one is a class (`chaos.faults.fault.Fault`) with a name, `fits`, `draw` and `strike`, and a
place in this list; nothing else has to know it. What it draws comes from the random numbers of
`draw`.
"""

from __future__ import annotations

from chaos.faults.fault import Fault
from chaos.faults.machine_faults import ClockJump, FullCommits, FullDisk
from chaos.faults.network_faults import Cut, Flap, Reset, Slow, Stranger
from chaos.faults.process_faults import ElasticKill, Freeze, Interrupt, Kill, KillLauncher, Pause
from chaos.faults.user_faults import OtherSetting, SamePort

__all__ = ["FAULTS", "Fault"]

FAULTS: list[type[Fault]] = [
    Kill, ElasticKill, KillLauncher, Interrupt, Freeze, Pause, Reset, Slow, Cut, Flap, FullDisk,
    FullCommits, Stranger, OtherSetting, ClockJump, SamePort,
]  # fmt: skip
