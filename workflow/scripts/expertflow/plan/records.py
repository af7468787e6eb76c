"""What a plan is made from and what it says: settings with reasons, time, money, memory, claims."""

from typing import Any, Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.settings import Loader, Training

Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["packed", "varlen", "sdpa", "flex", "eager"]
# Where the value of a setting comes from. An overlay is a demo block, or the configuration's file.
Origin = Literal["manifest", "command line", "overlay", "default", "computed", "tuned"]
ORIGIN_WORDS: dict[Origin, str] = {
    "manifest": "of the manifest",
    "command line": "of the command line",
    "overlay": "of the demo block or config.yaml",
    "default": "by default",
    "computed": "as computed",
    "tuned": "as tuned",
}

# Of a card's memory, what a prediction may fill; a judgement, as no card has confirmed one.
USABLE_FRACTION = 0.92


class Claim(Record, frozen=True, kw_only=True):
    """What somebody says a run takes, in the words of their log; null where nothing is said.

    ``duration`` is a text such as ``46:47``; ``gain_percent`` the least of ``hours`` that
    ``n_saves_after`` in place of ``n_saves`` are said to gain; ``n_warmup_steps`` what
    ``max(warmup_steps_min, int(warmup_ratio x n_steps))`` is said to give.
    """

    text: str
    hardware: str | None = None
    n_steps: int | None = None
    n_documents: int | None = None
    n_epochs: float | None = None
    batch_size: int | None = None
    steps_per_s: float | None = None
    tokens_per_step: float | None = None
    duration: str | None = None
    hours: float | None = None
    usd_per_hour: float | None = None
    usd: float | None = None
    parts_hours: tuple[float, ...] = ()
    n_saves: int | None = None
    n_saves_after: int | None = None
    minutes_per_save: float | None = None
    gain_percent: float | None = None
    n_warmup_steps: int | None = None
    warmup_ratio: float | None = None
    warmup_steps_min: int | None = None


class HardwareChoice(Record, frozen=True, kw_only=True):
    name: str
    n_gpus: int


class Calibration(Record, frozen=True, kw_only=True):
    """What a short run of the same plan on the same card took.

    ``step_s`` is the median, ``step_s_low`` and ``step_s_high`` are the quartiles of ``n_timings``
    timed steps, of epochs where these are short, or on a card of stretches between two log lines.
    ``step_s_mean`` shows steps that took much longer. ``startup_s`` is all that happens once: the
    start, loading, compiling, what the first steps took longer, writing the model.
    """

    expert: str
    hardware: str
    key: str
    n_warmup_steps: int
    n_timed_steps: int
    n_timings: int
    step_s: float
    step_s_low: float
    step_s_high: float
    step_s_mean: float
    save_s: float
    eval_s: float
    startup_s: float
    tokens_per_step: float
    peak_memory_bytes: int | None


class CostPlan(Record, frozen=True, kw_only=True):
    """What a run should cost. Hours and dollars are null where speed or price is unknown.

    The four parts of the middle prediction add up to ``predicted_hours``; parts that no calibration
    measured are null. Dollars are those of hours rounded up to ``billing_minutes``.
    """

    price_usd_per_hour: float | None = None
    price_as_of: str | None = None
    predicted_hours: float | None = None
    predicted_hours_low: float | None = None
    predicted_hours_high: float | None = None
    predicted_usd: float | None = None
    predicted_usd_low: float | None = None
    predicted_usd_high: float | None = None
    reason: str
    calibrated: bool = False
    mfu_fraction: float | None = None
    step_hours: float | None = None
    save_hours: float | None = None
    eval_hours: float | None = None
    startup_hours: float | None = None
    billing_minutes: float | None = None


class HardwareOption(Record, frozen=True, kw_only=True):
    """What the same work should take on other hardware; ``usd_per_hour`` is of all its cards."""

    name: str
    n_gpus: int
    fits: bool | None = None
    micro_batch_size: int | None = None
    checkpoint_activations: bool | None = None
    hours: float | None = None
    hours_low: float | None = None
    hours_high: float | None = None
    usd_per_hour: float | None = None
    price_as_of: str | None = None
    usd: float | None = None
    usd_low: float | None = None
    usd_high: float | None = None
    remark: str


class ClaimCheck(Record, frozen=True, kw_only=True):
    text: str
    holds: bool
    finding: str


class MemoryParts(Record, frozen=True, kw_only=True):
    """What the predicted peak consists of; a step is its activations, gradients and loss."""

    model_bytes: int
    optimizer_bytes: int
    step_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.model_bytes + self.optimizer_bytes + self.step_bytes + self.reserve_bytes


