"""Predict the peak memory of a step, and choose the micro-batch by it.

The prediction comes from a traced step, or else from the model's shape.

    model       weights as stored: fp32 where trained, or bf16; half or NF4 where frozen
    optimizer   persistent gradients like the weights, and two moments: 8 bytes, 4 for bf16 weights,
                or 2 with 8-bit optimizers
    step        activations, gradients in flight, autocast copies, a chunk of the loss
    reserve     1 GiB and 8 % for the allocator and the CUDA context: a judgment, not calibrated

A trace counts the bytes of the real training step without data. The prior's figures per token,
layer and unit of width come from tracing Qwen3-0.6B, the highest of 0.6B to 8B (docs/memory.md).
Both are for uncompiled layers; no card has confirmed either yet. Processes that shard the model
divide model and optimizer among them, but not the step. What each gathers temporarily (a layer, the
embeddings) is not counted; the whole model, which each loads and checks first, is.

The micro-batch is chosen by that, or else by the card's size. Checkpointed layers are computed
twice, about 30 % more work under an adapter, so checkpointing stays off if a micro-batch that keeps
the card busy fits without it. Otherwise the smallest such micro-batch is checkpointed: larger ones
save little, and an uncalibrated prediction may need the headroom.
"""

from itertools import pairwise
from typing import NamedTuple, NoReturn

from msgspec.structs import replace

from expertflow.core.errors import HardwareError
from expertflow.core.format import GIB, gib, percent
from expertflow.hardware.records import GpuFacts
from expertflow.plan.draft import PlanDraft
from expertflow.plan.flops import count_trained_weights, count_weights, linear_weights
from expertflow.plan.records import (
    USABLE_FRACTION,
    MemoryLine,
    MemoryParts,
    ModelFacts,
    PlanSpec,
    Precision,
)
from expertflow.plan.settings import Training
from expertflow.plan.switches import choose_precision
from expertflow.train.optimizers import state_bytes

# Gated-MLP decoders, like those that the figures below were measured on.
KNOWN_ARCHITECTURES = {"qwen2", "qwen3", "llama", "mistral"}
LOSS_BYTES_PER_VOCAB = 10.5
# Rows of a loss chunk: at least these, by whether the head is trained. On a card, as many as fit
# their half-precision logits into a share of its memory: each chunk reads the head twice, and a
# trained head's full gradient. The share is a judgment: 2,560 rows of Qwen3's logits on 80 GB.
LOSS_CHUNK_ROWS = {True: 1024, False: 256}
LOSS_CHUNK_FRACTION = 0.01
RESERVE_BYTES, RESERVE_FRACTION = 1 << 30, 0.08
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
NF4_BYTES = 0.52
CPU_MICRO_BATCH = 8
WANTED_GLOBAL_BATCH = 16
ROWS = (1, 2, 4, 8, 16)
# Tokens per micro-batch from which a card counts as busy. A judgment: each token does about one
# FLOP per byte of half-precision weights, and the cards of the table do 154 to 419 in the time it
# takes to read a byte; so reading weights is at most a tenth of the work.
BUSY_TOKENS = 4096


class LayerBytes(NamedTuple):
    """Bytes per token, layer and unit of width: all kept, checkpointed, one layer at its peak."""

    kept: int
    checkpointed: int
    at_peak: int


# Layers of trained fp32 weights output fp32; adapters make fp32 copies of their inputs.
FULL, FULL_BF16 = LayerBytes(84, 4, 101), LayerBytes(73, 2, 92)
ADAPTER, DORA = LayerBytes(78, 2, 122), LayerBytes(117, 2, 172)


