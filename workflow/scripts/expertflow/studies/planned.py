"""Make the plan of an expert from the records of the stages before it."""

from functools import partial
from pathlib import Path
from typing import Any

from expertflow.core.records import from_json, read_part, read_record
from expertflow.hardware.probe import probe_machine, resolve_gpu
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import Calibration, MemoryTrace
from expertflow.plan.draft import Draft
from expertflow.plan.records import ModelFacts, PlanSpec, TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.plan.switches import choose_attention
from expertflow.plan.tuned import Tuning
from expertflow.plan.tuning_records import TuningRecord
from expertflow.tokens.records import PackingRecord


def planned(
    *,
    expert: str,
    spec: PlanSpec,
    packing: Path,
    model: Path,
    calibration: Path | None = None,
    tuning: Path | None = None,
) -> TrainPlan:
    """Resolve the hardware, trace a step where there is a card, and plan.

    Raises:
        ConfigError, HardwareError: the plan is refused.
    """
    draft = drafted(expert=expert, spec=spec, packing=packing, model=model)
    return plan_of(
        draft,
        calibration=None if calibration is None else read_record(Calibration, calibration),
        tuning=None if tuning is None else _tuning(tuning, draft, model),
    )


def drafted(*, expert: str, spec: PlanSpec, packing: Path, model: Path) -> Draft:
    """Gather what a plan is made of; on a card with a trace, which predicts memory.

    Raises:
        HardwareError: the hardware is not known, or not here.
    """
    described = read_record(dict[str, Any], model)
    rows = read_record(PackingRecord, packing)
    gpu = resolve_gpu(spec.hardware, list(spec.gpu_table))
    attention = choose_attention(spec, gpu)[0]
    return Draft(
        expert=expert,
        spec=spec,
        packing=rows,
        facts=from_json(ModelFacts, described["facts"], where=str(model)),
        n_params=described["n_parameters"],
        gpu=gpu,
        trace=traced(attention, Path(described["path"]), spec, rows, gpu),
    )


def plan_of(
    draft: Draft, *, calibration: Calibration | None = None, tuning: Tuning | None = None
) -> TrainPlan:
    """Plan from what was gathered.

    Raises:
        ConfigError, HardwareError: the plan is refused.
    """
    return plan_training(
        expert=draft.expert,
        spec=draft.spec,
        packing=draft.packing,
        facts=draft.facts,
        n_params=draft.n_params,
        gpu=draft.gpu,
        trace=draft.trace,
        calibration=calibration,
        tuning=tuning,
    )


def cpu_name(gpu: GpuFacts | None) -> str | None:
    """Name the processor, where it is what trains; null where it has no name or a card does."""
    return None if gpu is not None else probe_machine(table=[]).cpu_model


def import_code(model: Path, spec: PlanSpec) -> None:
    """Import what tracing a step and training both need, so that neither has to be timed for it.

    Raises:
        TrainingError: the model's architecture is not known.
    """
    from expertflow.train.trace import memory as trace_memory

    base = Path(read_part(str, model, "path"))
    trace_memory.import_code(base, adapter=spec.lora is not None)


def traced(
    attention: str, base: Path, spec: PlanSpec, packing: PackingRecord, gpu: GpuFacts | None
) -> MemoryTrace | None:
    """Trace a step with a route of attention; null without a card, as nothing is predicted then."""
    if gpu is None:
        return None
    # Here, as a plan for a CPU is made without the seconds that torch takes to be imported.
    from expertflow.train.trace.memory import trace_memory

    return trace_memory(
        base,
        spec,
        gpu=gpu,
        attention=attention,
        sequence_length_tokens=packing.sequence_length_tokens,
        supervised_fraction=packing.train.n_target_tokens / packing.train.n_tokens,
    )


def _tuning(record: Path, draft: Draft, model: Path) -> Tuning:
    base = Path(read_part(str, model, "path"))
    spec, packing, gpu = draft.spec, draft.packing, draft.gpu
    return Tuning(
        record=read_record(TuningRecord, record),
        cpu=cpu_name(gpu),
        trace=partial(traced, base=base, spec=spec, packing=packing, gpu=gpu),
    )
