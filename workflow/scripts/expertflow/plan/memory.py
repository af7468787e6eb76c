"""Predict peak memory of a training step: from a traced step, or else from the model's shape.

    model       weights as they are held: fp32 where trained, half or NF4 where frozen
    optimizer   gradients that stay (fp32) and two moments: 8 bytes, or 2 with an 8-bit optimiser
    step        activations, gradients in flight, copies of autocast, a chunk of the loss
    reserve     1 GiB and 8 % for the allocator and the CUDA context: a judgement, not calibrated

A trace has the bytes of the training's own step without data. The prior's figures per token, layer
and unit of width are those that the trace gave for Qwen3-0.6B, the highest of 0.6B to 8B
(docs/memory.md). Both are uncompiled layers; no card has confirmed either yet.

Processes that hold shares of the model divide model and optimizer among them, the step not. What
each gathers whole for a moment (a layer, the embeddings) is not counted.
"""

from itertools import pairwise

from expertflow.core.format import GIB
from expertflow.core.records import Record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import MemoryLine, MemoryParts, MemoryTrace
from expertflow.plan.flops import linear_weights
from expertflow.plan.records import ModelFacts
from expertflow.plan.settings import LoraSpec, Optim

# Gated-MLP decoders, like those that the figures below were taken on.
KNOWN_ARCHITECTURES = {"qwen2", "qwen3", "llama", "mistral"}
LOSS_BYTES_PER_VOCAB = 10.5
# Rows of a chunk of the loss on a card: more where the head is trained too.
LOSS_CHUNK_ROWS = {True: 1024, False: 256}
RESERVE_BYTES, RESERVE_FRACTION = 1 << 30, 0.08
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
NF4_BYTES = 0.52
GRADIENT_BYTES = 4
MOMENT_BYTES: dict[Optim, int] = {"adamw_torch_fused": 8, "adamw_torch": 8, "adamw_8bit": 2}


class LayerBytes(Record, frozen=True, kw_only=True):
    """Bytes per token, layer and unit of width: all kept, checkpointed, one layer at its peak."""

    kept: int
    checkpointed: int
    at_peak: int


# Layers of trained fp32 weights hand on fp32; adapters take fp32 copies of their inputs.
FULL = LayerBytes(kept=84, checkpointed=4, at_peak=101)
ADAPTER = LayerBytes(kept=78, checkpointed=2, at_peak=122)
DORA = LayerBytes(kept=117, checkpointed=2, at_peak=172)


class Step(Record, frozen=True, kw_only=True):
    """A micro-batch forward and backward, as far as its bytes depend on it.

    ``n_shares`` is the number of processes that the model is shared out to.
    """

    method: str
    lora: LoraSpec | None
    precision: str
    optim: Optim
    n_shares: int
    n_params_total: int
    n_params_trainable: int
    n_tokens: int
    supervised_fraction: float
    checkpoint_activations: bool


def predict_memory(facts: ModelFacts, step: Step, trace: MemoryTrace | None) -> MemoryParts | None:
    """Predict of what the peak of one step consists; null where nothing is known of the model."""
    line = _traced(step, trace)
    moments = MOMENT_BYTES[step.optim] * step.n_params_trainable
    if line is not None:
        model, gradients = float(line.model_bytes), float(line.gradient_bytes)
        worst = step_bytes_at(line, step.n_tokens)
    elif facts.model_type in KNOWN_ARCHITECTURES:
        frozen = step.n_params_total - step.n_params_trainable
        # Only the layers' linear maps are in 4 bits: not the embedding, the head and the norms.
        n_nf4 = min(frozen, linear_weights(facts)) if step.method == "qlora" else 0
        model = n_nf4 * NF4_BYTES + (frozen - n_nf4) * WEIGHT_BYTES[step.precision]
        model += step.n_params_trainable * WEIGHT_BYTES["fp32"]
        gradients = float(GRADIENT_BYTES * step.n_params_trainable)
        worst = _prior_step_bytes(facts, step)
    else:
        return None
    model_bytes = int(model / step.n_shares)
    optimizer_bytes = int((gradients + moments) / step.n_shares)
    used = model_bytes + optimizer_bytes + int(worst)
    return MemoryParts(
        model_bytes=model_bytes,
        optimizer_bytes=optimizer_bytes,
        step_bytes=int(worst),
        reserve_bytes=RESERVE_BYTES + int(RESERVE_FRACTION * used),
    )


def total_bytes(parts: MemoryParts) -> int:
    """Add up the parts: the predicted peak."""
    return parts.model_bytes + parts.optimizer_bytes + parts.step_bytes + parts.reserve_bytes


def peak_reason(facts: ModelFacts, trace: MemoryTrace | None, gpu: GpuFacts | None) -> str:
    """Say in a line what the predicted peak rests on, or why there is none."""
    if trace is not None and trace.lines:
        return (
            "live bytes of the training's own step, traced without data, layers uncompiled;"
            f" {RESERVE_BYTES / GIB:g} GiB and {RESERVE_FRACTION:.0%} for allocator and context"
            " are a judgement"
        )
    why = "not traced on a CPU" if gpu is None else "no step was traced"
    if trace is not None and trace.hindrance is not None:
        why = f"no step was traced ({trace.hindrance})"
    if facts.model_type in KNOWN_ARCHITECTURES:
        return f"prior from per-layer figures, {why}"
    return f"no figures for the architecture {facts.model_type}, {why}"


def _traced(step: Step, trace: MemoryTrace | None) -> MemoryLine | None:
    """Give the traced line for a step; fp16 takes as many bytes as bf16."""
    if trace is None or (step.precision == "fp32") != (trace.precision == "fp32"):
        return None
    matching = (x for x in trace.lines if x.checkpoint_activations == step.checkpoint_activations)
    return next(matching, None)


def step_bytes_at(line: MemoryLine, n_tokens: int) -> float:
    """Give the bytes on the straight line between traced points, or the last such line's end."""
    pairs = list(pairwise(zip(line.n_tokens, line.step_bytes, strict=True)))
    holding = (pair for pair in pairs if n_tokens <= pair[1][0])
    (from_tokens, from_bytes), (to_tokens, to_bytes) = next(holding, pairs[-1])
    slope = (to_bytes - from_bytes) / (to_tokens - from_tokens)
    return max(0.0, from_bytes + slope * (n_tokens - from_tokens))


def _prior_step_bytes(facts: ModelFacts, step: Step) -> float:
    full = step.lora is None
    figures = FULL if full else DORA if step.lora and step.lora.use_dora else ADAPTER
    layers = facts.n_layers * figures.kept
    if step.checkpoint_activations:
        layers = facts.n_layers * figures.checkpointed + figures.at_peak
    wide = 2 if step.precision == "fp32" else 1
    activations = step.n_tokens * facts.hidden_size * wide * layers
    rows = min(step.n_tokens * step.supervised_fraction, LOSS_CHUNK_ROWS[full])
    # Autocast keeps half copies of trained weights until the forward pass is over.
    copies = 2 * step.n_params_trainable if full and step.precision != "fp32" else 0
    return activations + copies + rows * LOSS_BYTES_PER_VOCAB * facts.vocab_size
