"""Attention that keeps the documents of a packed row apart.

Registered with transformers under a name that has no mask function: transformers then builds no
mask and passes our keyword arguments through to every layer. Nothing is inferred from position ids,
and missing lengths are an error, never full attention.

Shapes: B rows, H query heads, K key heads, L tokens a row, D head width.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from expertflow.core.errors import TrainingError

NAME = "packed"


def attend(
    module: torch.nn.Module,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    document_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each document; return values as [B, L, H, D].

    With ``document_mask`` [B, 1, L, L], made once a batch, runs SDPA: the route of the CPU, where
    for short rows it is quicker than a call per document. Without it, ``cu_seq_lens_q`` drives
    torch's variable-length kernel, which needs CUDA and half precision.

    Raises:
        TrainingError: the batch came without document lengths.
    """
    if document_mask is None:
        if cu_seq_lens_q is None:
            raise TrainingError("packed attention got no document lengths; pass document_kwargs")
        return _attend_varlen(query_BHLD, key_BKLD, value_BKLD, cu_seq_lens_q, max_length_q), None
    out_BHLD = scaled_dot_product_attention(
        query_BHLD,
        key_BKLD,
        value_BKLD,
        attn_mask=document_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query_BHLD.shape[1] != key_BKLD.shape[1],
    )
    return out_BHLD.transpose(1, 2).contiguous(), None


def _attend_varlen(
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int | None,
) -> torch.Tensor:
    """Run the variable-length kernel over all rows as one list of documents.

    The kernel is not causal unless told: ``window_size=(-1, 0)``.
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, _, length, _ = query_BHLD.shape
    # Under autocast the norms of Qwen3 leave queries and keys in fp32, which the kernel refuses.
    query, key, value = (
        t.to(value_BKLD.dtype).transpose(1, 2).flatten(0, 1)
        for t in (query_BHLD, key_BKLD, value_BKLD)
    )
    longest = length if max_length is None else max_length
    out: Any = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    result: torch.Tensor = out.view(batch, length, *out.shape[1:])
    return result


def register() -> None:
    """Make the route known to transformers as ``attn_implementation="packed"``."""
    AttentionInterface.register(NAME, attend)
