"""Time one variant against the plan, in pairs that take turns."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import TrainingError
from expertflow.core.files import sha256_file
from expertflow.core.records import Record, read_part, read_record
from expertflow.hardware.probe import probe_machine
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.staging.records import StagingRecord
from expertflow.studies import compare_trials, variants
from expertflow.studies.estimate import estimate
from expertflow.studies.records import Timing, VariantRecord, VariantSpec
from expertflow.studies.subprocess_runner import TrialRunner, interruptible, scratch_folder
from expertflow.studies.variants import IsThePlanError, NotMeasurableError
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.records import PackingRecord
from expertflow.train.feed.on_the_fly import Documents
from expertflow.train.trial import Trial, TrialResult

PACKAGES = ("torch", "transformers", "peft", "accelerate")


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
    measure = {"tokens_per_s": _speed, "hours": _hours, "read_speed": _read_speed}
    with interruptible(), scratch_folder(job.scratch):
        blank = _blank(job)
        try:
            return measure[job.spec.variant.metric](job, blank)
        except IsThePlanError as reason:
            return replace(blank, outcome="is the plan", reason=str(reason))
        except NotMeasurableError as reason:
            return replace(blank, reason=str(reason))


def _speed(job: VariantJob, blank: VariantRecord) -> VariantRecord:
    spec, (base, packing, facts) = job.spec, _read_plan(job)
    rows = read_rows(job.rows / "train")
    first = variants.first_rows(base, rows, n_steps=spec.n_warmup_steps + spec.n_timed_steps)
    setup = variants.set_up_variant(
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
    pairs: list[tuple[TrialResult, TrialResult]] = []
    runner = TrialRunner()
    for i in range(spec.n_repeats):
        # The variant comes first once: what cannot be run costs no run of the plan.
        got: dict[str, TrialResult] = {}
        for side in ("variant", "plan")[:: 1 if i % 2 == 0 else -1]:
            got[side] = _run(runner, own if side == "variant" else plain, is_plan=side == "plan")
            if got[side].outcome != "measured":
                done, done_of_plan = zip(*pairs, strict=True) if pairs else ((), ())
                return _failed(blank, got[side], done, done_of_plan)
        pairs.append((got["variant"], got["plan"]))
    timed, timed_of_plan = zip(*pairs, strict=True)
    losses = compare_trials.compare_losses(
        pairs, base=base, plan=setup.plan, other_rows=setup.rows != "packed"
    )
    return replace(
        _measured(blank, timed, timed_of_plan),
        reason=setup.forced,
        ratio=estimate([a.tokens_per_s / b.tokens_per_s for a, b in pairs]),
        **losses,
    )


def _hours(job: VariantJob, blank: VariantRecord) -> VariantRecord:
    """Time the plan and a save, and work out a whole run with other saves."""
    base, _, _ = _read_plan(job)
    trial = replace(_trial(job, base, job.rows, job.spec.n_timed_steps), with_save=True)
    runner = TrialRunner()
    results = [_run(runner, trial, is_plan=True) for _ in range(job.spec.n_repeats)]
    for result in results:
        if result.outcome != "measured":
            return _failed(blank, result)
    ratios, how = compare_trials.hours_ratios(base, results, saves=job.spec.variant.saves)
    return replace(_measured(blank, (), results), reason=how, ratio=estimate(ratios))


def _read_speed(job: VariantJob, blank: VariantRecord) -> VariantRecord:
    """Read rows where they came from and where staging copied them, taking turns."""
    assert job.staging is not None
    staged = read_record(StagingRecord, job.staging).rows
    ratios, how = compare_trials.read_speed_ratios(staged, n_repeats=job.spec.n_repeats)
    return replace(blank, outcome="measured", reason=how, ratio=estimate(ratios))


def _read_plan(job: VariantJob) -> tuple[TrainPlan, PackingRecord, ModelFacts]:
    facts = read_part(ModelFacts, job.model, "facts")
    packing = read_record(PackingRecord, job.packing)
    plan = variants.one_process(read_record(TrainPlan, job.plan), packing=packing, facts=facts)
    return plan, packing, facts


def _varied(job: VariantJob, setup: variants.Setup, first: variants.FirstRows) -> Trial:
    rows, documents, plan = job.rows, None, setup.plan
    if setup.rows == "unpacked":
        rows = job.scratch / "rows"
        variants.write_unpacked(job.rows, rows, first)
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


def _run(runner: TrialRunner, trial: Trial, *, is_plan: bool) -> TrialResult:
    try:
        result = runner.run(trial)
    except TrainingError as error:
        if is_plan:
            raise
        raise NotMeasurableError(str(error)) from error
    if is_plan and result.outcome != "measured":
        return replace(result, problem=f"the plan itself: {result.problem}")
    return result


def _timing(result: TrialResult) -> Timing:
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
        loss_last=compare_trials.loss_last(result),
    )


def _measured(
    blank: VariantRecord, own: Sequence[TrialResult], plain: Sequence[TrialResult]
) -> VariantRecord:
    first = (*own, *plain)[0]
    return replace(
        blank,
        outcome="measured",
        device=first.device,
        gpu_name=first.gpu_name,
        timings=tuple(map(_timing, own)),
        plan_timings=tuple(map(_timing, plain)),
        tokens_per_s=_mean_speed(own),
        plan_tokens_per_s=_mean_speed(plain),
        activated=first.activated,
    )


def _failed(
    blank: VariantRecord,
    result: TrialResult,
    own: Sequence[TrialResult] = (),
    plain: Sequence[TrialResult] = (),
) -> VariantRecord:
    return replace(
        blank,
        outcome="out of memory" if result.outcome == "out of memory" else "failed",
        reason=result.problem,
        timings=tuple(map(_timing, own)),
        plan_timings=tuple(map(_timing, plain)),
    )


def _mean_speed(results: Sequence[TrialResult]) -> float | None:
    return sum(r.tokens_per_s for r in results) / len(results) if results else None


def _blank(job: VariantJob) -> VariantRecord:
    here = probe_machine(table=[])
    return VariantRecord(
        expert=job.expert,
        variant=job.spec.variant,
        outcome="not measurable",
        hardware=read_record(TrainPlan, job.plan).hardware,
        plan_sha256=sha256_file(job.plan),
        machine=f"{here.n_cpus_usable} processors, {here.cpu_model or 'unnamed'}",
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )
