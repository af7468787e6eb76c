"""Time one variant against the plan, in alternating pairs of runs."""

import importlib.metadata
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import TrainingError
from expertflow.core.files import sha256_file
from expertflow.core.progress import show_activity
from expertflow.core.records import fill_record, read_part, read_record
from expertflow.hardware.probe import probe_machine
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.studies import compare_trials, variants
from expertflow.studies.compare_trials import estimate_ratio
from expertflow.studies.records import VariantJob, VariantRecord
from expertflow.studies.subprocess_runner import (
    LIMIT_S,
    TrialRunner,
    interruptible,
    scratch_folder,
)
from expertflow.studies.variants import NotMeasurableError
from expertflow.tokens.arrow import read_rows
from expertflow.train.feed.on_the_fly import Documents
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial

PACKAGES = ("torch", "transformers", "peft", "accelerate")


def ablate_variant(job: VariantJob) -> VariantRecord:
    """Measure one variant; raise TrainingError if the plan itself cannot run."""
    measure = {"tokens_per_s": _speed, "hours": _hours, "read_speed": _read_speed}
    planned, here = read_record(TrainPlan, job.plan), probe_machine()
    blank = VariantRecord(
        expert=planned.expert,
        variant=job.spec.variant,
        outcome="not measurable",
        plan_sha256=sha256_file(job.plan),
        machine=f"{here['n_cpus_usable']} processors, {here['cpu_model'] or 'unnamed'}",
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )
    facts = read_part(ModelFacts, job.model, "facts")
    base = variants.with_one_process(planned, packing=job.packing, facts=facts)
    with interruptible(), scratch_folder(job.scratch):
        try:
            return measure[job.spec.variant.metric](job, base, blank)
        except NotMeasurableError as reason:
            return replace(blank, outcome=reason.outcome, reason=str(reason))


def _speed(job: VariantJob, base: TrainPlan, blank: VariantRecord) -> VariantRecord:
    spec, rows = job.spec, read_rows(job.rows / "train")
    first = variants.first_rows(base, rows, n_steps=spec.n_warmup_steps + spec.n_timed_steps)
    setup = variants.set_up_variant(
        base,
        spec.variant,
        first=first,
        is_unpacked=len(rows.seq_lengths.values) == len(rows),
        n_timed_steps=spec.n_timed_steps,
        packing=job.packing,
        facts=read_part(ModelFacts, job.model, "facts"),
    )
    blank = replace(blank, settings_sha256=setup.settings_sha256)
    own, plain = _varied(job, setup, first), _trial(job, base, job.rows, spec.n_timed_steps)
    pairs: list[tuple[TrialResult, TrialResult]] = []
    runner = TrialRunner(limit_s=LIMIT_S + job.spec.max_timed_s)
    for i in range(spec.n_repeats):
        # The variant runs first in the first pair: if it fails, no run of the plan is wasted.
        got = {}
        for trial in (own, plain) if i % 2 == 0 else (plain, own):
            with show_activity(lambda: f"pair {len(pairs) + 1} of {spec.n_repeats}"):
                result = _run(runner, trial, is_plan=trial is plain)
            if result.outcome != "measured":
                return _failed(blank, result, *zip(*pairs, strict=True))
            got[trial is plain] = result  # {False: the variant's, True: the plan's}
        pairs.append((got[False], got[True]))
    losses = compare_trials.compare_losses(
        pairs, base=base, plan=setup.plan, other_rows=setup.rows != "packed"
    )
    timed, timed_of_plan = zip(*pairs, strict=True)
    return replace(
        blank,
        outcome="measured",
        timings=timed,
        plan_timings=timed_of_plan,
        reason=setup.forced,
        ratio=estimate_ratio([a.tokens_per_s / b.tokens_per_s for a, b in pairs]),
        **losses,
    )


def _hours(job: VariantJob, base: TrainPlan, blank: VariantRecord) -> VariantRecord:
    trial = replace(_trial(job, base, job.rows, job.spec.n_timed_steps), with_save=True)
    runner = TrialRunner(limit_s=LIMIT_S + job.spec.max_timed_s)
    results: list[TrialResult] = []
    for _ in range(job.spec.n_repeats):
        results.append(_run(runner, trial, is_plan=True))
        if results[-1].outcome != "measured":
            # A repeat would fail too, on a card that costs money.
            return _failed(blank, results[-1])
    ratios, how = compare_trials.hours_ratios(base, results, saves=job.spec.variant.saves)
    blank = replace(blank, outcome="measured", plan_timings=tuple(results))
    return replace(blank, reason=how, ratio=estimate_ratio(ratios))


def _read_speed(job: VariantJob, _: TrainPlan, blank: VariantRecord) -> VariantRecord:
    assert job.staging is not None
    rows, n_repeats = job.staging.rows, job.spec.n_repeats
    ratios, how = compare_trials.read_speed_ratios(rows, n_repeats=n_repeats)
    return replace(blank, outcome="measured", reason=how, ratio=estimate_ratio(ratios))


def _varied(job: VariantJob, setup: variants.VariantSetup, first: variants.FirstRows) -> Trial:
    rows, documents, plan = job.rows, None, setup.plan
    if setup.rows == "unpacked":
        rows = job.scratch / "rows"
        variants.write_unpacked(job.rows, rows, first)
    elif setup.rows == "on_the_fly":
        assert job.keep is not None
        documents = Documents(shards=job.shards, keep=job.keep)
        plan = documents.adapt_plan(plan)
    return replace(_trial(job, plan, rows, setup.n_timed_steps), documents=documents)


def _trial(job: VariantJob, plan: TrainPlan, rows: Path, n_timed_steps: int) -> Trial:
    return fill_record(
        Trial,
        job,
        job.spec,
        plan=plan,
        rows=rows,
        scratch=job.scratch / "trial",
        n_timed_steps=n_timed_steps,
    )


def _run(runner: TrialRunner, trial: Trial, *, is_plan: bool) -> TrialResult:
    try:
        result = runner.run(trial)
    except TrainingError as error:
        if is_plan:
            raise
        # A plan that cannot run is an error; a variant that cannot run is a result.
        raise NotMeasurableError(str(error)) from error
    if is_plan and result.outcome != "measured":
        return replace(result, problem=f"the plan itself: {result.problem}")
    return result


def _failed(
    blank: VariantRecord,
    result: TrialResult,
    own: tuple[TrialResult, ...] = (),
    plain: tuple[TrialResult, ...] = (),
) -> VariantRecord:
    return replace(
        blank,
        outcome="out of memory" if result.outcome == "out of memory" else "failed",
        reason=result.problem,
        timings=own,
        plan_timings=plain,
    )
