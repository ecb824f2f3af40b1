"""Traces and random jobs: what users bring, what they get wrong, and what comes out."""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_order.base.errors import InvalidUsage
from hvd_order.cluster.model.job import check_job
from hvd_order.cluster.model.machines import Machines
from hvd_order.cluster.model.utility import Sigmoid
from hvd_order.cluster.policies.fifo import Fifo
from hvd_order.cluster.simulate.simulator import Rules, simulate
from hvd_order.cluster.workloads import own
from hvd_order.cluster.workloads.load import DATA, check_all, load_jobs
from hvd_order.cluster.workloads.machines import load_machines, machines_from, parse_machines
from hvd_order.cluster.workloads.random_jobs import Ranges, paper_machines, random_jobs

POLLUX = os.path.join(DATA, "pollux-workload-6.csv")
GAVEL = os.path.join(DATA, "gavel-small.trace")

PODS = ("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
        "deletion_time,scheduled_time\n")  # fmt: skip
TIRESIAS = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
WORKLOAD = "name,time,application,num_replicas,batch_size\n"
OWN = "name,arrival_s,workers,duration_s\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------------------ shipped traces
def test_the_workload_of_pollux_runs_to_its_end() -> None:
    machines = parse_machines("16x4gpu")
    assert check_all(POLLUX, machines) == 160
    models = collections.Counter(job.model for job in load_jobs(POLLUX))
    assert models == {"cifar10": 67, "ncf": 54, "deepspeech2": 16, "bert": 15, "yolov3": 5,
                      "imagenet": 3}  # fmt: skip
    assert simulate(load_jobs(POLLUX), machines, Fifo()).completed == 160


def test_jobs_of_pollux_scale_and_pay_for_large_batches() -> None:
    jobs = {job.name: job for job in load_jobs(POLLUX)}
    job = jobs["imagenet-18"]
    assert (job.requested, job.batch, job.arrival_s) == (24, 3200, 3472)
    assert job.samples > 90 * 1_281_000  # a sample of a large batch is worth less
    alone = job.speed.samples_per_s(1, 0, 1, job.batch)
    eight = job.speed.samples_per_s(8, 0, 2, job.batch)
    assert 4 * alone < eight < 8 * alone
    assert job.most > job.requested


def test_jobs_of_gavel_take_their_steps_over_their_throughput() -> None:
    jobs = list(load_jobs(GAVEL))
    assert len(jobs) == 13
    assert jobs[0].alone_s() == pytest.approx(3948 / 93.81276973018295)
    assert jobs[0].alone_s(1) == pytest.approx(3948 / 56.278593161152315)


def test_shipped_files_have_their_licences_beside_them() -> None:
    text = Path(DATA, "README.md").read_text()
    for name in os.listdir(DATA):
        assert name == "README.md" or name in text
    assert sum(os.path.getsize(os.path.join(DATA, name)) for name in os.listdir(DATA)) < 150_000


# ------------------------------------------------------------------------------ other traces
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("tiresias", TIRESIAS + "7,4,30,133,vgg11,120,23\n"),
        ("philly", PHILLY + "2017-11-08 08:00:00,120.0,4,480.0,6214e9\n"),
        ("jobs", OWN + "a,30,4,120\n"),
    ],
)
def test_a_job_takes_as_long_as_the_trace_says_and_longer_with_fewer_workers(
    tmp_path: Path, format: str, text: str
) -> None:
    path = write(tmp_path, text)
    (job,) = load_jobs(path)
    assert job == next(load_jobs(path, format))
    assert job.requested == 4
    assert job.alone_s() == pytest.approx(120)
    assert job.alone_s(2) == pytest.approx(240)
    assert job.alone_s(8) == pytest.approx(120)
    assert dict(job.worker) == {"gpu": 1}


def test_philly_is_sorted_by_time(tmp_path: Path) -> None:
    path = write(tmp_path, PHILLY + "2017-11-08 08:00:10,60,1,60,x\n2017-11-08 08:00:00,9,2,18,y\n"
                 "2017-11-08 08:00:05,0,1,0,x\n2017-11-08 08:00:06,5,0,0,x\n\n")  # fmt: skip
    jobs = list(load_jobs(path))
    assert [(job.arrival_s, job.model) for job in jobs] == [(0, "y"), (10, "x")]


def test_pods_of_pai_share_gpus_and_pending_ones_do_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, PODS + "p1,8000,4096,1,470,,LS,Running,10,110,30\n"
                 "p2,8000,4096,1,470,,BE,Pending,20,110,\np3,500,1024,0,0,,LS,Running,30,40,30\n"
                 "p4,500,1024,8,1000,,LS,Failed,50,50,50\n")  # fmt: skip
    first, second = load_jobs(path)
    assert dict(first.worker) == {"gpu": 0.47, "cpu": 8, "memory_gb": 4}
    assert (first.arrival_s, first.alone_s()) == (10, pytest.approx(80))
    assert dict(second.worker) == {"cpu": 0.5, "memory_gb": 1}


