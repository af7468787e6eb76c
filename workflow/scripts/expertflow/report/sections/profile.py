"""The report's ``profile`` section: what a profiler saw in a few steps."""

from pathlib import PurePath
from typing import Any

from expertflow.core.records import to_json
from expertflow.report.inputs import ReportInputs
from expertflow.report.sections.profile_kinds import by_kind, sorted_kernels

N_KERNELS = 15
SAME = (
    "n_steps", "first_step", "device", "wall_s", "n_neighbour_steps", "neighbour_step_s", "pause_s",
    "device_busy_fraction", "n_kernels", "kernels_s", "n_trace_bytes",
)  # fmt: skip


def profile_section(inputs: ReportInputs) -> dict[str, Any] | None:
    """Give the longest kernels and all kinds; null where no step was watched."""
    profile = inputs.profile
    if not profile.n_steps or profile.wall_s is None:
        return None
    step_s, neighbour_s = profile.wall_s / profile.n_steps, profile.neighbour_step_s
    folder = PurePath(inputs.training.steps_path).parent / "profile"
    return {
        **{key: getattr(profile, key) for key in SAME},
        "step_s": step_s,
        "overhead_fraction": step_s / neighbour_s - 1 if neighbour_s else None,
        "by_kind": to_json(by_kind(profile)),
        "kernels": to_json(sorted_kernels(profile, N_KERNELS)),
        "trace": str(folder / profile.trace) if profile.trace else None,
        "notes": list(profile.notes),
    }


def profile_reasons(inputs: ReportInputs) -> dict[str, str]:
    """Say of what is null in the section why it is."""
    profile = inputs.profile
    if profile.reason is not None:
        return {"profile": profile.reason}
    reasons = {f"profile.{key}": why for key, why in profile.unavailable.items()}
    if (why := profile.unavailable.get("neighbour_step_s")) is not None:
        reasons["profile.overhead_fraction"] = why
    return reasons
