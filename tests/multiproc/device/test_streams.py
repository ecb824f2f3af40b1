"""Training on a device that runs behind the host, on several streams.

The test device (tests/device) stands for a GPU: it has the rules of CUDA's streams, events and
caching allocator, and runs in real time on the host, so a missing wait gives other numbers here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.device.device_job import run_on_device

pytestmark = pytest.mark.timeout(120)

WAYS = [  # the usual one: tests/parity/test_matrix.py
    {"HVD_ORDER_DEBUG": "host_waits"},
    {"HVD_ORDER_AGREEMENT": "planned"},
    {"HVD_ORDER_AGREEMENT": "negotiated"},
    {"HVD_ORDER_SLICE_BYTES": "64"},
    {"HVD_ORDER_CROSS_ITERATION": "0"},
]


@pytest.mark.parametrize("env", WAYS, ids=lambda env: " ".join(env.values()))
def test_weights_are_those_of_one_process(env: dict[str, str]) -> None:
    run_on_device(
        """
        model = network()
        device.set_delays(-1, random_us=400)
        train(model, wrapped(model), 8)
        check_weights(weights(model))
        """,
        env=env,
    )


def test_kernels_have_the_weights_of_operators() -> None:
    """Late or not, on the device or on the CPU."""
    run_on_device(
        """
        def trained(where, delay_us, compression):
            device.set_delays(-1, random_us=delay_us)
            model = network().to(where)
            optimizer = wrapped(model, compression=compression)
            for step in range(8):
                optimizer.zero_grad()
                model(batch(step).to(where)).square().mean().backward()
                optimizer.step()
            return weights(model)

        kinds = [hvd.Compression.none, hvd.Compression.fp16]
        wanted = [trained("cpu", 0, kind) for kind in kinds]
        assert device.counts()["kernel_launches"] == 0
        try:
            trained(NAME, 0, hvd.Compression.int8)
        except RuntimeError as refused:
            assert "no kernels for" in str(refused)
        else:
            raise AssertionError("codes without kernels")
        without = [trained(NAME, 0, kind) for kind in kinds]
        assert device.counts()["kernel_launches"] == 0
        native.register_kernels(NAME, device.kernels())
        for kind, on_cpu, by_operators in zip(kinds, wanted, without):
            before = device.counts()["kernel_launches"]
            for delay_us in (0, 400):
                assert all(map(torch.equal, trained(NAME, delay_us, kind), by_operators))
            assert device.counts()["kernel_launches"] > before
            for mine, cpu in zip(by_operators, on_cpu):
                torch.testing.assert_close(mine, cpu)
        for kind in (hvd.Compression.bf16_ef, hvd.Compression.int8):
            for mine, cpu in zip(trained(NAME, 400, kind), trained("cpu", 0, kind)):
                torch.testing.assert_close(mine, cpu)
        """,
        kernels=False,
        timeout=100,
    )


@pytest.mark.parametrize("order", ["2.0", "float('inf')"])
def test_clipping_in_flight(order: str) -> None:
    run_on_device(
        f"""
        def clipped(model, optimizer, steps):
            norms = []
            for step in range(steps):
                backward(model, optimizer, step)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, {order})
                norms.append(norm.cpu())
                optimizer.step()
            return torch.stack(norms)

        model = network()
        device.set_delays(-1, random_us=400)
        optimizer = wrapped(model)
        norms = clipped(model, optimizer, 8)
        assert optimizer.overlap_report().deferred_parameters == 8
        wanted = check_weights(weights(model), clipped, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norms, wanted)
        """,
        env={"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TUNE": "0", "HVD_ORDER_SLICE_BYTES": "256"},
    )


def test_small_gradients_of_a_slice_are_packed_by_one_launch() -> None:
    run_on_device(
        """
        model = network(layers=6)
        optimizer = wrapped(model)
        train(model, optimizer, 4)
        weights(model)
        before = device.counts()["kernel_launches"]
        train(model, optimizer, 3, begin=4)
        weights(model)
        assert device.counts()["kernel_launches"] - before == 3, device.counts()
        """,
        env={"HVD_ORDER_SLICE_BYTES": "1000000"},
    )


@pytest.mark.parametrize("debug", ["", "host_waits"])
def test_what_a_reader_waits_for_on_the_host(debug: str) -> None:
    """The link is stopped: a reader returns at once, or only when the link goes on."""
    run_on_device(
        """
        import os
        import threading

        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 4)
        weights(model)
        device.close_gate(gradient_group().stream)
        backward(model, optimizer, 4)
        optimizer.step()
        reached = threading.Event()

        def read():
            model[0].weight.sum()
            reached.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        ahead = reached.wait(timeout=1)
        device.open_gates()
        assert reached.wait(timeout=20)
        reader.join()
        assert ahead == (not os.environ["HVD_ORDER_DEBUG"])
        """,
        env={"HVD_ORDER_DEBUG": debug},
    )


SIDE_STREAM = """
        def trained(delayed, order):
            device.set_delays(-1, random_us=0)
            model = network()
            optimizer = wrapped(model)
            side = torch.Stream(device=NAME)
            main = torch.accelerator.current_stream()
            averages = [torch.zeros_like(p) for p in model.parameters()]
            device.synchronize()
            if delayed:
                device.set_delays(0, constant_us=1000)
            for step in range(6):
                backward(model, optimizer, step)
                main.wait_stream(side)
                optimizer.step()
                side.wait_stream(main)  # as in ordinary training: behind the update
                with torch.no_grad():
                    for reader in order:
                        if reader == "main":
                            total = sum(p.sum() for p in model.parameters())
                        else:
                            with side:
                                torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
            device.synchronize()
            device.set_delays(-1, random_us=0)
            return weights(model) + [average.cpu() for average in averages]

        for order in (["side"], ["side", "main"], ["main", "side"]):
            assert all(map(torch.equal, trained(True, order), trained(False, order))), order
