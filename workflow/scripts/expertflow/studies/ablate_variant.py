"""Time one variant against the plan, in pairs that take turns."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import TrainingError
from expertflow.core.files import remove, sha256_file
from expertflow.core.records import Record, read_part, read_record
from expertflow.hardware.probe import probe_machine
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.staging.records import StagingRecord
from expertflow.studies.ablate_losses import compared, loss_last
from expertflow.studies.ablate_other import hours_ratios, read_speed_ratios
from expertflow.studies.apart import Trials, interruptible
from expertflow.studies.estimate import estimate
from expertflow.studies.records import Timing, VariantRecord, VariantSpec
from expertflow.studies.rows_unpacked import FirstRows, first_rows, write_unpacked
from expertflow.studies.variants import (
    IsThePlanError,
    NotMeasurableError,
    Setup,
    one_process,
    set_up,
)
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.records import PackingRecord
from expertflow.train.feed.on_the_fly import Documents
from expertflow.train.trial import Trial, TrialResult

PACKAGES = ("torch", "transformers", "peft", "accelerate")
Pair = tuple[TrialResult, TrialResult]


class VariantJob(Record, frozen=True, kw_only=True):
    """What to run, where its inputs are, and a place to work in, which is removed.

    ``shards`` and ``keep`` are there for documents that are tokenised in the loop, ``staging`` for
    a variant that is about reading speed.
    """

    expert: str
    spec: VariantSpec
    plan: Path
    packing: Path
    model: Path
    rows: Path
    scratch: Path
    shards: tuple[Path, ...] = ()
    keep: Path | None = None
    staging: Path | None = None


def ablate_variant(job: VariantJob) -> VariantRecord:
    """Measure one variant; that it cannot be had here is a result.

    Raises:
        TrainingError: the plan itself cannot be run.
        Interrupted: a signal came; nothing is left.
    """
    with interruptible(), _scratch(job.scratch):
        blank = _blank(job)
        try:
            if job.spec.variant.metric == "read_speed":
                return _read_speed(job, blank)
            if job.spec.variant.metric == "hours":
                return _hours(job, blank)
            return _speed(job, blank)
        except IsThePlanError as reason:
            return replace(blank, outcome="is the plan", reason=str(reason))
        except NotMeasurableError as reason:
            return replace(blank, reason=str(reason))


def _speed(job: VariantJob, blank: VariantRecord) -> VariantRecord:
    spec = job.spec
    facts = read_part(ModelFacts, job.model, "facts")
    packing = read_record(PackingRecord, job.packing)
    base = one_process(read_record(TrainPlan, job.plan), packing=packing, facts=facts)
    rows = read_rows(job.rows / "train")
    first = first_rows(base, rows, n_steps=spec.n_warmup_steps + spec.n_timed_steps)
    setup = set_up(
        base,
        spec.variant,
        first=first,
        is_unpacked=len(rows.seq_lengths.values) == len(rows),
        n_timed_steps=spec.n_timed_steps,
        packing=packing,
        facts=facts,
    )
    blank = replace(blank, settings_sha256=setup.settings_sha256)
    own = _varied(job, setup, first)
    plain = _trial(job, base, job.rows, spec.n_timed_steps)
    pairs: list[Pair] = []
    trials = Trials()
    for i in range(spec.n_repeats):
        # The variant comes first once: what cannot be run costs no run of the plan.
        got: dict[str, TrialResult] = {}
        for side in ("variant", "plan")[:: 1 if i % 2 == 0 else -1]:
            got[side] = _run(trials, own if side == "variant" else plain, is_plan=side == "plan")
            if got[side].outcome != "measured":
                return _spoilt(blank, got[side], pairs)
        pairs.append((got["variant"], got["plan"]))
    return _joined(blank, pairs, base, setup)


def _hours(job: VariantJob, blank: VariantRecord) -> VariantRecord:
    """Time the plan and a save, and work out a whole run with other saves."""
    facts = read_part(ModelFacts, job.model, "facts")
    packing = read_record(PackingRecord, job.packing)
    base = one_process(read_record(TrainPlan, job.plan), packing=packing, facts=facts)
    trial = replace(_trial(job, base, job.rows, job.spec.n_timed_steps), with_save=True)
    trials = Trials()
    results = [_run(trials, trial, is_plan=True) for _ in range(job.spec.n_repeats)]
    for result in results:
        if result.outcome != "measured":
            return _spoilt(blank, result, [])
    ratios, how = hours_ratios(base, results, saves=job.spec.variant.saves)
    return replace(
        blank,
        outcome="measured",
        reason=how,
        device=results[0].device,
        gpu_name=results[0].gpu_name,
        plan_timings=tuple(map(timing, results)),
        ratio=estimate(ratios),
        plan_tokens_per_s=_mean(results),
        activated=results[0].activated,
    )


def _read_speed(job: VariantJob, blank: VariantRecord) -> VariantRecord:
    """Read rows where they came from and where staging copied them, taking turns."""
    assert job.staging is not None
    staged = read_record(StagingRecord, job.staging).rows
    ratios, how = read_speed_ratios(staged, n_repeats=job.spec.n_repeats)
    return replace(blank, outcome="measured", reason=how, ratio=estimate(ratios))


def _varied(job: VariantJob, setup: Setup, first: FirstRows) -> Trial:
    rows, documents, plan = job.rows, None, setup.plan
    if setup.rows == "unpacked":
        rows = job.scratch / "rows"
        write_unpacked(job.rows, rows, first)
    elif setup.rows == "on_the_fly":
        assert job.keep is not None
        documents = Documents(shards=job.shards, keep=job.keep)
        plan = documents.planned(plan)
    return replace(_trial(job, plan, rows, setup.n_timed_steps), documents=documents)


def _trial(job: VariantJob, plan: TrainPlan, rows: Path, n_timed_steps: int) -> Trial:
    return Trial(
        plan=plan,
        model=job.model,
        rows=rows,
        scratch=job.scratch / "trial",
        n_warmup_steps=job.spec.n_warmup_steps,
        n_timed_steps=n_timed_steps,
        max_timed_s=job.spec.max_timed_s,
    )


def _run(trials: Trials, trial: Trial, *, is_plan: bool) -> TrialResult:
    try:
        result = trials.run(trial)
    except TrainingError as error:
        if is_plan:
            raise
        raise NotMeasurableError(str(error)) from error
    if is_plan and result.outcome != "measured":
        return replace(result, problem=f"the plan itself: {result.problem}")
    return result


def timing(result: TrialResult) -> Timing:
    """Keep of a trial what the record tells."""
    places = result.n_tokens + result.n_padding_tokens
    return Timing(
        tokens_per_s=result.tokens_per_s,
        n_tokens=result.n_tokens,
        timed_s=result.timed_s,
        startup_s=result.startup_s,
        first_step_s=result.first_step_s,
        data_wait_fraction=min(1.0, result.data_wait_s / result.timed_s),
        padding_fraction=result.n_padding_tokens / places,
        save_s=result.save_s,
        peak_memory_bytes=result.peak_memory_bytes,
        loss_last=loss_last(result),
    )


def _joined(
    blank: VariantRecord, pairs: list[Pair], base: TrainPlan, setup: Setup
) -> VariantRecord:
    own, plain = zip(*pairs, strict=True)
    told = compared(pairs, base=base, plan=setup.plan, other_rows=setup.rows != "packed")
    return replace(
        blank,
        outcome="measured",
        reason=setup.forced,
        device=own[0].device,
        gpu_name=own[0].gpu_name,
        timings=tuple(map(timing, own)),
        plan_timings=tuple(map(timing, plain)),
        ratio=estimate([a.tokens_per_s / b.tokens_per_s for a, b in pairs]),
        tokens_per_s=_mean(own),
        plan_tokens_per_s=_mean(plain),
        loss_differs=told.differs,
        loss_bound=told.bound,
        loss_bound_because=told.because,
        is_sane=told.is_sane,
        activated=own[0].activated,
    )


def _spoilt(blank: VariantRecord, result: TrialResult, pairs: list[Pair]) -> VariantRecord:
    outcome: Any = "out of memory" if result.outcome == "out of memory" else "failed"
    return replace(
        blank,
        outcome=outcome,
        reason=result.problem,
        timings=tuple(timing(own) for own, _ in pairs),
        plan_timings=tuple(timing(plain) for _, plain in pairs),
    )


def _mean(results: Any) -> float:
    return float(sum(r.tokens_per_s for r in results) / len(results))


def _blank(job: VariantJob) -> VariantRecord:
    here = probe_machine(table=[])
    return VariantRecord(
        expert=job.expert,
        variant=job.spec.variant,
        outcome="not measurable",
        reason=None,
        hardware=read_record(TrainPlan, job.plan).hardware,
        device=None,
        gpu_name=None,
        plan_sha256=sha256_file(job.plan),
        timings=(),
        plan_timings=(),
        ratio=None,
        tokens_per_s=None,
        plan_tokens_per_s=None,
        loss_differs=None,
        is_sane=None,
        activated=(),
        machine=f"{here.n_cpus_usable} processors, {here.cpu_model or 'unnamed'}",
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


@contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    remove(folder)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        remove(folder)
