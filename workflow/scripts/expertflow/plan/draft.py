"""A plan in the making: its inputs, and the reasons so far."""

from typing import TypeVar

from msgspec import Struct, field

from expertflow.hardware.records import GpuFacts
from expertflow.plan.flops import FlopsPerToken, adapter_weights, flops_per_token, unknown_targets
from expertflow.plan.records import MemoryTrace, ModelFacts, PlanSpec, Precision, Reason
from expertflow.plan.switches import choose_precision
from expertflow.tokens.records import PackingRecord

T = TypeVar("T")
# Adapters and all gradients are in fp32.
GRADIENT_BYTES = 4


class PlanDraft(Struct, kw_only=True):
    """Inputs and reasons of a plan; ``by_hand`` takes requests as they are, without predictions."""

    expert: str
    spec: PlanSpec
    packing: PackingRecord
    facts: ModelFacts
    n_params: int
    gpu: GpuFacts | None
    trace: MemoryTrace | None = None
    by_hand: bool = False
    reasons: dict[str, Reason] = field(default_factory=dict)

    def note(self, setting: str, value: T, because: str) -> T:
        """Replace the reason for a setting's value; return the value."""
        self.reasons[setting] = Reason(setting=setting, value=str(value), because=because)
        return value

    @property
    def precision(self) -> Precision:
        return choose_precision(self.spec, self.gpu, by_hand=self.by_hand)[0]

    @property
    def hardware(self) -> str:
        return self.gpu.name if self.gpu else "cpu"

    @property
    def memory_total_bytes(self) -> int | None:
        return self.gpu.memory_total_bytes if self.gpu else None

    @property
    def n_trainable(self) -> int:
        """Count trainable parameters, from the traced model if shapes are unknown."""
        lora = self.spec.lora
        if lora is None:
            return self.n_params
        if self.trace is not None and self.trace.lines and unknown_targets(self.facts, lora):
            return self.trace.lines[0].gradient_bytes // GRADIENT_BYTES
        return adapter_weights(self.facts, lora)

    @property
    def n_params_total(self) -> int:
        return self.n_params + (0 if self.spec.lora is None else self.n_trainable)

    @property
    def supervised_fraction(self) -> float:
        return self.packing.train.n_target_tokens / self.packing.train.n_tokens

    def flops(self, *, checkpoint: bool) -> FlopsPerToken:
        train = self.packing.train
        return flops_per_token(
            self.facts,
            lora=self.spec.lora,
            mean_context_tokens=train.sum_len_sq / (2 * train.n_tokens),
            supervised_fraction=self.supervised_fraction,
            checkpoint_activations=checkpoint,
        )