class MemoryLine(Record, frozen=True, kw_only=True):
    """Bytes of a step over the tokens of a micro-batch, for one way to run the layers.

    ``step_bytes`` are activations, gradients in flight and the loss at the worst moment, at each of
    ``n_tokens``, ascending; ``gradient_bytes`` those that stay. The peak bends down only where the
    loss begins to take more than one chunk; whole rows on both sides of that are among the points,
    so a straight line between two points is not too low for whole rows.
    """

    checkpoint_activations: bool
    model_bytes: int
    gradient_bytes: int
    n_tokens: tuple[int, ...]
    step_bytes: tuple[int, ...]


class MemoryTrace(Record, frozen=True, kw_only=True):
    """What a step without data or device showed.

    ``precision`` is the one that was traced; fp16 takes as many bytes as bf16. Where no step could
    be traced there are no lines, and ``hindrance`` says why.
    """

    precision: str
    lines: tuple[MemoryLine, ...]
    hindrance: str | None = None


class ModelFacts(Record, frozen=True, kw_only=True):
    """Shape of a dense decoder, as its config.json gives it.

    ``n_mlp_matrices`` is 3 where the MLP of a layer is gated, 2 where it is plain.
    """

    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    model_type: str
    n_mlp_matrices: int = 3


class PlanSpec(Training, frozen=True, kw_only=True):
    """What a plan is made from; ``origins`` says where settings come from that are no defaults."""

    origins: dict[str, Origin] = field(default_factory=dict)
    hardware: str
    gpu_table: tuple[dict[str, Any], ...] = ()
    prices: dict[str, dict[str, Any]] = field(default_factory=dict)
    price_usd_per_hour: float | None = None
    price_as_of: str | None = None
    billing_minutes: float | None = None
    system: str | None = None
    claims: tuple[Claim, ...] = ()
    compare: tuple[HardwareChoice, ...] = ()
    # The demo is on the CPU whatever the manifest is for: a budget cannot be held there.
    may_drop_budgets: bool = False

    def told(self, setting: str) -> str:
        """Name a setting with its origin: ``save_steps of the manifest``."""
        return f"{setting} {ORIGIN_WORDS[self.origins.get(setting, 'default')]}"


class Reason(Record, frozen=True, kw_only=True):
    """Why a setting has its value, and which one the set-up that this expert replaces had."""

    setting: str
    value: str
    because: str
    origin: Origin = "computed"
    source_value: str | None = None


class TrainPlan(Training, frozen=True, kw_only=True):
    """A training run: the settings with every ``auto`` resolved, and what follows from them.

    ``dataloader_prefetch_factor`` is 0 if every batch is made when it is asked for. A run that is
    out of memory goes on with half of its micro-batch if ``may_halve_micro_batch``. ``max_loss`` is
    null for twice what guessing gives or twice the first step's loss, whichever is more,
    ``n_threads`` for torch's own number, ``collection_interval_seconds`` for the monitor's.

    ``flops_per_token_*`` leave padding out; the hardware figure adds what checkpointing computes
    again. ``next_micro_batch_peak_bytes`` is the predicted peak of twice the micro-batch,
    ``without_checkpointing_peak_bytes`` that with all activations kept, where they are not.
    """

    # Settings that are never null here.
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    attention: Attention  # type: ignore[assignment]
    torch_compile: bool
    loader: Loader
    dataloader_prefetch_factor: int
    save_steps: int
    eval_steps: int
    origins: dict[str, Origin]
    expert: str
    hardware: str
    gpu: GpuFacts | None
    may_halve_micro_batch: bool
    global_batch_sequences: int
    sequence_length_tokens: int
    n_sequences: int
    n_steps: int
    n_steps_per_epoch: int
    n_epochs: float
    n_warmup_steps: int
    n_decay_steps: int
    precision: Precision
    n_params_total: int
    n_params_trainable: int
    flops_per_token_model: float
    flops_per_token_hardware: float
    flops_convention: str
    predicted_tokens: int
    predicted_peak_bytes: int | None
    predicted_peak_reason: str
    cost: CostPlan
    reasons: tuple[Reason, ...]
    memory: MemoryParts | None = None
    options: tuple[HardwareOption, ...] = ()
    claims: tuple[ClaimCheck, ...] = ()
    next_micro_batch_peak_bytes: int | None = None
    without_checkpointing_peak_bytes: int | None = None

    @property
    def model_flops(self) -> float:
        return self.flops_per_token_model * self.predicted_tokens
