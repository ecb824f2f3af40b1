"""Runs a command on every one of N emulated hosts; without a command: do the links keep their rate?

See README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.hosts.emulated import EmulatedHosts
from benchmarks.hosts.link_rate import PAYLOAD_SHARE, received_mbit
from benchmarks.hosts.namespaces import HostsUnavailable
from benchmarks.runner.records.environment import describe, environment
from benchmarks.runner.records.record import settings_of, write_record

_LOOK_S = 0.02  # between two looks whether a rank has ended
_CHECK_S = 2.0  # of traffic in each measurement


def main() -> None:
    options = _options()
    try:
        with EmulatedHosts(options.hosts, options.rate_mbit, options.congestion_control) as hosts:
            code = run(hosts, options.command) if options.command else check(hosts, options)
    except HostsUnavailable as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


def run(hosts: EmulatedHosts, command: Sequence[str]) -> int:
    """Runs `command` as one rank on each host; lines of output carry the host's name.

    Returns:
        0 when all succeeded, else the exit code of the first that failed, 128 + n after signal n;
        the others are ended then.
    """
    threads = str(max(1, (os.cpu_count() or 1) // len(hosts.names)))
    ranks, copies = [], []
    for host, name in enumerate(hosts.names):
        rank = hosts.popen(
            host,
            command,
            env={"OMP_NUM_THREADS": threads, **os.environ, **hosts.rank_environment(host)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        ranks.append(rank)
        for source, target in ((rank.stdout, sys.stdout), (rank.stderr, sys.stderr)):
            copies.append(threading.Thread(target=_copy, args=(source, target, name)))
            copies[-1].start()
    try:
        code = first_failure(ranks)
    finally:
        hosts.close()  # so that nobody holds the pipes' other ends
        for copy in copies:
            copy.join()
    return code


def check(hosts: EmulatedHosts, options: argparse.Namespace) -> int:
    """Prints what TCP gets through the links, one way and both ways at once."""
    last = len(hosts.names) - 1
    if last == 0:
        raise SystemExit("error: one host has nobody to send to; expected --hosts 2 or more")
    found, rate_mbit = environment(), options.rate_mbit
    print(describe(found) + "\n")
    byte_count = round(rate_mbit * 1e6 / 8 * _CHECK_S)
    bound = rate_mbit * PAYLOAD_SHARE
    print(
        f"{len(hosts.names)} hosts at {rate_mbit:g} Mbit/s, {hosts.congestion_control}; "
        f"TCP can carry {bound:.1f} Mbit/s"
    )
    received: dict[str, list[float]] = {}
    for title, pairs in (("one way", [(0, last)]), ("both ways", [(0, last), (last, 0)])):
        rates = received[title] = list(received_mbit(hosts, pairs, byte_count))
        text = ", ".join(f"{rate:.1f} Mbit/s ({100 * rate / bound:.1f} %)" for rate in rates)
        print(f"{title}: {text}")
    shares = {title: [rate / bound for rate in rates] for title, rates in received.items()}
    write_record("hosts", found, settings_of(options), {"received_mbit": received},
                 {"share_of_bound": shares}, options.out)  # fmt: skip
    return 0


def first_failure(ranks: Sequence[subprocess.Popen[Any]]) -> int:
    """Waits until a rank fails or all have succeeded; 0, or the exit code of that rank."""
    waiting = dict(enumerate(ranks))
    while waiting:
        for number, rank in list(waiting.items()):
            code = rank.poll()
            if code is None:
                continue
            del waiting[number]
            if code != 0:
                code = code if code > 0 else 128 - code
                print(f"rank {number} failed with exit code {code}; the others are ended",
                      file=sys.stderr)  # fmt: skip
                return code
        time.sleep(_LOOK_S)
    return 0


def _copy(source: IO[bytes], target: TextIO, name: str) -> None:
    """Passes lines on, each in one write so that those of several hosts do not mix."""
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            target.write(f"[{name}] {text}\n")
            target.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=1000.0, help="of each link, each way")
    parser.add_argument("--congestion-control", default="cubic")
    parser.add_argument("--out", type=Path, metavar="FILE", help="result file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    if options.command[:1] == ["--"]:
        del options.command[0]
    return options


if __name__ == "__main__":
    main()
