"""A made-up ablation: a ladder of seven rungs, one of which does not fit, and single changes."""

from typing import Any

from msgspec.structs import replace

from expertflow.studies.records import AblationRecord, Bar, ClaimVerdict, Estimate

SHORT = "tried 7.5 GB more than the card has"
NO_FP8 = "the card has no 8-bit matrix units"
ONE_DISK = "rows and scratch lie on one disk: there is nothing to compare"
PLAN_TOKENS_PER_S = 36_400.0
LADDER = "from_naive"
# name, label, speed over the plan's
RUNGS: tuple[tuple[str, str, float | None], ...] = (
    ("naive", "Naive loop: batch 1, no workers, fp32, padded", 0.031),
    ("batch", "Batches of 16", 0.102),
    ("pretokenized", "Tokenized before training", 0.155),
    ("workers", "Workers load the next batch", 0.157),
    ("bf16", "bf16 products", None),
    ("packed", "Documents packed into rows", 0.81),
    ("fused-loss", "Fused loss", 0.94),
)
CHANGES: tuple[tuple[str, str, float | None, str | None], ...] = (
    ("no-compile", "Without compile", 0.78, None),
    ("workers-8", "8 workers instead of 4", 1.001, None),
    ("recompute", "Gradient checkpointing on", 0.74, None),
    ("batch-32", "Micro-batch 32 instead of 16", 1.09, None),
    ("fp8", "8-bit matrix products", None, NO_FP8),
    ("no-tf32", "TF32 off", 0.999, None),
)


def estimate(value: float, spread: float = 0.012) -> Estimate:
    return Estimate(
        value=value, low=value * (1 - spread), high=value * (1 + spread),
        least=value * (1 - 1.5 * spread), most=value * (1 + 1.5 * spread),
    )  # fmt: skip


def make_bar(
    name: str,
    label: str,
    speed: float | None,
    *,
    of: str | None = None,
    before: float | None = None,
    **changed: Any,
) -> Bar:
    """Make a variant with a multiple of the plan's speed; null: it did not fit."""
    known = speed is not None
    usd = 2.49 / 3.6e-3 / (PLAN_TOKENS_PER_S * speed) if speed else None
    return Bar(
        **{
            "name": name, "label": label, "of": of,
            "outcome": "measured" if known else "out of memory",
            "reason": None if known else SHORT,
            "tokens_per_s": PLAN_TOKENS_PER_S * speed if speed else None,
            "ratio": estimate(speed) if speed else None,
            "step": estimate(speed / before, 0.02) if speed and before else None,
            "usd_per_million_tokens": usd,
            "peak_memory_bytes": 61_500_000_000 if known else None,
            "padding_fraction": 0.0 if known else None,
            "data_wait_fraction": 0.004 if known else None,
            "is_sane": True if known else None,
            **changed,
        }
    )  # fmt: skip


def make_ablation(**changed: Any) -> AblationRecord:
    """Make the record of expert-sql; the card's name says that it was not measured."""
    # The rung after a gap has no step, as in a real record.
    speeds = [None, *(speed for _, _, speed in RUNGS)]
    rungs = [
        make_bar(name, label, speed, of=LADDER, before=before)
        for (name, label, speed), before in zip(RUNGS, speeds, strict=False)
    ]
    singles = []
    for name, label, ratio, why in CHANGES:
        missing = {"outcome": "not measurable", "reason": why} if why else {}
        singles.append(make_bar(name, label, ratio, **missing))
    record = AblationRecord(
        expert="expert-sql", preset="full", model="Qwen/Qwen3-0.6B", hardware="H100 SXM",
        device="cuda", gpu_name="NVIDIA H100 80GB HBM3 (made up)", method="lora",
        sequence_length_tokens=2048, global_batch_sequences=64, n_repeats=3, n_warmup_steps=5,
        n_timed_steps=20, price_usd_per_hour=2.49, price_as_of="2026-11-01",
        plan_tokens_per_s=PLAN_TOKENS_PER_S,
        plan_usd_per_million_tokens=2.49 / 3.6e-3 / PLAN_TOKENS_PER_S,
        ladders=(tuple(name for name, _, _ in RUNGS),),
        bars=(*rungs, *singles), claims=make_claims(),
        versions={"torch": "2.13.0"}, unavailable={},
    )  # fmt: skip
    return replace(record, **changed)


def make_claims() -> tuple[ClaimVerdict, ...]:
    def claim(text: str, by: str, said: str, **rest: Any) -> ClaimVerdict:
        blank: dict[str, Any] = {"low": None, "high": None, "measured": None, "reason": None}
        return ClaimVerdict(**{"claim": text, "by": by, "said": said, **blank, **rest})

    return (
        claim("compile", "system E", "1.2 to 2 times", low=1.2, high=2.0,
              measured=estimate(1.28), verdict="as claimed"),
        claim("8 workers against 4", "system A", "8 are faster",
              measured=estimate(1.001), verdict="no change"),
        claim("TF32", "system E", "up to 8 times", low=1.0, high=8.0,
              measured=estimate(1.001), verdict="no change",
              reason="the plan computes in bf16: TF32 has nothing to speed up"),
        claim("packing", "system A", "5 times", low=5.0, high=5.0,
              measured=estimate(5.16, 0.02), verdict="more"),
        claim("local NVMe", "system D", "2 to 3 times", low=2.0, high=3.0,
              verdict="not measurable", reason=ONE_DISK),
        claim("half the saves", "system D", "5 to 10 %", low=1.05, high=1.1,
              measured=estimate(1.012, 0.002), verdict="less",
              reason="28 saves of 2 min are 2.5 % of 38 h"),
    )  # fmt: skip
