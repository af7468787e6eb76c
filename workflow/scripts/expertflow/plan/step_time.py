"""Predict the seconds of a training step on a card from its FLOPs and memory traffic.

    products      each product by its shape: FLOPs at the card's share of its peak, or the bytes of
                  its three matrices at its bandwidth, whichever takes longer
    attention     causal FLOPs within documents, at a lower share of the peak
    layers        bytes of all other kernels of the layers, by their widths
    loss          bytes of the logits of supervised tokens; the head is among the products
    weights       4-bit weights dequantized for each pass, or trained fp32 weights cast and their
                  gradients accumulated
    optimizer     bytes of weights, gradients and states, once a step
    launches      what the host needs to launch kernels, beyond the time that they run

Shares of the peak are fitted on one published run per family (bench/step_model.py shows which);
everything else is counted (bench/without_a_card.py) or a judgment.
"""

import math
from typing import NamedTuple

from expertflow.hardware.records import GpuFacts
from expertflow.plan.flops import (
    count_whole_weights,
    is_head_trained,
    layer_shapes,
    linear_weights,
    list_adapted_layers,
)
from expertflow.plan.records import ModelFacts, StepBound, StepSeconds
from expertflow.plan.settings import LoraSpec

# Share of the dense peak that large products reach, by the first words of a card's name, and
# whether it was fitted on such cards or taken from the most similar ones.
PRODUCT_SHARE = {
    "A100": (0.75, True), "H100": (0.57, True), "L40S": (0.61, True), "RTX 4090": (0.95, True),
    "H200": (0.57, False), "B200": (0.57, False), "L4": (0.61, False), "RTX": (0.95, False),
}  # fmt: skip
# Judgments: attention's share relative to the products', the share of the bandwidth that copies
# reach, and the host's seconds per launch.
ATTENTION_SHARE, BANDWIDTH_SHARE, LAUNCH_S = 0.6, 0.85, 6e-6
# The error on published runs that nothing was fitted on: 10th and 90th percentile of their seconds
# over the predicted ones (bench/step_model.py).
BAND = (0.82, 1.14)


class LayerCount(NamedTuple):
    """What a layer does in one micro-batch besides its products, forward and backward.

    ``n_bytes`` per token and unit of ``_width``, ``n_launches`` in total. Recomputing adds a share.
    """

    n_bytes: float
    n_launches: int


# By whether layers are compiled, and by method. Counted for Qwen3 and Llama at their widths.
LAYERS = {
    (True, "full"): LayerCount(18, 64),
    (True, "full bf16"): LayerCount(12.5, 47),
    (True, "lora"): LayerCount(16, 120),
    (True, "dora"): LayerCount(29, 165),
    (False, "full"): LayerCount(63, 196),
    (False, "full bf16"): LayerCount(49, 172),
    (False, "lora"): LayerCount(49, 240),
    (False, "dora"): LayerCount(84, 444),
}
RECOMPUTED = 0.3
# Bytes of a target's logits per vocabulary entry; per weight, NF4 bytes read and bf16 written, and
# bytes of a trained head's gradient per chunk of targets.
LOSS_BYTES, DEQUANTIZED_BYTES, HEAD_GRADIENT_BYTES = 10, 2.52, 21
BOUND_WORDS = {
    "products": "bound by matrix products",
    "bandwidth": "bound by memory bandwidth",
    "launches": "bound by launches, as the card waits for the host",
}


class StepWork(NamedTuple):
    """What one card does in a step. ``n_tokens`` are those of a micro-batch, with padding."""

    facts: ModelFacts
    lora: LoraSpec | None
    n_tokens: float
    n_micro_batches: int
    mean_context_tokens: float
    supervised_fraction: float
    checkpoint: bool
    compiled: bool
    is_quantized: bool
    n_trained: int
    # Bytes of a value in a product, of a trained weight, of its optimizer states.
    value_bytes: int = 2
    weight_bytes: int = 4
    state_bytes: int = 8
    n_shares: int = 1
    chunk_rows: float = math.inf
    loss_bytes: int = LOSS_BYTES
    layers: LayerCount | None = None

    @property
    def method(self) -> str:
        if self.lora is None:
            return "full" if self.weight_bytes == 4 else "full bf16"
        return "dora" if self.lora.use_dora else "lora"


