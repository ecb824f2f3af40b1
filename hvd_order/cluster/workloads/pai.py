"""Alibaba's GPU trace of 2023: pods as jobs, and nodes as machines.

Origin: alibaba/clusterdata, cluster-trace-gpu-v2023/csv (Weng et al., "Beware of Fragmentation",
USENIX ATC 2023). Pods: name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec, qos, pod_phase,
creation_time, deletion_time, scheduled_time, in seconds. Nodes: sn, cpu_milli, memory_mib, gpu,
model.

A pod is a job of one worker. It takes its processors (``cpu``), memory (``memory_gb``, in GiB) and
GPUs (``gpu``, a part of one where ``gpu_milli`` says so). It arrives when it was created and runs
as long as it ran: from scheduled to deleted. Left out are pods that were never scheduled or ran for
no time. Not read: gpu_spec (any GPU will do), qos, pod_phase. A machine's GPUs are one amount: that
two parts of a GPU do not fit into the gaps of two others is not seen.
"""

from __future__ import annotations

import math

from hvd_order.base.tables import Path, read_lines
from hvd_order.cluster.model.machines import Machine
from hvd_order.cluster.workloads.numbered import Numbered, timed_job

__all__ = ["NODE_COLUMNS", "POD_COLUMNS", "read_pai_nodes", "read_pai_pods"]

POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time",
               "deletion_time", "scheduled_time")  # fmt: skip
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu")


def read_pai_pods(path: Path) -> Numbered:
    """Reads the pods; ``timed_job`` says what is assumed of them.

    Raises:
        InvalidUsage: a line is no pod.
    """
    for line in read_lines(path, POD_COLUMNS):
        if not line.fields["scheduled_time"]:
            continue
        begin_s, end_s = line.number_of("scheduled_time"), line.number_of("deletion_time")
        if end_s < begin_s:
            raise line.wrong(f"deleted at {end_s:g} s, before it was scheduled at {begin_s:g} s")
        if end_s == begin_s:
            continue
        gpus = line.whole("num_gpu") * line.number_of("gpu_milli") / 1000
        worker = {
            "gpu": gpus,
            "cpu": line.number_of("cpu_milli") / 1000,
            "memory_gb": line.number_of("memory_mib") / 1024,
        }
        yield line, timed_job(
            line, line.text("name"), line.number_of("creation_time"), end_s - begin_s, 1,
            {name: amount for name, amount in worker.items() if amount > 0},
        )  # fmt: skip


def read_pai_nodes(path: Path) -> list[Machine]:
    """Reads the nodes. The trace says nothing of their links, so they have infinite ones.

    Raises:
        InvalidUsage: a line is no node.
    """
    return [
        Machine(
            line.text("sn"),
            {
                "gpu": line.number_of("gpu"),
                "cpu": line.number_of("cpu_milli") / 1000,
                "memory_gb": line.number_of("memory_mib") / 1024,
            },
            math.inf,
        )
        for line in read_lines(path, NODE_COLUMNS)
    ]
