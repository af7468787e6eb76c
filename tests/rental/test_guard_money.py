"""A budget holds across restarts, is counted to the second, and loses nothing to other clocks."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from expertflow.core.attempts import hash_host
from expertflow.core.errors import DataError
from expertflow.core.records import seal, write_record
from expertflow.plan.records import Ledger, PaidSession
from expertflow.rental.guard.ledger import BudgetSpent, Meter, merge_ledgers, read_ledger
from expertflow.rental.guard.options import parse_options
from expertflow.rental.guard.run import Guard


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_restart_does_not_get_a_new_budget(tmp_path: Path) -> None:
    path, clock = tmp_path / "ledger.json", Clock()
    meter = Meter(path, usd_per_hour=2.0, clock=clock)
    clock.now_s += 3600
    assert meter.total_usd(ahead_s=1800) == pytest.approx(3.0)
    meter.write_ledger()
    ledger = json.loads(path.read_text())
    for key in ("start_s", "end_s"):
        ledger["sessions"][0][key] -= 7200
    path.write_text(json.dumps(ledger))
    with pytest.raises(DataError, match=r"do not match the seal.*--forget-spent"):
        read_ledger(path)
    path.write_text(json.dumps(seal(ledger)))
    assert Meter(path, usd_per_hour=3.0, clock=clock).total_usd() == pytest.approx(2.0)


def test_a_budget_is_counted_to_the_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "ledger.json", Clock()
    meter = Meter(path, usd_per_hour=3600.0, max_usd=10.0, clock=clock)
    clock.now_s += 4
    assert meter.has_usd_for(5.99) and not meter.has_usd_for(6.0)
    assert meter.lasts_s(2.0) == pytest.approx(4.0)
    assert meter.format_usd() == "$4.00 of $10.00"
    clock.now_s += 100
    assert meter.lasts_s(2.0) == -2.0
    meter.write_ledger()
    (session,) = read_ledger(path).sessions
    assert session.end_s - session.start_s == pytest.approx(104.0, abs=1e-3)


def test_without_a_price_or_a_limit_time_is_endless_and_a_damaged_ledger_rejected(
    tmp_path: Path,
) -> None:
    spoiled = tmp_path / "spoiled.json"
    spoiled.write_text("{")
    free = Meter(spoiled, usd_per_hour=None, max_usd=1.0, clock=Clock())
    assert free.total_usd() is None and free.has_usd_for(1e9)
    free.write_ledger()
    assert spoiled.read_text() == "{"
    endless = Meter(tmp_path / "ledger.json", usd_per_hour=1.0, clock=Clock())
    assert endless.has_usd_for(1e9) and endless.total_usd() == 0.0
    assert free.lasts_s(1.0) == endless.lasts_s(1.0) == threading.TIMEOUT_MAX
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(DataError, match="--forget-spent"):
        read_ledger(tmp_path / "ledger.json")


@pytest.mark.parametrize("paid_before_s", [None, 600.0])
def test_another_clock_loses_no_dollars(tmp_path: Path, paid_before_s: float | None) -> None:
    path, now_s = tmp_path / "ledger.json", datetime.now(UTC).timestamp()
    ahead = PaidSession(start_s=now_s + 60, end_s=now_s + 3660, usd_per_hour=5.0)
    write_record(path, Ledger(sessions=(ahead,)))
    since_s = None if paid_before_s is None else now_s - paid_before_s
    meter = Meter(path, usd_per_hour=1.0, since_s=since_s, clock=Clock())
    assert meter.usd_before == pytest.approx(5.0)
    meter.write_ledger()
    assert ahead in read_ledger(path).sessions


def test_a_machine_that_was_paid_throughout_is_counted_once(tmp_path: Path) -> None:
    path, now_s = tmp_path / "ledger.json", datetime.now(UTC).timestamp()
    earlier, another = (
        PaidSession(start_s=now_s - 7200, end_s=now_s - 1800, usd_per_hour=1.0, machine=machine)
        for machine in (hash_host(), "another")
    )
    write_record(path, Ledger(sessions=(earlier,)))
    # Paid for the last hour: half an hour of the earlier session is before that and one within.
    meter = Meter(path, usd_per_hour=1.0, since_s=now_s - 3600, clock=Clock())
    assert meter.usd_before == pytest.approx(1.0, abs=0.01)
    assert meter.total_usd() == pytest.approx(2.0, abs=0.01)
    meter.write_ledger()
    assert Meter(path, usd_per_hour=1.0, clock=Clock()).usd_before == pytest.approx(2.0, abs=0.01)
    # Another machine was paid since the same moment: it counts in full, and once.
    both = merge_ledgers(Ledger(sessions=(earlier,)), Ledger(sessions=(another,)), judged=Ledger())
    write_record(path, both)
    meter = Meter(path, usd_per_hour=1.0, since_s=now_s - 3600, clock=Clock())
    assert meter.usd_before == pytest.approx(1.0 + 1.5) and len(both.sessions) == 2


def test_what_was_paid_before_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    since = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    words = ["--usd-per-hour", "2.5", "--paid-since", since, "--", "true"]
    guard = Guard(parse_options(words, None))
    guard.start_meter()
    assert guard.meter.total_usd() == pytest.approx(5.0, abs=0.1)
    # What this session costs, or its reserve alone, would not be forgotten.
    for options in (["--paid-since", since, "--max-usd", "4"], ["--max-usd", "0.04"]):
        guard = Guard(parse_options([*options, "--usd-per-hour", "2.5", "--", "true"], None))
        with pytest.raises(BudgetSpent, match=r"60 s \(\$0\.04\) reserved .*; raise --max-usd$"):
            guard.start_meter()
