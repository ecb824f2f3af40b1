"""The log of exchanges that are gone."""

from __future__ import annotations

from hvd_order.engine.requests.step_log import StepLogs


class Exchange:
    def prepare_to_join(self) -> None: ...

    def stand_in(self, event: str) -> None: ...

    def end_join(self) -> None: ...


def test_logs_of_dropped_exchanges_keep_no_events() -> None:
    logs = StepLogs()
    for number in range(200):
        exchange = Exchange()
        log = logs.open(f"0/{number}", exchange)
        for _ in range(100):
            log.note("begin")
        del exchange
    living = Exchange()
    logs.open("0/200", living).note("end")
    assert logs.recent() == [["step", "0/200", 0, "end"]]
    assert logs.exchanges() == [living]
    assert logs.counts()["0/0"] == 100  # what a joined rank compares with
    kept = sum(len(log.since(0)) for key in logs.counts() if (log := logs.get(key)))
    assert kept < 20 * 64