def test_gavel_with_throughputs_of_one_s_own(tmp_path: Path) -> None:
    rates = write(tmp_path, json.dumps({"t4": {"('A', 1)": {"null": 2.0}, "('A', 2)":
                  {"null": 3.0}, "('B', 1)": {"null": 0.0}}}), "rates.json")  # fmt: skip
    line = 'A\tpython3 "a"b\tx\t-n\t1\t600\t2\t5\t-1.000000\t40\n'
    path = write(tmp_path, line)
    (job,) = load_jobs(path, throughputs=rates, device="t4")
    assert (job.arrival_s, job.alone_s(), job.alone_s(1)) == (40, 200, 300)
    assert job.utility(1e6) == 5
    with pytest.raises(InvalidUsage, match="no GPU type 'v100'; it has t4"):
        list(load_jobs(path, throughputs=rates))
    write(tmp_path, line.replace("A\t", "B\t"))
    with pytest.raises(InvalidUsage, match=r"trace.csv, line 1: no throughput of 'B' with 2"):
        list(load_jobs(path, throughputs=rates, device="t4"))
    Path(rates).write_text('{"t4": {"A": 1}}')
    with pytest.raises(InvalidUsage, match=r"rates.json: t4, 'A'"):
        list(load_jobs(path, throughputs=rates, device="t4"))
    Path(rates).write_text("{")
    with pytest.raises(InvalidUsage, match=r"rates.json: no JSON"):
        list(load_jobs(path, throughputs=rates, device="t4"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv is empty"),
        ("\n\n", "trace.csv is empty"),
        (OWN, "trace.csv has a header and nothing else"),
        ("a,b\n1,2\n", "line 1: columns of no known format; there are: jobs, pollux"),
        ("name,time,application,batch_size\n", "lacks num_replicas of the format 'pollux'"),
        (
            WORKLOAD + "a,1,bert,2,24\nb,2,gpt,2,24\n",
            "line 3: application is 'gpt'; known are bert",
        ),
        (WORKLOAD + "a,-1,bert,2,24\n", "line 2: time is -1; expected a number of at least 0"),
        (WORKLOAD + "a,1,bert,2.5,24\n", "line 2: num_replicas is 2.5; expected a whole number"),
        (WORKLOAD + "a,1,bert,0,24\n", "line 2: num_replicas is 0"),
        (WORKLOAD + "a,1,bert,48,24\n", "line 2: 48 workers share a batch of 24"),
        (WORKLOAD + "a,1,bert,2,24\nb,5,be\n", "line 3: 3 fields; expected 5"),
        (WORKLOAD + "a,9,bert,2,24\nb,5,bert,2,24\n", "line 3: job 'b' arrives at 5 s, .* at 9 s"),
        (WORKLOAD + "a,1,bert,2,24\na,5,bert,2,24\n", "line 3: a second job is called 'a'"),
        (WORKLOAD + '"a,1,bert,2,24\n', "line 2: no text table"),
        (TIRESIAS + "7,4,soon,133,vgg11,120,23\n", "line 2: submit_time is 'soon'"),
        (TIRESIAS + "7,4,0,133,vgg11,0,23\n", "line 2: duration is 0; expected a number above 0"),
        (TIRESIAS + "7,4,nan,133,vgg11,120,23\n", "line 2: submit_time is nan"),
        (PHILLY + "yesterday,5,1,5,x\n", "line 2: timestamp is 'yesterday'"),
        (PHILLY + "2017-11-08 08:00:10,-5,1,5,x\n", "line 2: duration is -5"),
        (PODS + "p,1,1,1,1000,,LS,Running,10,20,30\n", "line 2: deleted at 20 s, before .* 30 s"),
        (OWN + ",0,1,5\n", "line 2: name is empty"),
        ("name,arrival_s,workers,leest\na,0,1,1\n", "line 2: unknown column 'leest'"),
        ("name,arrival_s,workers\na,0,1\n", "line 2: no duration_s; expected it, or samples and"),
        ("name,arrival_s,workers,duration_s,speed\na,0,1,5,1:3\n", "line 2: both duration_s and"),
        ("name,arrival_s,workers,samples,speed\na,0,1,5,one:3\n", "line 2: speed is 'one:3'"),
        ("name,arrival_s,workers,samples,speed\na,0,1,5,1:0\n", "line 2: a table of speeds"),
        ("name,arrival_s,workers,duration_s,worker\na,0,1,5,gpu\n", "line 2: 'gpu' in 'gpu'"),
        ("name,arrival_s,workers,duration_s,worker\na,0,1,5,gpu:-1\n", "line 2: 'gpu:-1'"),
        ("name,arrival_s,workers,duration_s,least\na,0,2,5,3\n", "line 2: job 'a': 2 workers of 3"),
        ("name,arrival_s,workers,duration_s,slope\na,0,2,5,3\n", "line 2: due_s and slope"),
    ],
)
def test_bad_traces_are_named_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidUsage, match=f"{re.escape(str(tmp_path))}.*{message}"):
        list(load_jobs(path))


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"name,arrival_s,workers,duration_s\n\xff\xfe,0,1,5\n")
    with pytest.raises(InvalidUsage, match=r"trace.csv, line 2: no text table"):
        list(load_jobs(path))
    with pytest.raises(InvalidUsage, match=r"missing.csv cannot be read"):
        list(load_jobs(tmp_path / "missing.csv"))
    with pytest.raises(InvalidUsage, match=r"no format .* 'csv'; there are: jobs"):
        list(load_jobs(path, "csv"))


