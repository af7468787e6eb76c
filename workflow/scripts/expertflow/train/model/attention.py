"""Attention within the documents of a packed row.

Ours is registered with transformers under a name without a mask function, so it builds no mask and
passes our keyword arguments through. Missing lengths are an error, never full attention. For its
own kernels, used here for comparison, transformers makes masks from the position ids.

Shapes: B rows, H query heads, K key heads, L tokens a row, N of a document, D head width.
"""

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from expertflow.core.errors import TrainingError, single_line

NAME = "packed"
# Plan routes that have another name in transformers.
IMPLEMENTATIONS = {"varlen": NAME, "flex": "flex_attention"}
# Oldest GPUs that the variable-length kernel supports (Ampere).
KERNEL_CAPABILITY = (8, 0)
# The only GPUs for which torch has FlashAttention-3 (Hopper).
FLASH_3_CAPABILITY = (9, 0)
HALF = (torch.bfloat16, torch.float16)
# Some families add these to the scores; a kernel that ignored them would train another model.
REFUSED = ("s_aux", "position_bias")
KERNEL: Callable[..., Any] = varlen.varlen_attn
# Since torch 2.12; before that, every query head needs its own key head.
TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def caps_scores(config: Any) -> bool:
    """Return whether a model softly caps its attention scores, as Gemma 2 does."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def transformers_name(attention: str) -> str:
    return IMPLEMENTATIONS.get(attention, attention)


def attention_forward(
    module: torch.nn.Module,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    document_bounds: torch.Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each document; return values as [B, L, H, D].

    ``cu_seq_lens_q`` selects torch's variable-length kernel, ``document_bounds`` (the same values,
    on the host) one SDPA call per document. Both may end in bounds of empty documents. With a
    sliding window, query i sees keys j with i - j < window. Raises TrainingError without document
    lengths, or if the model needs an unsupported feature.
    """
    name = type(module).__name__
    for other in REFUSED:
        if others.get(other) is not None:
            raise TrainingError(f"{name} needs {other}, which packed attention does not support")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise TrainingError(f"{name} is not causal; only causal language models can be trained")
    heads = query_BHLD, key_BKLD, value_BKLD
    length = query_BHLD.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if cu_seq_lens_q is not None:
        if softcap is not None:
            raise TrainingError(f"{name} needs softcap, which the variable-length kernel lacks")
        if dropout:
            raise TrainingError(
                f"{name} needs attention dropout {dropout:g}, which the variable-length kernel"
                " lacks; set attention_dropout to 0 in the model's config.json"
            )
        longest = length if max_length_q is None else max_length_q
        return _attend_varlen(heads, cu_seq_lens_q, longest, scaling, window), None
    if document_bounds is None:
        raise TrainingError(
            f"{name} received no document lengths: its model does not pass them on; set"
            " training.attention to sdpa"
        )
    return _attend_documents(heads, document_bounds, scaling, window, dropout, softcap), None


# The lengths differ from batch to batch, so compiling the loop would recompile it each time.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_documents(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bounds: torch.Tensor,
    scaling: float | None,
    window: int | None,
    dropout: float,
    softcap: float | None,
) -> torch.Tensor:
    batch, _heads, length, _width = heads[0].shape
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in heads)
    if softcap is not None or needs_own_heads(query):
        key, value = _repeated(query, key, value)
    # Bounds [0, 3, 8, 8] -> [3, 5]: an empty document is left out.
    lengths = [end - start for start, end in pairwise(bounds.tolist()) if start < end]
    documents = []
    # Split, since the gradient of each slice would be as long as all documents together.
    for parts_NHD in zip(*(torch.split(t, lengths) for t in (query, key, value)), strict=True):
        q_HND, k_HND, v_HND = (part_NHD.transpose(0, 1) for part_NHD in parts_NHD)
        if softcap is not None:
            out_HND = _attend_capped(q_HND, k_HND, v_HND, window, softcap, scaling, dropout)
        else:
            n = q_HND.shape[1]
            cut = window is not None and n > window
            out_HND = scaled_dot_product_attention(
                q_HND[None],
                k_HND[None],
                v_HND[None],
                attn_mask=_window_mask(n, window, query.device) if cut else None,
                is_causal=not cut,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )[0]
        documents.append(out_HND.transpose(0, 1))
    out = torch.cat(documents)
    return out.view(batch, length, *out.shape[1:])


