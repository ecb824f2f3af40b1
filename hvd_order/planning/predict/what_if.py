"""Predicted step on a network, sent as today and in order, with its waits and their causes.

All results come from a few simulated steps; times are of one step in the steady state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hvd_order.base.errors import InvalidUsage
from hvd_order.base.link.advice import Outlook
from hvd_order.base.link.link_model import LinkModel
from hvd_order.base.link.slice_settings import (
    SliceSettings,
    arrival_settings,
    best_settings,
)
from hvd_order.planning.bounds.bound import program_optimum_s, step_bound_s
from hvd_order.planning.bounds.clipped_bound import clipped_program_optimum_s
from hvd_order.planning.graph.graph import Graph
from hvd_order.planning.predict.coded import WORTH, coded_bytes, coded_transfers, in_order
from hvd_order.planning.predict.network import Network
from hvd_order.planning.predict.scenario import named
from hvd_order.planning.predict.simulate import (
    AllReduceScenario,
    Simulated,
    StepWorkload,
    TransferSchedule,
    ddp,
    simulate,
)
from hvd_order.planning.predict.simulated_step import RECORDED, SimulatedStep, step_of, times_of
from hvd_order.planning.predict.workers.server_steps import ServerSteps
from hvd_order.planning.predict.workers.throughput import Cluster
from hvd_order.planning.predict.workers.transmission import policy
from hvd_order.planning.predict.workers.worker_step import WorkerStep
from hvd_order.planning.predict.workload import workload_of

__all__ = ["WayName", "WhatIf"]

WayName = Literal["today", "arrival", "order", "split", "coded"]

_STEPS = 12
_QUICK_STEPS = 8


@dataclass(frozen=True)
class _AllReduceWay:
    title: str
    work: StepWorkload
    network: AllReduceScenario
    schedule: TransferSchedule


@dataclass(frozen=True)
class _ServerWay:
    title: str
    step: WorkerStep
    cluster: Cluster


class WhatIf:
    """A model on a network."""

    def __init__(
        self,
        graph: Graph,
        network: Network,
        servers: int | None = None,
        clipped: bool = False,
        encodes: bool = True,
    ) -> None:
        """Takes the graph of one worker's step, with median times.

        Args:
            servers: parameter servers with links like the workers'; None: all-reduce.
            clipped: whether the program clips gradients by their global norm in every step.
            encodes: whether the program's framework has ``Compression.auto``.

        Raises:
            InvalidUsage: no gradient travels: one worker without servers, or no gradients; or
                gradients are clipped that servers apply.
        """
        if servers is not None and servers < 1:
            raise InvalidUsage(f"{servers} servers; at least 1 is needed")
        if servers is not None and clipped:
            raise InvalidUsage(
                "parameter servers update each slice by itself, so no gradient is clipped by the "
                "norm of all; leave out the servers or the clipping"
            )
        if not any(graph.producers):
            raise InvalidUsage("no parameter of the profile has a gradient, so nothing travels")
        if network.ranks == 1 and servers is None:
            raise InvalidUsage("with one worker nothing travels; ask for two or more")
        # Servers update their parameters, so workers do not.
        self.graph = graph if servers is None else _without_updates(graph)
        self.network = network
        self.servers = servers
        self.clipped = clipped
        self.encodes = encodes
        self.size_bytes = sum(
            p.size_bytes for p, producers in zip(graph.parameters, graph.producers, strict=True)
            if producers
        )  # fmt: skip
        self._phases = {op.name: op.phase for op in graph.ops}

    @property
    def link(self) -> LinkModel:
        """Link model for bounds and slice settings: all workers' bytes over the bottleneck."""
        if self.servers is None:
            return self.network.link
        # Each byte leaves each worker once, and all workers' bytes arrive at the servers.
        worst = max(1.0, self.network.ranks / self.servers)
        message_s = self.network.message_latency_s
        return LinkModel(2 * message_s, max(message_s, 1e-6), worst / self._rate)

    @property
    def wire_s(self) -> float:
        """Time of a link for a step's gradients, bytes alone."""
        return self.size_bytes * self.link.seconds_per_byte

    @property
    def bound_s(self) -> float:
        """Lower bound on the step for any order of transfers, ops in program order."""
        if len(self.graph.resources) > 1:
            return step_bound_s(self.graph, self.link)
        bound = clipped_program_optimum_s if self.clipped else program_optimum_s
        return bound(self.graph, self.link)

    @property
    def coded(self) -> list[str]:
        """The gradients that travel in 8 bits where that pays; none where it does not."""
        return list(self._coded_bytes) if self._coded_bytes and self.outlook().coded_s else []

    @cached_property
    def _coded_bytes(self) -> dict[str, int]:
        can_encode = self.encodes and self.servers is None
        return coded_bytes(self.graph, self.link) if can_encode else {}

    @property
    def ways(self) -> list[WayName]:
        """The ways of sending that `step` knows: today's first, that of our defaults last or, where
        codes of 8 bits pay, before the one with them.
        """
        return [name for name, _ in self._ways() if name != "coded" or self.coded]

    def outlook(self) -> Outlook:
        """Step times of all ways of sending, and the bound."""
        return self._outlook

    @cached_property
    def _outlook(self) -> Outlook:
        times = {name: self._played(way, _QUICK_STEPS).steady_s for name, way in self._ways()}
        coded_s = times.pop("coded", None)
        return Outlook(
            self.network.ranks,
            self.graph.compute_s,
            self.wire_s,
            times["today"],
            times["arrival"],
            times["order"],
            self.bound_s,
            times.get("split"),
            coded_s if coded_s is not None and WORTH * coded_s < min(times.values()) else None,
        )

    def step(self, name: WayName) -> SimulatedStep:
        """A steady step, sent in one of the ways.

        Raises:
            InvalidUsage: there is no such way here.
        """
        way = named("the way of sending", name, dict(self._ways()))
        result = self._played(way, _STEPS)
        if isinstance(result, ServerSteps):
            return step_of(result.times(), way.title, self._phases, awaits_all=False)
        awaits_all = isinstance(way, _AllReduceWay) and not way.schedule.cross_iteration
        return step_of(times_of(result), way.title, self._phases, awaits_all)

    def _played(self, way: _AllReduceWay | _ServerWay, steps: int) -> Simulated | ServerSteps:
        if isinstance(way, _ServerWay):
            assert self.servers is not None
            return ServerSteps(way.step, way.cluster, self.network.ranks, self.servers, steps)
        return simulate(
            way.work, way.network, way.schedule,
            ranks=self.network.ranks, steps=steps, recorded=RECORDED, clipped=self.clipped,
        )  # fmt: skip

    @property
    def _rate(self) -> float:
        rate = self.network.bytes_per_s
        if not rate:
            raise InvalidUsage("one worker has no measured bandwidth; give --bandwidth")
        return rate

    def _ways(self) -> Iterator[tuple[WayName, _AllReduceWay | _ServerWay]]:
        best = best_settings(self.link, self.size_bytes)
        sliced = f"in slices of {best.slice_bytes / 2**20:.3g} MiB, what is needed first first"
        return self._all_reduces(sliced) if self.servers is None else self._on_servers(best, sliced)

    def _all_reduces(self, sliced: str) -> Iterator[tuple[WayName, _AllReduceWay]]:
        message_s = self.network.message_latency_s
        work, network = workload_of(self.graph), self.network.all_reduce()
        order = in_order(self.network, self.size_bytes)
        fused = arrival_settings(self.size_bytes)
        arrival = TransferSchedule(
            fused.slice_bytes, fused.credit_bytes, "arrival", control_latency_s=message_s
        )
        buckets, all_awaited = ddp(work)
        yield "today", _AllReduceWay("as today (DDP)", buckets, network, all_awaited)
        if not self.clipped:
            yield "arrival", _AllReduceWay("as they come, overlapping", work, network, arrival)
            yield "order", _AllReduceWay(sliced, work, network, order)
        else:
            awaited = replace(arrival, cross_iteration=False)
            yield "arrival", _AllReduceWay("as they come, all awaited", work, network, awaited)
            awaited = replace(order, cross_iteration=False)
            yield "order", _AllReduceWay(f"{sliced}, all awaited", work, network, awaited)
            halves = replace(order, split=True, reservation_lead_s=0.0)
            yield "split", _AllReduceWay(f"{sliced}, in halves", work, network, halves)
        if self._coded_bytes:
            fewer = workload_of(self.graph, wire_bytes=self._coded_bytes)
            coded = coded_transfers(self.network, order, self.clipped)
            yield "coded", _AllReduceWay("the same, with 8 bits where it pays", fewer, *coded)

    def _on_servers(self, best: SliceSettings, sliced: str) -> Iterator[tuple[WayName, _ServerWay]]:
        seconds = [[op.duration_s for op in self.graph.ops]]
        whole = WorkerStep(self.graph, seconds)
        slices = whole.in_slices(best.slice_bytes)

        def cluster(transmission: str) -> Cluster:
            way = replace(policy(transmission), latency_s=self.network.message_latency_s)
            return Cluster(self._rate, pull=way, push=way)

        # As gRPC sends: tensors that are ready take turns.
        requested = replace(cluster("round_robin"), pulls="request", step_end="updated")
        yield "today", _ServerWay("as today (pulled by the next step)", whole, requested)
        yield "arrival", _ServerWay("as they come, pulled at once", whole, cluster("fifo"))
        yield "order", _ServerWay(sliced, slices, cluster("ordered"))


def _without_updates(graph: Graph) -> Graph:
    ops = tuple(replace(op, duration_s=0.0) if op.phase == "update" else op for op in graph.ops)
    return Graph(graph.parameters, ops)
