"""Inputs and output of a plan: settings with reasons, time, money, memory, claims."""

from functools import partial
from typing import Annotated, Any, Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.core.settings import NOTHING, Setting, name_of
from expertflow.hardware.records import GpuFacts
from expertflow.plan.settings import Loader, Training

Precision = Literal["fp32", "bf16", "fp16"]
StepBound = Literal["products", "bandwidth", "launches"]
Attention = Literal["packed", "varlen", "sdpa", "flex", "eager"]
# Where a setting's value comes from. An overlay is a demo block, or the configuration's file.
Origin = Literal["manifest", "command line", "overlay", "default", "computed", "tuned"]
ORIGIN_WORDS: dict[Origin, str] = {
    "manifest": "from the manifest",
    "command line": "from the command line",
    "overlay": "from the demo block or config.yaml",
    "default": "by default",
    "computed": "as computed",
    "tuned": "as tuned",
}

# Share of a card's memory that a prediction may fill; a judgment, not confirmed on a card.
USABLE_FRACTION = 0.92


# A figure of a claim: it has no effect on a run.
Figure = partial(Setting, affects=NOTHING)


class Claim(Record, frozen=True, kw_only=True):
    """Figures that somebody claims for a run, as in their log; null where nothing is claimed.

    The manifest's schema and the flags of ``check_claims.py`` are generated from it.
    """

    text: Annotated[str, Figure("The claim in words.")]
    n_steps: Annotated[int | None, Figure("Optimizer steps.", ge=1)] = None
    n_documents: Annotated[int | None, Figure("Training examples.", ge=1)] = None
    n_epochs: Annotated[float | None, Figure("Passes over them.", gt=0)] = None
    batch_size: Annotated[int | None, Figure("Examples per step.", ge=1)] = None
    steps_per_s: Annotated[float | None, Figure("Steps per second.", gt=0)] = None
    tokens_per_step: Annotated[float | None, Figure("Tokens per step.", gt=0)] = None
    duration: Annotated[str | None, Figure('Time as the log prints it, in quotes: "46:47".')] = None
    hours: Annotated[float | None, Figure("Hours claimed.", gt=0)] = None
    usd_per_hour: Annotated[float | None, Figure("Price per hour.", ge=0)] = None
    usd: Annotated[float | None, Figure("Dollars claimed.", ge=0)] = None
    parts_hours: Annotated[
        tuple[float, ...], Figure("Parts that should add up to the hours.", ge=0)
    ] = ()
    hardware: Annotated[
        str | None, Figure("One card of this kind, by its name in config/hardware/gpus.yaml.")
    ] = None
    n_saves: Annotated[int | None, Figure("Saves in the run.", ge=1)] = None
    n_saves_after: Annotated[int | None, Figure("Saves that would suffice.", ge=0)] = None
    minutes_per_save: Annotated[float | None, Figure("Minutes per save.", gt=0)] = None
    gain_percent: Annotated[
        float | None, Figure("Minimum gain claimed, in percent of the hours.", ge=0)
    ] = None
    gain_percent_max: Annotated[
        float | None, Figure("Maximum gain, where a range is claimed.", ge=0)
    ] = None
    hours_before: Annotated[float | None, Figure("Hours before a change.", gt=0)] = None
    steps_per_s_before: Annotated[
        float | None, Figure("Steps per second before a change.", gt=0)
    ] = None
    speedup: Annotated[float | None, Figure("Speedup factor of all changes together.", gt=0)] = None
    speedups: Annotated[
        tuple[float, ...], Figure("Factors that make it up, except TF32.", gt=0)
    ] = ()
    tf32_speedup: Annotated[float | None, Figure("Factor of TF32.", gt=0)] = None
    precision: Annotated[
        Precision | None, Figure("Precision of the run; TF32 applies to fp32.")
    ] = None
    n_warmup_steps: Annotated[int | None, Figure("Warm-up steps claimed.", ge=0)] = None
    warmup_ratio: Annotated[
        float | None,
        Figure("Their ratio, in max(warmup_steps_min, int(warmup_ratio x n_steps)).", ge=0),
    ] = None
    warmup_steps_min: Annotated[int | None, Figure("Their minimum in that formula.", ge=0)] = None


class HardwareChoice(Record, frozen=True, kw_only=True):
    name: str
    n_gpus: int


# Steps of a calibration, warm-up included; fewer if max_steps are.
CALIBRATION_STEPS = 40


class Calibration(Record, frozen=True, kw_only=True):
    """Timings of a short run of the same plan on the same card.

    ``step_s`` is the median, ``step_s_low`` and ``step_s_high`` are the quartiles of ``n_timings``
    timings: of steps, of epochs if these are short, or on a card of the steps between two log
    lines. ``step_s_mean`` shows occasional much slower steps. ``startup_s`` is all one-time work:
    startup, loading, compiling, slower first steps, writing the model.
    """

    expert: str
    hardware: str
    key: str
    n_timed_steps: int
    n_timings: int
    step_s: float
    step_s_low: float
    step_s_high: float
    step_s_mean: float
    save_s: float
    eval_s: float
    startup_s: float


