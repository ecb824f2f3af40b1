"""Everything that could see a parameter or a gradient too early, and must not."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import RankFactory
from torch import Tensor, nn

import hvd_order.torch as hvd
from hvd_order.torch.parameters.read_guard import (
    InFlightGradient,
    PendingParameter,
    disarm_parameter,
)

LR = 0.1


def wrapped(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **how: Any
) -> Any:
    options = {"lr": LR} if make is torch.optim.SGD else {}
    return hvd.DistributedOptimizer(
        make(model.parameters(), **options), named_parameters=model.named_parameters(), **how
    )


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(3, 3, bias=False, dtype=torch.float64)


def my_rows() -> Tensor:
    """Row r is rank r's; the average gradient of ``model(x).sum()`` is their mean."""
    return torch.arange(1.0, 4.0, dtype=torch.float64)[None] * (hvd.rank() + 1)


def backward(model: nn.Module) -> None:
    model(my_rows()).sum().backward()


def mean_gradient() -> Tensor:
    mean = (hvd.size() + 1) / 2
    return (torch.arange(1.0, 4.0, dtype=torch.float64) * mean).expand(3, 3)


def one_step_left_open() -> tuple[nn.Linear, Any, Tensor]:
    """A model whose fourth update is deferred, its optimizer, and the weight it will have."""
    model = linear()
    start = model.weight.detach().clone()
    optimizer = wrapped(model)
    for _ in range(4):  # in the steps before, who reads is watched
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert type(model.weight) is PendingParameter
    return model, optimizer, start - 4 * LR * mean_gradient()


def check(seen: Tensor, wanted: Tensor, rtol: float = 1e-12) -> None:
    """Raises with both values if they differ."""
    torch.testing.assert_close(seen, wanted, rtol=rtol, atol=0)


READERS: dict[str, Callable[[nn.Linear, Any], Tensor]] = {
    "data": lambda m, o: m.weight.data,
    "norm": lambda m, o: (m.weight + 0).detach(),
    "numpy": lambda m, o: torch.from_numpy(m.weight.detach().numpy()),
    "vector": lambda m, o: nn.utils.parameters_to_vector(m.parameters()).detach().view(3, 3),
    "state_dict": lambda m, o: m.state_dict()["weight"],
    "state_dict keep_vars": lambda m, o: m.state_dict(keep_vars=True)["weight"].detach(),
    "deepcopy": lambda m, o: copy.deepcopy(m).weight.detach(),
    "deepcopy of parameter": lambda m, o: copy.deepcopy(m.weight).detach(),
    "pickle": lambda m, o: pickle.loads(pickle.dumps(m)).weight.detach(),
    "evaluation": lambda m, o: evaluated(m),
    "ema": lambda m, o: torch._foreach_mul([p.detach() for p in m.parameters()], 1.0)[0],
    "functional_call": lambda m, o: torch.func.functional_call(
        m, dict(m.named_parameters()), torch.eye(3, dtype=torch.float64)
    ).detach().t(),
    "optimizer.state_dict": lambda m, o: (o.state_dict(), m.weight.data)[1],
    "flush": lambda m, o: (o.flush(), m.weight.data)[1],
    "synchronize": lambda m, o: (o.synchronize(), m.weight.data)[1],
    "torch.save": lambda m, o: saved(m),
}  # fmt: skip


def evaluated(model: nn.Linear) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.eye(3, dtype=torch.float64)).t()


def saved(model: nn.Linear) -> Tensor:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).weight.detach()


def body_reader(name: str) -> None:
    model, optimizer, wanted = one_step_left_open()
    seen = READERS[name](model, optimizer)
    check(seen, wanted)
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize("name", READERS)
def test_every_reader_sees_the_finished_update(ranks: RankFactory, name: str) -> None:
    ranks(2).run(body_reader, name)


