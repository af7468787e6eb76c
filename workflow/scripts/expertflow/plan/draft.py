"""A plan in the making: what it is made of, and the reasons so far."""

from msgspec import Struct, field

from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import Calibration, MemoryParts, MemoryTrace
from expertflow.plan.flops import adapter_weights, unknown_targets
from expertflow.plan.memory import GRADIENT_BYTES, Step, predict_memory, total_bytes
from expertflow.plan.records import ModelFacts, PlanSpec, Reason
from expertflow.tokens.records import PackingRecord


class Draft(Struct):
    """What the plan is made of, and the reasons collected on the way.

    ``by_hand``: a resolved plan is resolved again with changes made by hand, where what is asked
    for is taken and no memory is predicted.
    """

    expert: str
    spec: PlanSpec
    packing: PackingRecord
    facts: ModelFacts
    n_params: int
    gpu: GpuFacts | None
    trace: MemoryTrace | None = None
    calibration: Calibration | None = None
    reasons: list[Reason] = field(default_factory=list)
    by_hand: bool = False

    def because(self, setting: str, value: object, reason: str) -> None:
        """Note why a setting has its value."""
        self.reasons.append(Reason(setting=setting, value=str(value), because=reason))

    @property
    def n_trainable(self) -> int:
        """Count the parameters that are trained: by the traced model where shapes are unknown."""
        lora = self.spec.lora
        if lora is None:
            return self.n_params
        if self.trace is not None and self.trace.lines and unknown_targets(self.facts, lora):
            # Adapters and their gradients are in fp32.
            return self.trace.lines[0].gradient_bytes // GRADIENT_BYTES
        return adapter_weights(self.facts, lora)

    @property
    def supervised_fraction(self) -> float:
        """Give the share of packed tokens that are targets."""
        return self.packing.train.n_target_tokens / self.packing.train.n_tokens

    def memory_parts(
        self, micro_batch: int, precision: str, checkpoint: bool
    ) -> MemoryParts | None:
        """Predict of what the peak of a micro-batch consists; null where that cannot be done."""
        if self.by_hand:
            return None
        spec = self.spec
        adapter = 0 if spec.lora is None else self.n_trainable
        step = Step(
            method=spec.method,
            lora=spec.lora,
            precision=precision,
            optim=spec.optim,
            n_shares=spec.world_size if spec.parallel == "fsdp" else 1,
            n_params_total=self.n_params + adapter,
            n_params_trainable=self.n_trainable,
            n_tokens=micro_batch * self.packing.sequence_length_tokens,
            supervised_fraction=self.supervised_fraction,
            checkpoint_activations=checkpoint,
        )
        return predict_memory(self.facts, step, self.trace)

    def peak_bytes(self, micro_batch: int, precision: str, checkpoint: bool) -> int | None:
        """Predict the peak memory of a micro-batch; null where that cannot be done."""
        parts = self.memory_parts(micro_batch, precision, checkpoint)
        return None if parts is None else total_bytes(parts)
