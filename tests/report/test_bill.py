"""The bill: every job, the time between jobs, losses, and the source of the price."""

import pytest
from made_up_runs import CPU, GPU, START_S, make_attempts
from msgspec.structs import replace

from expertflow.plan.records import Ledger, PaidSession
from expertflow.report.bill import build_bill
from expertflow.report.inputs import ReportInputs
from expertflow.report.run_records import Bill

PRICE = 2.49


def bill_of(inputs: ReportInputs) -> Bill:
    bill = build_bill(inputs)
    assert bill
    jobs_s = sum(stage.wall_s for stage in bill.stages)
    assert jobs_s + bill.between_jobs_s - bill.overlap_s == pytest.approx(bill.machine.wall_s)
    return bill


def paid(start_s: float, end_s: float, usd_per_hour: float, machine: str) -> PaidSession:
    return PaidSession(
        start_s=START_S + start_s, end_s=START_S + end_s, usd_per_hour=usd_per_hour, machine=machine
    )


def test_resumed_work_is_not_lost() -> None:
    """Of two sessions the last took 2,776 s; the clock's remaining time came from the first."""
    (lost,) = bill_of(GPU.inputs).lost
    assert (lost.attempts, lost.wall_s) == (1, 600)
    time = replace(GPU.inputs.training.time, wall_s=3_186.0, startup_s=100.0, other_s=60.0)
    inputs = replace(GPU.inputs, training=replace(GPU.inputs.training, time=time))
    (lost,) = bill_of(inputs).lost
    assert lost.wall_s == 600 - (3_186 - 60 - 50 - 2_776)
    assert lost.usd == pytest.approx(300 / 3600 * PRICE)


def test_a_long_pause_counts_for_nothing() -> None:
    for pause_s, wall_s in ((3_600, 3_700), (3_601, 100)):
        times = {
            "fetch_source": [[(0.0, 60.0)]],
            "train_expert": [[(60.0 + pause_s, 100.0 + pause_s)]],
        }
        inputs = GPU.change(plan={"cost": replace(GPU.inputs.plan.cost, billing_minutes=60.0)})
        machine = bill_of(replace(inputs, attempts=make_attempts(times))).machine
        # Both a machine of 3,700 s and two of a minute are billed two hours.
        assert (machine.wall_s, machine.usd) == (wall_s, pytest.approx(2 * PRICE))


def test_other_machines_and_cpus_have_no_rented_card() -> None:
    attempts = make_attempts({"fetch_source": [[(0.0, 60.0)]], "train_expert": [[(80.0, 100.0)]]})
    ((fetched,),) = attempts["fetch_source"]
    attempts["fetch_source"] = ((replace(fetched, machine="home"),),)
    machine = bill_of(replace(GPU.inputs, attempts=attempts)).machine
    assert (machine.n_machines, machine.wall_s) == (2, 100)
    assert machine.usd == pytest.approx(20 / 3600 * PRICE)
    bill = bill_of(CPU.inputs)
    assert not bill.idle_card_s and "no card was used" in str(bill.idle_card_s.reason)
    assert not build_bill(replace(CPU.inputs, attempts={}))


def test_the_guards_ledger_is_the_price() -> None:
    """Its ledger is minutes old when the report is built; sessions of other runs do not count."""
    sessions = (
        paid(-9_000, -8_000, 9.0, "c0ffee"), paid(-30, 700, 3.0, "c0ffee"), paid(0, 9e3, 9.0, ""),
        paid(0, 9e3, 9.0, "another"), paid(702, 4_000, 3.0, "c0ffee"),
    )  # fmt: skip
    cost = replace(GPU.inputs.plan.cost, price_usd_per_hour=None)
    inputs = replace(
        GPU.inputs,
        ledger=Ledger(sessions=sessions),
        plan=replace(GPU.inputs.plan, cost=cost),
    )
    bill = bill_of(inputs)
    assert bill.machine.usd == pytest.approx((730 + 3_385) / 3600 * 3.0)
    assert bill.machine.usd_source.startswith(
        "the guard's ledger: the full machine, even if jobs of"
    )
    assert bill.stages[-3].usd == pytest.approx(500 / 3600 * 3.0)


HOUR_S = 3600.0


def test_the_guard_pays_for_more_than_this_result() -> None:
    """Another expert was trained for hours between two jobs of this one."""
    sessions = [(-30, 100), (200, 5.5 * HOUR_S), (6 * HOUR_S - 50, 8 * HOUR_S)]
    times = {"fetch_source": [[(0.0, 60.0)]], "train_expert": [[(6 * HOUR_S, 8 * HOUR_S)]]}
    attempts = make_attempts(times)
    machines = (attempts["train_expert"][0][0].machine, "another")
    ledger = Ledger(sessions=tuple(paid(*one, 3.0, m) for m in machines for one in sessions))
    inputs = replace(GPU.inputs, attempts=attempts, ledger=ledger)
    assert bill_of(inputs).machine.usd == pytest.approx((80 + 60 + 2 * HOUR_S) / 3600 * 3.0)
