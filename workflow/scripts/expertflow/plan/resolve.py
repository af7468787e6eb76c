"""Resolve every setting of a training run, each with its reason, and predict time and cost.

A pure function of the manifest's settings, the packed rows, the model's shape and a *named* card:
readings that change from minute to minute belong to the preflight of the training job.

A manifest names the hand-run setup it replaces in ``system``, as ``"B: repository model, RTX 2060
6 GB"``. The values are those of its scripts and logs; what they do not state is omitted.
"""

import math
from typing import Any

from msgspec.structs import replace

from expertflow.core.format import percent
from expertflow.core.settings import name_of
from expertflow.plan import switches, tuned
from expertflow.plan.claims import check_claims, time_words, usd_words
from expertflow.plan.cost import check_budgets, plan_cost
from expertflow.plan.draft import PlanDraft
from expertflow.plan.flops import CONVENTION, flops_doubts
from expertflow.plan.memory import choose_batch, peak_bytes, peak_reason, predict_memory
from expertflow.plan.options import compare_options
from expertflow.plan.records import Calibration, CostPlan, PlanSpec, TrainPlan
from expertflow.plan.settings import Training, TrainingSection
from expertflow.plan.tuned import Tuning
from expertflow.tokens.records import PackingRecord

# The setups: A, four LoRA experts on an RTX 4090; B, a repository model on an RTX 2060; C, chain
# of thought on an H100; D, 600k examples on an H100; E, 25 examples on an RTX 4090.
SYSTEMS = "ABCDE"
SOURCE_VALUES: dict[Any, tuple[str | None, ...]] = {
    Training.batch_size: ("16", "4 on a 6 GB card, by tiers of memory", "2", "4", None),
    Training.gradient_accumulation_steps: ("4", "2", "4", "2", None),
    Training.gradient_checkpointing: ("False", None, "True", None, None),
    TrainPlan.sequence_length_tokens: ("2048", None, "1536", None, None),
    TrainPlan.precision: ("bf16", None, "bf16", None, None),
    Training.dataloader_num_workers: ("8", "physical cores // 2", "4", "4", None),
    Training.dataloader_prefetch_factor: ("8", None, "4", None, None),
    Training.dataloader_persistent_workers: ("True", None, None, None, None),
    Training.group_by_length: ("True", None, None, None, None),
    Training.attention: ("sdpa", None, None, None, None),
    Training.torch_compile: (None, None, None, "True", None),
    Training.save_steps: ("250", None, None, "2000", None),
    Training.collection_interval_seconds: ("1 s", "5 s", None, None, None),
    Training.loader: (*[None] * 4, "a loop that waited for its data 83% of each batch"),
}
# Evaluations of a run whose manifest leaves eval_steps open, and their maximum share of its FLOPs.
N_EVALS, MAX_EVAL_SHARE = 10, 0.03


