"""The programs of test_matrix.py on a device that runs behind the host (tests/device)."""

from __future__ import annotations

import pytest
from helpers.device.device_job import run_on_device
from parity.test_matrix import CASES, OPTIMIZERS

# torch.compile knows no back end for the test device. The fused kernels are the CPU's and CUDA's.
NOT_HERE = ("Compiled",)


@pytest.mark.timeout(400)  # the first one builds the device
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[] if name == "AdamW-foreach" else [pytest.mark.long])
        for name in OPTIMIZERS
        if name != "AdamW-fused"
    ],
)
def test_equals_one_process(optimizer: str) -> None:
    programs = [
        program for program, used in CASES if used == optimizer and not program.startswith(NOT_HERE)
    ]
    run_on_device(
        f"""
        from parity.programs import PROGRAMS
        from parity.test_matrix import TOLERANCE, train

        device.set_delays(-1, random_us=50)
        wrong = []
        for program in {programs}:
            try:
                result = train(program, {optimizer!r}, True, NAME)
            except Exception as error:
                raise AssertionError(program) from error
            alone = train(program, {optimizer!r}, False)["weights"]
            for name, wanted in alone.items():
                error = (result["weights"][name] - wanted).abs().max() / wanted.abs().max()
                if not error <= TOLERANCE:
                    wrong.append((program, name, float(error)))
            overlaps = PROGRAMS[program].overlaps and {optimizer!r} != "LBFGS"
            if result["deferred"] != overlaps:
                wrong.append((program, "deferred", result["deferred"]))
        assert not wrong, wrong
        """,
        timeout=240,
    )
