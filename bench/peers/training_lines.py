"""Lines of a training measurement: medians, ratios to ours, if the work was the same; tables."""

import math

from measured import Row, format_spread, ratios, spread

OURS, FREE, PADDED = "ours", "TRL padding-free", "TRL padded"
# Largest relative difference of a step's loss that another order of sums explains.
LOSS_BOUNDS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
# For the features in our log, the peer's own statements.
TOLD = ("attention", "loss", "compilation", "activation checkpointing")


def summary(
    line: str, runs: dict[str, dict[int, Row]], problems: dict[str, str], precision: str
) -> Row:
    """Reduce a line's repeats to medians, and to ratios to ours within a repeat."""
    own, ours = runs[line], runs[OURS]
    if line in problems or not own:
        return {"problem": problems.get(line, "not run")}

    def median_of(name: str) -> float | None:
        values = [run[name] for run in own.values()]
        return None if None in values else spread(values)["median"]

    row: Row = {
        "tokens_per_s": spread(list(rates(own).values())),
        "step_s": spread([s for r in own.values() for s in r["steps_s"]]),
        "n_tokens": {r["n_tokens"] for r in own.values()}.pop(),
        "peak_host_rss_bytes": median_of("peak_host_rss_bytes"),
        "peak_device_bytes": median_of("peak_memory_bytes"),
        "words": next(iter(own.values()))["words"],
    }
    if line == OURS:
        return row
    return {
        **row,
        "ours_over_peer": ratios(rates(ours), rates(own)),
        **agreement(line, ours, own, precision),
    }


def rates(runs: dict[int, Row]) -> dict[int, float]:
    """Return tokens per second of each repeat."""
    return {i: run["n_tokens"] / run["timed_s"] for i, run in runs.items()}


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


def print_method(method: str, measured: Row) -> None:
    if "problem" in measured:
        print(f"\n{method}: not measured: {measured['problem']}")
        return
    print(f"\n{method}, {measured['settings']['precision']}")
    print(
        f"{'line':>18} {'tokens/s':>9} {'ours/peer':>16}"
        f" {'peak MB':>8} {'card MB':>8} {'loss apart':>10}"
    )
    for name, row in measured["lines"].items():
        if "problem" in row:
            print(f"{name:>18} not measured: {row['problem']}")
            continue
        card = row["peak_device_bytes"]
        print(
            f"{name:>18} {row['tokens_per_s']['median']:9,.0f}"
            f" {format_spread(row.get('ours_over_peer')):>16}"
            f" {row['peak_host_rss_bytes'] / 1e6:8.0f}"
            f" {or_dash(card and card / 1e6, '.0f'):>8} {or_dash(row.get('loss_apart'), '.1e'):>10}"
        )
        for word in row["words"]:
            if name != OURS or word.startswith(TOLD):
                print(f"{'':>18} {word}")
    if proof := measured.get("proof"):
        apart = f"{or_dash(proof.get('loss_apart'), '.1e')} apart over {proof.get('n_steps')} steps"
        print(f"{'proof in fp32':>18} {proof.get('problem') or apart}")


def or_dash(value: float | None, how: str) -> str:
    """Format a figure, or a dash if there is none."""
    return "-" if value is None else format(value, how)