def predict_memory(draft: PlanDraft, micro_batch: int, *, checkpoint: bool) -> MemoryParts | None:
    if draft.by_hand:
        return None
    spec, facts, n_trained = draft.spec, draft.facts, draft.n_trainable
    n_tokens = micro_batch * draft.packing.sequence_length_tokens
    trace, line = draft.trace, None
    # Traced in bf16; fp16 takes as many bytes.
    if trace is not None and draft.precision != "fp32":
        line = next((x for x in trace.lines if x.checkpoint_activations == checkpoint), None)
    if line is not None:
        model, gradients = float(line.model_bytes), float(line.gradient_bytes)
        step_bytes = int(step_bytes_at(line, n_tokens))
    elif facts.model_type in KNOWN_ARCHITECTURES:
        frozen = _frozen_bytes(spec, facts, draft.n_params_total - n_trained, draft.precision)
        gradients = n_trained * WEIGHT_BYTES[spec.trained_dtype]
        # Trained weights take as many bytes as their gradients, which have the same dtype.
        model = frozen + gradients
        step_bytes = int(_prior_step_bytes(draft, n_tokens, checkpoint=checkpoint))
    else:
        return None
    model_bytes = int(model / spec.n_shares)
    moments = state_bytes(spec) * n_trained
    optimizer_bytes = int((gradients + moments) / spec.n_shares)
    if spec.n_shares > 1 and model > model_bytes + optimizer_bytes + step_bytes:
        # Loading is the peak: a card holds the whole model before it is sharded, and nothing else.
        model_bytes, optimizer_bytes, step_bytes = int(model), 0, 0
    used = model_bytes + optimizer_bytes + step_bytes
    return MemoryParts(
        model_bytes=model_bytes,
        optimizer_bytes=optimizer_bytes,
        step_bytes=step_bytes,
        reserve_bytes=RESERVE_BYTES + int(RESERVE_FRACTION * used),
    )


def standing_bytes(spec: PlanSpec, facts: ModelFacts) -> tuple[int, str]:
    """Return the bytes that a card must hold for any micro-batch, and what they consist of."""
    n_trained = count_trained_weights(facts, spec.lora)
    n_frozen = 0 if spec.lora is None else count_weights(facts)
    weights = _frozen_bytes(spec, facts, n_frozen, "bf16")
    weights += n_trained * WEIGHT_BYTES[spec.trained_dtype]
    # A gradient has its weight's dtype.
    each = WEIGHT_BYTES[spec.trained_dtype] + state_bytes(spec)
    whole, share = int(weights), int(weights + n_trained * each) // spec.n_shares
    # Each process loads the whole model before it is sharded.
    if whole > share:
        return whole, "all weights, which each process loads first,"
    return share, "weights, gradients and optimizer"


def _frozen_bytes(spec: PlanSpec, facts: ModelFacts, n_frozen: int, precision: Precision) -> float:
    # Only the layers' linear weights are in 4 bits: not the embedding, the head or the norms.
    n_nf4 = min(n_frozen, linear_weights(facts)) if spec.method == "qlora" else 0
    return n_nf4 * NF4_BYTES + (n_frozen - n_nf4) * WEIGHT_BYTES[precision]


def suggest_others(training: Training) -> str:
    """Return what helps where no setting of the current method does."""
    # fsdp cannot shard 4-bit weights.
    may_quantize = training.method != "qlora" and training.parallel != "fsdp"
    return f"a larger card{', method qlora' if may_quantize else ''} or a smaller model"


def suggest_smaller(spec: PlanSpec, facts: ModelFacts, gpu: GpuFacts | None) -> str:
    """Return settings of full training whose weights and states fit a card, then other ways."""
    others = f"use {suggest_others(spec)}"
    # fsdp cannot shard 8-bit moments.
    optim = spec.optim if spec.parallel == "fsdp" else "adamw_8bit"
    lean = replace(spec, pure_bf16=True, optim=optim)
    (now, _), (then, _) = (standing_bytes(one, facts) for one in (spec, lean))
    room = USABLE_FRACTION * ((gpu and gpu.memory_total_bytes) or 0) - RESERVE_BYTES
    may_be_lean = spec.method == "full" and choose_precision(spec, gpu)[0] == "bf16"
    # Suggest only what saves memory, and enough of it to fit.
    if not may_be_lean or then >= now or then > room:
        return others
    return f"set pure_bf16 to true and optim to {optim}, or {others}"


def peak_bytes(draft: PlanDraft, micro_batch: int, *, checkpoint: bool) -> int | None:
    parts = predict_memory(draft, micro_batch, checkpoint=checkpoint)
    return None if parts is None else parts.total_bytes