def test_a_named_format_says_what_the_file_lacks(tmp_path: Path) -> None:
    path = write(tmp_path, "job,gpus\n1,2\n")
    with pytest.raises(InvalidUsage, match=r"line 1: no column job_id, num_gpu.*it has job, gpus"):
        list(load_jobs(path, "tiresias"))


def test_jobs_are_read_as_they_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "a,0,1,5\nb,0,1,5\nc,0,1\n")
    jobs = load_jobs(path)
    assert [job.name for job in itertools.islice(jobs, 2)] == ["a", "b"]
    with pytest.raises(InvalidUsage, match="line 4"):
        next(jobs)


def test_the_first_pass_names_the_job_that_does_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path, OWN + "a,0,4,5\nb,1,9,5\n")
    assert check_all(path, parse_machines("2x8gpu")) == 2
    machines = parse_machines("2x4gpu")
    with pytest.raises(InvalidUsage, match=r"trace.csv, line 3: job 'b' needs 9 workers of 1 gpu"):
        check_all(path, machines)
    assert check_all(path, machines, requested=False) == 2
    with pytest.raises(InvalidUsage, match=r"line 2: .*'gpu'; the machines have cpu"):
        check_all(path, Machines.alike(1, {"cpu": 8}))


# ------------------------------------------------------------------------------ own table
def test_the_documented_table_loads_as_documented(tmp_path: Path) -> None:
    lines = [line[4:] for line in (own.__doc__ or "").splitlines() if line.startswith("    ")]
    resnet, bert = load_jobs(write(tmp_path, "\n".join(lines)))
    assert (resnet.name, resnet.requested, resnet.alone_s()) == ("resnet", 4, 3600)
    assert (bert.arrival_s, dict(bert.worker)) == (600, {"gpu": 1, "cpu": 4})
    documented = set(re.findall(r"^\| ([a-z_, ]+?) \|", own.__doc__ or "", re.MULTILINE))
    assert {name for row in documented for name in row.split(", ")} - {"column"} == set(own.COLUMNS)


def test_measured_speeds_are_kept_for_one_machine_and_for_several(tmp_path: Path) -> None:
    path = write(tmp_path, "name,arrival_s,workers,samples,speed,speed_apart,server,"
                 "workers_per_server,value,due_s,slope\n"
                 "a,0,4,7000,1:100 2:190 4:350,2:150 4:250,cpu:2,2,10,60,0.5\n")  # fmt: skip
    (job,) = load_jobs(path)
    assert job.alone_s() == pytest.approx(20)
    assert job.speed.samples_per_s(2, 1, 1, 1) == 190
    assert job.speed.samples_per_s(4, 2, 2, 1) == 250
    assert (job.servers_for(4), dict(job.server)) == (2, {"cpu": 2})
    assert job.utility(60) == pytest.approx(5)


# ------------------------------------------------------------------------------ machines
def test_machines_in_short() -> None:
    machines = parse_machines("4xgpu:8,cpu:64,bandwidth_gbit:8 + 2x4gpu")
    assert machines.resources == ("gpu", "cpu")
    assert machines.capacity.tolist() == [[8, 64]] * 4 + [[4, 0]] * 2
    assert [m.bytes_per_s for m in machines.machines[3:5]] == [1e9, math.inf]
    assert machines_from("4x8gpu").capacity.tolist() == [[8]] * 4


def test_machines_of_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, "name,gpu,memory_gb,bandwidth_gbit\nleft,8,256,25\nright,0,64,10\n")
    machines = machines_from(path)
    assert [m.name for m in machines.machines] == ["left", "right"]
    assert machines.capacity.tolist() == [[8, 256], [0, 64]]
    assert machines.machines[0].bytes_per_s == pytest.approx(3.125e9)


