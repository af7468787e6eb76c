"""A plan in the making: what it is made of, and the reasons so far."""

from dataclasses import dataclass, field

from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import Calibration, MemoryParts, MemoryTrace
from expertflow.plan.flops import adapter_weights
from expertflow.plan.memory import predict_peak_bytes
from expertflow.plan.records import ModelFacts, PlanSpec, Reason
from expertflow.tokens.records import PackingRecord


@dataclass(slots=True)
class Draft:
    """What the plan is made of, and the reasons collected on the way."""

    expert: str
    spec: PlanSpec
    packing: PackingRecord
    facts: ModelFacts
    n_params: int
    gpu: GpuFacts | None
    trace: MemoryTrace | None = None
    calibration: Calibration | None = None
    reasons: list[Reason] = field(default_factory=list)

    def because(self, setting: str, value: object, reason: str) -> None:
        """Note why a setting has its value."""
        self.reasons.append(Reason(setting=setting, value=str(value), because=reason))

    @property
    def n_trainable(self) -> int:
        """Count the parameters that are trained."""
        if self.spec.lora is None:
            return self.n_params
        return adapter_weights(self.facts, self.spec.lora)

    @property
    def supervised_fraction(self) -> float:
        """Give the share of packed tokens that are targets."""
        return self.packing.train.n_target_tokens / self.packing.train.n_tokens

    def memory_parts(
        self, micro_batch: int, precision: str, checkpoint: bool
    ) -> MemoryParts | None:
        """Take the predicted peak apart; null where it cannot be."""
        return None

    def peak_bytes(self, micro_batch: int, precision: str, checkpoint: bool) -> int | None:
        """Predict the peak memory of a micro-batch; null where that cannot be done."""
        spec = self.spec
        return predict_peak_bytes(
            self.facts,
            method=spec.method,
            precision=precision,
            optim=spec.optim,
            n_shares=spec.world_size if spec.parallel == "fsdp" else 1,
            n_params_total=self.n_params,
            n_params_trainable=self.n_trainable,
            tokens_per_micro_batch=micro_batch * self.packing.sequence_length_tokens,
            supervised_fraction=self.supervised_fraction,
            checkpoint_activations=checkpoint,
        )