def plan_training(
    draft: PlanDraft, *, calibration: Calibration | None = None, tuning: Tuning | None = None
) -> TrainPlan:
    """Resolve a run; raise ConfigError for contradictions, HardwareError if no row fits."""
    # A copy, since a caller may plan the same draft again.
    draft, spec = replace(draft, chosen={}, reasons={}), draft.spec
    plan, adopted = resolve_settings(draft), None
    if tuning is not None:
        trial = tuned.choose_tuned(tuning, plan, draft)
        if isinstance(trial, str):
            draft.note(Training.tuned, spec.tuned, trial)
        else:
            adopted, spec = trial, trial.spec
            trace = draft.trace
            if spec.attention is not None and spec.attention != plan.attention:
                trace = tuning.trace(spec.attention)
            again = replace(draft, spec=spec, trace=trace, chosen={}, reasons={})
            # The manifest decides whether its micro-batch is automatic, not the tuned spec.
            plan = replace(
                resolve_settings(again), may_halve_micro_batch=plan.may_halve_micro_batch
            )
            draft.reasons = again.reasons
            because = "applies where the manifest leaves a setting open"
            draft.note(Training.tuned, spec.tuned, because)
    key, ignored = tuned.calibration_key(plan, draft.facts.model_type), None
    if calibration is not None and calibration.key != key:
        other, _ = tuned.first_difference(calibration.key, key)
        ignored = f"the existing calibration is for another run ({other}) and is ignored"
        calibration = None
    cost = plan_cost(draft, plan, calibration=calibration, ignored=ignored)
    plan = replace(plan, cost=cost)
    for budget in check_budgets(cost, draft.spec):
        draft.note(*budget)
    claims = check_claims(draft.spec.claims, plan)
    plan = replace(plan, options=compare_options(draft, plan), claims=claims)
    _note_rest(draft, spec, plan)
    origins = plan.origins
    if adopted is not None:
        adopted.explain(draft.reasons)
        origins = origins | dict.fromkeys(adopted.free, "tuned")
    replaced = source_values(draft.spec.system, n_steps=plan.n_steps)
    reasons = (
        replace(reason, origin=origins.get(name, "computed"), source_value=replaced.get(name))
        for name, reason in draft.reasons.items()
    )
    return replace(plan, origins=origins, reasons=tuple(reasons))


def source_values(system: str | None, *, n_steps: int) -> dict[str, str]:
    """Return the values of the setup that ``system`` names, by setting; none if unknown.

    >>> source_values("B: repository model", n_steps=66)["n_warmup_steps"]
    '10 = max(10, int(0.1 x 66))'
    """
    letter = (system or "").partition(":")[0].strip()
    # As a tuple, since a string also contains the empty string and "AB".
    if letter not in tuple(SYSTEMS):
        return {}
    column = SYSTEMS.index(letter)
    found = {name_of(setting): values[column] for setting, values in SOURCE_VALUES.items()}
    if letter in "AB":
        # The warm-up of B depends on the steps.
        steps = max(10, int(0.1 * n_steps))
        rule = f"{steps} = max(10, int(0.1 x {n_steps}))" if letter == "B" else "10 % of the steps"
        found[name_of(TrainPlan.n_warmup_steps)] = rule
    return {name: value for name, value in found.items() if value is not None}


