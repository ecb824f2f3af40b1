"""What a message of the order agreement costs its sender: real sends of Gloo, between processes.

The sender does what csrc/torch/c10d/c10d_control.cc does: it makes a frame, posts its send and
later waits for many sends together. The receiver has receives posted ahead.
"""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_FRAME_WORDS = 128  # csrc/torch/c10d/frames.cc
_BATCH = 16
_MESSAGES = 200 * _BATCH
_ROUNDS = 9


def measure_send_cost() -> dict[str, list[float]]:
    """By round, seconds a message: the post alone, and the processor time of all the sender's
    threads, Gloo's among them.
    """
    context = multiprocessing.get_context("spawn")
    port: multiprocessing.Queue[int] = context.Queue()
    receiver = context.Process(target=_receive, args=(port,))
    receiver.start()
    try:
        return _send(_group(0, port.get(timeout=60)))
    finally:
        receiver.join()


def send_cost_s(measured: dict[str, list[float]]) -> float:
    """The larger of the two, in the round that other work on the machine disturbed least."""
    return max(min(seconds) for seconds in measured.values())


def _group(rank: int, port: int, server: dist.TCPStore | None = None) -> dist.ProcessGroupGloo:
    timeout = timedelta(seconds=60)
    store = server or dist.TCPStore("127.0.0.1", port, timeout=timeout)
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


def _send(group: dist.ProcessGroupGloo) -> dict[str, list[float]]:
    posts, processor = [], []
    for _ in range(_ROUNDS):
        group.barrier().wait()
        begin_s, post_s = time.process_time(), 0.0
        for _ in range(_MESSAGES // _BATCH):
            before_s = time.perf_counter()
            works = [
                group.send([torch.zeros(_FRAME_WORDS, dtype=torch.int32)], 1, 0)
                for _ in range(_BATCH)
            ]
            post_s += time.perf_counter() - before_s
            for work in works:
                work.wait()
        processor.append((time.process_time() - begin_s) / _MESSAGES)
        posts.append(post_s / _MESSAGES)
    return {"post_s": posts, "processor_s": processor}


def _receive(port: multiprocessing.Queue[int]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(server.port)
    group = _group(1, server.port, server)
    for _ in range(_ROUNDS):
        group.barrier().wait()
        for _ in range(_MESSAGES // _BATCH):
            works = [
                group.recv([torch.zeros(_FRAME_WORDS, dtype=torch.int32)], 0, 0)
                for _ in range(_BATCH)
            ]
            for work in works:
                work.wait()
