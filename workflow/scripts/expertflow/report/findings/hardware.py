"""Findings on the card: its memory and its counters.

Temperatures are never judged: the driver reports when the card is too hot.
"""

from expertflow.plan.records import USABLE_FRACTION
from expertflow.report.findings import evidence as e
from expertflow.report.findings.evidence import Findings, make_finding
from expertflow.report.format import duration, percent, size
from expertflow.report.records import Report

THERMAL_LIMIT = 0.01
BUSY_LIMIT_PERCENT = 60.0
_OR_CHECKPOINT = ", or set gradient_checkpointing: true"
SPILL_LIMIT = 0.01  # of the card's memory: less is the sampling of a peak
HOST_WORK = ("data", "checkpoint", "start-up")  # evaluation keeps the card busy
FULL_FRACTION = 0.9  # of the card: a driver moves memory to the host when it is full


def find_memory_retries(report: Report) -> Findings:
    if retries := report.training_report.training.memory_retries:
        used = report.training_parameters
        times = "once" if len(retries) == 1 else f"{len(retries)} times"
        yield make_finding(
            "memory-short",
            evidence=f"out of memory {times}; the run continued with smaller micro-batches",
            threshold="never",
            origin="the plan predicted that it would fit",
            recommendation=f"set batch_size to {used.batch_size} and gradient_accumulation_steps"
            f" to {used.gradient_accumulation_steps}, so that the next run starts with them",
            worth=e.NOT_TIMED,
        )


def find_failed_staging(report: Report) -> Findings:
    if failed := [note for note in report.staging.notes if note.is_fallback]:
        what = " and ".join(note.kind for note in failed)
        yield make_finding(
            "not-staged",
            evidence=f"{what} were read in place: {failed[0].reason}",
            threshold="none",
            origin=e.FALLBACK,
            recommendation="free space on the scratch disk, choose another one with scratch, or set"
            " it to null",
            worth=e.NOT_TIMED,
        )


def find_recomputation(report: Report) -> Findings:
    total = report.training_report.hardware.gpu.memory_total_bytes
    without = report.plan.without_checkpointing_peak_bytes
    checkpointed = report.training_parameters.gradient_checkpointing
    if not (checkpointed and total and without and e.is_long_enough(report)):
        return
    # A plan that was 10 % short here would be 10 % short there.
    without *= _taken_of_plan(report)
    is_short = report.training_report.training.memory_retries
    if not is_short and without < USABLE_FRACTION * total:
        model = report.model
        share = 1 - model.flops_per_token_model / model.flops_per_token_hardware
        yield make_finding(
            "recomputation",
            evidence=f"activations were computed twice, {percent(share)} of the hardware's FLOPs;"
            f" without that, the predicted peak is at most {size(without)} of {size(total)}",
            threshold=f"keep them if the prediction is below {percent(USABLE_FRACTION)} of memory",
            recommendation="set gradient_checkpointing: false",
            worth=e.price_time(
                report, share * report.time.train_s, "the same share of the step time"
            ),
        )


def _taken_of_plan(report: Report) -> float:
    """Return by what factor the allocator exceeded the prediction: the next run would, too."""
    planned = report.plan.memory_peak_bytes
    taken = report.training_report.hardware.memory_peak_reserved_bytes
    return max(1.0, taken / planned) if planned and taken else 1.0


def find_kernel_limits(report: Report) -> Findings:
    card = e.read_counters(report)
    if not e.has_readings(report):
        return
    if card.is_memory_bound:
        yield make_finding(
            "memory-bound-kernels",
            worth=e.NOT_TIMED,
            evidence=f"multiprocessors were active {card.sm:.0f} % of the time, tensor cores"
            f" {card.tensor:.0f} %",
            threshold=f"tensor cores below {e.TENSOR_LOW_PERCENT:.0f} % while multiprocessors are"
            f" above {e.SM_BUSY_PERCENT:.0f} % (medians)",
            origin="our judgment; 80 % is what DCGM's guidance calls necessary for good use",
            recommendation=_fewer_kernels(report),
        )
    if card.has_small_kernels:
        yield make_finding(
            "small-kernels",
            worth=e.NOT_TIMED,
            evidence=f"some kernel ran {card.kernel:.0f} % of the time, at {percent(card.power)} of"
            " the power limit",
            threshold=f"above {e.KERNEL_BUSY_PERCENT:.0f} % busy, below"
            f" {percent(e.POWER_LOW_FRACTION)} of the limit (medians)",
            recommendation=f"{_fewer_kernels(report)}, for fewer and larger kernels",
        )


