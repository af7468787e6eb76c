"""Answer held-out questions with a model: greedy, batched, left-padded, deterministic."""

from collections.abc import Sequence
from typing import Any

import torch

from expertflow.train.model import causal_lm


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    end_id: int,
    pad_id: int,
    max_new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Continue each prompt (token ids) until the end of the turn or ``max_new_tokens``.

    Prompts of like length share a batch; answers come back in the order of the prompts, without the
    end token.
    """
    lm = causal_lm(model).eval()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids, mask = pad_left([prompts[i] for i in chosen], pad_id=pad_id)
        out = lm.generate(
            input_ids=ids.to(lm.device),
            attention_mask=mask.to(lm.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=end_id,
            pad_token_id=pad_id,
            use_cache=True,
        )
        for i, row in zip(chosen, out[:, ids.shape[1] :].tolist(), strict=True):
            answers[i] = row[: row.index(end_id)] if end_id in row else row
    return answers


def pad_left(prompts: Sequence[list[int]], *, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give ids and attention mask, both [B, longest], prompts flush right."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
