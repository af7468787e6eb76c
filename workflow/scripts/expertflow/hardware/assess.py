"""Say in words what the figures of a card suggest, and what to do; silent below evidence.

Thresholds without a source are judgement. The driver's utilisation is never judged alone without
being called what it is: "some kernel was running".
"""

from collections.abc import Iterator

from expertflow.hardware.records import MonitorRecord

# Fewer readings than these say nothing (judgement).
ENOUGH_SAMPLES = 10
# Source systems' bar for utilisation; here it only says that the card often had nothing to do.
OFTEN_IDLE_PERCENT = 60.0
BUSY_PERCENT, LOW_POWER_FRACTION = 90.0, 0.6
TENSOR_PERCENT, SM_PERCENT = 25.0, 80.0
FULL_FRACTION = 0.95
THROTTLED_FRACTION = 0.01
NEAR_LIMIT_C = 3.0


def assess(record: MonitorRecord, n_known: int) -> Iterator[str]:
    """Yield remarks on a record of ``n_known`` readings of the card."""
    if n_known < ENOUGH_SAMPLES:
        return
    yield from _assess_use(record)
    used, total = record.memory_used_bytes, record.memory_total_bytes
    if used is not None and total and used.max > FULL_FRACTION * total:
        yield (
            f"memory was {used.max / total:.0%} full: a smaller micro-batch at the same global"
            " batch leaves room"
        )
    lost_s, wall_s = (record.throttle_s or {}).get("thermal"), record.wall_s
    if lost_s is not None and wall_s and lost_s > THROTTLED_FRACTION * wall_s:
        yield (
            f"heat held the clocks back {lost_s / wall_s:.1%} of the time (by"
            f" {record.throttle_source}): improve cooling, or rent another host"
        )
    limits, seen = record.temperature_limits_c or {}, record.temperature_c
    # What the maker wants it to stay below, else where it slows down. A cool card is no fault.
    name = next((name for name in ("max_operating", "slowdown") if name in limits), None)
    if seen is not None and name is not None and seen.max > limits[name] - NEAR_LIMIT_C:
        yield (
            f"the card reached {seen.max:.0f} °C and its own limit ({name.replace('_', ' ')}) is"
            f" {limits[name]:.0f} °C: improve cooling before a long run"
        )


def _assess_use(record: MonitorRecord) -> Iterator[str]:
    busy, power, limit = record.any_kernel_percent, record.power_w, record.power_limit_w
    if busy is not None and busy.mean < OFTEN_IDLE_PERCENT:
        yield (
            f"no kernel at all was running {100 - busy.mean:.0f} % of the time (any kernel"
            f" {busy.mean:.0f} %): look at data wait, evaluation, saving and start-up before the"
            " model"
        )
    if busy is not None and power is not None and limit and busy.mean > BUSY_PERCENT:
        if power.mean < LOW_POWER_FRACTION * limit:
            yield (
                f"some kernel was running {busy.mean:.0f} % of the time, yet power was"
                f" {power.mean / limit:.0%} of its limit: small kernels or waits inside them;"
                " compile the model, or raise the micro-batch"
            )
    tensor, sm = record.tensor_active_percent, record.sm_active_percent
    if tensor is not None and sm is not None:
        if tensor.mean < TENSOR_PERCENT and sm.mean > SM_PERCENT:
            yield (
                f"multiprocessors were busy {sm.mean:.0f} % and tensor cores {tensor.mean:.0f} % of"
                " the time: kernels wait for memory; fuse the loss and norms, or raise the"
                " micro-batch"
            )
