"""Count model FLOPs per token of packed rows.

    P = L (2 h nq d + 2 h nkv d + 3 h I)    linear weights of the layers
    H = h V                                 the head, one product whether tied or not
    R                                       adapter weights
    A = L nq d
    s = sum(len²) / (2 sum(len))            mean causal context of block-diagonal rows

    forward              2 (P + H + R) + 4 A s
    backward, full       4 (P + H) + 8 A s
    backward, adapters   2 (P + H) + 4 R + 8 A s

The head runs on supervised rows only, so H counts by their share. Gradient checkpointing computes
the layers again: that is hardware FLOPs (HFU), never model FLOPs (MFU). The embedding lookup is 0.
Source: checked in tests against torch's FlopCounterMode.
"""

from dataclasses import dataclass

from expertflow.plan.records import LoraSpec, ModelFacts

CONVENTION = (
    "multiply-adds count 2; causal block-diagonal attention; head on supervised rows only;"
    " embedding lookup 0; recomputation in hardware FLOPs only"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsPerToken:
    """FLOPs per token without padding: of the model, and as the hardware executes them."""

    model: float
    hardware: float


def linear_weights(facts: ModelFacts) -> int:
    """Count the weights of the layers' linear maps (P)."""
    h, d = facts.hidden_size, facts.head_dim
    attention = 2 * h * facts.n_heads * d + 2 * h * facts.n_kv_heads * d
    return facts.n_layers * (attention + 3 * h * facts.intermediate_size)


def adapter_weights(facts: ModelFacts, lora: LoraSpec | None) -> int:
    """Count adapter weights (R): r (in + out) per adapted linear map."""
    if lora is None:
        return 0
    h, q, kv = facts.hidden_size, facts.n_heads * facts.head_dim, facts.n_kv_heads * facts.head_dim
    shapes = {
        "q_proj": (h, q),
        "k_proj": (h, kv),
        "v_proj": (h, kv),
        "o_proj": (q, h),
        "gate_proj": (h, facts.intermediate_size),
        "up_proj": (h, facts.intermediate_size),
        "down_proj": (facts.intermediate_size, h),
    }
    per_layer = sum(lora.r * sum(shapes[name]) for name in lora.targets if name in shapes)
    magnitudes = sum(shapes[n][1] for n in lora.targets if n in shapes) if lora.use_dora else 0
    return facts.n_layers * (per_layer + magnitudes)


def flops_per_token(
    facts: ModelFacts,
    *,
    lora: LoraSpec | None,
    mean_context_tokens: float,
    supervised_fraction: float,
    checkpoint_activations: bool,
) -> FlopsPerToken:
    """Count forward and backward FLOPs of one token of a packed row.

    ``mean_context_tokens`` is s above; ``supervised_fraction`` is the share of tokens whose
    successor is a target.
    """
    p, r = linear_weights(facts), adapter_weights(facts, lora)
    head = facts.hidden_size * facts.vocab_size * supervised_fraction
    attention = facts.n_layers * facts.n_heads * facts.head_dim * mean_context_tokens
    forward = 2 * (p + head + r) + 4 * attention
    if lora is None:
        backward = 4 * (p + head) + 8 * attention
    else:
        backward = 2 * (p + head) + 4 * r + 8 * attention
    again = 2 * (p + r) + 4 * attention if checkpoint_activations else 0.0
    return FlopsPerToken(model=forward + backward, hardware=forward + backward + again)