class PaidSession(Record, frozen=True, kw_only=True):
    """A period on a rented machine; times are in seconds of the system clock.

    ``machine`` is the hash that job attempts there also have.
    """

    start_s: float
    end_s: float
    usd_per_hour: float
    machine: str = ""


class Ledger(Record, frozen=True, kw_only=True):
    """Everything paid for a run, here and on other machines, as the guard counts it."""

    sessions: tuple[PaidSession, ...] = ()


class StepSeconds(Record, frozen=True, kw_only=True):
    """The parts of a predicted step on one card (plan/step_time.py); they add up to ``total_s``."""

    products_s: float
    attention_s: float
    layers_s: float
    loss_s: float
    weights_s: float
    optimizer_s: float
    launches_s: float
    total_s: float


class StepChange(Record, frozen=True, kw_only=True):
    """A setting at another value, and the step time that the same model predicts for it.

    ``fits`` is null where the memory of that step was not predicted.
    """

    setting: str
    value: str
    step_s: float
    fits: bool | None = None


class CostPlan(Record, frozen=True, kw_only=True):
    """The predicted cost of a run; hours and dollars are null where speed or price is unknown.

    The four parts of the middle prediction add up to ``predicted_hours``; parts without a
    calibration are null. Dollars are for hours rounded up to ``billing_minutes``.

    ``step`` is predicted from the step's FLOPs and memory traffic, ``bound`` is what limits it, and
    ``changes`` are the predictions with other settings; a calibration changes none of them.
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
    bound: StepBound | None = None
    step: StepSeconds | None = None
    changes: tuple[StepChange, ...] = ()


class HardwareOption(Record, frozen=True, kw_only=True):
    """The same work on other hardware; ``usd_per_hour`` is for all its cards."""

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
    """The parts of the predicted peak; a step is its activations, gradients and loss."""

    model_bytes: int
    optimizer_bytes: int
    step_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.model_bytes + self.optimizer_bytes + self.step_bytes + self.reserve_bytes


class MemoryLine(Record, frozen=True, kw_only=True):
    """Bytes of a step as a function of micro-batch tokens, for one way to run the layers.

    ``step_bytes`` are activations, gradients in flight and the loss at the peak, at each of
    ``n_tokens``, ascending; ``gradient_bytes`` are the gradients that persist. The slope falls only
    where the loss begins to take more than one chunk; the points include full rows on both sides of
    that, so linear interpolation never underestimates full rows.
    """

    checkpoint_activations: bool
    model_bytes: int
    gradient_bytes: int
    n_tokens: tuple[int, ...]
    step_bytes: tuple[int, ...]


class MemoryTrace(Record, frozen=True, kw_only=True):
    """Results of tracing a step in half precision, without data or device.

    If tracing failed there are no lines, and ``unavailable_reason`` says why.
    """

    lines: tuple[MemoryLine, ...]
    unavailable_reason: str | None = None


class ModelFacts(Record, frozen=True, kw_only=True):
    """Shape of a dense decoder."""

    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    model_type: str


class PlanSpec(Training, frozen=True, kw_only=True):
    """The inputs of a plan; ``origins`` records where non-default settings come from."""

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
    # The demo runs on the CPU whatever the manifest targets; a budget cannot be enforced there.
    may_drop_budgets: bool = False

    def cite_setting(self, setting: Any) -> str:
        """Return a setting's name with its origin: ``save_steps from the manifest``."""
        name = name_of(setting)
        return f"{name} {ORIGIN_WORDS[self.origins.get(name, 'default')]}"


class Reason(Record, frozen=True, kw_only=True):
    """Why a setting has its value, and its value in the setup that this expert replaces."""

    setting: str
    value: str
    because: str
    origin: Origin = "computed"
    source_value: str | None = None


class TrainPlan(Training, frozen=True, kw_only=True):
    """A training run: the settings with every ``auto`` resolved, and what follows from them.

    ``dataloader_prefetch_factor`` is 0 if every batch is made on demand. A run that runs out of
    memory continues with half its micro-batch if ``may_halve_micro_batch``. Null means, for
    ``max_loss``, twice the loss of guessing or of the first step, whichever is larger; for
    ``n_threads``, torch's default; for ``collection_interval_seconds``, the monitor's.
    ``flops_per_token_*`` exclude padding; the hardware figure includes recomputation by
    checkpointing. ``next_micro_batch_peak_bytes`` is the predicted peak of twice the micro-batch,
    ``without_checkpointing_peak_bytes`` that without checkpointing, if the plan checkpoints.
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
