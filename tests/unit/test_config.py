"""Knobs: defaults, reading from the environment, messages, and the generated page."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hvd_order.base.config import KNOBS, Config, parse_bytes, reference_page
from hvd_order.base.errors import InvalidUsage

REPOSITORY = Path(__file__).parents[2]


def test_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()


def test_every_field_has_one_knob_and_the_documented_default_is_the_default() -> None:
    assert [knob.field for knob in KNOBS] == [f.name for f in dataclasses.fields(Config)]
    for knob in KNOBS:
        assert knob.parse(knob.default) == getattr(Config(), knob.field), knob.env


def test_every_knob_is_read() -> None:
    config = Config.from_environment(
        {
            "HVD_ORDER_SLICE_BYTES": "500KB",
            "HVD_ORDER_CREDIT_BYTES": "4194304",
            "HVD_ORDER_PLAN": "/shared/plan.json",
            "HVD_ORDER_TUNE": "off",
            "HVD_ORDER_POLICY": "Arrival",
            "HVD_ORDER_AGREEMENT": "negotiated",
            "HVD_ORDER_CROSS_ITERATION": "0",
            "HVD_ORDER_TIMEOUT": "2.5",
            "HVD_ORDER_STALL_WARNING": "1",
            "HVD_ORDER_TIMELINE": "trace.json",
            "HVD_ORDER_ELASTIC_DIR": "/shared/job",
            "HVD_ORDER_CHECK_RANKS": "yes",
            "HVD_ORDER_DEBUG": "split, Host_Waits",
            "HOROVOD_LOG_LEVEL": "FATAL",
            "HVD_ORDER_ALIAS": "1",
        }
    )
    assert config == Config(
        slice_bytes=500_000,
        credit_bytes=4_194_304,
        plan="/shared/plan.json",
        tune=False,
        policy="arrival",
        agreement="negotiated",
        cross_iteration=False,
        timeout=timedelta(seconds=2.5),
        stall_warning=timedelta(seconds=1),
        timeline="trace.json",
        elastic_dir="/shared/job",
        check_ranks=True,
        debug=frozenset({"host_waits", "split"}),
        log="error",
        alias=True,
    )


def test_to_environment_is_the_inverse_of_from_environment() -> None:
    config = Config(
        slice_bytes=64,
        timeout=timedelta(milliseconds=1234),
        timeline="t.json",
        debug=frozenset({"split"}),
    )
    assert Config.from_environment(config.to_environment()) == config
    assert Config.from_environment(Config().to_environment()) == Config()


def test_horovods_timeline_variable_is_read_and_ours_wins() -> None:
    assert Config.from_environment({"HOROVOD_TIMELINE": "h.json"}).timeline == "h.json"
    assert Config.from_environment({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None
    both = {"HOROVOD_TIMELINE": "h.json", "HVD_ORDER_TIMELINE": "o.json"}
    assert Config.from_environment(both).timeline == "o.json"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4194304", 4194304),
        ("2MiB", 2097152),
        ("2mib", 2097152),
        (" 1.5 GiB ", 1610612736),
        ("500KB", 500000),
        ("64B", 64),
        ("3MB", 3000000),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1.5", "2 MiBs", "1e6", "2TiB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HVD_ORDER_SLICE_BYTES", "big", "HVD_ORDER_SLICE_BYTES: expected a size"),
        ("HVD_ORDER_POLICY", "fifo", "expected one of priority, arrival; got 'fifo'"),
        ("HVD_ORDER_AGREEMENT", "vote", "leader, negotiated, planned"),
        ("HVD_ORDER_CHECK_RANKS", "maybe", "HVD_ORDER_CHECK_RANKS: expected 1 or 0"),
        ("HVD_ORDER_TIMEOUT", "soon", "HVD_ORDER_TIMEOUT: expected a number of seconds"),
        ("HVD_ORDER_TIMEOUT", "nan", "expected a number of seconds"),
        ("HVD_ORDER_TIMEOUT", "inf", "expected a number of seconds"),
        ("HVD_ORDER_TIMEOUT", "0", "timeout is 0 s; it must be positive"),
        ("HVD_ORDER_STALL_WARNING", "-3", "stall_warning is -3 s"),
        ("HVD_ORDER_SLICE_BYTES", "63", "smallest useful slice"),
        ("HVD_ORDER_DEBUG", "split,all", "HVD_ORDER_DEBUG: expected some of host_waits, split, "),
        ("HVD_ORDER_BACKEND", "MPI", "pip install torch, and unset the variable"),
    ],
)
def test_wrong_values_name_the_cure(variable: str, text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Config.from_environment({variable: text})


def test_a_credit_below_the_slice_names_the_cure() -> None:
    with pytest.raises(InvalidUsage, match="raise HVD_ORDER_CREDIT_BYTES"):
        Config(slice_bytes=2 * 2**20, credit_bytes=2**20)
    assert Config(credit_bytes=2**20).slice_bytes is None  # a slice that fits will be chosen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_servers": 1}, "HVD_ORDER_MAX_SERVERS is 1"),
        ({"min_servers": 3}, "begins with 2 servers, less than 3"),
        ({"min_servers": 0}, "HVD_ORDER_MIN_SERVERS is 0; 1 is the least"),
        ({"min_servers": 1, "ps_replicas": True}, "2 is the least with a copy of each slice"),
        ({"max_servers": 3, "ps_balance": False}, "need HVD_ORDER_PS_BALANCE=1"),
    ],
)
def test_limits_of_servers_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Config(servers=2, **values)
    assert Config(servers=2, max_servers=4, min_servers=2, ps_replicas=True).max_servers == 4


def test_a_misspelt_variable_is_reported() -> None:
    with pytest.warns(RuntimeWarning, match="did you mean HVD_ORDER_SLICE_BYTES"):
        Config.from_environment({"HVD_ORDER_SLICE_BYTE": "2MiB"})


def test_values_are_checked_when_made_in_code_as_well() -> None:
    with pytest.raises(InvalidUsage, match="expected leader, negotiated or planned"):
        Config().with_values(agreement="vote")
    with pytest.raises(InvalidUsage, match="expected priority or arrival"):
        Config().with_values(policy="fifo")


def test_the_page_in_docs_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run: python -m hvd_order.base.config > docs/config.md"