def body_learning_rate(kind: str) -> None:
    model = linear()
    start = model.weight.detach().clone()
    optimizer = wrapped(model)
    group = optimizer.param_groups[0]
    if kind == "tensor":
        group["lr"] = torch.tensor(LR, dtype=torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        if kind == "tensor":
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5
    wanted = start - LR * (1 + 0.5 + 0.25 + 0.125) * mean_gradient()
    check(model.weight.data, wanted, rtol=1e-7)


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_an_update_has_the_learning_rate_of_its_own_step(ranks: RankFactory, kind: str) -> None:
    ranks(2).run(body_learning_rate, kind)


def body_load_state_dict() -> None:
    model, _, _ = one_step_left_open()
    model.load_state_dict({"weight": torch.ones(3, 3)})
    check(model.weight.data, torch.ones(3, 3, dtype=torch.float64))


def test_loading_a_checkpoint_is_not_undone_by_a_deferred_update(ranks: RankFactory) -> None:
    ranks(2).run(body_load_state_dict)


def body_gradient_reads() -> None:
    model = linear()
    optimizer = wrapped(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model)
        if step == 2:
            assert type(model.weight.grad) is InFlightGradient
            check(model.weight.grad.clone(), mean_gradient())
        optimizer.step()
    check(model.weight.grad.clone(), mean_gradient())


def test_a_gradient_that_is_read_is_the_average(ranks: RankFactory) -> None:
    ranks(2).run(body_gradient_reads)


def body_scaler() -> float:
    model = linear()
    start = model.weight.detach().clone()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(my_rows()).sum()
        if step == 3 and hvd.rank() == 1:
            loss = loss * float("inf")  # on one rank; all must skip
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    check(model.weight.data, start - 4 * LR * mean_gradient())
    return scaler.get_scale()


def test_grad_scaler_without_ritual(ranks: RankFactory) -> None:
    assert ranks(2).run(body_scaler) == [4.0, 4.0]


def body_identity() -> dict[str, bool]:
    model = linear()
    inner = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()  # the same on all ranks
    inner.step()  # state from before wrapping, as from a checkpoint
    inner.zero_grad()
    fired: list[str] = []
    inner.register_step_post_hook(lambda *_: fired.append("post"))
    inner.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    again = pickle.loads(pickle.dumps(optimizer))
    return {
        "same object": optimizer is inner,
        "instance": isinstance(optimizer, torch.optim.Adam),
        "state kept": float(optimizer.state_dict()["state"][0]["step"]) == 4,
        "hooks once a step": fired == ["pre", "post"] * 3,
        "amp support": optimizer._step_supports_amp_scaling,
        "pickles as its class": type(again) is torch.optim.Adam,
        "copies as its class": type(copy.deepcopy(optimizer)) is torch.optim.Adam,
    }


def test_the_wrapped_optimizer_is_still_the_users(ranks: RankFactory) -> None:
    for seen in ranks(2).run(body_identity):
        assert all(seen.values()), seen


def body_new_group() -> None:
    model = linear()
    late = nn.Parameter(torch.ones(3, dtype=torch.float64))
    start = late.detach().clone()
    optimizer = wrapped(model)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad()
        loss = model(my_rows()).sum()
        if step >= 3:
            loss = loss + (late * my_rows()[0]).sum()
        loss.backward()
        optimizer.step()
    check(late.data, start - 3 * LR * mean_gradient()[0])


def test_parameters_added_later_are_averaged_too(ranks: RankFactory) -> None:
    ranks(2).run(body_new_group)


def body_sparse(optimizer_class: str, as_dense: bool) -> None:
    results = []
    for distributed in (True, False):
        torch.manual_seed(2)
        table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        make = getattr(torch.optim, optimizer_class)
        optimizer = make(table.parameters(), lr=LR)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=table.named_parameters(), sparse_as_dense=as_dense
            )
        everyone = [torch.tensor([r, r + 1, 7]) for r in range(hvd.size())]
        for step in range(5):
            optimizer.zero_grad()
            rows = [everyone[hvd.rank()]] if distributed else everyone
            if step != 3 or not distributed or hvd.rank() == 0:
                use = rows if step != 3 else rows[:1]
                scale = 1 if distributed else 1 / hvd.size()
                sum(table(row).square().sum() * scale for row in use).backward()
            optimizer.step()
        results.append(table.weight.data.clone())
    check(*results, rtol=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "as_dense"), [("SGD", False), ("SparseAdam", False), ("SGD", True)]
)
def test_sparse_gradients(ranks: RankFactory, optimizer: str, as_dense: bool) -> None:
    ranks(2).run(body_sparse, optimizer, as_dense)


def body_options() -> None:
    for how, factor in (({"op": hvd.Sum}, hvd.size()), ({"gradient_predivide_factor": 2.0}, 1)):
        model = linear()
        start = model.weight.detach().clone()
        optimizer = wrapped(model, **how)
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        wanted = -4 * LR * factor * mean_gradient()
        check(model.weight.data - start, wanted)


def test_sum_and_predivide(ranks: RankFactory) -> None:
    ranks(2).run(body_options)


def body_compressed() -> dict[str, float]:
    """Relative error of four updates by sevenths, which no format has exactly."""
    errors = {}
    for name in ("none", "fp16", "bf16"):
        parameter = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            named_parameters=[("parameter", parameter)],
            compression=getattr(hvd.Compression, name),
        )
        for _ in range(4):
            optimizer.zero_grad()
            (parameter * (hvd.rank() + 1) / 7).sum().backward()
            optimizer.step()
        wanted = -4 * (hvd.size() + 1) / 2 / 7
        errors[name] = float((parameter.data / wanted - 1).abs().max())
    return errors


