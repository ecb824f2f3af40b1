"""The quick measurement of a link, with streams that take the time of a model."""

from __future__ import annotations

import pytest

from hvd_order.base.link.link_model import measured_link

SLICE_S = 2e-3


@pytest.mark.parametrize("mbit", [10, 56, 1000, 10_000])
@pytest.mark.parametrize("slower", [1.0, 3.0])  # another rank takes so many times as long
def test_a_slow_link_is_measured_in_about_a_second(mbit: float, slower: float) -> None:
    per_byte = 8e-6 / mbit
    streams: list[float] = []

    def time_stream(sizes: list[int]) -> float:
        streams.append(len(sizes) * SLICE_S + sum(sizes) * per_byte)
        return streams[-1]

    found = measured_link(time_stream, longest=lambda seconds: slower * seconds)
    assert found.seconds_per_byte == pytest.approx(per_byte, rel=0.1)
    # Two streams of 6 MiB in all are the least.
    assert sum(streams) < 1.2 + 6.4e6 * per_byte
    assert len(streams) <= 30
