"""Count the work of a run: FLOPs of its steps, and what comes between them."""

from expertflow.plan.cost import Work
from expertflow.plan.draft import Draft
from expertflow.plan.flops import FlopsPerToken, flops_per_token
from expertflow.plan.records import Precision, TrainPlan


def flops_of(draft: Draft, *, checkpoint: bool) -> FlopsPerToken:
    """Give the FLOPs of a token of this expert's rows."""
    train = draft.packing.train
    return flops_per_token(
        draft.facts,
        lora=draft.spec.lora,
        mean_context_tokens=train.sum_len_sq / (2 * train.n_tokens),
        supervised_fraction=draft.supervised_fraction,
        checkpoint_activations=checkpoint,
    )


def work_of(draft: Draft, plan: TrainPlan, precision: Precision, *, checkpoint: bool) -> Work:
    """Give the work of a plan, at another precision or with other checkpointing if need be."""
    flops = flops_of(draft, checkpoint=checkpoint)
    return Work(
        flops_model=flops.model * plan.predicted_tokens,
        flops_hardware=flops.hardware * plan.predicted_tokens,
        n_steps=plan.n_steps,
        save_steps=plan.save_steps,
        save_every_minutes=plan.save_every_minutes,
        eval_steps=plan.eval_steps,
        precision=precision,
        saves_best=plan.load_best_model_at_end,
    )
