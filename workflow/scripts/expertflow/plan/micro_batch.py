"""Choose the micro-batch: by predicted memory, or by the card's size where none is predicted.

Checkpointed layers are computed twice, about 30 % more work under an adapter, so they stay off if a
micro-batch that keeps the card busy fits without. If it does not, a micro-batch that is just large
enough for that is checkpointed: larger ones save little, and the room that they would take is what
an uncalibrated prediction may lack.
"""

from typing import NoReturn

from expertflow.core.errors import HardwareError
from expertflow.core.format import GIB, gib
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import USABLE_FRACTION
from expertflow.plan.draft import Draft

CPU_MICRO_BATCH = 8
ROWS = (1, 2, 4, 8, 16)
# Tokens of a micro-batch from which on a card is taken to be busy. A judgement: each token does
# about one FLOP a byte of half-precision weights, and the cards of the table do 154 to 419 in the
# time that a byte takes to be read; so reading weights is at most a tenth of the work.
BUSY_TOKENS = 4096


def choose_micro_batch(draft: Draft, precision: str) -> tuple[int, bool]:
    """Choose the rows of a micro-batch, and whether activations are checkpointed.

    Raises:
        HardwareError: one row does not fit the card.
    """
    spec, gpu = draft.spec, draft.gpu
    if spec.batch_size is not None:
        return spec.batch_size, _checkpoint_of_given(draft, spec.batch_size, precision)
    if gpu is None:
        checkpoint = bool(spec.gradient_checkpointing)
        draft.because("batch_size", CPU_MICRO_BATCH, "default on a CPU")
        draft.because("gradient_checkpointing", checkpoint, _checkpoint_reason(draft, checkpoint))
        return CPU_MICRO_BATCH, checkpoint
    if gpu.memory_total_bytes is None or draft.peak_bytes(1, precision, False) is None:
        return _micro_batch_by_tier(draft, gpu)
    return _micro_batch_by_memory(draft, precision)


def _checkpoint_of_given(draft: Draft, micro: int, precision: str) -> bool:
    """Decide on checkpointing for a micro-batch of the manifest."""
    spec, gpu = draft.spec, draft.gpu
    checkpoint = bool(spec.gradient_checkpointing)
    reason = spec.told("batch_size")
    if gpu is not None:
        if spec.gradient_checkpointing is None:
            checkpoint = not _fits(draft, micro, precision, checkpoint=False)
        if draft.peak_bytes(micro, precision, checkpoint) is not None:
            reason = f"{reason}; {_sizes(draft, micro, precision, checkpoint)}"
            if not _fits(draft, micro, precision, checkpoint=checkpoint):
                _refuse_given(draft, micro, precision, checkpoint=checkpoint)
                reason = f"{reason}; it is predicted to fill the card to the brim"
    draft.because("batch_size", micro, reason)
    without = draft.peak_bytes(micro, precision, False)
    reason = _checkpoint_reason(draft, checkpoint, without_bytes=without)
    if checkpoint and spec.gradient_checkpointing is None:
        reason += _sparing(draft, micro, precision)
    draft.because("gradient_checkpointing", checkpoint, reason)
    return checkpoint


def _sparing(draft: Draft, micro: int, precision: str) -> str:
    """Say which smaller micro-batch would keep the card busy and spare the computing again."""
    plain = [n for n in _fitting(draft, precision, checkpoint=False) if micro % n == 0]
    if not plain or _tokens(draft, plain[-1]) < BUSY_TOKENS:
        return ""
    rows, times = plain[-1], micro // plain[-1]
    return (
        f"; batch_size {rows} with gradient_accumulation_steps {times} times as many fits without"
    )


def _refuse_given(draft: Draft, micro: int, precision: str, *, checkpoint: bool) -> None:
    """Refuse a micro-batch of the manifest that is predicted to need more than the whole card.

    Raises:
        HardwareError: it does.
    """
    total = draft.gpu.memory_total_bytes if draft.gpu else None
    peak = draft.peak_bytes(micro, precision, checkpoint)
    if total is None or peak is None or peak <= total:
        return
    fewer = (
        n for n in range(micro - 1, 0, -1) if _fits(draft, n, precision, checkpoint=checkpoint)
    )
    rows = next(fewer, None)
    if rows is None:
        _refuse(draft, precision, checkpoint=checkpoint)
    raise HardwareError(
        f"training.batch_size {micro} needs {gib(peak)} and"
        f" {draft.gpu.name if draft.gpu else 'cpu'} has {total / GIB:.1f}; set it to auto, or to"
        f" {rows} or less with gradient_accumulation_steps {-(-micro // rows)} times as many"
    )


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
    draft.because("batch_size", micro, reason)
    checkpoint = spec.gradient_checkpointing is not False
    draft.because("gradient_checkpointing", checkpoint, "on, as memory cannot be predicted")
    return micro, checkpoint


