"""Calculate the complete bill of a result: every job of the chain, and the time between them.

Jobs lie on one timeline. If none ran for more than ``PAUSE_S``, nobody waited for the next: such a
pause does not count. Seconds of jobs, plus those between jobs, minus those in which several ran,
are the seconds of the timeline.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from expertflow.core.attempts import Attempt
from expertflow.plan.cost import round_up_hours
from expertflow.plan.records import PaidSession
from expertflow.report import derive
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Measured, Missing, convert_value
from expertflow.report.records import Interval
from expertflow.report.run_records import Bill, LostAttempts, MachineTime, StageBill

PAUSE_S = 3600.0
# Times of other results are not known here.
SHARED = "the full machine, even if jobs of other results ran there, too"
PRICED = f"the price per hour: {SHARED}, with pauses of up to an hour between jobs"
PAID = f"the guard's ledger: {SHARED}, while these jobs ran, and up to an hour before them"
NO_CARD = "no card was used: the plan is for the CPU"
# Jobs closer than this share of the timeline are drawn as one.
LEAST_GAP_PERCENT = 0.3
Jobs = Sequence[tuple[Attempt, ...]]
Bar = tuple[float, float, str]  # left and width in percent, color


def build_bill(inputs: ReportInputs) -> Measured[Bill]:
    jobs = inputs.attempts
    trained = jobs.get("train_expert")
    if not trained:
        return Missing("training was not run by the workflow, which records job times")
    attempts = [attempt for found in jobs.values() for job in found for attempt in job]
    lines = join_intervals(map(interval, attempts), PAUSE_S)
    busy_s, wall_s = total_s(join_intervals(map(interval, attempts))), total_s(lines)
    # The attempt that finished: one that failed may have run elsewhere.
    machine = trained[0][-1].machine
    there = [attempt for attempt in attempts if attempt.machine == machine]
    lines_there = join_intervals(map(interval, there), PAUSE_S)
    machine_s = total_s(lines_there)
    usd, source = _machine_usd(inputs, lines_there)
    on_card = [interval(attempt) for attempt in there if attempt.n_cards]
    no_card: Measured[float] = Missing(NO_CARD)
    return Bill(
        stages=tuple(_bill_stage(inputs, name, found) for name, found in jobs.items()),
        between_jobs_s=wall_s - busy_s,
        overlap_s=sum(map(seconds, attempts)) - busy_s,
        idle_card_s=machine_s - total_s(join_intervals(on_card)) if inputs.plan.gpu else no_card,
        machine=MachineTime(
            first_start=_time_text(lines[0][0]),
            last_end=_time_text(lines[-1][1]),
            n_machines=len({attempt.machine for attempt in attempts}),
            wall_s=wall_s,
            usd=usd,
            usd_source=source,
        ),
        lost=tuple(_lost(inputs, name, found) for name, found in jobs.items() if _failed(found)),
    )


def _bill_stage(inputs: ReportInputs, name: str, jobs: Jobs) -> StageBill:
    attempts = [attempt for job in jobs for attempt in job]
    card_s: Measured[float] = Missing(NO_CARD)
    if inputs.plan.gpu:
        card_s = sum(seconds(attempt) * attempt.n_cards for attempt in attempts)
    n_cards = inputs.training.world_size
    return StageBill(
        stage=name,
        jobs=len(jobs),
        attempts=len(attempts),
        wall_s=sum(map(seconds, attempts)),
        card_s=card_s,
        # The price is that of the machine with all its cards.
        usd=convert_value(card_s, lambda card_s: _price(inputs, card_s / n_cards)),
    )


def _price(inputs: ReportInputs, duration_s: float) -> Measured[float]:
    return convert_value(derive.usd_per_hour(inputs), lambda usd: duration_s / 3600 * usd)


def _machine_usd(inputs: ReportInputs, lines: Sequence[Interval]) -> tuple[Measured[float], str]:
    """Return what the machine that trained cost, and the source: the guard, if one ran."""
    sessions = [session for session in inputs.paid_sessions if _overlapping(session, lines)]
    if not sessions:
        minutes = inputs.plan.cost.billing_minutes
        hours = sum(round_up_hours((end_s - start_s) / 3600, minutes) for start_s, end_s in lines)
        return _price(inputs, 3600 * hours), PRICED
    # The guard writes its ledger periodically, and its last session continues.
    sessions[-1] = replace(sessions[-1], end_s=max(sessions[-1].end_s, lines[-1][1]))
    usd = sum(_paid_s(session, lines) / 3600 * session.usd_per_hour for session in sessions)
    return usd, PAID


def _overlapping(session: PaidSession, lines: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the lines that are in a session."""
    return [
        (max(start_s, session.start_s), min(end_s, session.end_s))
        for start_s, end_s in lines
        if start_s <= session.end_s and end_s >= session.start_s
    ]


