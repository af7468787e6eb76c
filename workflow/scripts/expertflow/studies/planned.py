"""Make the plan of an expert from the records of the stages before it."""

import json
from pathlib import Path

from expertflow.core.records import from_json, read_record
from expertflow.hardware.probe import resolve_gpu
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import Calibration, MemoryTrace
from expertflow.plan.records import ModelFacts, PlanSpec, TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.plan.switches import choose_attention
from expertflow.tokens.records import PackingRecord


def planned(
    *, expert: str, spec: PlanSpec, packing: Path, model: Path, calibration: Path | None = None
) -> TrainPlan:
    """Resolve the hardware, trace a step where there is a card, and plan.

    Raises:
        ConfigError, HardwareError: the plan is refused.
    """
    described = json.loads(model.read_text(encoding="utf-8"))
    rows = read_record(PackingRecord, packing)
    gpu = resolve_gpu(spec.hardware, list(spec.gpu_table))
    return plan_training(
        expert=expert,
        spec=spec,
        packing=rows,
        facts=from_json(ModelFacts, described["facts"], where=str(model)),
        n_params=described["n_parameters"],
        gpu=gpu,
        trace=None if gpu is None else _traced(Path(described["path"]), spec, rows, gpu),
        calibration=None if calibration is None else read_record(Calibration, calibration),
    )


def import_code(model: Path, spec: PlanSpec) -> None:
    """Import what tracing a step and training both need, so that neither has to be timed for it.

    Raises:
        TrainingError: the model's architecture is not known.
    """
    from expertflow.train import trace_memory

    base = Path(json.loads(model.read_text(encoding="utf-8"))["path"])
    trace_memory.import_code(base, adapter=spec.lora is not None)


def _traced(base: Path, spec: PlanSpec, packing: PackingRecord, gpu: GpuFacts) -> MemoryTrace:
    # Here, as a plan for a CPU is made without the seconds that torch takes to be imported.
    from expertflow.train.trace_memory import trace_memory

    return trace_memory(
        base,
        spec,
        gpu=gpu,
        attention=choose_attention(spec, gpu)[0],
        sequence_length_tokens=packing.sequence_length_tokens,
        supervised_fraction=packing.train.n_target_tokens / packing.train.n_tokens,
    )