def is_predicted_to_fit(draft: PlanDraft, micro_batch: int, *, checkpoint: bool) -> bool | None:
    """Return whether a micro-batch fits the card; null without a prediction."""
    peak = peak_bytes(draft, micro_batch, checkpoint=checkpoint)
    return can_hold(draft.memory_total_bytes, peak)


def can_hold(total: int | None, peak: int | None) -> bool | None:
    """Return whether a card's memory holds a peak, both in bytes; null if either is unknown."""
    return None if total is None or peak is None else peak <= USABLE_FRACTION * total


def peak_reason(draft: PlanDraft) -> str:
    trace, model_type = draft.trace, draft.facts.model_type
    if trace is not None and trace.lines:
        return (
            "live bytes of the actual training step, traced without data, layers uncompiled;"
            f" {RESERVE_BYTES / GIB:g} GiB and {percent(RESERVE_FRACTION, 0)} for allocator and"
            " context are a judgment"
        )
    why = "not traced on a CPU" if draft.gpu is None else "no step was traced"
    if trace is not None and trace.unavailable_reason is not None:
        why = f"no step was traced ({trace.unavailable_reason})"
    if model_type in KNOWN_ARCHITECTURES:
        return f"prior from per-layer figures, {why}"
    return f"no figures for the architecture {model_type}, {why}"


def step_bytes_at(line: MemoryLine, n_tokens: int) -> float:
    """Interpolate between traced points, or extrapolate the last segment."""
    pairs = list(pairwise(zip(line.n_tokens, line.step_bytes, strict=True)))
    holding = (pair for pair in pairs if n_tokens <= pair[1][0])
    (from_tokens, from_bytes), (to_tokens, to_bytes) = next(holding, pairs[-1])
    slope = (to_bytes - from_bytes) / (to_tokens - from_tokens)
    return max(0.0, from_bytes + slope * (n_tokens - from_tokens))


def _prior_step_bytes(draft: PlanDraft, n_tokens: int, *, checkpoint: bool) -> float:
    facts, lora, precision = draft.facts, draft.spec.lora, draft.precision
    full = FULL_BF16 if draft.spec.pure_bf16 else FULL
    figures = full if lora is None else DORA if lora.use_dora else ADAPTER
    layers = facts.n_layers * figures.kept
    if checkpoint:
        # What all layers keep, and one recomputed layer.
        layers = facts.n_layers * figures.checkpointed + figures.at_peak
    # The figures are for half precision.
    wide = 2 if precision == "fp32" else 1
    activations = n_tokens * facts.hidden_size * wide * layers
    chunk = loss_chunk_rows(facts.vocab_size, draft.memory_total_bytes, trained=draft.trains_head)
    rows = min(n_tokens * draft.supervised_fraction, chunk)
    # Autocast keeps half-precision copies of trained weights until the forward pass is over.
    is_cast = lora is None and precision != draft.spec.trained_dtype
    copies = 2 * draft.n_trainable if is_cast else 0
    if lora is not None and draft.trains_head and precision != "fp32":
        copies = 2 * facts.hidden_size * facts.vocab_size
    return activations + copies + rows * LOSS_BYTES_PER_VOCAB * facts.vocab_size


