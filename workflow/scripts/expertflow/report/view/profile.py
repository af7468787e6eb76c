"""What the page shows of a profile: kinds for the bar, rows for the table, and what it cost."""

from typing import Any

from expertflow.core.records import Record
from expertflow.report import format as f

Report = dict[str, Any]

N_CHARS = 160
# kind -> what the page calls it, and its colour
KINDS = {
    "attention": ("Attention", "purple"),
    "matmul": ("Matrix products", "blue"),
    "loss": ("Loss", "red"),
    "optimiser": ("Optimiser", "green"),
    "elementwise": ("Norms, elementwise", "orange"),
    "copies": ("Copies", "yellow"),
    "communication": ("Communication", "grey"),
    "other": ("Other", "faint"),
}
ON_CPU = (
    "On a CPU these are operators, by the seconds that each spent itself on any thread;"
    " other holds views, allocations and the calls of the automatic differentiation."
)
ON_CARD = (
    "Kinds go by the names of kernels; the products and sums of the loss have common ones and count"
    " as these."
)


class Share(Record, frozen=True, kw_only=True):
    """A kind in the bar. ``colour`` names a CSS variable."""

    label: str
    colour: str
    step_s: str
    fraction: float


class Row(Record, frozen=True, kw_only=True):
    """A kernel in the table."""

    name: str
    kind: str
    calls: str
    step_s: str
    share: str


class Kernels(Record, frozen=True, kw_only=True):
    """The section on kernels."""

    title: str
    noun: str
    parts: tuple[Share, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def kernels(report: Report) -> Kernels | None:
    profile = report["profile"]
    if profile is None:
        return None
    n_steps, first = profile["n_steps"], profile["first_step"]
    on_cpu = profile["device"] == "cpu"
    where = f"step {first}" if n_steps == 1 else f"steps {first} to {first + n_steps - 1}"
    return Kernels(
        title=f"{where}, watched by a profiler",
        noun="operator" if on_cpu else "kernel",
        parts=tuple(
            Share(
                label=KINDS[kind["kind"]][0],
                colour=KINDS[kind["kind"]][1],
                step_s=_short_time(kind["total_s"] / n_steps),
                fraction=kind["share_fraction"],
            )
            for kind in profile["by_kind"]
        ),
        rows=tuple(_row(kernel, n_steps) for kernel in profile["kernels"]),
        notes=(
            ON_CPU if on_cpu else _busy(report) + ON_CARD,
            _cost(profile),
            _trace(report),
            *(f"{note[:1].upper()}{note[1:]}." for note in profile["notes"]),
        ),
    )


def _row(kernel: dict[str, Any], n_steps: int) -> Row:
    return Row(
        name=f.clip(kernel["name"], N_CHARS),
        kind=KINDS[kernel["kind"]][0].lower(),
        calls=_calls(kernel["n_calls"] / n_steps),
        step_s=_short_time(kernel["total_s"] / n_steps),
        share=f.tenths(kernel["share_fraction"]),
    )


def _calls(n_a_step: float) -> str:
    return f.count(n_a_step) if n_a_step == int(n_a_step) else f"{n_a_step:,.1f}"


def _busy(report: Report) -> str:
    share = report["profile"]["device_busy_fraction"]
    return "" if share is None else f"A kernel ran in {f.tenths(share)} of these steps. "


def _cost(profile: dict[str, Any]) -> str:
    before, overhead = profile["neighbour_step_s"], profile["overhead_fraction"]
    text = f"Watched, a step took {_short_time(profile['step_s'])}"
    if before is not None and overhead is not None:
        n = profile["n_neighbour_steps"]
        ones = "that before" if n == 1 else f"each of the {n} before"
        text += f", {ones} {_short_time(before)} ({f.signed_percent(overhead)})"
    return (
        f"{text}; training waited {f.duration(profile['pause_s'])} for the profile. Both are in"
        " this report\u2019s times."
    )


def _trace(report: Report) -> str:
    trace = report["profile"]["trace"]
    if trace is None:
        return f"No trace: {report['unavailable'].get('profile.trace', 'no reason was recorded')}."
    size = f.size(report["profile"]["n_trace_bytes"])
    return f"{trace} ({size}) is the trace, to be opened in Perfetto."


def _short_time(seconds: float) -> str:
    """Write seconds in the unit that keeps the number above 1.

    >>> [_short_time(s).replace(f.NBSP, " ") for s in (2.5, 0.0271, 0.00042)]
    ['2.5 s', '27.1 ms', '420 µs']
    """
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g}{f.NBSP}{unit}"
    return f"{seconds * 1e6:.3g}{f.NBSP}\u00b5s"