class CardSpeed(NamedTuple):
    """The speed that a card reaches; ``is_fitted`` if its family is among the published runs."""

    flops_per_s: float
    bytes_per_s: float
    is_fitted: bool

    @property
    def band(self) -> tuple[float, float]:
        """Return low and high over the middle, squared for a card without a known run."""
        low, high = BAND
        return (low, high) if self.is_fitted else (low**2, high**2)

    @property
    def basis(self) -> str:
        if self.is_fitted:
            return "the band is this model's error on published runs"
        return (
            "no published run on this kind of card was compared: its share of the peak is that of a"
            " similar one, and the band is wider"
        )

    def product_s(self, n_rows: float, n_in: float, n_out: float, value_bytes: int) -> float:
        # Factors are read and the product is written while it is computed: the slower one counts.
        n_values = n_rows * n_in + n_in * n_out + n_rows * n_out
        computing = 2 * n_rows * n_in * n_out / self.flops_per_s
        return max(computing, n_values * value_bytes / self.bytes_per_s)


def peak_flops_per_s(gpu: GpuFacts | None, precision: str, *, use_tf32: bool) -> float | None:
    """Return the card's dense peak at a precision; null where no source lists it."""
    if gpu is None:
        return None
    tf32 = gpu.peak_tf32_flops_per_s if use_tf32 else None
    peaks = {"bf16": gpu.peak_bf16_flops_per_s, "fp16": gpu.peak_fp16_flops_per_s, "fp32": tf32}
    return peaks[precision]


def card_speed(gpu: GpuFacts | None, precision: str, *, use_tf32: bool) -> CardSpeed | str:
    """Return the speed of a card, or why it is unknown."""
    if gpu is None:
        return "no estimate on a CPU, which only a dry run (snakemake -n) measures"
    peak = peak_flops_per_s(gpu, precision, use_tf32=use_tf32)
    if peak is None or gpu.peak_bandwidth_bytes_per_s is None:
        what = f"{precision} peak" if peak is None else "bandwidth"
        return f"no estimate: the {what} of {gpu.name} is unknown"
    # The first match: RTX 4090 is listed before RTX, and L40S before L4.
    found = next((x for name, x in PRODUCT_SHARE.items() if gpu.name.startswith(name)), None)
    if found is None:
        return f"no estimate: no published run is known on a card like {gpu.name}"
    share, is_fitted = found
    return CardSpeed(peak * share, gpu.peak_bandwidth_bytes_per_s * BANDWIDTH_SHARE, is_fitted)


def predict_step(work: StepWork, speed: CardSpeed) -> StepSeconds:
    """Return the parts of a step in seconds; they add up to ``total_s``."""
    # Bytes of layers and logits are counted for 2-byte values.
    facts, lora, wide = work.facts, work.lora, work.value_bytes / 2
    layers = work.layers or LAYERS[work.compiled, work.method]
    again = 1 + RECOMPUTED if work.checkpoint else 1
    context = facts.n_heads * facts.head_dim * work.mean_context_tokens
    # Backward takes twice the forward; checkpointing repeats the forward.
    attention = 4 * facts.n_layers * context * work.n_tokens * (4 if work.checkpoint else 3)
    per_token = _width(facts, compiled=work.compiled) * layers.n_bytes * again * wide
    targets, per_logit = work.n_tokens * work.supervised_fraction, work.loss_bytes * wide
    head = speed.product_s(targets, facts.hidden_size, facts.vocab_size, work.value_bytes)
    trains_head = is_head_trained(lora, tied=facts.tie_word_embeddings)
    if trains_head:
        # Once per chunk, and so shared by its targets.
        per_logit += HEAD_GRADIENT_BYTES * facts.hidden_size / work.chunk_rows
    # The head: forward and gradient of its inputs, and of its weights where it is trained.
    parts = {
        "products_s": _layer_products_s(work, speed) + head * (3 if trains_head else 2),
        "attention_s": attention / (speed.flops_per_s * ATTENTION_SHARE),
        "layers_s": facts.n_layers * work.n_tokens * per_token / speed.bytes_per_s,
        "loss_s": targets * facts.vocab_size * per_logit / speed.bytes_per_s,
        "weights_s": _weight_bytes(work) / speed.bytes_per_s,
    }
    launches = facts.n_layers * layers.n_launches * again * LAUNCH_S
    # The host launches ahead of the card, so only what exceeds the card's work adds time.
    parts["launches_s"] = max(0.0, launches - sum(parts.values()))
    # Once per micro-batch; the optimizer below runs once per step.
    parts = {name: work.n_micro_batches * seconds for name, seconds in parts.items()}
    # Clipping reads and writes gradients; the remainder is the update.
    updating = (6 * work.weight_bytes + 2 * work.state_bytes) * work.n_trained / work.n_shares
    parts["optimizer_s"] = updating / speed.bytes_per_s
    return StepSeconds(total_s=sum(parts.values()), **parts)


