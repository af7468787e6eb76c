"""What a search for the fastest settings found; the plan reads it where a manifest names it."""

from typing import Literal

from expertflow.core.records import Record


class TunedSettings(Record, frozen=True, kw_only=True):
    """What was searched. All choices have the same global batch, so they learn the same."""

    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    attention: str
    torch_compile: bool
    n_threads: int | None
    loader: Literal["thread", "workers"]
    dataloader_num_workers: int


class TuningTrial(Record, frozen=True, kw_only=True):
    """One choice of settings, and what became of it.

    ``predicted_peak_bytes`` is null where nothing could be predicted, as on a CPU. ``tokens_per_s``
    is null unless steps were timed. ``reason`` says why a choice was left out or given up.
    """

    settings: TunedSettings
    outcome: Literal["measured", "given up", "left out", "out of memory", "failed"]
    reason: str | None
    predicted_peak_bytes: int | None
    peak_memory_bytes: int | None
    tokens_per_s: float | None
    step_s: float | None
    startup_s: float | None
    n_timed_steps: int


class TuningRecord(Record, frozen=True, kw_only=True):
    """tuning.json. ``key`` names what it holds for: card, model, method, row length, batch.

    ``best`` is null where nothing could be run. ``default`` is what the plan would choose by itself
    and ``gain`` how many times its speed the best has, measured again in turns at the end; null
    with the default as the best where too few turns were timed, null with another where the default
    could not be run.
    ``was_cached``: whether trials of an earlier search were taken over.
    """

    expert: str
    key: str
    hardware: str
    gpu_name: str | None
    model: str
    sequence_length_tokens: int
    global_batch_sequences: int
    best: TunedSettings | None
    default: TunedSettings
    default_tokens_per_s: float | None
    best_tokens_per_s: float | None
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    trials: tuple[TuningTrial, ...]
    search_s: float
    was_cached: bool
