"""Count model FLOPs per token of packed rows.

    P = L (2 h nq d + 2 h nkv d + m h I)    linear weights of the layers; m = 3 gated, 2 plain
    H = h V                                 the head, one product whether tied or not
    R                                       adapter weights
    T                                       the head where it is trained beside adapters, else 0
    D                                       weights under a DoRA adapter with dropout, else 0
    A = L nq d
    s = sum(len²) / (2 sum(len))            mean causal context of block-diagonal rows

    forward              2 (P + H + R + D) + 4 A s
    backward, full       4 (P + H) + 8 A s
    backward, adapters   2 (P + H + D + T) + 4 R + 8 A s

The head runs on supervised rows only, so H is scaled by their share. DoRA scales the output of the
frozen weights; with dropout the adapter has its own inputs, which pass through those weights a
second time. Gradient checkpointing recomputes the layers, which adds to hardware FLOPs (HFU), never
to model FLOPs (MFU). It stops once it has what it needs, so a layer's last product is not repeated,
unless DoRA without dropout scales it. The embedding lookup is 0. Not counted, below 0.5 % together:
the norms of DoRA's weights, once per micro-batch, and the work saved in the lowest layer under an
adapter. Checked in tests against torch's FlopCounterMode.
"""

from expertflow.core.records import Record
from expertflow.plan.records import ModelFacts
from expertflow.plan.settings import ALL_LINEAR, LoraSpec

# Model types whose layers' names and shapes are known; all others are assumed to have a gated MLP.
KNOWN_TYPES = {
    "cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral",
    "olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2",
}  # fmt: skip
# Types with one product for queries, keys and values, and no gate. GPT-2 has two called c_proj.
FUSED_QKV = {
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
}
CONVENTION = (
    "multiply-adds count 2; causal block-diagonal attention; head on supervised rows only;"
    " frozen weights under DoRA with dropout twice; embedding lookup 0; recomputation in hardware"
    " FLOPs only"
)


class FlopsPerToken(Record, frozen=True, kw_only=True):
    """FLOPs per token without padding: of a forward pass, of the model, of the hardware."""

    forward: float
    model: float
    hardware: float


def linear_weights(facts: ModelFacts) -> int:
    return facts.n_layers * sum(n_in * n_out for n_in, n_out in layer_shapes(facts).values())


def count_weights(facts: ModelFacts) -> int:
    """Return the weights of layers, embedding and head; norms and biases are left out."""
    n_vocab = 1 if facts.tie_word_embeddings else 2
    return linear_weights(facts) + n_vocab * facts.hidden_size * facts.vocab_size


def count_trained_weights(facts: ModelFacts, lora: LoraSpec | None) -> int:
    if lora is None:
        return count_weights(facts)
    return adapter_weights(facts, lora) + count_whole_weights(facts, lora)


def count_whole_weights(facts: ModelFacts, lora: LoraSpec) -> int:
    """Return the weights of embedding and head that are trained in full alongside an adapter."""
    n_matrices = len(set(lora.modules_to_save))
    # A tied embedding and head are one matrix.
    if facts.tie_word_embeddings:
        n_matrices = min(1, n_matrices)
    return n_matrices * facts.hidden_size * facts.vocab_size


def is_head_trained(lora: LoraSpec | None, *, tied: bool) -> bool:
    if lora is None:
        return True
    # Training a tied embedding trains the head.
    return "lm_head" in lora.modules_to_save or (tied and bool(lora.modules_to_save))


def flops_doubts(facts: ModelFacts, lora: LoraSpec | None) -> str:
    """Return what the FLOPs count assumes about a model; empty if nothing."""
    doubts = []
    if facts.model_type not in KNOWN_TYPES:
        doubts.append(f"FLOPs assume a gated MLP; model type {facts.model_type} is unknown")
    if unknown := unknown_targets(facts, lora):
        doubts.append(f"adapters of {', '.join(unknown)} are not counted; their shapes are unknown")
    return "; ".join(doubts)


def unknown_targets(facts: ModelFacts, lora: LoraSpec | None) -> tuple[str, ...]:
    known = layer_shapes(facts)
    names = () if lora is None else list_adapted_layers(facts, lora)
    return tuple(name for name in names if name not in known)


