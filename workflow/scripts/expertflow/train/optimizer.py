"""Optimiser and learning-rate schedule, by the names of the manifest."""

import math
from typing import Any

import torch

from expertflow.plan.records import TrainPlan


def make_optimizer(model: Any, plan: TrainPlan) -> torch.optim.Optimizer:
    """Make AdamW; norms, biases and other vectors get no weight decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=plan.learning_rate,
        betas=(plan.adam_beta1, plan.adam_beta2),
        fused=plan.optim == "adamw_torch_fused",
    )


def learning_rate(step: int, plan: TrainPlan) -> float:
    """Give the learning rate of optimiser step ``step``, counted from 0.

    A pure function of the step, so there is no scheduler state to save.
    """
    warmup, total = plan.n_warmup_steps, plan.n_steps
    if step < warmup:
        return plan.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    if plan.lr_scheduler_type == "cosine":
        return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if plan.lr_scheduler_type == "linear":
        return plan.learning_rate * (1 - progress)
    return plan.learning_rate