def _micro_batch_by_memory(draft: Draft, precision: str) -> tuple[int, bool]:
    """Take what keeps the card busy, without checkpointing where that fits."""
    wanted = draft.spec.gradient_checkpointing
    plain = _fitting(draft, precision, checkpoint=False) if wanted is not True else []
    again = _fitting(draft, precision, checkpoint=True) if wanted is not False else []
    busy = min(n for n in ROWS if n == ROWS[-1] or _tokens(draft, n) >= BUSY_TOKENS)
    if plain and (plain[-1] >= busy or not again or again[-1] <= plain[-1]):
        micro, checkpoint, why = plain[-1], False, "the most rows that fit without checkpointing"
    elif again:
        micro, checkpoint = min(again[-1], busy), True
        why = "the most rows that fit"
        if again[-1] > busy:
            why = f"{_tokens(draft, busy):,} tokens, enough to keep a card busy (a judgement)"
    else:
        _refuse(draft, precision, checkpoint=wanted is not False)
    draft.because("batch_size", micro, f"{why}; {_sizes(draft, micro, precision, checkpoint)}")
    without = draft.peak_bytes(micro, precision, False)
    reason = _checkpoint_reason(draft, checkpoint, without_bytes=without)
    if checkpoint and plain and wanted is None:
        reason = (
            f"without it no more than {_tokens(draft, plain[-1]):,} tokens fit; below"
            f" {BUSY_TOKENS:,} a card is taken to be idle in part (a judgement)"
        )
    draft.because("gradient_checkpointing", checkpoint, reason)
    return micro, checkpoint


def _fitting(draft: Draft, precision: str, *, checkpoint: bool) -> list[int]:
    return [n for n in ROWS if _fits(draft, n, precision, checkpoint=checkpoint)]


def _tokens(draft: Draft, n_rows: int) -> int:
    return n_rows * draft.packing.sequence_length_tokens


def _fits(draft: Draft, micro: int, precision: str, *, checkpoint: bool) -> bool:
    total = draft.gpu.memory_total_bytes if draft.gpu else None
    peak = draft.peak_bytes(micro, precision, checkpoint)
    return total is None or peak is None or peak <= USABLE_FRACTION * total


def _sizes(draft: Draft, micro: int, precision: str, checkpoint: bool) -> str:
    """Say what a micro-batch is predicted to need, and what twice of it would."""
    total = draft.gpu.memory_total_bytes if draft.gpu else None
    now, twice = (draft.peak_bytes(n, precision, checkpoint) or 0 for n in (micro, 2 * micro))
    of = "" if total is None else f" of {total / GIB:.1f}"
    return f"predicted {now / GIB:.1f}{of} GiB, and {twice / GIB:.1f} with {2 * micro} rows"


def _refuse(draft: Draft, precision: str, *, checkpoint: bool) -> NoReturn:
    needed = (draft.peak_bytes(1, precision, checkpoint) or 0) / GIB
    ways = "use a larger card, method qlora, a smaller model, or a shorter max_seq_length"
    if not checkpoint:
        ways = f"set gradient_checkpointing to auto, or {ways}"
    raise HardwareError(
        f"one row of {draft.packing.sequence_length_tokens} tokens needs {needed:.1f} GiB and"
        f" {draft.gpu.name if draft.gpu else 'cpu'} has less; {ways}"
    )


def _checkpoint_reason(draft: Draft, checkpoint: bool, without_bytes: int | None = None) -> str:
    if draft.spec.gradient_checkpointing is not None:
        return draft.spec.told("gradient_checkpointing")
    if draft.gpu is None:
        return "off by default on a CPU"
    if checkpoint:
        return f"needed to fit: predicted {(without_bytes or 0) / GIB:.1f} GiB without"
    return "not needed: activations are predicted to fit"
