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

# Set-up A: four LoRA experts on an RTX 4090.
A: dict[Any, str] = {
    Training.batch_size: "16",
    Training.gradient_accumulation_steps: "4",
    Training.gradient_checkpointing: "False",
    TrainPlan.sequence_length_tokens: "2048",
    TrainPlan.precision: "bf16",
    Training.dataloader_num_workers: "8",
    Training.dataloader_prefetch_factor: "8",
    Training.dataloader_persistent_workers: "True",
    Training.group_by_length: "True",
    Training.attention: "sdpa",
    TrainPlan.n_warmup_steps: "10% of the steps",
    Training.save_steps: "250",
    Training.collection_interval_seconds: "1 s",
}
# Set-up B: a repository model on an RTX 2060; its warm-up depends on the steps.
B: dict[Any, str] = {
    Training.batch_size: "4 on a 6 GB card, by tiers of memory",
    Training.gradient_accumulation_steps: "2",
    Training.dataloader_num_workers: "physical cores // 2",
    Training.collection_interval_seconds: "5 s",
}
# Set-up C: chain of thought on an H100.
C: dict[Any, str] = {
    Training.batch_size: "2",
    Training.gradient_accumulation_steps: "4",
    Training.gradient_checkpointing: "True",
    TrainPlan.sequence_length_tokens: "1536",
    TrainPlan.precision: "bf16",
    Training.dataloader_num_workers: "4",
    Training.dataloader_prefetch_factor: "4",
}
# Set-up D: 600k examples on an H100.
D: dict[Any, str] = {
    Training.batch_size: "4",
    Training.gradient_accumulation_steps: "2",
    Training.dataloader_num_workers: "4",
    Training.save_steps: "2000",
    Training.torch_compile: "True",
}
# Set-up E: 25 examples on an RTX 4090.
E: dict[Any, str] = {Training.loader: "a loop that waited for its data 83% of each batch"}
SYSTEMS = {"A": A, "B": B, "C": C, "D": D, "E": E}


def source_values(system: str | None, *, n_steps: int) -> dict[str, str]:
    """Return the values of the set-up that ``system`` names, by setting; none if unknown.

    >>> source_values("B: repository model", n_steps=66)["n_warmup_steps"]
    '10 = max(10, int(0.1 x 66))'
    """
    letter = (system or "").partition(":")[0].strip()
    values = dict(SYSTEMS.get(letter, {}))
    if letter == "B":
        steps = max(10, int(0.1 * n_steps))
        values[TrainPlan.n_warmup_steps] = f"{steps} = max(10, int(0.1 x {n_steps}))"
    return {name_of(setting): value for setting, value in values.items()}


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
