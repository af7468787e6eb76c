"""Keep the wait for a profile out of what is judged as lost: it was asked for."""

from typing import Any

Report = dict[str, Any]


def pause_s(report: Report) -> float:
    """Give the seconds of other time that training waited for its profile."""
    profile, other_s = report["profile"], float(report["time"]["other_s"])
    return 0.0 if profile is None else min(profile["pause_s"] or 0.0, max(0.0, other_s))


def judged_time(report: Report) -> dict[str, Any]:
    """Give the parts of wall time without that wait, neither in other time nor in the whole."""
    time, waited_s = report["time"], pause_s(report)
    return {**time, "other_s": time["other_s"] - waited_s, "wall_s": time["wall_s"] - waited_s}
