"""Predict peak memory of a training step from the model's shape.

A prior, made of per-layer figures that a live-bytes tracker gave on meta tensors (no GPU check
yet), so the plan says "predicted":

    weights         bytes per parameter of the training dtype
    trainables      fp32: gradient 4 + two moments 8 bytes each, or 2 with an 8-bit optimiser
    activations     46-70 h bytes per token and layer; 2 h when checkpointed, plus one layer at peak
    loss            made chunk by chunk, and no logits are kept: 10.5 V bytes per row of a chunk
    reserve         1 GB and 8 % for the allocator and the CUDA context

Processes that hold shares of the model divide weights and trainables among them, activations not.
What each gathers whole for a moment (a layer, the embeddings) is not counted.
"""

from expertflow.plan.records import ModelFacts, Optim

# Gated-MLP decoders, like those that the figures below were taken on.
KNOWN_ARCHITECTURES = {"qwen2", "qwen3", "llama", "mistral"}
ACTIVATION_BYTES_PER_HIDDEN = {"full": 70, "lora": 60, "qlora": 60}
CHECKPOINT_BYTES_PER_HIDDEN = 2
PEAK_LAYER_BYTES_PER_HIDDEN = 72
LOSS_BYTES_PER_VOCAB = 10.5
# Rows of a chunk of the loss on a card: more where the head is trained too.
LOSS_CHUNK_ROWS = {"full": 1024, "lora": 256, "qlora": 256}
RESERVE_BYTES, RESERVE_FRACTION = 1 << 30, 0.08
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
NF4_BYTES = 0.52
GRADIENT_BYTES = 4
MOMENT_BYTES: dict[Optim, int] = {"adamw_torch_fused": 8, "adamw_torch": 8, "adamw_8bit": 2}


def predict_peak_bytes(
    facts: ModelFacts,
    *,
    method: str,
    precision: str,
    optim: Optim,
    n_shares: int,
    n_params_total: int,
    n_params_trainable: int,
    tokens_per_micro_batch: int,
    supervised_fraction: float,
    checkpoint_activations: bool,
) -> int | None:
    """Predict the peak of one step in bytes, reserve included; null for an unknown architecture.

    ``n_shares`` is the number of processes that the model is shared out to.
    """
    if facts.model_type not in KNOWN_ARCHITECTURES:
        return None
    frozen = n_params_total - n_params_trainable
    frozen_bytes = NF4_BYTES if method == "qlora" else WEIGHT_BYTES[precision]
    trained_bytes = WEIGHT_BYTES["fp32"] + GRADIENT_BYTES + MOMENT_BYTES[optim]
    weights = (frozen * frozen_bytes + n_params_trainable * trained_bytes) / n_shares
    wide = 2 if precision == "fp32" else 1
    h = facts.hidden_size * wide
    if checkpoint_activations:
        layers = facts.n_layers * CHECKPOINT_BYTES_PER_HIDDEN + PEAK_LAYER_BYTES_PER_HIDDEN
    else:
        layers = facts.n_layers * ACTIVATION_BYTES_PER_HIDDEN[method]
    activations = tokens_per_micro_batch * h * layers
    rows = min(tokens_per_micro_batch * supervised_fraction, LOSS_CHUNK_ROWS[method])
    loss = rows * LOSS_BYTES_PER_VOCAB * facts.vocab_size
    return int((weights + activations + loss) * (1 + RESERVE_FRACTION) + RESERVE_BYTES)
