"""A plan in progress: its inputs, and the choices so far, each with its reason."""

from typing import Any, TypeVar

from msgspec import Struct, field

from expertflow.core.settings import name_of
from expertflow.hardware.records import GpuFacts
from expertflow.plan.flops import (
    FlopsPerToken,
    count_trained_weights,
    flops_per_token,
    is_head_trained,
    unknown_targets,
)
from expertflow.plan.records import MemoryTrace, ModelFacts, PlanSpec, Precision, Reason
from expertflow.plan.switches import choose_precision
from expertflow.tokens.records import PackingRecord

T = TypeVar("T")
# Adapters and their gradients are in fp32.
GRADIENT_BYTES = 4


class PlanDraft(Struct, kw_only=True):
    """Inputs of a plan, its chosen fields, and their reasons.

    ``by_hand`` accepts requests as given, without predictions.
    """

    expert: str
    spec: PlanSpec
    packing: PackingRecord
    facts: ModelFacts
    n_params: int
    gpu: GpuFacts | None
    trace: MemoryTrace | None = None
    by_hand: bool = False
    chosen: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Reason] = field(default_factory=dict)

    def choose(self, setting: Any, value: T, because: str) -> T:
        """Set a field of the plan, such as ``Training.batch_size``; return the value."""
        self.chosen[name_of(setting)] = value
        self.note(setting, value, because)
        return value

    def note(self, setting: Any, shown: object, because: str) -> None:
        """Replace the reason for a field's value, and the value shown."""
        name = name_of(setting)
        self.reasons[name] = Reason(setting=name, value=str(shown), because=because)

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
        return count_trained_weights(self.facts, lora)

    @property
    def trains_head(self) -> bool:
        return is_head_trained(self.spec.lora, tied=self.facts.tie_word_embeddings)

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
            mean_context_tokens=train.mean_context_tokens,
            supervised_fraction=self.supervised_fraction,
            checkpoint_activations=checkpoint,
        )
