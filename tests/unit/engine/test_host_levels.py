"""Which ranks share a host, from what each knows of itself."""

import pytest

from hvd_order.engine.host_levels import hosts_of


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ([("a", 0, 2), ("a", 1, 2), ("b", 0, 1)], [0, 0, 1]),
        ([("a", 0, 2), ("b", 0, 2), ("a", 1, 2), ("b", 1, 2)], [0, 1, 0, 1]),  # Slurm, cyclic
        ([("a", 0, 2), ("a", 1, 2), ("a", 0, 2), ("a", 1, 2)], [0, 0, 1, 1]),  # emulated hosts
        ([("a", 0, 1), ("a", 0, 1)], [0, 1]),
        ([("pod1", 0, 2), ("pod2", 1, 2)], [0, 1]),  # containers of one host
        ([("a", 3, 4), ("a", 0, 4), ("a", 1, 4)], [0, 1, 1]),
    ],
)
def test_hosts_of_ranks(places: list[tuple[str, int, int]], hosts: list[int]) -> None:
    assert hosts_of(places) == hosts