def resolve_settings(draft: PlanDraft) -> TrainPlan:
    """Resolve every ``auto``, and add what follows from the settings."""
    spec, packing, gpu, choose = draft.spec, draft.packing, draft.gpu, draft.choose
    train, place = packing.train, f"training.{name_of(Training.parallel)}"
    if draft.by_hand:
        place = f"--{name_of(Training.parallel)}"
    precision = choose(
        TrainPlan.precision, *switches.choose_precision(spec, gpu, by_hand=draft.by_hand)
    )
    micro, accumulation, checkpoint = choose_batch(draft)
    global_batch = micro * accumulation * spec.world_size
    # Rounded up: the last step of an epoch may have fewer rows.
    per_epoch = -(-train.n_sequences // global_batch)
    n_tokens = train.n_tokens
    steps = choose(
        TrainPlan.n_steps, *switches.choose_steps(spec, per_epoch, tokens_per_epoch=n_tokens)
    )
    warmup = choose(TrainPlan.n_warmup_steps, *switches.choose_warmup(spec, steps))
    attention = choose(TrainPlan.attention, *switches.choose_attention(spec, gpu))
    draft.note(Training.parallel, *switches.choose_parallel(spec, place))
    for setting, choice in switches.choose_loader(spec, packing.packing).items():
        choose(setting, *choice)
    choose(Training.use_tf32, *switches.choose_tf32(spec, gpu))
    compiled = switches.choose_compile(spec, gpu, attention=attention, packing=packing.packing)
    choose(Training.torch_compile, *compiled)
    choose(Training.group_by_length, *switches.choose_grouping(spec, packing.packing))
    draft.chosen.update(
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        save_steps=spec.save_steps or steps,
    )
    predicted_tokens = round(n_tokens * steps / per_epoch)
    evals = _choose_eval_steps(draft, steps, n_tokens=predicted_tokens, checkpoint=checkpoint)
    choose(Training.eval_steps, *evals)
    asked = {name: getattr(spec, name) for name in Training.__struct_fields__}
    # Settings that the plan does not resolve, such as the row length, are passed through.
    origins = spec.origins | {
        name: "computed"
        if draft.chosen.get(name, value) != value
        else spec.origins.get(name, "default")
        for name, value in asked.items()
    }
    return TrainPlan(
        **{**asked, **draft.chosen},
        origins=origins,
        expert=draft.expert,
        hardware=draft.hardware,
        gpu=gpu,
        may_halve_micro_batch=spec.batch_size is None,
        global_batch_sequences=global_batch,
        sequence_length_tokens=packing.sequence_length_tokens,
        n_sequences=train.n_sequences,
        n_steps_per_epoch=per_epoch,
        n_epochs=steps / per_epoch,
        n_decay_steps=min(steps - warmup, math.ceil(spec.lr_decay_ratio * steps)),
        predicted_tokens=predicted_tokens,
        cost=CostPlan(reason=""),
        reasons=(),
        **_predict(draft, micro, checkpoint=checkpoint),
    )


def _choose_eval_steps(
    draft: PlanDraft, n_steps: int, *, n_tokens: int, checkpoint: bool
) -> tuple[int, str]:
    """Spread about ten evaluations over a run, fewer where they would take too long."""
    if draft.spec.eval_steps is not None:
        return draft.spec.eval_steps, draft.spec.cite_setting(Training.eval_steps)
    flops = draft.flops(checkpoint=checkpoint)
    share = flops.forward * draft.packing.held_out.n_tokens / (flops.hardware * n_tokens)
    each = f"an evaluation takes {percent(share, 2)} of the steps' FLOPs"
    # The one before the first step counts, too.
    n_evals = min(N_EVALS, int(MAX_EVAL_SHARE / share) - 1) if share else N_EVALS
    if n_evals < 2:
        most = percent(MAX_EVAL_SHARE, 0)
        return n_steps, f"at the end: {each}, and more would exceed {most}"
    # Even on tiny data, not after every step.
    steps = min(n_steps, max(2, math.ceil(n_steps / n_evals)))
    return steps, f"{math.ceil(n_steps / steps)} in the run, at most {N_EVALS}: {each}"


def _predict(draft: PlanDraft, micro: int, *, checkpoint: bool) -> dict[str, Any]:
    if doubts := flops_doubts(draft.facts, draft.spec.lora):
        draft.note(TrainPlan.flops_per_token_model, "approximate", doubts)
    flops = draft.flops(checkpoint=checkpoint)
    memory = predict_memory(draft, micro, checkpoint=checkpoint)
    plain = peak_bytes(draft, micro, checkpoint=False) if checkpoint else None
    return {
        "n_params_total": draft.n_params_total,
        "n_params_trainable": draft.n_trainable,
        "memory": memory,
        "predicted_peak_bytes": None if memory is None else memory.total_bytes,
        "predicted_peak_reason": peak_reason(draft),
        "next_micro_batch_peak_bytes": peak_bytes(draft, 2 * micro, checkpoint=checkpoint),
        "without_checkpointing_peak_bytes": plain,
        "flops_per_token_model": flops.model,
        "flops_per_token_hardware": flops.hardware,
        "flops_convention": CONVENTION,
    }


def _note_rest(draft: PlanDraft, spec: PlanSpec, plan: TrainPlan) -> None:
    """Note what the plan leaves to time, the trainer, or packing."""
    length = plan.sequence_length_tokens
    draft.note(TrainPlan.sequence_length_tokens, length, _length_reason(draft.packing))
    rows = plan.global_batch_sequences
    draft.note(TrainPlan.global_batch_sequences, rows, _batch_reason(draft.packing, plan))
    draft.note(Training.save_steps, plan.save_steps, _save_reason(spec, plan))
    left = {
        Training.n_threads: "decided on the training machine, which a plan does not inspect:"
        " its physical cores, or --cores if fewer",
        Training.collection_interval_seconds: "the monitor's default: 1 s, or less where an epoch"
        " would get fewer than 20 samples",
    }
    for setting, because in left.items():
        asked, value = (getattr(made, name_of(setting)) for made in (spec, plan))
        draft.note(setting, value or "auto", spec.cite_setting(setting) if asked else because)


def _batch_reason(packing: PackingRecord, plan: TrainPlan) -> str:
    """Return the documents of a step, and what its rows mean to a recipe for unpacked data."""
    train, n_rows = packing.train, plan.global_batch_sequences
    per_row = train.n_documents / train.n_sequences
    because = f"about {min(n_rows, train.n_sequences) * per_row:,.0f} documents a step"
    if train.n_documents > train.n_sequences:
        because += f"; {_translate_recipe(train.n_documents, per_row, plan)}"
    if train.n_sequences < n_rows:
        because += f"; the data has {train.n_sequences:,} rows, so every step sees all of them"
    return because


def _translate_recipe(n_documents: int, per_row: float, plan: TrainPlan) -> str:
    """Return this batch's steps at one example per row, and a batch that keeps the examples."""
    n_rows, cards = plan.global_batch_sequences, plan.world_size
    n_before = math.ceil(n_documents / n_rows * plan.n_epochs)
    per_card = max(1, round(n_rows / cards / per_row))
    # The largest micro-batch that fits and divides a card's rows.
    micro = max(n for n in range(1, plan.batch_size + 1) if per_card % n == 0)
    n_kept = per_card * cards * per_row
    recipe = (
        f"a recipe for unpacked data has {n_rows:,} a step, so {n_before:,} steps, here"
        f" {plan.n_steps:,} at the same {name_of(Training.learning_rate)} {plan.learning_rate:g}"
    )
    if n_kept > 2 * n_rows:
        return f"{recipe}; {name_of(TrainingSection.packing)} none keeps its examples per step"
    return (
        f"{recipe}; {name_of(Training.batch_size)} {micro} with"
        f" {name_of(Training.gradient_accumulation_steps)} {per_card // micro} keeps about"
        f" {n_kept:,.0f} a step and {math.ceil(n_documents / n_kept * plan.n_epochs):,} steps"
    )


def _length_reason(packing: PackingRecord) -> str:
    length, reasons = packing.sequence_length_tokens, [packing.length_reason]
    others = sorted(packing.choices, key=lambda choice: choice.sequence_length_tokens)
    # The chosen length, between its nearest neighbors.
    shorter = [c for c in others if c.sequence_length_tokens < length][-1:]
    longer = [c for c in others if c.sequence_length_tokens > length][:1]
    same = [c for c in others if c.sequence_length_tokens == length]
    for choice in (*shorter, *same, *longer):
        n_over, cut = choice.n_over_long_documents, "no document is longer"
        if n_over:
            cut = f"{n_over:,} documents are longer, by {choice.n_over_long_tokens:,} tokens"
        rows = f"rows {percent(choice.fill_fraction)} full"
        reasons.append(f"{choice.sequence_length_tokens}: {cut}, {rows}")
    return "; ".join(filter(None, reasons))


def _save_reason(spec: PlanSpec, plan: TrainPlan) -> str:
    minutes, cost = spec.save_every_minutes, plan.cost
    how = (
        f"{spec.cite_setting(Training.save_steps)}, and every {minutes:g} minutes"
        if spec.save_steps
        else f"save_steps is null: at the end, and every {minutes:g} minutes"
    )
    if cost.step_hours is not None:
        n_steps = min(plan.save_steps, plan.n_steps)
        minutes = min(minutes, cost.step_hours * 60 / plan.n_steps * n_steps)
    lost = f"an interruption loses at most {time_words(minutes / 60)}"
    if cost.price_usd_per_hour is not None:
        lost += f", {usd_words(minutes / 60 * cost.price_usd_per_hour)}"
    return f"{how}; {lost}"
