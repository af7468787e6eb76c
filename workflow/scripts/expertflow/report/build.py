"""Join all records to one report: plain JSON values, null where nothing was measured.

Key names carry units. The few that do not (``batch_size``, ``warmup_steps``, ...) are paths that
readers of older training reports already use. ``workflow/schemas/report.schema.yaml`` describes
every key.
"""

from typing import Any

from expertflow.core.records import to_json
from expertflow.report import derive
from expertflow.report.bottleneck import bottleneck
from expertflow.report.diagnose import accept, find
from expertflow.report.inputs import ReportInputs
from expertflow.report.reasons import explain
from expertflow.report.sections.data import data_section
from expertflow.report.sections.evaluation import evaluation_section
from expertflow.report.sections.hardware import hardware_section
from expertflow.report.sections.plan import plan_against_actual, plan_section
from expertflow.report.sections.profile import profile_section
from expertflow.report.sections.staging import staging_section
from expertflow.report.sections.time import split, time_section
from expertflow.report.verdict import verdict

SCHEMA_VERSION = 2
MFU_CONVENTION = (
    "MFU: FLOPs that the model needs for its useful tokens, over the seconds of stepping (saves,"
    " evaluation and start-up left out) and the dense peak of all devices at the precision used;"
    " HFU adds what activation checkpointing computes again"
)


def build_report(inputs: ReportInputs, provenance: dict[str, Any]) -> dict[str, Any]:
    """Build report.json from the records of every stage.

    ``provenance`` is what only the caller knows (git, lockfile, inputs, command); its keys are
    kept, and those that the records know are added.
    """
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": _run(inputs),
        "model": _model(inputs),
        "data": data_section(inputs),
        "training_parameters": _training_parameters(inputs),
        "training_report": {"training": _training(inputs), "hardware": hardware_section(inputs)},
        "time": time_section(inputs.training),
        "throughput": _throughput(inputs),
        "cost": _cost(inputs),
        "plan": plan_section(inputs),
        "evaluation": evaluation_section(inputs),
        "staging": staging_section(inputs),
        "profile": profile_section(inputs),
        "export": to_json(inputs.export),
        "comparison": [] if inputs.ablation is None else [to_json(inputs.ablation)],
        "provenance": _provenance(inputs, provenance),
    }
    report["plan_against_actual"] = plan_against_actual(report)
    report["unavailable"] = explain(report, inputs)  # rules repeat some of the reasons
    report["bottleneck"] = bottleneck(report)
    report["findings"] = to_json(find(report))
    report["acceptance"] = to_json(accept(report, inputs.spec.acceptance))
    report["verdict"] = verdict(report)
    return report


def _run(inputs: ReportInputs) -> dict[str, Any]:
    training = inputs.training
    return {
        "id": f"{training.expert}-{training.fingerprint[:12]}",
        "expert": training.expert,
        "description": inputs.spec.description,
        "preset": inputs.spec.preset,
        "status": training.status,
        "started_at": training.started_at,
        "simulated": inputs.monitor.simulated,
    }


def _model(inputs: ReportInputs) -> dict[str, Any]:
    model, plan, training = inputs.model, inputs.plan, inputs.training
    return {
        "name": model.name,
        "kind": model.kind,
        "revision": model.revision,
        "licence": model.licence,
        "params_total": training.n_params_total,
        "params_trainable": training.n_params_trainable,
        "method": training.method,
        "lora": to_json(plan.lora),
        "flops_per_token_model": plan.flops_per_token_model,
        "flops_per_token_hardware": plan.flops_per_token_hardware,
        "convention": plan.flops_convention,
    }


