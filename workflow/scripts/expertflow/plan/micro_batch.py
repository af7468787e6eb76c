"""Choose the micro-batch: by predicted memory, or by the card's size where none is predicted."""

from expertflow.core.errors import HardwareError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.draft import Draft

CPU_MICRO_BATCH = 8
USABLE_FRACTION = 0.92
GIB = 1 << 30


def choose_micro_batch(draft: Draft, precision: str) -> tuple[int, bool]:
    """Choose the rows of a micro-batch, and whether activations are checkpointed.

    Raises:
        HardwareError: one row does not fit the card.
    """
    spec, gpu = draft.spec, draft.gpu
    if spec.batch_size is not None:
        checkpoint = bool(spec.gradient_checkpointing)
        draft.because("micro_batch_size", spec.batch_size, "batch_size of the manifest")
        if spec.gradient_checkpointing is None and gpu is not None:
            checkpoint = not _fits(draft, spec.batch_size, precision, checkpoint=False)
        draft.because("checkpoint_activations", checkpoint, _checkpoint_reason(draft, checkpoint))
        return spec.batch_size, checkpoint
    if gpu is None:
        checkpoint = bool(spec.gradient_checkpointing)
        draft.because("micro_batch_size", CPU_MICRO_BATCH, "default on a CPU")
        draft.because("checkpoint_activations", checkpoint, _checkpoint_reason(draft, checkpoint))
        return CPU_MICRO_BATCH, checkpoint
    if gpu.memory_total_bytes is None or draft.peak_bytes(1, precision, False) is None:
        return _micro_batch_by_tier(draft, gpu)
    return _micro_batch_by_memory(draft, precision)


def _micro_batch_by_tier(draft: Draft, gpu: GpuFacts) -> tuple[int, bool]:
    """Go by the card's size where memory cannot be predicted."""
    spec = draft.spec
    size_gb = (gpu.memory_total_bytes or 0) / 1e9
    tiers = (
        (spec.gpu_memory_threshold_large_gb, 16),
        (spec.gpu_memory_threshold_medium_gb, 8),
        (spec.gpu_memory_threshold_small_gb, 4),
        (0.0, 1),
    )
    micro = next(rows for threshold, rows in tiers if size_gb >= threshold)
    reason = f"memory cannot be predicted for this model or card; tier of a {size_gb:.0f} GB card"
    draft.because("micro_batch_size", micro, reason)
    checkpoint = spec.gradient_checkpointing is not False
    draft.because("checkpoint_activations", checkpoint, "on, as memory cannot be predicted")
    return micro, checkpoint


def _micro_batch_by_memory(draft: Draft, precision: str) -> tuple[int, bool]:
    """Take the largest micro-batch up to the wanted global batch that is predicted to fit."""
    wanted = draft.spec.gradient_checkpointing
    for checkpoint in (False, True) if wanted is None else (wanted,):
        for micro in (16, 8, 4, 2, 1):
            if _fits(draft, micro, precision, checkpoint=checkpoint):
                gib = (draft.peak_bytes(micro, precision, checkpoint) or 0) / GIB
                draft.because("micro_batch_size", micro, f"the largest that fits: {gib:.1f} GiB")
                reason = _checkpoint_reason(draft, checkpoint)
                draft.because("checkpoint_activations", checkpoint, reason)
                return micro, checkpoint
    needed = (draft.peak_bytes(1, precision, wanted is not False) or 0) / GIB
    raise HardwareError(
        f"one row of {draft.packing.sequence_length_tokens} tokens needs {needed:.1f} GiB and"
        f" {draft.gpu.name if draft.gpu else 'cpu'} has less; use a larger card, method qlora, a"
        " smaller model, or a shorter max_seq_length"
    )


def _fits(draft: Draft, micro: int, precision: str, *, checkpoint: bool) -> bool:
    total = draft.gpu.memory_total_bytes if draft.gpu else None
    peak = draft.peak_bytes(micro, precision, checkpoint)
    return total is None or peak is None or peak <= USABLE_FRACTION * total


def _checkpoint_reason(draft: Draft, checkpoint: bool) -> str:
    if draft.spec.gradient_checkpointing is not None:
        return "gradient_checkpointing of the manifest"
    return "needed to fit" if checkpoint else "not needed: activations are predicted to fit"
