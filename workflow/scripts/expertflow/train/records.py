"""Records of training: the base model, each step, and the complete run."""

from pathlib import Path
from typing import Literal

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.hashes import HashCache
from expertflow.core.records import Record
from expertflow.plan.records import ModelFacts
from expertflow.staging.content import WEIGHTS, read_content
from expertflow.tokens.records import TokenizerRecord

RoutePart = Literal["attention", "compilation", "loss"]
NOT_ON_CPU = "measured on CUDA devices only; this run was on the CPU"


class ModelSpec(Record, frozen=True, kw_only=True):
    """Settings of ``prepare_model``: a hub id, a directory, or ``builtin:tiny-qwen3``.

    ``content`` has hashes of local files, so that edits to them count as changes.
    """

    model: str
    revision: str | None
    license: str | None
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    content: dict[str, str]
    seed: int
    added_tokens: tuple[str, ...] = ()


class ModelRecord(Record, frozen=True, kw_only=True):
    name: str
    kind: Literal["builtin", "local", "hub"]
    revision: str | None
    path: str
    license: str | None
    facts: ModelFacts
    n_parameters: int
    n_weight_bytes: int
    weights_sha256: str
    tokenizer: TokenizerRecord

    @property
    def files_outside(self) -> dict[Path, str]:
        """Hashes of a model's files that are read in place; checked wherever it is used."""
        content, hashes = read_content("weights", Path(self.path), key=""), HashCache()
        found = {
            content.source / name: hashes.sha256(content.source / name) for name in content.sizes
        }
        weights = [sha256 for path, sha256 in sorted(found.items()) if path.suffix == WEIGHTS]
        hashes.save()
        if sha256_json(weights) != self.weights_sha256:
            raise DataError(f"{self.path}: its weights changed while they were read; run again")
        return found


class StepRecord(Record, frozen=True, kw_only=True):
    """One optimizer step. Times are host seconds, ``data_wait_s`` a part of ``step_s``.

    Token counts exclude padding. ``grad_norm`` is null if a loss scaler skipped the step. The
    parts' seconds are the device's, null except in timed steps.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    n_tokens: int
    n_target_tokens: int
    step_s: float
    data_wait_s: float
    elapsed_s: float
    h2d_s: float | None
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None


class SampledSteps(Record, frozen=True, kw_only=True):
    """Mean device seconds of a step's parts over the ``n_steps`` timed steps."""

    n_steps: int
    h2d_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float


class MemoryRetry(Record, frozen=True, kw_only=True):
    after_step: int
    micro_batch_size: int
    n_accumulation_steps: int
    message: str


class Fallback(Record, frozen=True, kw_only=True):
    """A part of the training route that fell back to a plainer one before step ``after_step`` + 1.

    ``planned`` and ``used`` are names of that part's choices, e.g. attention implementations.
    """

    part: RoutePart
    planned: str
    used: str
    reason: str
    after_step: int


class EvalPoint(Record, frozen=True, kw_only=True):
    """Held-out loss in nats per supervised token, after ``step`` steps."""

    step: int
    loss: float
    n_target_tokens: int
    eval_s: float


class SavePoint(Record, frozen=True, kw_only=True):
    """A checkpoint after ``step`` steps, when on the run's clock, and how long training waited."""

    step: int
    elapsed_s: float
    save_s: float


class EpochSummary(Record, frozen=True, kw_only=True):
    """One entry per epoch started; the last one may be partial."""

    epoch: int
    steps: int
    loss_mean: float
    eval_loss: float | None
    tokens: int
    seconds: float
    tokens_per_s: float


class TimeSpent(Record, frozen=True, kw_only=True):
    """Wall time by activity, over all sessions of the run; parts add up to ``wall_s``.

    ``other_s`` includes work lost to a kill. ``train_s`` is forward + backward + optimizer.
    """

    wall_s: float
    startup_s: float
    data_wait_s: float
    h2d_s: float | None
    train_s: float
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    checkpoint_s: float
    eval_s: float
    other_s: float
    gpu_idle_s: float | None