def loss_chunk_rows(vocab_size: int, card_bytes: int | None, *, trained: bool) -> int:
    """Return how many targets have their logits in memory at once on a card."""
    least = LOSS_CHUNK_ROWS[trained]
    fitting = int(LOSS_CHUNK_FRACTION * (card_bytes or 0) / (2 * vocab_size))
    return max(least, fitting // LOSS_CHUNK_ROWS[False] * LOSS_CHUNK_ROWS[False])


def choose_batch(draft: PlanDraft) -> tuple[int, int, bool]:
    """Choose micro-batch, accumulation and checkpointing; raise HardwareError if no row fits."""
    micro, checkpoint = choose_micro_batch(draft)
    spec, n_cards = draft.spec, draft.spec.world_size
    if spec.gradient_accumulation_steps is not None:
        value = spec.gradient_accumulation_steps
        reason = spec.cite_setting(Training.gradient_accumulation_steps)
    elif spec.batch_size is not None:
        value, reason = 1, "the manifest sets the micro-batch but no accumulation"
    else:
        most = max(1, WANTED_GLOBAL_BATCH // n_cards)
        if micro > most:
            because = (
                f"{n_cards} processes share a global batch of about {WANTED_GLOBAL_BATCH} rows;"
                f" {micro} would fit each"
            )
            # A power of two can be halved when memory runs out.
            micro = draft.choose(Training.batch_size, 1 << (most.bit_length() - 1), because)
            if checkpoint and spec.gradient_checkpointing is None:
                # All activations of so few rows may fit.
                checkpoint = not is_predicted_to_fit(draft, micro, checkpoint=False)
                _choose_checkpoint(draft, micro, checkpoint)
        value = max(1, round(WANTED_GLOBAL_BATCH / (micro * n_cards)))
        shared = f" x {n_cards}" if n_cards > 1 else ""
        reason = (
            f"for a global batch of about {WANTED_GLOBAL_BATCH} rows: {micro} x {value}{shared} ="
            f" {micro * value * n_cards}"
        )
    return micro, draft.choose(Training.gradient_accumulation_steps, value, reason), checkpoint


def choose_micro_batch(draft: PlanDraft) -> tuple[int, bool]:
    """Choose micro-batch and checkpointing; raise HardwareError if no row fits."""
    spec = draft.spec
    checkpoint = bool(spec.gradient_checkpointing)
    if spec.batch_size is not None:
        return spec.batch_size, _take_given(draft, spec.batch_size, checkpoint=checkpoint)
    if draft.gpu is None:
        draft.choose(Training.batch_size, CPU_MICRO_BATCH, "default on a CPU")
        return CPU_MICRO_BATCH, _choose_checkpoint(draft, CPU_MICRO_BATCH, checkpoint)
    if is_predicted_to_fit(draft, 1, checkpoint=False) is None:
        return _micro_batch_by_tier(draft)
    return _micro_batch_by_memory(draft)


def _take_given(draft: PlanDraft, micro: int, *, checkpoint: bool) -> bool:
    spec, length = draft.spec, draft.packing.sequence_length_tokens
    reason, sparing = spec.cite_setting(Training.batch_size), ""
    if draft.gpu is not None:
        if spec.gradient_checkpointing is None:
            checkpoint = not _fits(draft, micro, checkpoint=False)
        peak, total = peak_bytes(draft, micro, checkpoint=checkpoint), draft.memory_total_bytes
        if peak is not None:
            reason = f"{reason}; {_sizes(draft, micro, checkpoint)}"
        if not _fits(draft, micro, checkpoint=checkpoint):
            if total is not None and peak is not None and peak > total:
                # From one row less down to 1.
                fitting = (n for n in range(micro)[:0:-1] if _fits(draft, n, checkpoint=checkpoint))
                if (rows := next(fitting, None)) is None:
                    _refuse(draft, checkpoint=checkpoint)
                raise HardwareError(
                    f"training.batch_size {micro} needs {gib(peak)} but {draft.hardware} has"
                    f" {total / GIB:.1f}; set it to auto, or to {rows} or less with"
                    f" {-(-micro // rows)} times the gradient_accumulation_steps"
                )
            # A prediction within the card's memory is not certain enough to reject the request.
            reason = f"{reason}; it is predicted to fill the card completely"
    draft.choose(Training.batch_size, micro, reason)
    if checkpoint and spec.gradient_checkpointing is None:
        # Only a divisor keeps the global batch.
        plain = [n for n in _fitting(draft, checkpoint=False) if micro % n == 0]
        if plain and plain[-1] * length >= BUSY_TOKENS:
            sparing = (
                f"; batch_size {plain[-1]} with {micro // plain[-1]} times the"
                " gradient_accumulation_steps fits without"
            )
    return _choose_checkpoint(draft, micro, checkpoint, sparing)


def _micro_batch_by_tier(draft: PlanDraft) -> tuple[int, bool]:
    spec = draft.spec
    # Decimal, like the thresholds.
    size_gb = (draft.memory_total_bytes or 0) / 1e9
    tiers = {
        8: spec.gpu_memory_threshold_large_gb,
        4: spec.gpu_memory_threshold_medium_gb,
        2: spec.gpu_memory_threshold_small_gb,
    }
    micro = next((rows for rows, least_gb in tiers.items() if size_gb >= least_gb), 1)
    reason = f"memory cannot be predicted for this model or card; tier of a {size_gb:.0f} GB card"
    draft.choose(Training.batch_size, micro, reason)
    checkpoint = spec.gradient_checkpointing is not False
    return micro, _choose_checkpoint(draft, micro, checkpoint)


def _micro_batch_by_memory(draft: PlanDraft) -> tuple[int, bool]:
    wanted, length = draft.spec.gradient_checkpointing, draft.packing.sequence_length_tokens
    plain = _fitting(draft, checkpoint=False) if wanted is not True else []
    again = _fitting(draft, checkpoint=True) if wanted is not False else []
    # The fewest rows with that many tokens, or else the most rows.
    busy = min(n for n in ROWS if n == ROWS[-1] or n * length >= BUSY_TOKENS)
    if plain and (plain[-1] >= busy or not again or again[-1] <= plain[-1]):
        micro, checkpoint, why = plain[-1], False, "the most rows that fit without checkpointing"
    elif again:
        micro, checkpoint = min(again[-1], busy), True
        why = "the most rows that fit"
        if again[-1] > busy:
            why = f"{busy * length:,} tokens, enough to keep a card busy (a judgment)"
    else:
        _refuse(draft, checkpoint=wanted is not False)
    draft.choose(Training.batch_size, micro, f"{why}; {_sizes(draft, micro, checkpoint)}")
    if checkpoint and plain and wanted is None:
        reason = (
            f"without it no more than {plain[-1] * length:,} tokens fit; below"
            f" {BUSY_TOKENS:,} a card is assumed to be partly idle (a judgment)"
        )
        return micro, draft.choose(Training.gradient_checkpointing, checkpoint, reason)
    return micro, _choose_checkpoint(draft, micro, checkpoint)


def _fitting(draft: PlanDraft, *, checkpoint: bool) -> list[int]:
    return [n for n in ROWS if _fits(draft, n, checkpoint=checkpoint)]


def _fits(draft: PlanDraft, micro: int, *, checkpoint: bool) -> bool:
    return is_predicted_to_fit(draft, micro, checkpoint=checkpoint) is not False


def _sizes(draft: PlanDraft, micro: int, checkpoint: bool) -> str:
    total = draft.memory_total_bytes
    now, twice = (peak_bytes(draft, n, checkpoint=checkpoint) or 0 for n in (micro, 2 * micro))
    of = "" if total is None else f" of {total / GIB:.1f}"
    return f"predicted {now / GIB:.1f}{of} GiB, and {twice / GIB:.1f} with {2 * micro} rows"


def _refuse(draft: PlanDraft, *, checkpoint: bool) -> NoReturn:
    needed = (peak_bytes(draft, 1, checkpoint=checkpoint) or 0) / GIB
    ways = suggest_smaller(draft.spec, draft.facts, draft.gpu)
    ways += ", or a shorter max_seq_length"
    if not checkpoint and _fits(draft, 1, checkpoint=True):
        ways = f"set gradient_checkpointing to auto, or {ways}"
    raise HardwareError(
        f"one row of {draft.packing.sequence_length_tokens} tokens needs {needed:.1f} GiB but"
        f" {draft.hardware} has less; {ways}"
    )


def _choose_checkpoint(draft: PlanDraft, micro: int, checkpoint: bool, more: str = "") -> bool:
    without = peak_bytes(draft, micro, checkpoint=False)
    if draft.spec.gradient_checkpointing is not None:
        reason = draft.spec.cite_setting(Training.gradient_checkpointing)
    elif draft.gpu is None:
        reason = "off by default on a CPU"
    elif can_hold(draft.memory_total_bytes, without) is None:
        switch = "on" if checkpoint else "off for the batch_size that is set"
        reason = f"{switch}, since memory cannot be predicted"
    elif checkpoint:
        reason = f"needed to fit: predicted {(without or 0) / GIB:.1f} GiB without"
    else:
        reason = "not needed: activations are predicted to fit"
    return draft.choose(Training.gradient_checkpointing, checkpoint, reason + more)