def _fewer_kernels(report: Report) -> str:
    larger = "use a larger micro-batch, or a larger max_seq_length if batch_size cannot grow"
    is_compiled = report.training_parameters.torch_compile
    return larger if is_compiled else "set torch_compile: true, or use a larger micro-batch"


def find_idle_card(report: Report) -> Findings:
    stats = report.training_report.hardware.any_kernel_percent
    if not stats or not e.has_readings(report) or stats.mean >= BUSY_LIMIT_PERCENT:
        return
    shares = e.time_shares(report)
    # A card idles while the host works: the longest such part is the first suspect.
    cause = max(HOST_WORK, key=lambda name: shares[name])
    why = "the run's times do not show why; within the steps the host is the first suspect"
    advice = _fewer_kernels(report)
    # One part of wall time that explains half of the idle time is a cause; less is a guess.
    if shares[cause] >= 0.5 * (1 - stats.mean / 100):
        why = f"{cause} took {percent(shares[cause])} of wall time"
        advice = f"see what this report says about {cause}"
    yield make_finding(
        "idle-card",
        evidence=f"some kernel ran {stats.mean:.0f} % of the time; {why}",
        threshold=f"at least {BUSY_LIMIT_PERCENT:.0f} % (mean)",
        origin="the low end of the band that an earlier setup used",
        recommendation=advice,
        worth=e.PRICED_ELSEWHERE,
    )


def find_throttling(report: Report) -> Findings:
    hardware = report.training_report.hardware
    causes, watched_s = hardware.throttle_s or {}, hardware.watched_s
    # Causes overlap in time: the longest, not the sum.
    hot_s = max((s for name, s in causes.items() if "thermal" in name), default=0.0)
    if watched_s and e.has_readings(report) and hot_s > THERMAL_LIMIT * watched_s:
        yield make_finding(
            "thermal-throttling",
            evidence=f"heat held the clocks back {percent(hot_s / watched_s)} of the"
            f" time ({duration(hot_s)})",
            threshold=f"at most {percent(THERMAL_LIMIT)} of the time",
            recommendation="improve the cooling, or use another host",
            worth="how much it slowed the steps was not measured",
        )


def find_spilled_memory(report: Report) -> Findings:
    hardware = report.training_report.hardware
    lost, total = hardware.memory_spilled_bytes, hardware.gpu.memory_total_bytes
    used = hardware.memory_used_bytes
    if not (lost and total and used and e.has_readings(report)):
        return
    if lost > SPILL_LIMIT * total and used.max > FULL_FRACTION * total:
        yield make_finding(
            "memory-spilled",
            worth=e.NOT_TIMED,
            evidence=f"{size(lost)} of device memory was in host memory",
            threshold=f"at most {percent(SPILL_LIMIT)} of the card's {size(total)}",
            recommendation="use a smaller micro-batch at the same global batch"
            + ("" if report.training_parameters.gradient_checkpointing else _OR_CHECKPOINT),
        )


def find_free_memory(report: Report) -> Findings:
    plan, used = report.plan, report.training_parameters
    training, hardware = report.training_report.training, report.training_report.hardware
    after = plan.next_micro_batch_peak_bytes
    total, n_micro = hardware.gpu.memory_total_bytes, used.gradient_accumulation_steps
    if not (after and total) or not e.is_long_enough(report):
        return
    after *= _taken_of_plan(report)
    # Free memory is better spent on keeping activations: another rule.
    # Twice the rows are half the micro-batches of a step: an odd number has no half.
    is_spoken_for = n_micro % 2 or training.memory_retries or used.gradient_checkpointing
    if after < USABLE_FRACTION * total and not is_spoken_for:
        micro = 2 * used.batch_size
        yield make_finding(
            "memory-room",
            severity="info",
            evidence=f"a micro-batch of {micro} is predicted to need at most {size(after)} of"
            f" {size(total)}",
            threshold=f"the next micro-batch would take {percent(USABLE_FRACTION)} of memory or"
            " more",
            recommendation=f"set batch_size: {micro}, gradient_accumulation_steps: {n_micro // 2}",
            worth=f"{e.NO_LOSS} that was measured",
        )
