"""Plan the training of an expert from the records of earlier stages."""

import logging
from functools import partial
from pathlib import Path

from expertflow.core.errors import HardwareError
from expertflow.core.records import Record, read_part, read_record
from expertflow.hardware.probe import no_gpu_reason, probe_machine, resolve_gpu
from expertflow.hardware.records import GpuFacts
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import Calibration, MemoryTrace, ModelFacts, PlanSpec, TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.plan.switches import choose_attention
from expertflow.plan.tuned import Tuning, TuningRecord
from expertflow.tokens.records import PackingRecord

log = logging.getLogger(__name__)


class PlanInputs(Record, frozen=True, kw_only=True):
    expert: str
    spec: PlanSpec
    packing: Path
    model: Path


class StudyJob(PlanInputs, frozen=True, kw_only=True):
    rows: Path
    scratch: Path
    code: str


class CalibrationJob(StudyJob, frozen=True, kw_only=True):
    tuning: Path | None = None


class TuneJob(StudyJob, frozen=True, kw_only=True):
    cache: Path
    max_seconds: float = 180.0


class PlanJob(PlanInputs, frozen=True, kw_only=True):
    calibration: Path | None = None
    tuning: Path | None = None


def plan_expert(
    inputs: PlanInputs, *, calibration: Path | None = None, tuning: Path | None = None
) -> TrainPlan:
    """Resolve the hardware, trace a step if there is a card, and plan."""
    draft = draft_plan(inputs)
    found = None
    if tuning is not None:
        found = Tuning(
            record=read_record(TuningRecord, tuning),
            cpu=cpu_name(draft.gpu),
            trace=partial(trace_step, draft, read_part(str, inputs.model, "path")),
        )
    measured = None if calibration is None else read_record(Calibration, calibration)
    return plan_training(draft, calibration=measured, tuning=found)


def draft_plan(inputs: PlanInputs) -> PlanDraft:
    spec, model = inputs.spec, inputs.model
    if spec.hardware == "auto" and (missing := no_gpu_reason()):
        log.warning("%s: the plan is for its CPU", missing)
    draft = PlanDraft(
        expert=inputs.expert,
        spec=spec,
        packing=read_record(PackingRecord, inputs.packing),
        facts=read_part(ModelFacts, model, "facts"),
        n_params=read_part(int, model, "n_parameters"),
        gpu=resolve_gpu(spec.hardware, spec.gpu_table),
    )
    # Memory is traced with the attention implementation that the plan will choose.
    attention, _ = choose_attention(spec, draft.gpu)
    draft.trace = trace_step(draft, read_part(str, model, "path"), attention)
    return draft


def cpu_name(gpu: GpuFacts | None) -> str | None:
    return None if gpu is not None else probe_machine()["cpu_model"]


def card_names() -> list[str | None]:
    return [card["name"] for card in probe_machine()["gpus"]]


def check_card(gpu: GpuFacts, name: str | None, study: str) -> None:
    """Raise HardwareError if a card is not the planned one; an unnamed card passes."""
    if name not in (None, gpu.name, *gpu.driver_names):
        raise HardwareError(
            f"{study}: the plan is for {gpu.name}, but this machine has {name}; set hardware to"
            f" auto, or run it on a machine with {gpu.name}"
        )


def trace_step(draft: PlanDraft, base: str, attention: str) -> MemoryTrace | None:
    """Trace a step with an attention implementation; return null without a card."""
    if draft.gpu is None:
        return None
    # Imported here: a plan for a CPU does not need torch, which takes seconds to import.
    from expertflow.train.memory_trace import trace_memory

    return trace_memory(
        Path(base),
        draft.spec,
        gpu=draft.gpu,
        attention=attention,
        sequence_length_tokens=draft.packing.sequence_length_tokens,
        supervised_fraction=draft.supervised_fraction,
    )
