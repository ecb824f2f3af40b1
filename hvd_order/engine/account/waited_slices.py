"""What readers of a tensor wait for, from the layout of a model."""

from __future__ import annotations

from hvd_order._native import _torch as native
from hvd_order.base.account.exposed import WaitedSlices

__all__: list[str] = []


def waited_slices(layout: native.SliceLayout) -> WaitedSlices:
    """Returns what readers of the tensors of ``layout`` wait for."""
    slices = layout.slices
    scatters = [s.operation == native.Operation.REDUCE_SCATTER for s in slices]
    all_scatters = [number for number, is_one in enumerate(scatters) if is_one]
    tensors = max(s.last_tensor for s in slices) + 1 if slices else 0
    parameters = layout.parameter_of(0) if layout.is_sharded else 0
    last: list[list[int]] = []
    begins: list[list[int]] = []  # by tensor
    for tensor in range(tensors):
        of_tensor = layout.slices_of(tensor)
        ends = [number for number in of_tensor if not scatters[number]]
        last.append(ends or of_tensor)
        gradient = tensor - parameters if parameters and tensor >= parameters else tensor
        begins.append([number for number in layout.slices_of(gradient) if scatters[number]])
    first: list[list[int]] = []
    for number, each in enumerate(slices):
        if not all_scatters or scatters[number]:
            first.append([number])
        elif each.operation == native.Operation.ALL_GATHER:
            of_tensors = range(each.first_tensor, each.last_tensor + 1)
            first.append(sorted({b for t in of_tensors for b in begins[t]}) or [number])
        else:  # the squares follow all first halves
            first.append(all_scatters)
    return WaitedSlices(last, first, [layout.slice_name(number) for number in range(len(slices))])
