"""The test device has CUDA's rules; each test fails if its rule is broken."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device.test_device import NAME, load


@pytest.fixture
def device() -> Iterator[Any]:
    extension = load()
    yield extension
    extension.open_gates()
    extension.set_delays(-1)
    extension.synchronize()


def test_work_runs_behind_the_host(device: Any) -> None:
    device.close_gate(0)
    x = torch.ones(4, device=NAME)
    event = torch.Event(NAME)
    event.record()
    assert not event.query()
    device.open_gates()
    assert x.sum().item() == 4
    assert event.query()


def test_a_wait_for_an_event_that_was_never_recorded_is_no_wait(device: Any) -> None:
    side = torch.Stream(device=NAME)
    never = torch.Event(NAME)
    assert never.query()
    side.wait_event(never)
    side.synchronize()


def test_a_wait_takes_the_record_at_the_time_of_the_call(device: Any) -> None:
    first, second = torch.Stream(device=NAME), torch.Stream(device=NAME)
    event = torch.Event(NAME)
    first.record_event(event)
    second.wait_event(event)
    device.close_gate(first.stream_id)
    first.record_event(event)  # moves the event, and not the wait
    second.synchronize()
    assert not event.query()
    device.open_gates()
    event.synchronize()


def test_a_missing_wait_shows(device: Any) -> None:
    x = torch.zeros(4, device=NAME)
    device.synchronize()
    side = torch.Stream(device=NAME)
    device.close_gate(0)
    x.add_(1)
    with side:
        early = x.cpu()
    device.open_gates()
    torch.accelerator.current_stream().synchronize()
    assert early.tolist() == [0] * 4
    assert x.cpu().tolist() == [1] * 4


def test_freed_memory_goes_at_once_to_the_next_tensor_of_its_stream(device: Any) -> None:
    x = torch.zeros(1024, device=NAME)
    address = x.data_ptr()
    device.close_gate(0)
    x.add_(1)
    del x
    y = torch.zeros(1024, device=NAME)  # while the stream still works on x
    assert y.data_ptr() == address
    device.open_gates()
    assert y.sum().item() == 0


def test_another_streams_use_is_waited_for_only_if_it_was_recorded(device: Any) -> None:
    side = torch.Stream(device=NAME)
    for record in (True, False):
        x = torch.ones(2048, device=NAME)
        device.synchronize()
        device.close_gate(side.stream_id)
        with side:
            total = x.sum()
        if record:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        y = torch.zeros(2048, device=NAME)
        assert (y.data_ptr() != address) == record
        torch.accelerator.current_stream().synchronize()  # zeros before the sum
        device.open_gates()
        with side:
            assert (total.item() == 2048) == record
        del y, total


def test_a_copy_to_the_host_waits_for_its_stream_alone(device: Any) -> None:
    x = torch.ones(4, device=NAME)
    side = torch.Stream(device=NAME)
    device.synchronize()
    device.close_gate(side.stream_id)
    assert x.cpu().tolist() == [1] * 4
    device.open_gates()


def test_a_source_on_the_host_has_been_read_when_the_copy_returns(device: Any) -> None:
    source = torch.ones(4)
    device.close_gate(0)
    x = source.to(NAME)
    source.zero_()
    device.open_gates()
    assert x.cpu().tolist() == [1] * 4


def test_the_current_stream_belongs_to_the_thread(device: Any) -> None:
    found = []
    with torch.Stream(device=NAME):
        thread = threading.Thread(target=lambda: found.append(device.current_stream()))
        thread.start()
        thread.join()
    assert found == [0]


FAILS = """
import torch
from helpers.device.test_device import NAME, load

device = load()
side = torch.Stream(device=NAME)
device.fail(side.stream_id, "an uncorrectable error")
for _ in range(2):
    try:
        side.synchronize()
    except RuntimeError as error:
        print(error)
"""


def test_a_failed_stream_stays_failed() -> None:
    """In a process of its own, whose device is of no more use."""
    command = [sys.executable, "-c", FAILS]
    tests = Path(__file__).resolve().parents[1]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tests)
    assert ended.stdout.count("an uncorrectable error") == 2


def test_operators_give_the_cpus_numbers(device: Any) -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(
        torch.nn.Linear(48, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
        torch.nn.Linear(32, 5), torch.nn.LayerNorm(5),
    )  # fmt: skip
    there = torch.nn.Sequential(
        torch.nn.Linear(48, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(),
        torch.nn.Linear(32, 5), torch.nn.LayerNorm(5),
    )  # fmt: skip
    there.load_state_dict(here.state_dict())
    here.double()
    there.double().to(NAME)
    device.set_delays(-1, random_us=200)
    x = torch.randn(2, 48, dtype=torch.float64)
    y = torch.tensor([1, 4])
    for model, where in ((here, "cpu"), (there, NAME)):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(where)), y.to(where)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu())
