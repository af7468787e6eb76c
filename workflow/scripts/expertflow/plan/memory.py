"""Predict peak memory of a training step: from a traced step, or else from the model's shape.

    model       weights as stored: fp32 where trained, half or NF4 where frozen
    optimizer   persistent gradients (fp32) and two moments: 8 bytes, or 2 with 8-bit optimizers
    step        activations, gradients in flight, autocast copies, a chunk of the loss
    reserve     1 GiB and 8 % for the allocator and the CUDA context: a judgment, not calibrated

A trace counts the bytes of the real training step without data. The prior's figures per token,
layer and unit of width come from tracing Qwen3-0.6B, the highest of 0.6B to 8B (docs/memory.md).
Both are for uncompiled layers; no card has confirmed either yet. Processes that shard the model
divide model and optimizer among them, but not the step. What each gathers for a moment (a layer,
the embeddings) is not counted.
"""

from itertools import pairwise
from typing import NamedTuple

from expertflow.core.format import GIB
from expertflow.plan.draft import GRADIENT_BYTES, PlanDraft
from expertflow.plan.flops import linear_weights
from expertflow.plan.records import USABLE_FRACTION, MemoryLine, MemoryParts
from expertflow.train.optimizers import OPTIMIZERS

# Gated-MLP decoders, like those that the figures below were measured on.
KNOWN_ARCHITECTURES = {"qwen2", "qwen3", "llama", "mistral"}
LOSS_BYTES_PER_VOCAB = 10.5
# Rows of a loss chunk on a card: more where the head is trained too.
LOSS_CHUNK_ROWS = {True: 1024, False: 256}
RESERVE_BYTES, RESERVE_FRACTION = 1 << 30, 0.08
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
NF4_BYTES = 0.52


class LayerBytes(NamedTuple):
    """Bytes per token, layer and unit of width: all kept, checkpointed, one layer at its peak."""

    kept: int
    checkpointed: int
    at_peak: int


# Layers of trained fp32 weights output fp32; adapters make fp32 copies of their inputs.
FULL, ADAPTER, DORA = LayerBytes(84, 4, 101), LayerBytes(78, 2, 122), LayerBytes(117, 2, 172)


def predict_memory(draft: PlanDraft, micro_batch: int, *, checkpoint: bool) -> MemoryParts | None:
    if draft.by_hand:
        return None
    spec, facts, n_trained = draft.spec, draft.facts, draft.n_trainable
    n_tokens = micro_batch * draft.packing.sequence_length_tokens
    trace, line = draft.trace, None
    # fp16 takes as many bytes as bf16.
    if trace is not None and (draft.precision == "fp32") == (trace.precision == "fp32"):
        line = next((x for x in trace.lines if x.checkpoint_activations == checkpoint), None)
    if line is not None:
        model, gradients = float(line.model_bytes), float(line.gradient_bytes)
        step_bytes = int(step_bytes_at(line, n_tokens))
    elif facts.model_type in KNOWN_ARCHITECTURES:
        frozen = draft.n_params_total - n_trained
        # Only the layers' linear maps are in 4 bits: not the embedding, the head and the norms.
        n_nf4 = min(frozen, linear_weights(facts)) if spec.method == "qlora" else 0
        model = n_nf4 * NF4_BYTES + (frozen - n_nf4) * WEIGHT_BYTES[draft.precision]
        model += n_trained * WEIGHT_BYTES["fp32"]
        gradients = float(GRADIENT_BYTES * n_trained)
        step_bytes = int(_prior_step_bytes(draft, n_tokens, checkpoint=checkpoint))
    else:
        return None
    n_shares = spec.world_size if spec.parallel == "fsdp" else 1
    model_bytes = int(model / n_shares)
    moments = OPTIMIZERS[spec.optim].state_bytes * n_trained
    optimizer_bytes = int((gradients + moments) / n_shares)
    used = model_bytes + optimizer_bytes + step_bytes
    return MemoryParts(
        model_bytes=model_bytes,
        optimizer_bytes=optimizer_bytes,
        step_bytes=step_bytes,
        reserve_bytes=RESERVE_BYTES + int(RESERVE_FRACTION * used),
    )


def peak_bytes(draft: PlanDraft, micro_batch: int, *, checkpoint: bool) -> int | None:
    parts = predict_memory(draft, micro_batch, checkpoint=checkpoint)
    return None if parts is None else parts.total_bytes


def is_predicted_to_fit(draft: PlanDraft, micro_batch: int, *, checkpoint: bool) -> bool | None:
    """Return whether a micro-batch fits the card; null without a prediction."""
    total, peak = draft.memory_total_bytes, peak_bytes(draft, micro_batch, checkpoint=checkpoint)
    return None if total is None or peak is None else peak <= USABLE_FRACTION * total


def peak_reason(draft: PlanDraft) -> str:
    trace, model_type = draft.trace, draft.facts.model_type
    if trace is not None and trace.lines:
        return (
            "live bytes of the training's own step, traced without data, layers uncompiled;"
            f" {RESERVE_BYTES / GIB:g} GiB and {RESERVE_FRACTION:.0%} for allocator and context"
            " are a judgment"
        )
    why = "not traced on a CPU" if draft.gpu is None else "no step was traced"
    if trace is not None and trace.hindrance is not None:
        why = f"no step was traced ({trace.hindrance})"
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
    figures = FULL if lora is None else DORA if lora.use_dora else ADAPTER
    layers = facts.n_layers * figures.kept
    if checkpoint:
        layers = facts.n_layers * figures.checkpointed + figures.at_peak
    wide = 2 if precision == "fp32" else 1
    activations = n_tokens * facts.hidden_size * wide * layers
    rows = min(n_tokens * draft.supervised_fraction, LOSS_CHUNK_ROWS[lora is None])
    # Autocast keeps half-precision copies of trained weights until the forward pass is over.
    copies = 2 * draft.n_trainable if lora is None and precision != "fp32" else 0
    return activations + copies + rows * LOSS_BYTES_PER_VOCAB * facts.vocab_size