def _paid_s(session: PaidSession, lines: Sequence[Interval]) -> float:
    """Return a session's seconds with jobs, and those before if others cannot have used them."""
    parts = _overlapping(session, lines)
    # Setting up before the first job; if it took longer, another result may have used it.
    before_s = parts[0][0] - session.start_s
    return total_s(parts) + (before_s if before_s <= PAUSE_S else 0.0)


def _failed(jobs: Jobs) -> list[Attempt]:
    """Return the attempts that were followed by another."""
    return [attempt for job in jobs for attempt in job[:-1]]


def _lost(inputs: ReportInputs, name: str, jobs: Jobs) -> LostAttempts:
    failed = _failed(jobs)
    lost_s, what = sum(map(seconds, failed)), f"{name}: attempts that ended early"
    if name == "train_expert":
        # Every session started up, and all work that counts is on the clock, whichever did it.
        time, n_sessions = inputs.training.time, inputs.training.n_sessions
        worked_s = time.wall_s - time.other_s - time.startup_s + time.startup_s / n_sessions
        resumed_s = max(0.0, worked_s - seconds(jobs[0][-1]))
        lost_s, what = max(0.0, lost_s - resumed_s), f"{what}, minus the work that was resumed"
    usd = _price(inputs, lost_s)
    return LostAttempts(what=what, attempts=len(failed), wall_s=lost_s, usd=usd)


def draw_bill(bill: Bill, inputs: ReportInputs) -> list[tuple[StageBill, list[Bar]]]:
    """Return each stage with the bars of its jobs."""
    everything = (attempt for found in inputs.attempts.values() for job in found for attempt in job)
    lines, rows = join_intervals(map(interval, everything), PAUSE_S), []
    per_s = 100 / bill.machine.wall_s

    # Percent of the timeline, on which pauses have no length.
    def place(time_s: float) -> float:
        return per_s * sum(
            min(end_s, time_s) - start_s for start_s, end_s in lines if start_s < time_s
        )

    for stage in bill.stages:
        jobs, bars = inputs.attempts.get(stage.stage, ()), []
        lost, done = _failed(jobs), [job[-1] for job in jobs]
        # A job requests a card even if the plan is for the CPU.
        on_card = any(attempt.n_cards for attempt in done) and inputs.plan.gpu
        for attempts, color in ((done, "blue" if on_card else "gray"), (lost, "red")):
            # Hundreds of shards would be hundreds of one-pixel bars.
            joined = join_intervals(map(interval, attempts), LEAST_GAP_PERCENT / per_s)
            bars += [(place(a), place(b) - place(a), color) for a, b in joined]
        rows.append((stage, bars))
    return rows


def interval(attempt: Attempt) -> Interval:
    return attempt.start_s, attempt.end_s


def seconds(attempt: Attempt) -> float:
    return attempt.end_s - attempt.start_s


def join_intervals(intervals: Iterable[Interval], apart_s: float = 0.0) -> list[Interval]:
    """Join intervals that overlap or are at most ``apart_s`` apart; in order.

    >>> join_intervals([(5, 6), (0, 2), (1, 3)], 1.0)
    [(0, 3), (5, 6)]
    """
    joined: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if joined and start_s <= joined[-1][1] + apart_s:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((start_s, end_s))
    return joined


def total_s(intervals: Iterable[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