"""


def test_a_reader_on_a_side_stream_waits_for_the_update() -> None:
    """The updates run late; the side stream is ordered behind step() once, before any read."""
    run_on_device(SIDE_STREAM, timeout=100)


CHANGES_ON_A_SIDE_STREAM = """
        def trained(delay_us):
            device.set_delays(-1, random_us=0)
            model = network()
            optimizer = wrapped(model)
            side = torch.Stream(device=NAME)
            main = torch.accelerator.current_stream()
            seen = []
            device.synchronize()
            device.set_delays(side.stream_id, constant_us=delay_us)
            for step in range(6):
                backward(model, optimizer, step)
                side.wait_stream(main)
                with side:
                    for i, p in enumerate(model.parameters()):
                        factor = torch.full((), 0.5 + i, device=NAME) * 0.5
                        p.grad.mul_(factor)
                        del factor  # its memory is used again on this stream
                        torch.full((), 7.0, device=NAME)
                        if {reads} and step % 2:
                            seen.append(p.grad.sum())
                main.wait_stream(side)
                optimizer.step()
            device.synchronize()
            device.set_delays(-1, random_us=0)
            return weights(model) + [each.cpu() for each in seen]

        assert all(map(torch.equal, trained(1000), trained(0)))
"""


@pytest.mark.parametrize("reads", [False, True])
def test_changes_on_a_side_stream_are_made_behind_it(reads: bool) -> None:
    """Noted on a late stream, made on another; also where elements are read before step()."""
    run_on_device(
        CHANGES_ON_A_SIDE_STREAM.replace("{reads}", str(reads)),
        env={"HVD_ORDER_DEBUG": "split", "HVD_ORDER_TUNE": "0", "HVD_ORDER_SLICE_BYTES": "256"},
    )


def test_absent_gradients_wait_for_their_sums_and_for_nothing_else() -> None:
    run_on_device(
        """
        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 4)
        optimizer.zero_grad()
        x = batch(4)
        # Rank 0 leaves out the last layer.
        (model[:3](x) if rank == 0 else model(x)).square().mean().backward()
        optimizer.step()
        device.close_gate(device.current_stream())  # work of the program
        model[3].weight.sum()  # whether it is updated depends on the other rank's flag
        device.open_gates()
        total = sum(p.double().sum() for p in model.parameters()).item()
        everywhere = hvd.allgather_object(total)
        assert len(set(everywhere)) == 1, everywhere
        """
    )


def test_an_optimizer_may_be_dropped_while_the_device_is_at_work() -> None:
    run_on_device(
        """
        import gc
        import threading
        from hvd_order.engine.engine_host import running_host

        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 4)
        weights(model)
        device.close_gate(gradient_group().stream)
        backward(model, optimizer, 4)
        optimizer.step()
        sum(p.sum() for p in model.parameters())  # launched: the sums are still to come
        threading.Timer(0.3, device.open_gates).start()
        del optimizer
        gc.collect()
        assert running_host().models == set(), "its buffers are kept, and no other can be planned"
        check_weights(weights(model), steps=5)
        """
    )


def test_events_and_streams_are_used_again() -> None:
    run_on_device(
        """
        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 10)
        device.synchronize()
        before, sums_before = device.counts(), gradient_group().all_reduces
        train(model, optimizer, 50, begin=10)
        device.synchronize()
        after, sums = device.counts(), gradient_group().all_reduces - sums_before
        assert after["pool_streams_taken"] == before["pool_streams_taken"]
        # The test device's process group makes some for each sum, as it has no pool.
        created = after["events_created"] - before["events_created"]
        assert created <= 2 * sums + 20, (created, sums)
        """
    )


def test_a_failure_of_the_device_reaches_every_rank() -> None:
    ended = run_on_device(
        """
        import os
        import time

        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 4)
        weights(model)
        if rank == 1:
            device.fail(gradient_group().stream, "an uncorrectable error")
        end = time.monotonic() + 20
        error = None
        step = 4
        # At first the device's own error may come, from whatever the program does with it.
        while not isinstance(error, hvd.HorovodInternalError) and time.monotonic() < end:
            step += 1
            try:
                train(model, optimizer, 1, begin=step)
            except Exception as raised:
                error = raised
        print(repr(error), flush=True)
        assert isinstance(error, hvd.HorovodInternalError), error
        try:
            optimizer.step()
        except hvd.HorovodInternalError:
            pass
        else:
            raise AssertionError("step() raised nothing")
        hvd.shutdown()  # as at the end of Python
        os._exit(0)  # the streams that failed keep tensors from being freed
        """
    )
    for one in ended:
        assert "the device of rank 1 failed: an uncorrectable error" in one.stdout


def test_a_rank_is_killed_whose_sums_the_survivors_device_waits_for(tmp_path: Path) -> None:
    """The survivor's host is a step ahead; its device goes on when the sums are cancelled."""
    ended = run_on_device(
        f"""
        import os
        import signal
        import time
        from pathlib import Path

        launched = Path({str(tmp_path / "launched")!r})
        model = network()
        optimizer = wrapped(model)
        train(model, optimizer, 6)
        if rank == 1:
            device.close_gate(gradient_group().stream)
        train(model, optimizer, 1, begin=6)
        end = time.monotonic() + 20
        if rank == 1:
            while not launched.exists():
                assert time.monotonic() < end
            os.kill(os.getpid(), signal.SIGKILL)
        launched.touch()
        try:
            for step in range(7, 10**6):
                train(model, optimizer, 1, begin=step)
                assert time.monotonic() < end
        except hvd.HorovodInternalError as error:
            print(error, flush=True)
        device.synchronize()
        hvd.shutdown()
        """,
        killed=1,
    )
    assert "rank 1" in ended[0].stdout


def test_a_planned_order_follows_the_device_and_not_the_launches() -> None:
    """The host launches all layers at once; their gradients come one after the other."""
    run_on_device(
        """
        from hvd_order.engine.engine_host import running_host

        def slow_backward(layer, args, output):
            output.register_hook(lambda _: device.busy(0.01))

        model = network(layers=4, width=64)
        for layer in model:
            layer.register_forward_hook(slow_backward)
        optimizer = wrapped(model)

        def backward(step):
            optimizer.zero_grad()
            model(torch.ones(2, 64, device=NAME)).square().mean().backward()
            optimizer.step()

        for step in range(4):
            backward(step)
        weights(model)
        host = running_host()
        host.engine.start_recording()
        backward(4)
        weights(model)
        host.engine.stop_recording()
        events = sorted(host.engine.take_events(), key=lambda event: event.issued_ns)
        first = host.layouts[0].slice_name(events[0].slice)
        assert first.startswith("3."), [host.layouts[0].slice_name(e.slice) for e in events]
        """,
        env={"HVD_ORDER_AGREEMENT": "planned", "HVD_ORDER_SLICE_BYTES": "8KiB"},
    )
