"""Reasons for what the plan leaves to time, the trainer, or packing, and for what was replaced.

A manifest names the hand-run set-up it replaces in ``system``, as ``"B: repository model, RTX 2060
6 GB"``. The values are those of its scripts and logs; what they do not state is left out.
"""

from typing import Any

from expertflow.core.settings import name_of
from expertflow.plan.claims import time_words, usd_words
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import PlanSpec, TrainPlan
from expertflow.plan.settings import Training
from expertflow.tokens.records import PackingRecord

# What they had: A, four LoRA experts on an RTX 4090; B, a repository model on an RTX 2060; C, chain
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


def source_values(system: str | None, *, n_steps: int) -> dict[str, str]:
    """Return the values of the set-up that ``system`` names, by setting; none if unknown.

    >>> source_values("B: repository model", n_steps=66)["n_warmup_steps"]
    '10 = max(10, int(0.1 x 66))'
    """
    letter = (system or "").partition(":")[0].strip()
    if letter not in tuple(SYSTEMS):
        return {}
    column = SYSTEMS.index(letter)
    found = {name_of(setting): values[column] for setting, values in SOURCE_VALUES.items()}
    if letter in "AB":
        # The warm-up of B depends on the steps.
        steps = max(10, int(0.1 * n_steps))
        rule = f"{steps} = max(10, int(0.1 x {n_steps}))" if letter == "B" else "10% of the steps"
        found[name_of(TrainPlan.n_warmup_steps)] = rule
    return {name: value for name, value in found.items() if value is not None}


def note_rest(draft: PlanDraft, spec: PlanSpec, plan: TrainPlan) -> None:
    length = plan.sequence_length_tokens
    draft.note(TrainPlan.sequence_length_tokens, length, _length_reason(draft.packing))
    draft.note(Training.save_steps, plan.save_steps, _save_reason(spec, plan))
    for setting, asked, value, because in (
        (Training.eval_steps, spec.eval_steps, plan.eval_steps, "once an epoch"),
        (
            Training.n_threads,
            spec.n_threads,
            spec.n_threads or "auto",
            "decided on the machine that trains, which a plan does not look at: torch's own number,"
            " its physical cores as a rule",
        ),
        (
            Training.collection_interval_seconds,
            spec.collection_interval_seconds,
            spec.collection_interval_seconds or "auto",
            "the monitor's own: 1 s, or less where an epoch would get fewer than 20 samples",
        ),
    ):
        draft.note(setting, value, spec.cite_setting(setting) if asked else because)


def _length_reason(packing: PackingRecord) -> str:
    length, told = packing.sequence_length_tokens, [packing.length_reason]
    others = sorted(packing.choices, key=lambda choice: choice.sequence_length_tokens)
    shorter = [c for c in others if c.sequence_length_tokens < length][-1:]
    longer = [c for c in others if c.sequence_length_tokens > length][:1]
    same = [c for c in others if c.sequence_length_tokens == length]
    for choice in (*shorter, *same, *longer):
        n_over, cut = choice.n_over_long_documents, "no document is longer"
        if n_over:
            cut = f"{n_over:,} documents are longer, {choice.n_over_long_tokens:,} tokens in them"
        rows = f"rows {choice.fill_fraction:.1%} full"
        told.append(f"{choice.sequence_length_tokens}: {cut}, {rows}")
    return "; ".join(filter(None, told))


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