def test_compression_rounds_what_travels(ranks: RankFactory) -> None:
    for errors in ranks(2).run(body_compressed):
        assert errors["none"] < 1e-14
        assert 1e-5 < errors["fp16"] < 2**-10
        assert 1e-4 < errors["bf16"] < 2**-7


def body_layouts() -> None:
    results = []
    for distributed in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
        model[0] = model[0].to(memory_format=torch.channels_last)
        model[2] = model[2].float()  # two dtypes, two gradient buffers
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters()
            )
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.ones(1, 2, 4, 4, dtype=torch.float64)  # equal rows: no rank is special
            hidden = model[1](model[0](x)).float()
            model[2](hidden).square().sum().backward()
            optimizer.step()
        results.append([p.data.clone() for p in model.parameters()])
    for mine, alone in zip(*results, strict=True):
        check(mine, alone, rtol=1e-6)


def test_memory_formats_and_dtypes(ranks: RankFactory) -> None:
    ranks(2).run(body_layouts)


def body_misuse() -> dict[str, str]:
    errors = {}
    model = linear()
    optimizer = wrapped(model)
    backward(model)
    for name, mistake in {
        "zero_grad": optimizer.zero_grad,
        "second backward": lambda: backward(model),
    }.items():
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            mistake()
        errors[name] = str(caught.value)
    optimizer.step()
    check(model.weight.detach(), linear().weight.detach() - LR * mean_gradient())  # of one pass
    return errors


def test_gradients_in_flight_are_protected(ranks: RankFactory) -> None:
    for errors in ranks(2).run(body_misuse):
        assert "before optimizer.step()" in errors["zero_grad"]
        assert "more than backward_passes_per_step" in errors["second backward"]
        assert "weight" in errors["second backward"]


class CountingSGD(torch.optim.SGD):
    """Looks at its group's own counter: updating in parts would count parts."""

    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        with torch.no_grad():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] / group["count"] * parameter.grad


def body_not_separable() -> None:
    model = linear()
    start = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        CountingSGD(model.parameters(), lr=LR), named_parameters=model.named_parameters()
    )
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    check(model.weight.data, start - LR * (1 + 1 / 2 + 1 / 3 + 1 / 4) * mean_gradient())


def test_an_optimizer_with_a_counter_in_its_group(ranks: RankFactory) -> None:
    ranks(2).run(body_not_separable)


def body_dropped_optimizer() -> None:
    model, optimizer, wanted = one_step_left_open()
    del optimizer
    check(model.weight.data, wanted)


def test_dropping_the_optimizer_loses_no_update(ranks: RankFactory) -> None:
    ranks(2).run(body_dropped_optimizer)


def body_script() -> None:
    """TorchScript reads parameters in C++, so they are updated in step()."""
    model = linear()
    start = model.weight.detach().clone()
    scripted = torch.jit.trace(model, my_rows())
    optimizer = wrapped(model)
    for _ in range(4):
        optimizer.zero_grad()
        scripted(my_rows()).sum().backward()
        optimizer.step()
    check(model.weight.data, start - 4 * LR * mean_gradient())


def test_readers_in_cpp(ranks: RankFactory) -> None:
    ranks(2).run(body_script)


def body_stale() -> str:
    model, _, _ = one_step_left_open()
    disarm_parameter(model.weight)  # as a reader that Python does not see
    with pytest.raises(RuntimeError, match="StaleRead") as caught:
        backward(model)
    return str(caught.value)


def test_a_stale_read_is_never_silent(ranks: RankFactory) -> None:
    for message in ranks(2).run(body_stale):
        assert "'weight'" in message


def body_digest(mode: dict[str, str]) -> str:
    """Of the weights after a training whose slices are ordered in this way."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HVD_ORDER_SLICE_BYTES": "1KiB", **mode}.items():
            patch.setenv(name, value)
        hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(5)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2), named_parameters=model.named_parameters()
    )
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 40) + hvd.rank()).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    hvd.shutdown()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


MODES = [
    {"HVD_ORDER_AGREEMENT": "leader"},
    {"HVD_ORDER_AGREEMENT": "negotiated"},
    {"HVD_ORDER_AGREEMENT": "planned"},
    {"HVD_ORDER_POLICY": "arrival"},
    {"HVD_ORDER_CROSS_ITERATION": "0"},
]


def test_results_do_not_depend_on_how_slices_are_ordered(ranks: RankFactory) -> None:
    assert len({digest for mode in MODES for digest in ranks(2).run(body_digest, mode)}) == 1