class KeptWeights(Record, frozen=True, kw_only=True):
    """Weights that training kept. ``path`` is relative to the checkpoint folder (``.``)."""

    step: int
    held_out_loss: float | None
    path: str
    weights_sha256: str


class Kernel(Record, frozen=True, kw_only=True):
    name: str
    n_calls: int
    total_s: float


class KernelProfile(Record, frozen=True, kw_only=True):
    """Profile of ``n_steps`` steps from ``first_step`` on, counted from 1.

    ``kernels`` are those of a CUDA device, operators by their own time on a CPU. ``wall_s`` is the
    profiled steps' time, ``pause_s`` how long training waited for the profile. ``reason`` explains
    why no step was profiled.
    """

    device: str
    n_steps: int = 0
    first_step: int | None = None
    wall_s: float | None = None
    pause_s: float | None = None
    kernels: tuple[Kernel, ...] = ()
    trace: str | None = None
    n_trace_bytes: int | None = None
    reason: str | None = None


class RunSummary(Record, frozen=True, kw_only=True):
    """A run's summary. Sessions are processes: more than one means resumed.

    ``published_step`` is the published weights' step among the ``candidates``, which are sorted by
    step. ``checkpoint_write_s`` is background writing time in the last session.
    """

    expert: str
    fingerprint: str
    started_at: str
    method: str
    device: str
    precision: str
    attention: str
    activated: tuple[str, ...]
    world_size: int
    n_threads: int
    seed: int
    n_params_total: int
    n_params_trainable: int
    n_steps: int
    n_epochs: float
    stopped_early_at_step: int | None
    published_step: int
    candidates: tuple[KeptWeights, ...]
    micro_batch_size: int
    n_accumulation_steps: int
    memory_retries: tuple[MemoryRetry, ...]
    fallbacks: tuple[Fallback, ...] = ()
    sampled_steps: SampledSteps | None
    n_tokens: int
    n_target_tokens: int
    n_padding_tokens: int
    loss_first: float
    loss_last: float
    eval_points: tuple[EvalPoint, ...]
    save_points: tuple[SavePoint, ...]
    epoch_summaries: tuple[EpochSummary, ...]
    time: TimeSpent
    n_sessions: int
    resumed_at_steps: tuple[int, ...]
    n_saves: int
    checkpoint_write_s: float
    peak_memory_allocated_bytes: int | None = None
    peak_memory_reserved_bytes: int | None = None
    peak_host_rss_bytes: int
    gpu_names: tuple[str, ...] = ()
    weights_sha256: str
    unavailable: dict[str, str]


class TrainingRecord(RunSummary, frozen=True, kw_only=True):
    """``measured_peak_flops_per_s`` is the speed of one large product where no peak is known."""

    status: Literal["finished"] = "finished"
    gpu_name: str | None
    measured_peak_flops_per_s: float | None
    on_the_fly: bool
    packing_sha256: str
    steps_path: str
    versions: dict[str, str]


class TrialResult(Record, frozen=True, kw_only=True):
    """A trial's measurements; unless measured, only ``outcome`` and ``problem`` are meaningful.

    ``timed_s`` is the total of the timed steps, with the device idle at both ends, ``steps_s`` each
    step's seconds, on the device if it is a GPU. ``startup_s`` is the time before the first step;
    ``losses`` are per target, of all steps.
    """

    outcome: Literal["measured", "given up", "out of memory", "failed"]
    problem: str | None = None
    device: str = ""
    gpu_name: str | None = None
    n_timed_steps: int = 0
    n_tokens: int = 0
    n_target_tokens: int = 0
    n_padding_tokens: int = 0
    timed_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    data_wait_s: float = 0.0
    startup_s: float = 0.0
    save_s: float | None = None
    peak_memory_bytes: int | None = None
    peak_host_rss_bytes: int = 0
    losses: tuple[float, ...] = ()
    activated: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of documents, without padding, per second of the timed part."""
        return self.n_tokens / self.timed_s if self.timed_s else 0.0

    @property
    def padding_fraction(self) -> float:
        return self.n_padding_tokens / (self.n_tokens + self.n_padding_tokens)