def _attend_capped(
    query_HND: torch.Tensor,
    key_HND: torch.Tensor,
    value_HND: torch.Tensor,
    window: int | None,
    softcap: float,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attend with scores s as ``cap tanh(s / cap)``, by plain operations: no kernel supports it."""
    scale = query_HND.shape[-1] ** -0.5 if scaling is None else scaling
    scores_HNN = torch.matmul(query_HND, key_HND.mT) * scale
    scores_HNN = torch.tanh(scores_HNN / softcap) * softcap
    mask_NN = _window_mask(query_HND.shape[1], window, query_HND.device)
    weights_HNN = scores_HNN.float().masked_fill(~mask_NN, -torch.inf).softmax(-1)
    weights_HNN = torch.nn.functional.dropout(weights_HNN.to(value_HND.dtype), dropout)
    return torch.matmul(weights_HNN, value_HND)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    causal_NN = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    # A window of 2: query i sees keys i - 1 and i, the diagonal and the one below it.
    return causal_NN if window is None else causal_NN.triu(1 - window)


def needs_own_heads(query: torch.Tensor) -> bool:
    # CUDA's memory-efficient attention rejects shared heads; the fallback materializes N x N
    # scores.
    return query.is_cuda


def _repeated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n_times = query.shape[1] // key.shape[1]
    if n_times == 1:
        return key, value
    return key.repeat_interleave(n_times, dim=1), value.repeat_interleave(n_times, dim=1)


def _attend_varlen(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    batch, n_heads, length, _width = heads[0].shape
    # Under autocast, Qwen3's norms leave queries and keys in fp32, which the kernel rejects.
    dtype = heads[2].dtype if heads[2].dtype in HALF else torch.get_autocast_dtype("cuda")
    query, key, value = (t.to(dtype).transpose(1, 2).flatten(0, 1) for t in heads)
    if torch.compiler.is_compiling():
        # A final operation in the kernel's axis order; else the rotation is written, then copied.
        query, key = query * 1, key * 1
    # A window with none to the right is causal attention.
    window_size = (-1 if window is None else window - 1, 0)
    options: dict[str, object] = {"window_size": window_size, "scale": scaling}
    if TAKES_GROUPED_HEADS:
        options["enable_gqa"] = n_heads != key.shape[1]
    else:
        key, value = _repeated(query, key, value)
    out = KERNEL(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    result: torch.Tensor = out.view(batch, length, *out.shape[1:])
    return result


def describe_route(
    attention: str, *, device: torch.device, dtype: torch.dtype, caps: bool = False
) -> str:
    """Describe the kernel of a route; reject one that does not run here."""
    if attention in (NAME, "varlen"):
        reason = varlen_unavailable_reason(device, dtype, caps)
        if reason is None:
            return "variable-length kernel over all documents of a micro-batch"
        if attention == "varlen":
            raise TrainingError(f"training.attention varlen: {reason}; use auto")
        call = "plain operations for each" if caps else "one SDPA call per"
        return f"{call} document, because {reason}"
    if attention == "flex" and device.type == "cpu":
        raise TrainingError("training.attention flex has no backward pass on a CPU; use auto")
    return f"{transformers_name(attention)} of transformers, documents separated by a mask"


def varlen_unavailable_reason(
    device: torch.device, dtype: torch.dtype, caps: bool = False
) -> str | None:
    if caps:
        return "the variable-length kernel cannot cap scores, as this model does"
    if device.type != "cuda":
        return f"the variable-length kernel does not run on a {device.type.upper()}"
    if dtype not in HALF:
        return f"the variable-length kernel supports bf16 and fp16, not {dtype}"
    capability = torch.cuda.get_device_capability(device)
    if capability < KERNEL_CAPABILITY:
        return f"the variable-length kernel needs Ampere or newer, not {capability}"
    return None


def activate_flash_3(device: torch.device) -> str:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != FLASH_3_CAPABILITY:
        return "no FlashAttention-3: it needs a Hopper card"
    if "FA3" not in torch.nn.attention.list_flash_attention_impls():
        return f"no FlashAttention-3: torch {torch.__version__} does not support it"
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        return f"no FlashAttention-3: it cannot be loaded ({single_line(error, 120)})"
    return "FlashAttention-3"


AttentionInterface.register(NAME, attention_forward)
