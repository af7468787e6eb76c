"""Rules over what the run had to do without: memory, a fast engine, a known peak, its witness."""

from expertflow.report import derive
from expertflow.report.finding import NO_LOSS, NOT_TIMED, Report, finding, watched
from expertflow.report.format import percent
from expertflow.report.records import Finding
from expertflow.report.rows import why_rows_differ

MONITOR_LIMIT = 0.005


def short_memory(report: Report) -> Finding | None:
    """Find a run that went on with smaller micro-batches."""
    retries = report["training_report"]["training"]["memory_retries"]
    if not retries:
        return None
    used = report["training_parameters"]
    times = "once" if len(retries) == 1 else f"{len(retries)} times"
    return finding(
        "memory-short",
        evidence=f"memory was short {times}; the run went on with smaller micro-batches",
        threshold="never",
        origin="the plan predicted that it fits",
        recommendation=(
            f"set batch_size to {used['batch_size']} and gradient_accumulation_steps to"
            f" {used['gradient_accumulation_steps']}, so that the next run starts so"
        ),
        worth=(None, NOT_TIMED),
    )


def not_staged(report: Report) -> Finding | None:
    """Find rows or weights that should have been copied to a fast disk and could not be."""
    section = report["staging"]
    notes = (section["used"] or {"rows": section, "weights": section["weights"]}).values()
    failed = [note for note in notes if note["is_fallback"]]
    if not failed:
        return None
    what = " and ".join(note["kind"] for note in failed)
    return finding(
        "not-staged",
        evidence=f"{what} were read where they are: {failed[0]['reason']}",
        threshold="none",
        origin="a fallback is said",
        recommendation=(
            "make room on the scratch disk, name another one with scratch, or set it to null"
        ),
        worth=(None, NOT_TIMED),
    )


def slow_tokeniser(report: Report) -> Finding | None:
    """Find shards that the fast tokeniser could not take."""
    because = report["data"]["tokenizer_fallbacks"]
    if not because:
        return None
    return finding(
        "tokenizer-fallback",
        severity="info",
        evidence=f"some shards were tokenised by the slower engine: {because[0]}",
        threshold="none",
        origin="a fallback is said",
        recommendation="nothing, unless tokenising is what takes long: both engines' ids are equal",
        worth=(None, "tokenising is outside the wall time of training"),
    )


def measured_peak(report: Report) -> Finding | None:
    """Say where MFU is over a peak that was measured, not published."""
    gpu = report["training_report"]["hardware"]["gpu"]
    if gpu["peak_source"] != derive.MEASURED_PEAK:
        return None
    return finding(
        "measured-peak",
        severity="info",
        evidence=f"no source gives a peak for {gpu['name']}; MFU is over what one product reached",
        threshold="a published peak",
        origin="a fallback is said",
        recommendation="add the card to config/hardware/gpus.yaml, with a source; MFU then falls",
        worth=(None, NO_LOSS),
    )


def busy_monitor(report: Report) -> Finding | None:
    """Find a monitor that took more of the machine than a witness should."""
    share = report["training_report"]["hardware"]["monitor_cpu_fraction"]
    if share is None or not watched(report) or share <= MONITOR_LIMIT:
        return None
    return finding(
        "monitor-overhead",
        severity="info",
        evidence=f"the monitor took {percent(share)} of one core",
        threshold=f"at most {percent(MONITOR_LIMIT)}",
        recommendation="raise collection_interval_seconds",
        worth=(None, "a core beside the trainer; what it cost in time was not measured"),
    )


def lost_monitor(report: Report) -> Finding | None:
    """Say where the monitor left nothing, or did not live to sum up."""
    hardware = report["training_report"]["hardware"]
    if hardware["samples"] > 0:
        return None
    return finding(
        "monitor-lost",
        severity="info",
        evidence="the monitor left no sample of this run",
        threshold="one at least",
        origin="a fallback is said",
        recommendation="run monitor_gpu.py alone to see what it says",
        worth=(None, NO_LOSS),
    )


def other_rows(report: Report) -> Finding | None:
    """Say where trained tokens could not be held against the packed rows."""
    because = why_rows_differ(report)
    if because is None:
        return None
    return finding(
        "rows-not-compared",
        severity="info",
        evidence=because,
        threshold="every full epoch sees the packed rows once",
        origin="a check that could not be made is said",
        recommendation="none, if the run was made by hand",
        worth=(None, NO_LOSS),
    )
