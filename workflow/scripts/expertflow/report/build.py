"""Join all records into one report: figures, or the reasons why there are none."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from msgspec.structs import replace

from expertflow.core.records import from_json
from expertflow.core.settings import name_of
from expertflow.plan.records import TrainPlan
from expertflow.report import build_run as run
from expertflow.report import derive
from expertflow.report import run_records as r
from expertflow.report.bill import build_bill
from expertflow.report.build_evaluation import build_evaluation
from expertflow.report.derive import NO_PRICE
from expertflow.report.diagnose import NO_TIME, apply_rule, find_bottleneck, list_findings
from expertflow.report.inputs import ReportInputs
from expertflow.report.learned import ANSWERS, judge_run
from expertflow.report.measured import Measured, Missing, explain, fill, or_missing, to_plain
from expertflow.report.profile import list_kernels, sum_by_kind
from expertflow.report.records import Profile, Provenance, Report, Staging, UsedStaging
from expertflow.staging.records import Staged

N_KERNELS = 15
MFU_CONVENTION = (
    "MFU: FLOPs that the model needs for its useful tokens, over the seconds of stepping (without"
    " saves, evaluation and startup) and the dense peak of all devices at the precision used;"
    " HFU adds what activation checkpointing recomputes"
)
NOT_PASSED = {
    "git": "the workflow is not in a git checkout",
    **dict.fromkeys(("lockfile_sha256", "command", "host_hash"), "not passed to the report"),
}


def build_report(inputs: ReportInputs, provenance: Mapping[str, Any]) -> Report:
    """Build the report; ``provenance`` is what only the caller knows: git, lockfile, command."""
    training, hardware = run.build_training(inputs), run.build_hardware(inputs)
    cost, plan, throughput = _cost(inputs), run.build_plan(inputs), _throughput(inputs)
    data, time = _data(inputs), derive.split_time(inputs.training)
    unlike = None if plan.calibrated else run.STEPS_ALONE
    report = Report(
        schema_version=2,
        run=_run(inputs),
        model=_model(inputs),
        data=data,
        training_parameters=_training_parameters(inputs),
        training_report=r.TrainingReport(training=training, hardware=hardware),
        time=time,
        throughput=throughput,
        cost=cost,
        bill=build_bill(inputs),
        plan=plan,
        evaluation=build_evaluation(inputs.evaluation),
        staging=_staging(inputs),
        profile=_profile(inputs),
        export=explain(inputs.export, {"merged_into": "no adapter was trained"}),
        comparison=() if inputs.ablation is None else (inputs.ablation,),
        provenance=_provenance(inputs, provenance),
        plan_against_actual=(
            run.plan_row("Optimizer steps", "steps", plan.steps, training.steps),
            run.plan_row("Useful tokens", "tokens", plan.trained_tokens, data.trained_tokens),
            run.plan_row("Useful tokens per second", "tokens/s", plan.useful_tokens_per_s,
                      throughput.useful_tokens_per_s, run.estimate_speed_band(inputs)),
            run.plan_row("Wall time", "h", plan.hours, cost.hours,
                      (plan.band.hours_low, plan.band.hours_high), unlike),
            run.plan_row("Cost", "usd", plan.usd, cost.billed_usd,
                      (plan.band.usd_low, plan.band.usd_high), unlike),
            run.plan_row("Peak device memory", "bytes", plan.memory_peak_bytes,
                      hardware.memory_peak_reserved_bytes),
        ),
        unavailable={},
        bottleneck=NO_TIME,
        findings=(),
        acceptance=(),
        verdict=ANSWERS["unclear"],
    )  # fmt: skip
    # In this order: findings read all figures, bars read findings, the verdict reads bars.
    reasons = {path: why for path, why in to_plain(report)[1].items() if why}
    report = replace(
        report,
        unavailable=reasons,
        bottleneck=find_bottleneck(report),
        findings=list_findings(report),
    )
    plain, bars = to_plain(report)[0], inputs.spec.acceptance
    del plain["acceptance"], plain["verdict"]  # bars are judged before these two are known
    report = replace(report, acceptance=tuple(apply_rule(plain, bar) for bar in bars))
    return replace(report, verdict=judge_run(report))


def _run(inputs: ReportInputs) -> r.Run:
    training = inputs.training
    return fill(
        r.Run,
        inputs.spec,
        training,
        inputs.monitor,
        id=f"{training.expert}-{training.fingerprint[:12]}",
    )


def _model(inputs: ReportInputs) -> r.Model:
    model, plan, training = inputs.model, inputs.plan, inputs.training
    return fill(
        r.Model,
        model,
        plan,
        why={
            "revision": "only models from a hub have a revision",
            "license": "the model states no license",
            name_of(TrainPlan.lora): "the method trains all weights",
        },
        params_total=training.n_params_total,
        params_trainable=training.n_params_trainable,
    )


def _data(inputs: ReportInputs) -> r.Data:
    documents, packing, training = inputs.documents, inputs.packing, inputs.training
    rows = packing.train
    # Packing drops documents, too: too long, or without a target after rendering.
    n_refused = sum(packing.n_dropped_by_reason.values())
    counts = {source.source: source for source in documents.sources}
    one, other = documents.n_dropped_by_reason, packing.n_dropped_by_reason
    no_source = {
        "revision": "the source has no revision; its sha256 pins it",
        "license": "the manifest states no license for this source",
    }
    sources = []
    for source in inputs.datasets.sources:
        found = counts[source.name]
        n_train, n_held_out = packing.n_dropped_by_source.get(source.name, (0, 0))
        n_left_out = found.n_rejected + found.n_filtered + found.n_dropped + n_train + n_held_out
        sources.append(
            fill(
                r.Source,
                # Before the source, which does not count what ``where`` excludes, or at all.
                found,
                source,
                why=no_source,
                n_train=found.n_train - n_train,
                n_held_out=found.n_held_out - n_held_out,
                n_left_out=n_left_out,
            )
        )
    # As run, over all epochs; ``fill_fraction`` is for the rows as packed.
    n_seen = training.n_tokens + training.n_padding_tokens
    no_rows = "no rows were packed"
    return fill(
        r.Data,
        documents,
        packing,
        training,
        rows,
        documents=documents.n_documents - n_refused,
        documents_train=documents.n_train - n_refused + packing.n_dropped_held_out,
        documents_with_special_text=packing.n_special_text_documents,
        tokenizer_fallbacks=packing.engine_fallbacks,
        documents_held_out=documents.n_held_out - packing.n_dropped_held_out,
        dropped_by_reason={k: one.get(k, 0) + other.get(k, 0) for k in sorted({*one, *other})},
        chat_template=inputs.model.tokenizer.layout.chat_template_origin,
        sources=tuple(sources),
        seq_len_suggestion=packing.suggestion.reason,
        useful_tokens=rows.n_tokens,
        padding_fraction=_share(training.n_padding_tokens, n_seen, "no token was trained"),
        fill_fraction=_share(rows.n_tokens, rows.n_tokens + rows.n_padding_tokens, no_rows),
        truncated_fraction=_share(rows.n_tokens_dropped, rows.n_tokens_in, no_rows),
        length_histogram=packing.histogram,
    )


def _share(part: int, whole: int, reason: str) -> Measured[float]:
    return part / whole if whole else Missing(reason)


def _training_parameters(inputs: ReportInputs) -> r.TrainingParameters:
    plan, training = inputs.plan, inputs.training
    return fill(
        r.TrainingParameters,
        plan,
        batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.n_accumulation_steps,
        world_size=training.world_size,
        num_train_epochs=plan.n_epochs,
        max_seq_length=plan.sequence_length_tokens,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        attention=training.attention,
        why={name_of(TrainPlan.patience): "early stopping was not enabled"},
        seed=training.seed,
    )


def _throughput(inputs: ReportInputs) -> r.Throughput:
    plan, training = inputs.plan, inputs.training
    time = derive.split_time(training)
    return r.Throughput(
        useful_tokens_per_s=derive.per_stepping_s(training, training.n_tokens),
        steps_per_s=derive.per_stepping_s(training, training.n_steps),
        tokens_per_step=training.n_tokens / training.n_steps,
        mfu_fraction=derive.utilization(inputs, plan.flops_per_token_model),
        hfu_fraction=derive.utilization(inputs, plan.flops_per_token_hardware),
        goodput_fraction=time.train_s / time.wall_s,
        convention=f"{MFU_CONVENTION} ({plan.flops_convention}).",
    )


def _cost(inputs: ReportInputs) -> r.Cost:
    training, cost = inputs.training, inputs.plan.cost
    of_guard = cost.price_usd_per_hour is None and inputs.paid_sessions
    # Sessions of the guard have a price, but no date for it.
    no_date = (
        "the price was given to the guard, without a date" if of_guard else "the price has no date"
    )
    price = derive.usd_per_hour(inputs)
    return r.Cost(
        usd=derive.cost_usd(inputs),
        billed_usd=derive.cost_usd(inputs, billed=True),
        hours=training.time.wall_s / 3600,
        usd_per_hour=price,
        rate_as_of=or_missing(cost.price_as_of, no_date if price else NO_PRICE),
        usd_per_million_tokens=derive.usd_per_million_tokens(inputs),
        energy_kwh=derive.energy_kwh(inputs),
    )


def _staging(inputs: ReportInputs) -> Staging:
    used, why = inputs.preflight.get("staging"), "did not record where it read from"
    notes: dict[str, Staged] | None = used and from_json(
        dict[str, Staged], used, where="preflight.json.staging"
    )
    return fill(
        Staging,
        _staged(inputs.staging.rows),
        expert=inputs.staging.expert,
        weights=_staged(inputs.staging.weights),
        used=UsedStaging(**{kind: _staged(note) for kind, note in notes.items()})
        if notes
        else Missing(f"the preflight of this run {why}"),
    )


def _staged(note: Staged) -> Staged:
    # A target without copying: an earlier copy already existed.
    idle = "nothing had to be copied: " if note.target else ""
    return explain(note, {
        "target": note.reason,
        "n_bytes_copied": note.reason,
        "copy_bytes_per_s": f"{idle}{note.reason}",
        "source_file_system": f"not determined: {note.reason}",
        "source_read_bytes_per_s": note.source_read_method,
        "target_read_bytes_per_s": note.target_read_method,
    })  # fmt: skip


def _profile(inputs: ReportInputs) -> Measured[Profile]:
    profile = inputs.profile
    if profile.trace is None or profile.wall_s is None:
        return Missing(profile.reason or "no step was profiled")
    return fill(
        Profile,
        profile,
        trace=str(PurePath(inputs.training.steps_path).parent / "profile" / profile.trace),
        step_s=profile.wall_s / profile.n_steps,
        n_kernels=len(profile.kernels),
        by_kind=sum_by_kind(profile),
        kernels=list_kernels(profile, N_KERNELS),
    )


def _provenance(inputs: ReportInputs, given: Mapping[str, Any]) -> Provenance:
    training = inputs.training
    # A null from the caller counts as not passed: both get the reason.
    known = {name: value for name, value in given.items() if value is not None}
    unknown: Any = {name: Missing(why) for name, why in NOT_PASSED.items() if name not in known}
    return fill(
        Provenance,
        training,
        inputs.packing,
        torch=or_missing(training.versions.get("torch"), "the trainer did not record its version"),
        driver=run.read_monitor(inputs, "driver"),
        documents_sha256=inputs.documents.sha256,
        **unknown,
        **{"input_sha256": {}, "chain": (), **known},
    )
