"""Random schedules of streams, delays and readers have the weights of L0, to the last bit."""

from __future__ import annotations

import pytest
from helpers.device.device_job import run_on_device

# Each schedule draws: a delay for each stream, how fast the link is, who reads the parameters
# after step() and on which stream, whether gradients are clipped or compressed, and which layers
# are used.
# Programs are few, so that L0's weights are computed once for each; delays change no number.
BODY = """
import gc
import os
import random

PROGRAMS = 8
STEPS = 6


def run(program, schedule):
    gc.collect()  # the optimizer before, whose model would stand beside the planned one
    drawn = random.Random(program)  # the same on all ranks, and in all schedules
    model = network(layers=drawn.choice([2, 3, 5]), width=16, seed=program)
    passes = drawn.choice([1, 1, 2])
    compression = drawn.choice([hvd.Compression.none] * 2 + [hvd.Compression.bf16_ef])
    optimizer = wrapped(model, backward_passes_per_step=passes, compression=compression)
    side = torch.Stream(device=NAME)
    main = torch.accelerator.current_stream()
    average = [torch.zeros_like(p) for p in model.parameters()]
    device.synchronize()
    if schedule is not None:
        late = random.Random(1000 * schedule + rank)
        device.set_delays(-1, random_us=late.choice([0, 50, 300]))
        for stream in (0, side.stream_id, gradient_group().stream):
            device.set_delays(
                stream,
                constant_us=late.choice([0, 0, 100, 500]), random_us=late.choice([0, 50, 300]),
            )
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = True  # every rank has every gradient, or they would clip by different norms
        for part in range(passes):
            rows = batch(step * passes + part)
            left_out = drawn.random() < 0.2 and step > 2 and len(model) > 2
            whole = whole and not left_out
            used = model[:-1] if left_out and rank == 0 else model
            used(rows).square().mean().backward()
        if whole and drawn.random() < 0.2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        main.wait_stream(side)
        optimizer.step()
        side.wait_stream(main)
        readers = drawn.choice([[], ["main"], ["side"], ["main", "side"], ["side", "main"]])
        with torch.no_grad():
            for reader in readers:
                with main if reader == "main" else side:
                    for mean, p in zip(average, model.parameters()):
                        if reader == "side":
                            mean.lerp_(p, 0.25)
                        else:
                            p.sum()
    device.synchronize()
    device.set_delays(-1)
    return torch.cat([p.detach().cpu().flatten() for p in [*model.parameters(), *average]])


def job(debug):
    hvd.shutdown()
    os.environ["HVD_ORDER_DEBUG"] = debug
    hvd.init()


job("host_waits")
wanted = [run(program, None) for program in range(PROGRAMS)]
job("")
wrong = [
    schedule
    for schedule in range(SCHEDULES)
    if not torch.equal(run(schedule % PROGRAMS, schedule), wanted[schedule % PROGRAMS])
]
assert not wrong, f"schedules with other weights: {wrong}"
"""


# 1,000 in all take a quarter of an hour; `make test` runs the first ten.
LONG = [pytest.mark.long, pytest.mark.timeout(600)]
PARTS = [(0, 10), *(pytest.param(50 * i, 50 * (i + 1), marks=LONG) for i in range(20))]


@pytest.mark.parametrize("agreement", ["leader", "planned"])
@pytest.mark.parametrize(("first", "end"), PARTS)
def test_any_schedule_has_the_weights_of_a_host_that_waits(
    first: int, end: int, agreement: str
) -> None:
    run_on_device(
        BODY.replace("SCHEDULES", f"{first}, {end}"),
        env={"HVD_ORDER_AGREEMENT": agreement},
        timeout=60 + 2 * (end - first),
    )
