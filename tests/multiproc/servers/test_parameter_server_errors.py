"""What parameter servers cannot do says so, and what to do instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from helpers.launching import run_cli, write_script
from helpers.on_ranks import on_ranks
from helpers.ranks import RankPool
from helpers.servers import Servers, Training, job
from torch.optim import LBFGS, SGD, Adadelta, Adam

import hvd_order.torch as hvd


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except hvd.HorovodInternalError as error:
        return f"internal: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def body_misuse(env: Mapping[str, str]) -> dict[str, str]:
    said = {}
    with job(env):
        for kind in (LBFGS, Adadelta):
            model = torch.nn.Linear(4, 4)
            said[kind.__name__] = message_of(
                lambda kind=kind, model=model: hvd.DistributedOptimizer(  # type: ignore[misc]
                    kind(model.parameters()), named_parameters=model.named_parameters()
                )
            )
        complex_ones = [torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))]
        said["complex"] = message_of(lambda: hvd.DistributedOptimizer(SGD(complex_ones, lr=0.1)))
        doubles = [torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]
        said["double"] = message_of(lambda: hvd.DistributedOptimizer(SGD(doubles, lr=0.1)))
        with pytest.raises(RuntimeError, match="floating point"):  # torch's own
            torch.nn.Parameter(torch.ones(4, dtype=torch.int64))

        training = Training(lambda groups: SGD(groups, lr=0.01, momentum=0.9), distributed=True)
        before = training.optimizer.state_dict()
        training.run(4)
        model, optimizer = training.model, training.optimizer
        said["load"] = message_of(lambda: optimizer.load_state_dict(before))

        def backward() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()

        backward()
        gradient = model[0].weight.grad  # type: ignore[union-attr]
        said["read"] = message_of(lambda: gradient.sum().item())  # type: ignore[union-attr,operator]
        said["clip"] = message_of(
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        )
        said["synchronize"] = message_of(optimizer.synchronize)  # type: ignore[attr-defined]
        optimizer.step()
        backward()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = lr / 2
        said["changed"] = message_of(optimizer.step)
        optimizer.param_groups[0]["lr"] = lr
        said["changed back"] = message_of(optimizer.step)
        said["goes on"] = message_of(lambda: training.run(2))
        losses = training.losses
    assert losses == losses  # no NaN
    return said


def test_misuse_is_told(two_ranks: RankPool) -> None:
    with Servers(2, 1, {"HVD_ORDER_PS_UPDATE": "server"}) as servers:
        for said in two_ranks.run(body_misuse, servers.env):
            cure = "set HVD_ORDER_PS_UPDATE=worker"
            for key in ("LBFGS", "Adadelta", "read", "clip", "synchronize", "changed", "load"):
                assert cure in said[key], (key, said[key])
            assert "servers cannot update as LBFGS does" in said["LBFGS"]
            assert "only as SGD, Adam, AdamW, Adagrad, RMSprop" in said["Adadelta"]
            assert "HVD_ORDER_COMM=allreduce" in said["complex"] or cure in said["complex"]
            assert "float32" in said["double"]
            assert cure in said["double"]
            assert "before training begins" in said["load"]
            assert "after step()" in said["changed"]
            for key in ("read", "clip", "synchronize"):
                assert "between backward() and step()" in said[key]
            assert said["changed back"] == said["goes on"] == "nothing was raised"


@on_ranks(2)
def test_missing_servers_and_settings_are_told() -> None:
    said = []
    model = torch.nn.Linear(4, 4)
    with job({}):
        said.append(message_of(lambda: hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), comm="ps"
        )))  # fmt: skip
    async_on_workers = {"HVD_ORDER_COMM": "ps", "HVD_ORDER_PS_MODE": "async"}
    said.append(message_of(lambda: job(async_on_workers).__enter__()))
    no_servers, worker_updates = said
    assert "hvd-order run -np N --servers M" in no_servers
    assert "set HVD_ORDER_PS_UPDATE=server" in worker_updates


def body_complex_sums(env: Mapping[str, str]) -> str:
    with job(env):
        parameters = [torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))]
        return message_of(lambda: hvd.DistributedOptimizer(Adam(parameters, lr=0.1)))


def test_sums_of_complex_numbers_are_refused(two_ranks: RankPool) -> None:
    with Servers(2, 1) as servers:
        for said in two_ranks.run(body_complex_sums, servers.env):
            assert "HVD_ORDER_COMM=allreduce" in said


def test_an_elastic_job_has_no_servers(tmp_path: Path) -> None:
    discovery = tmp_path / "discover"
    discovery.write_text("#!/bin/sh\necho localhost:2\n", encoding="utf-8")
    discovery.chmod(0o755)
    end = run_cli(
        "run", "-np", 2, "--min-np", 1, "--max-np", 2, "--servers", 1, "--host-discovery-script",
        discovery, *write_script(tmp_path, "print('trains')"), timeout=60,
    )  # fmt: skip
    assert end.returncode != 0
    assert "--servers does not go with elastic jobs" in end.stderr
    assert "trains" not in end.stdout
    assert os.linesep.join(end.stderr.splitlines()[:1])  # it says so first


def test_a_server_does_not_wait_for_ever_for_workers_that_never_come() -> None:
    """As when a wrong setting has ended them in init()."""
    with Servers(2, 1, {"HVD_ORDER_TIMEOUT": "2"}) as servers:
        assert servers.wait(60) == [1]
        assert "server 0: ranks 0, 1 of 2 did not come within 2 s (HVD_ORDER_TIMEOUT)" in (
            servers.log()
        )
