"""Collectives for the arrays of a library that works on a stream of its own."""

from __future__ import annotations

import pytest
from helpers.device.device_job import run_on_device

pytestmark = pytest.mark.timeout(120)


def test_a_library_with_its_own_stream() -> None:
    """It overwrites its array as soon as a call has returned, and reads what was written."""
    run_on_device(
        """
        import hvd_order.array as arrays

        # PyTorch 2.13 knows only devices that are not renamed.
        torch.Tensor.__dlpack_device__ = lambda self: (1 if self.device.type == "cpu" else 12, 0)
        own = torch.Stream(device=NAME)


        class Array:
            def __init__(self, tensor):
                self.tensor = tensor

            def __dlpack_device__(self):
                return self.tensor.__dlpack_device__()

            def __dlpack__(self, max_version=None):
                own.synchronize()  # DLPack has no streams for this device
                return self.tensor.__dlpack__(max_version=max_version)

            def fill(self, value):
                with own:
                    self.tensor.fill_(value)

            def numbers(self):
                with own:
                    return self.tensor.cpu().tolist()


        def from_dlpack(producer):
            return Array(torch.utils.dlpack.from_dlpack(producer))


        with own:
            array = Array(torch.zeros(4, device=NAME))
        for delay_us in (0, 2000):
            device.set_delays(-1, random_us=delay_us)
            array.fill(rank + 1)
            handle = arrays.allreduce_async(array, op=hvd.Sum)
            array.fill(100)
            assert arrays.synchronize(handle).numbers() == [3] * 4
            array.fill(rank + 1)
            arrays.allreduce_(array, op=hvd.Sum)
            assert array.numbers() == [3] * 4
        """
    )
