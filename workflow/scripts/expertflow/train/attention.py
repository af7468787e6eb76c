"""Attention that keeps the documents of a packed row apart.

Registered with transformers under a name that has no mask function: transformers then builds no
mask and passes our keyword arguments through to every layer. Nothing is inferred from position ids,
and missing lengths are an error, never full attention.

Shapes: B rows, H query heads, K key heads, L tokens a row, N of a document, D head width.
"""

from itertools import pairwise
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
    document_bounds: tuple[int, ...] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each document; return values as [B, L, H, D].

    ``cu_seq_lens_q`` drives torch's variable-length kernel, which needs CUDA, half precision and
    Ampere or newer. ``document_bounds`` (the same figures, on the host) drive one SDPA call per
    document: the route of the CPU, where it beats a masked call per row (bench/attention_cpu.py).

    Raises:
        TrainingError: the batch came without document lengths.
    """
    if cu_seq_lens_q is not None:
        return _attend_varlen(query_BHLD, key_BKLD, value_BKLD, cu_seq_lens_q, max_length_q), None
    if document_bounds is None:
        raise TrainingError("packed attention got no document lengths; pass document_kwargs")
    batch, _heads, length, _width = query_BHLD.shape
    query, key, value = (
        t.transpose(1, 2).flatten(0, 1) for t in (query_BHLD, key_BKLD, value_BKLD)
    )
    documents = []
    for start, end in pairwise(document_bounds):
        out_1HND = scaled_dot_product_attention(
            query[start:end].transpose(0, 1)[None],
            key[start:end].transpose(0, 1)[None],
            value[start:end].transpose(0, 1)[None],
            is_causal=True,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        documents.append(out_1HND[0].transpose(0, 1))
    out = torch.cat(documents)
    return out.view(batch, length, *out.shape[1:]), None


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