def _training_parameters(inputs: ReportInputs) -> dict[str, Any]:
    plan, training = inputs.plan, inputs.training
    return {
        "warmup_steps": plan.n_warmup_steps,
        "batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.n_accumulation_steps,
        "world_size": training.world_size,
        "global_batch_sequences": plan.global_batch_sequences,
        "total_steps": plan.n_steps,
        "num_train_epochs": plan.n_epochs,
        "max_seq_length": plan.sequence_length_tokens,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "tf32": plan.use_tf32,
        "attention": training.attention,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": plan.lr_scheduler_type,
        "weight_decay": plan.weight_decay,
        "max_grad_norm": plan.max_grad_norm,
        "adam_beta1": plan.adam_beta1,
        "adam_beta2": plan.adam_beta2,
        "optim": plan.optim,
        "save_steps": plan.save_steps,
        "save_every_minutes": plan.save_every_minutes,
        "eval_steps": plan.eval_steps,
        "load_best_model_at_end": plan.load_best_model_at_end,
        "patience": plan.patience,
        "logging_steps": plan.logging_steps,
        "seed": training.seed,
    }


def _training(inputs: ReportInputs) -> dict[str, Any]:
    training = inputs.training
    return {
        "steps": training.n_steps,
        "planned_steps": inputs.plan.n_steps,
        "stopped_early_at_step": training.stopped_early_at_step,
        "published_step": training.published_step,
        "n_candidates": len(training.candidates),
        "epochs": training.n_epochs,
        "sessions": training.n_sessions,
        "resumed_at_steps": list(training.resumed_at_steps),
        "saves": training.n_saves,
        "checkpoint_write_s": training.checkpoint_write_s,
        "memory_retries": to_json(training.memory_retries),
        "on_the_fly": training.on_the_fly,
        "sampled_steps": to_json(training.sampled_steps),
        "activated": list(training.activated),
        "loss_first": training.loss_first,
        "loss_last": training.loss_last,
        "eval_points": to_json(training.eval_points),
        "save_points": to_json(training.save_points),
        "epoch_summaries": to_json(training.epoch_summaries),
        "series_path": training.steps_path,
    }


def _throughput(inputs: ReportInputs) -> dict[str, Any]:
    plan, training = inputs.plan, inputs.training
    return {
        "useful_tokens_per_s": derive.tokens_per_s(training).value,
        "target_tokens_per_s": derive.per_stepping_s(training, training.n_target_tokens).value,
        "steps_per_s": derive.per_stepping_s(training, training.n_steps).value,
        "tokens_per_step": training.n_tokens / training.n_steps,
        "mfu_fraction": derive.utilisation(inputs, plan.flops_per_token_model).value,
        "hfu_fraction": derive.utilisation(inputs, plan.flops_per_token_hardware).value,
        "goodput_fraction": derive.goodput(split(training).spent).value,
        "convention": f"{MFU_CONVENTION} ({plan.flops_convention}).",
    }


def _cost(inputs: ReportInputs) -> dict[str, Any]:
    training = inputs.training
    return {
        "usd": derive.cost_usd(inputs).value,
        "billed_usd": derive.billed_usd(inputs).value,
        "hours": training.time.wall_s / 3600,
        "usd_per_hour": inputs.plan.cost.price_usd_per_hour,
        "rate_as_of": inputs.plan.cost.price_as_of,
        "usd_per_million_tokens": derive.usd_per_million(inputs, training.n_tokens).value,
        "usd_per_million_target_tokens": derive.usd_per_million(
            inputs, training.n_target_tokens
        ).value,
        "energy_kwh": derive.energy_kwh(inputs).value,
    }


def _provenance(inputs: ReportInputs, given: dict[str, Any]) -> dict[str, Any]:
    training = inputs.training
    return {
        "git": None,
        "lockfile_sha256": None,
        "input_sha256": {},
        "command": None,
        "host_hash": None,
        "chain": [],
        "torch": training.versions.get("torch"),
        "driver": inputs.monitor.driver,
        "versions": dict(training.versions),
        "fingerprint": training.fingerprint,
        "documents_sha256": inputs.documents.sha256,
        "packing_sha256": training.packing_sha256,
        "tokenizer_sha256": inputs.packing.tokenizer_sha256,
        "weights_sha256": training.weights_sha256,
        **given,
    }
