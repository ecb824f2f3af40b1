"""Checksums of tensors: equal for equal bits, and for no others that one would meet."""

from __future__ import annotations

import pytest
import torch

from hvd_order.torch.rank_check.checksum import checksums

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.int8, torch.bool,
]  # fmt: skip


def checksum(tensor: torch.Tensor) -> tuple[object, int]:
    (value,) = checksums([tensor])
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (101, 331)], ids=str)
def test_equal_bits_are_equal_and_one_other_bit_is_not(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    octets = tensor.clone().reshape(-1).view(torch.uint8)
    for place in {0, octets.numel() // 2, octets.numel() - 1}:
        for bit in (0, 7) if dtype != torch.bool else (0,):
            other = octets.clone()
            other[place] ^= 1 << bit
            assert checksum(other.view(dtype).view(shape)) != checksum(tensor)


@pytest.mark.parametrize("rows", [3, 5000])
def test_elements_that_change_places_are_noticed(rows: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(rows, 64)
    first = checksum(tensor)
    assert checksum(tensor.flip(0)) != first
    assert checksum(tensor.roll(1, 0)) != first
    swapped = tensor.clone()
    swapped[[0, 2]] = tensor[[2, 0]]
    assert checksum(swapped) != first


def test_where_a_tensor_lies_makes_no_difference() -> None:
    torch.manual_seed(0)
    buffer = torch.randn(1001)
    tensor = buffer[1:]  # begins in the middle of a word of 64 bits
    assert checksum(tensor) == checksum(tensor.clone())
    matrix = torch.randn(30, 20)
    assert checksum(matrix[:, ::2]) == checksum(matrix[:, ::2].clone())


def test_an_order_of_its_own_is_told() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 5, 5)
    last = images.to(memory_format=torch.channels_last)
    assert checksum(last)[0] != checksum(images)[0]
    assert checksum(last) == checksum(images.clone().to(memory_format=torch.channels_last))


def test_what_has_no_elements_of_its_own_is_passed_over() -> None:
    sparse = torch.eye(3).to_sparse()
    assert checksums([torch.empty(2, device="meta"), sparse]) == [(None, 0), (None, 0)]
