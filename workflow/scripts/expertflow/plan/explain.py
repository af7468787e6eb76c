"""Reasons for what the plan leaves to time, to the trainer, or to packing."""

from collections.abc import Iterator

from expertflow.plan.arithmetic import time_words, usd_words
from expertflow.plan.cost_records import CostPlan
from expertflow.plan.records import PlanSpec, Reason, make_reason
from expertflow.tokens.records import LengthChoice, PackingRecord


def explain_rest(
    spec: PlanSpec,
    packing: PackingRecord,
    *,
    cost: CostPlan,
    n_steps: int,
    save_steps: int,
    eval_steps: int,
) -> Iterator[Reason]:
    """Give the reasons for row length, saves, evaluations, threads and the monitor."""
    yield make_reason("sequence_length_tokens", packing.sequence_length_tokens, _length(packing))
    yield make_reason("save_steps", save_steps, _saves(spec, cost, n_steps, save_steps))
    yield make_reason(
        "eval_steps",
        eval_steps,
        spec.told("eval_steps") if spec.eval_steps else "once an epoch",
    )
    yield make_reason(
        "n_threads",
        spec.n_threads or "auto",
        spec.told("n_threads")
        if spec.n_threads
        else "decided on the machine that trains, which a plan does not look at: torch's own"
        " number, its physical cores as a rule",
    )
    yield make_reason(
        "collection_interval_seconds",
        spec.collection_interval_seconds or "auto",
        spec.told("collection_interval_seconds")
        if spec.collection_interval_seconds
        else "the monitor's own: 1 s, or less where an epoch would get fewer than 20 samples",
    )


def _length(packing: PackingRecord) -> str:
    """Say why the rows are so long, and what a shorter and a longer one would do."""
    length = packing.sequence_length_tokens
    others = sorted(packing.choices, key=lambda choice: choice.sequence_length_tokens)
    shorter = [c for c in others if c.sequence_length_tokens < length][-1:]
    same = [c for c in others if c.sequence_length_tokens == length]
    longer = [c for c in others if c.sequence_length_tokens > length][:1]
    told = [_choice(choice) for choice in (*shorter, *same, *longer)]
    return "; ".join(filter(None, (packing.length_reason, *told)))


def _choice(choice: LengthChoice) -> str:
    cut = (
        f"{choice.n_over_long_documents:,} documents are longer, {choice.n_over_long_tokens:,}"
        " tokens in them"
        if choice.n_over_long_documents
        else "no document is longer"
    )
    return f"{choice.sequence_length_tokens}: {cut}, rows {choice.fill_fraction:.1%} full"


def _saves(spec: PlanSpec, cost: CostPlan, n_steps: int, save_steps: int) -> str:
    """Say what an interruption loses at most, in minutes and dollars."""
    minutes = spec.save_every_minutes
    how = (
        f"{spec.told('save_steps')}, and every {minutes:g} minutes"
        if spec.save_steps
        else f"save_steps is null: at the end, and every {minutes:g} minutes"
    )
    if cost.step_hours is not None:
        minutes = min(minutes, cost.step_hours * 60 / n_steps * min(save_steps, n_steps))
    lost = f"an interruption loses at most {time_words(minutes / 60)}"
    if cost.price_usd_per_hour is not None:
        lost += f", {usd_words(minutes / 60 * cost.price_usd_per_hour)}"
    return f"{how}; {lost}"
