"""Records of an ablation: what every switch is worth on this machine, next to claims.

A *variant* is the plan with some settings changed. It is timed against the plan in alternating
pairs, so that a machine that slows down does not make a switch look bad.
"""

import math
from pathlib import Path
from typing import Any, Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.staging.records import StagingRecord
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import TrialResult

# The plan's own rows; their documents, one per row, padded to the longest of a batch; or documents
# tokenized in the training loop.
Rows = Literal["packed", "unpacked", "on_the_fly"]
# Speed; hours of a complete run with another number of saves; or read speed of staged rows over
# that of their source.
Metric = Literal["tokens_per_s", "hours", "read_speed"]
PLAN = "plan"


class Variant(Record, frozen=True, kw_only=True):
    """A way to train: the plan with ``training`` settings overridden, and maybe other rows.

    ``rung`` counts from 0, the end of ladder ``of`` furthest from the plan. ``saves`` multiplies
    the plan's number.
    """

    name: str
    label: str
    rows: Rows = "packed"
    training: dict[str, Any] = field(default_factory=dict)
    of: str | None = None
    rung: int | None = None
    metric: Metric = "tokens_per_s"
    saves: float = 1.0


class Saying(Record, frozen=True, kw_only=True):
    """A claim about a change; bounds are null without figures, the upper one for a minimum."""

    claim: str
    by: str
    said: str
    low: float | None = None
    high: float | None = None


class ClaimedRatio(Saying, frozen=True, kw_only=True):
    """The claimed speed of ``of`` over that of ``to``, two variants or ``plan``.

    If no variant answers it, ``unmeasured`` explains why.
    """

    of: str = PLAN
    to: str = PLAN
    unmeasured: str | None = None


class TrialLengths(Record, frozen=True, kw_only=True):
    n_repeats: int
    n_warmup_steps: int
    n_timed_steps: int
    max_timed_s: float


class AblationSpec(TrialLengths, frozen=True, kw_only=True):
    preset: str
    variants: tuple[Variant, ...]
    claims: tuple[ClaimedRatio, ...]


class VariantSpec(TrialLengths, frozen=True, kw_only=True):
    variant: Variant


class VariantJob(Record, frozen=True, kw_only=True):
    spec: VariantSpec
    plan: Path
    packing: PackingRecord
    model: Path
    rows: Path
    scratch: Path
    shards: tuple[Path, ...] = ()
    keep: Path | None = None
    staging: StagingRecord | None = None


class Estimate(Record, frozen=True, kw_only=True):
    """A ratio with its 95 % interval and the extremes of the repeats."""

    value: float
    low: float
    high: float
    least: float
    most: float

    def divide_by(self, other: "Estimate") -> "Estimate":
        """Divide two ratios measured independently against the same thing.

        The extremes are of any two repeats. Half-widths of logarithms add in quadrature, each with
        the quantile of its few degrees of freedom, so the interval is somewhat too wide.
        """
        value = self.value / other.value
        half = math.hypot(math.log(self.high / self.value), math.log(other.high / other.value))
        return Estimate(
            value=value,
            low=value * math.exp(-half),
            high=value * math.exp(half),
            least=self.least / other.most,
            most=self.most / other.least,
        )


# The plan compared with itself needs no measurement.
IS_ONE = Estimate(value=1.0, low=1.0, high=1.0, least=1.0, most=1.0)


class VariantRecord(Record, frozen=True, kw_only=True):
    """Results of one variant. ``ratio`` is its metric over the plan's, by pairs.

    ``not measurable`` means that this machine or model cannot do it. ``loss_differs`` is its loss
    over the plan's, minus 1, after the same tokens; ``is_sane``: rounding or another order of
    documents explains that. Variants with equal ``settings_sha256`` differ by noise alone.
    """

    expert: str
    variant: Variant
    outcome: Literal["measured", "is the plan", "out of memory", "failed", "not measurable"]
    reason: str | None = None
    plan_sha256: str
    timings: tuple[TrialResult, ...] = ()
    plan_timings: tuple[TrialResult, ...] = ()
    ratio: Estimate | None = None
    loss_differs: float | None = None
    is_sane: bool | None = None
    loss_bound: float | None = None
    machine: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    settings_sha256: str | None = None


class Bar(Record, frozen=True, kw_only=True):
    """A bar of the waterfall, or a row of the table: a variant against the plan.

    ``step`` is what the change from the previous rung is worth; null if it is not a rung, or
    nothing changes here. ``tokens_per_s`` is the plan's over all jobs times ``ratio``, so that a
    slower job shows no step; null, like dollars, for another ``metric``.
    """

    name: str
    label: str
    of: str | None
    outcome: str
    reason: str | None
    tokens_per_s: float | None
    ratio: Estimate | None
    step: Estimate | None
    usd_per_million_tokens: float | None
    peak_memory_bytes: int | None
    padding_fraction: float | None
    data_wait_fraction: float | None
    is_sane: bool | None
    metric: Metric = "tokens_per_s"
    loss_differs: float | None = None
    loss_bound: float | None = None


class ClaimVerdict(Saying, frozen=True, kw_only=True):
    """A claim next to its measurement here; ``reason`` qualifies it or explains why it is null."""

    measured: Estimate | None
    verdict: Literal[
        "as claimed", "less", "more", "no change", "not decided", "measured", "not measurable"
    ]
    reason: str | None
    metric: Metric = "tokens_per_s"


class AblationRecord(Record, frozen=True, kw_only=True):
    """ablation.json; ``unavailable`` maps a null figure to its reason."""

    expert: str
    preset: str
    model: str
    hardware: str
    device: str | None
    gpu_name: str | None
    method: str
    sequence_length_tokens: int
    global_batch_sequences: int
    n_repeats: int
    n_warmup_steps: int
    n_timed_steps: int
    price_usd_per_hour: float | None
    price_as_of: str | None
    plan_tokens_per_s: float | None
    plan_usd_per_million_tokens: float | None
    ladders: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...]
    claims: tuple[ClaimVerdict, ...]
    versions: dict[str, str]
    unavailable: dict[str, str]
    machine: str | None = None
    notes: tuple[str, ...] = ()