def test_machines_of_pai(tmp_path: Path) -> None:
    path = write(tmp_path, "sn,cpu_milli,memory_mib,gpu,model\nn0,32000,262144,0,\n"
                 "n1,96000,786432,8,V100M32\n")  # fmt: skip
    machines = load_machines(path)
    assert machines.resources == ("gpu", "cpu", "memory_gb")
    assert machines.capacity.tolist() == [[0, 32, 256], [8, 96, 768]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "machines ''; expected such as 4x8gpu"),
        ("8gpu", "machines '8gpu'"),
        ("0x8gpu", "machines '0x8gpu'"),
        ("2xgpu", "'gpu' in 'gpu'"),
        ("2xgpu:8,gpu:4", "'gpu' twice"),
        ("2xgpu:8,bandwidth:4", "a bandwidth without a unit; expected bandwidth_gbit"),
        ("2xgpu:8,bandwidth_gbit:0", "bandwidth_gbit is 0"),
        ("2xbandwidth_gbit:9", "machine 'm0' has no resources"),
    ],
)
def test_texts_that_are_no_machines(text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        machines_from(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,gpu\na,8\nb,x\n", "line 3: gpu is 'x'"),
        ("name,gpu\na,8\nb\n", "line 3: 1 fields"),
        ("name,gpu,bandwidth\na,8,9\n", "line 2: a bandwidth without a unit"),
        ("machine,gpu\na,8\n", "line 1: no column name"),
        ("name,gpu\na,8\na,8\n", "two machines are called 'a'"),
    ],
)
def test_tables_that_are_no_machines(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        machines_from(write(tmp_path, text))


# ------------------------------------------------------------------------------ random jobs
def test_a_seed_tells_the_jobs() -> None:
    assert list(random_jobs(30, 1)) == list(random_jobs(30, 1))
    assert list(random_jobs(30, 1)) != list(random_jobs(30, 2))


@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(20, 200),
    slot_s=st.floats(1200, 7200),
    arrivals=st.sampled_from(["uniform", "poisson"]),
)
@settings(max_examples=15, deadline=None)
def test_random_jobs_keep_the_papers_ranges(
    seed: int, slots: int, slot_s: float, arrivals: str
) -> None:
    machines = paper_machines(2)
    jobs = list(random_jobs(20, seed, slots=slots, slot_s=slot_s, arrivals=arrivals))  # type: ignore[arg-type]
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    for job in jobs:
        check_job(job, machines)
        slot = job.arrival_s / slot_s
        assert slot == pytest.approx(round(slot))
        assert arrivals == "poisson" or round(slot) < slots
        assert 50 * 20_000 <= job.samples <= 200 * 500_000
        assert 1 <= job.requested <= 30
        assert job.most == job.batch <= 200
        assert job.worker.get("gpu", 0) <= 4
        assert "gpu" not in job.server
        fastest_s = job.samples / job.speed.samples_per_s(job.most, 1, 2, job.batch)
        assert fastest_s <= slots * slot_s
        assert isinstance(job.utility, Sigmoid)
        assert 1 <= job.utility.due_s / slot_s <= 15.001


def test_kinds_of_random_jobs_have_their_shares() -> None:
    slopes = [job.utility.slope * 3600 for job in random_jobs(2000, 3)]  # type: ignore[union-attr]
    assert sum(slope == 0 for slope in slopes) / 2000 == pytest.approx(0.10, abs=0.03)
    assert sum(slope > 3.999 for slope in slopes) / 2000 == pytest.approx(0.35, abs=0.04)
    assert all(slope == 0 or 0.0099 < slope < 1.0001 or 3.999 < slope < 6.001 for slope in slopes)


def test_poisson_arrivals_come_as_often_as_uniform_ones() -> None:
    last = [job.arrival_s for job in random_jobs(1000, 5, slots=500, arrivals="poisson")][-1]
    assert last / 3600 == pytest.approx(500, rel=0.1)


def test_random_jobs_run() -> None:
    rules = Rules(slot_s=3600, until_s=200 * 3600)
    summary = simulate(random_jobs(30, 1, slots=20), paper_machines(), Fifo(), rules)
    assert summary.jobs == 30
    assert summary.completed > 0
    assert summary.utility > 0


def test_random_jobs_that_cannot_be() -> None:
    with pytest.raises(InvalidUsage, match="arrivals"):
        list(random_jobs(3, 1, arrivals="burst"))  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="none would end within 1 slots"):
        list(random_jobs(3, 1, slots=1, ranges=Ranges(epochs=(10**6, 10**6))))