def bound_of(step: StepSeconds) -> StepBound:
    """Return what bounds a step: what takes most of its time, or launches once they add to it."""
    # It is above 0 only where the card runs out of work.
    if step.launches_s > 0:
        return "launches"
    computing = step.products_s + step.attention_s
    return "products" if computing > step.total_s / 2 else "bandwidth"


def bound_words(step: StepSeconds) -> str:
    return BOUND_WORDS[bound_of(step)]


def _width(facts: ModelFacts, *, compiled: bool) -> int:
    """Return the sum of the widths of what a layer reads and writes.

    Uncompiled, heads are read and written about four times as often: norms, rotation, copies.
    """
    heads = (facts.n_heads + 2 * facts.n_kv_heads) * facts.head_dim
    return 2 * (facts.hidden_size + facts.intermediate_size) + heads * (1 if compiled else 4)


def _layer_products_s(work: StepWork, speed: CardSpeed) -> float:
    """Return the seconds of a micro-batch's products in all layers."""
    lora, n, size = work.lora, work.n_tokens, work.value_bytes
    shapes = layer_shapes(work.facts)
    forward = {name: speed.product_s(n, *shape, size) for name, shape in shapes.items()}
    narrow = of_weights = 0.0
    for name, (n_in, n_out) in shapes.items():
        if lora is None:
            of_weights += speed.product_s(n_in, n, n_out, size)
        elif name in list_adapted_layers(work.facts, lora):
            narrow += speed.product_s(n, n_in, lora.r, size)
            narrow += speed.product_s(n, lora.r, n_out, size)
            # DoRA's dropped-out inputs pass through the frozen weights a second time.
            forward[name] *= 2 if lora.use_dora and lora.dropout else 1
    once = sum(forward.values())
    # Forward and gradient of the inputs; of adapters, that of the weights as well.
    seconds = 2 * once + 3 * narrow + of_weights
    if work.checkpoint:
        # A layer's last product is not repeated (plan/flops.py).
        seconds += once + narrow - list(forward.values())[-1]
    return work.facts.n_layers * seconds


def _weight_bytes(work: StepWork) -> float:
    """Return the bytes that weights move besides products, in a micro-batch."""
    dequantizing, n_trained = 0.0, work.n_trained
    if work.is_quantized:
        # 4-bit weights are unpacked again for each pass.
        passes = 3 if work.checkpoint else 2
        dequantizing = linear_weights(work.facts) * DEQUANTIZED_BYTES * passes
    if work.lora is not None:
        # Those of the adapters are too few to count.
        n_trained = count_whole_weights(work.facts, work.lora)
    # A gradient is added to the previous micro-batch's; fp32 ones are cast both ways.
    adding = 3 * work.weight_bytes * (1 - 1 / work.n_micro_batches)
    casting = 2 * (work.weight_bytes + 2) if work.weight_bytes == 4 else 0
    return dequantizing + n_trained * (adding + casting)