def list_adapted_layers(facts: ModelFacts, lora: LoraSpec) -> tuple[str, ...]:
    """Return the names of the layers with an adapter, with all-linear expanded where known."""
    if lora.targets == (ALL_LINEAR,) and facts.model_type in KNOWN_TYPES:
        return tuple(layer_shapes(facts))
    return lora.targets


def adapter_weights(facts: ModelFacts, lora: LoraSpec | None) -> int:
    if lora is None:
        return 0
    adapted = _adapted(facts, lora)
    magnitudes = sum(out for _, out in adapted) if lora.use_dora else 0
    # A is r x in and B is out x r, so r (in + out); DoRA adds a magnitude per output.
    return facts.n_layers * (lora.r * sum(map(sum, adapted)) + magnitudes)


def _adapted(facts: ModelFacts, lora: LoraSpec) -> list[tuple[int, int]]:
    shapes = layer_shapes(facts)
    return [shapes[name] for name in list_adapted_layers(facts, lora) if name in shapes]


def layer_shapes(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    # (in, out) by name. The last is the layer's last product, which checkpointing does not repeat.
    h, q, kv = facts.hidden_size, facts.n_heads * facts.head_dim, facts.n_kv_heads * facts.head_dim
    inner = facts.intermediate_size
    if names := FUSED_QKV.get(facts.model_type):
        shapes = (h, q + 2 * kv), (q, h), (h, inner), (inner, h)
        return dict(zip(names, shapes, strict=True))
    if facts.model_type == "phi3":
        qkv = {"qkv_proj": (h, q + 2 * kv), "o_proj": (q, h)}
        return {**qkv, "gate_up_proj": (h, 2 * inner), "down_proj": (inner, h)}
    attention = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
    if facts.model_type == "phi":
        attention["dense"] = attention.pop("o_proj")
        return {**attention, "fc1": (h, inner), "fc2": (inner, h)}
    if facts.model_type == "starcoder2":
        return {**attention, "c_fc": (h, inner), "c_proj": (inner, h)}
    gated = {"gate_proj": (h, inner), "up_proj": (h, inner), "down_proj": (inner, h)}
    return {**attention, **gated}


def flops_per_token(
    facts: ModelFacts,
    *,
    lora: LoraSpec | None,
    mean_context_tokens: float,
    supervised_fraction: float,
    checkpoint_activations: bool,
) -> FlopsPerToken:
    """Count forward and backward FLOPs of one token of a packed row.

    ``mean_context_tokens`` is s above; ``supervised_fraction`` the share of tokens before a target.
    """
    p, r = linear_weights(facts), adapter_weights(facts, lora)
    twice = 0  # frozen weights that dropped-out inputs pass through a second time (D)
    if lora is not None and lora.use_dora and lora.dropout:
        twice = facts.n_layers * sum(n_in * n_out for n_in, n_out in _adapted(facts, lora))
    head = facts.hidden_size * facts.vocab_size * supervised_fraction
    attention = facts.n_layers * facts.n_heads * facts.head_dim * mean_context_tokens
    forward = 2 * (p + head + r + twice) + 4 * attention
    again = 0.0
    if lora is None:
        # The gradients of inputs and of weights: each takes as much as the forward pass.
        backward = 4 * (p + head) + 8 * attention
    else:
        # Frozen weights need only the gradients of their inputs.
        backward = 2 * (p + head + twice) + 4 * r + 8 * attention
        if is_head_trained(lora, tied=facts.tie_word_embeddings):
            backward += 2 * head
    if checkpoint_activations:
        # Only layers are checkpointed, not the head.
        repeated = p + r + twice
        if not _needs_last_product(facts, lora):
            repeated -= facts.n_layers * facts.hidden_size * facts.intermediate_size
        again = 2 * repeated + 4 * attention
    model = forward + backward
    return FlopsPerToken(forward=forward, model=model, hardware=model + again)


def _needs_last_product(facts: ModelFacts, lora: LoraSpec | None) -> bool:
    """Return whether the backward pass reads the output of a layer's last frozen product."""
    if lora is None or not lora.use_dora or lora.dropout:
        return False
    return list(layer_shapes(facts))[-1] in list_adapted_layers(facts, lora)
