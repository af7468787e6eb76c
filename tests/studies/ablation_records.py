"""Made-up records of variants."""

from typing import Any

from expertflow.studies.compare_trials import estimate_ratio
from expertflow.studies.records import (
    AblationSpec,
    ClaimedRatio,
    Variant,
    VariantRecord,
)
from expertflow.train.records import TrialResult

NO_RATIO = {"timings": (), "plan_timings": (), "ratio": None}


def timing(tokens_per_s: float, **changes: Any) -> TrialResult:
    settings: dict[str, Any] = {
        "outcome": "measured", "n_tokens": 1000, "timed_s": 1000 / tokens_per_s,
        "data_wait_s": 100 / tokens_per_s, "n_padding_tokens": 250, "losses": (5.0,),
        "device": "cpu",
    }  # fmt: skip
    return TrialResult(**{**settings, **changes})


def variant(name: str, **changes: Any) -> Variant:
    settings: dict[str, Any] = {"name": name, "label": name, "rows": "packed", "training": {}}
    return Variant(**{**settings, **changes})


def measured(name: str, *ratios: float, plan: float = 100.0, **changes: Any) -> VariantRecord:
    """Return a variant with these ratios to a plan of ``plan`` tokens a second."""
    settings: dict[str, Any] = {
        "expert": "e", "variant": variant(name), "outcome": "measured", "reason": None,
        "hardware": "cpu", "plan_sha256": "p",
        "timings": tuple(timing(plan * r) for r in ratios),
        "plan_timings": tuple(timing(plan) for _ in ratios),
        "ratio": estimate_ratio(ratios) if ratios else None, "loss_differs": 0.0, "is_sane": True,
        "machine": "2 processors", "versions": {"torch": "2"},
    }  # fmt: skip
    return VariantRecord(**{**settings, **changes})


def plain(name: str, reason: str = "nothing would change") -> VariantRecord:
    return measured(name, outcome="is the plan", reason=reason, **NO_RATIO)


def hopeless(name: str, reason: str = "no such card", outcome: str = "not measurable") -> Any:
    return measured(name, outcome=outcome, reason=reason, **NO_RATIO)


def claim(of: str, to: str, **changes: Any) -> ClaimedRatio:
    return ClaimedRatio(**{"claim": "c", "by": "A", "said": "s", "of": of, "to": to, **changes})


def spec_of(variants: list[Variant], claims: list[ClaimedRatio] | None = None) -> AblationSpec:
    return AblationSpec(
        preset="demo",
        variants=tuple(variants),
        claims=tuple(claims or ()),
        n_repeats=3,
        n_warmup_steps=5,
        n_timed_steps=20,
        max_timed_s=60.0,
    )
