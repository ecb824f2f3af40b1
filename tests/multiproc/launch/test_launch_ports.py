"""Where the processes of a job listen: on one host, where no other host can reach them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launching import Job, launcher, no_interface_chosen, write_script
from helpers.processes import descendants, heard_elsewhere, listening_at
from helpers.ranks import free_port
from helpers.training.scripts import trains_a_layer

TRAINS = f"""\
import os, sys, time
{trains_a_layer()}
hvd.allreduce(torch.ones(1))
os.write(1, f"trained {{hvd.rank()}}\\n".encode())
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
hvd.shutdown()
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-np", "2"], id="ranks"),
        pytest.param(["-np", "2", "--servers", "2"], id="servers", marks=pytest.mark.long),
        pytest.param(["-np", "2", "--min-np", "1"], id="elastic", marks=pytest.mark.long),
    ],
)
def test_a_job_on_one_host_listens_on_loopback_alone(tmp_path: Path, options: list[str]) -> None:
    go = tmp_path / "go"
    command = [*launcher(*options), *write_script(tmp_path, TRAINS), str(go)]
    with Job(command, no_interface_chosen()) as job:
        for _ in range(2):
            job.wait_for("trained")
        listening = listening_at(descendants(job.pid))
        assert len(listening) >= 3, "the store and what Gloo has opened in each rank"
        assert heard_elsewhere(listening) == []
        go.touch()
        assert job.wait() == 0, job.text()


@pytest.mark.parametrize(
    "address", ["localhost", pytest.param("127.0.0.1", marks=pytest.mark.long)]
)
def test_rank_0_of_a_job_started_by_hand_listens_where_the_others_come(
    tmp_path: Path, address: str
) -> None:
    go = tmp_path / "go"
    command = [*write_script(tmp_path, TRAINS), str(go)]
    port = free_port()
    where = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    with (
        Job(command, {**no_interface_chosen(), **where, "RANK": "0"}) as first,
        Job(command, {**no_interface_chosen(), **where, "RANK": "1"}) as second,
    ):
        first.wait_for("trained 0")
        second.wait_for("trained 1")
        store = [each for each in listening_at(descendants(first.pid)) if each[2] == port]
        assert [address for _, address, _ in store] == ["127.0.0.1"]
        go.touch()
        assert (first.wait(), second.wait()) == (0, 0), first.text() + second.text()
