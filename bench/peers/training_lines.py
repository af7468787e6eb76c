"""Lines of a training measurement: medians, ratios to ours, and whether the work was the same."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from turns import ratios, spread

OURS, FREE, PADDED = "ours", "TRL padding-free", "TRL padded"
# Largest relative difference of a step's loss that another order of sums explains.
LOSS_BOUNDS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
Row = dict[str, Any]


def summary(
    line: str, runs: dict[str, dict[int, Row]], problems: dict[str, str], precision: str
) -> Row:
    """Reduce a line's repeats to medians, and to ratios to ours within a repeat."""
    own, ours = runs[line], runs[OURS]
    if line in problems or not own:
        return {"problem": problems.get(line, "not run")}
    row: Row = {
        "tokens_per_s": asdict(spread(list(rates(own, "timed_s").values()))),
        "tokens_per_cpu_s": asdict(spread(list(rates(own, "cpu_s").values()))),
        "step_s": asdict(spread([s for r in own.values() for s in r["steps_s"]])),
        "n_tokens": {r["n_tokens"] for r in own.values()}.pop(),
        "peak_host_rss_bytes": spread([r["peak_host_rss_bytes"] for r in own.values()]).median,
        "peak_device_bytes": None,
        "words": next(iter(own.values()))["words"],
    }
    if all(r["peak_memory_bytes"] is not None for r in own.values()):
        row["peak_device_bytes"] = spread([r["peak_memory_bytes"] for r in own.values()]).median
    if line == OURS:
        return row
    faster, cheaper = (ratios(rates(ours, what), rates(own, what)) for what in ("timed_s", "cpu_s"))
    return {
        **row,
        "ours_over_peer": faster and asdict(faster),
        "ours_over_peer_by_cpu": cheaper and asdict(cheaper),
        **agreement(line, ours, own, precision),
    }


def rates(runs: dict[int, Row], what: str) -> dict[int, float]:
    """Return tokens per second of each repeat, in wall (``timed_s``) or CPU time (``cpu_s``)."""
    return {i: run["n_tokens"] / run[what] for i, run in runs.items()}


def agreement(line: str, ours: dict[int, Row], own: dict[int, Row], precision: str) -> Row:
    """Compare losses step by step, and tokens, if the batches are the same.

    ``same_work`` is false if something differs or a loss is not finite, and null if it cannot be
    shown: with random ids all losses are near that of a guess, and in half precision those of
    other batches look the same.
    """
    pairs = [
        pair
        for i in ours.keys() & own.keys()
        for pair in zip(ours[i]["losses"], own[i]["losses"], strict=False)
    ]
    alike = all(len(ours[i]["losses"]) == len(own[i]["losses"]) for i in ours.keys() & own.keys())
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return {"loss_apart": None, "loss_bound": None, "same_work": False}
    apart = max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)
    if line == PADDED or apart is None:
        # Its batches contain other documents, so its losses only show that it trains.
        return {"loss_apart": apart, "loss_bound": None, "same_work": None}
    n_tokens = {r["n_tokens"] for runs in (ours, own) for r in runs.values()}
    bound = LOSS_BOUNDS[precision]
    differs = apart > bound or len(n_tokens) > 1 or not alike
    shown = None if precision != "fp32" else True
    return {"loss_apart": apart, "loss_bound": bound, "same_work": False if differs else shown}


def same_work(method: Row) -> bool | None:
    """Return whether the padding-free line did our work; null if it was not compared."""
    if "problem" in method:
        return None
    shown = method.get("proof") or method["lines"].get(FREE, {})
    found = [line.get("same_work") for line in (*method["lines"].values(), shown)]
    same: bool | None = False if False in found else shown.get("same_work")
    return same


def all_the_same(found: Iterable[bool | None]) -> bool | None:
    """Combine the answers of methods: false takes precedence, then unknown.

    >>> all_the_same([True, None])
    >>> all_the_same([None, False])
    False
    """
    answers = list(found)
    if False in answers:
        return False
    return None if None in answers else True


def failure(measured: Row, *, has_peer: bool) -> str | None:
    """Return why a measurement is invalid: an installed side failed, or did different work."""
    reasons = []
    for method, row in measured["methods"].items():
        # A missing peer is listed, which is not a failure.
        parts = {**row.get("lines", {}), "proof in fp32": row.get("proof", {})} if has_peer else {}
        for name, part in {OURS: row, **parts}.items():
            if "problem" in part:
                reasons.append(f"{method}, {name}: {part['problem']}")
        if same_work(row) is False:
            reasons.append(f"{method}: losses or tokens beyond their bound, or not finite")
    return "; ".join(reasons) or None
