"""Check before the first step that training computes a model as its own code does.

The trainer applies the head itself, to supervised rows only, and gives every layer the document
bounds. A family that changes its logits in an unknown way, carries a state across documents, or
does not use the registered attention would silently train as another model.

Shapes: B rows, L tokens a row, N tokens of a document, H width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from expertflow.core.errors import TrainingError, single_line
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Collator
from expertflow.train.model.loss import product_dtype
from expertflow.train.model.packed import PackedLoss, causal_lm, find_head, hidden_states

# Two rows of two documents; the second row is padded.
LENGTHS = [[9, 15], [17, 6]]
LENGTH = 24
# Largest logits of the probe: above any cap in use, since caps hardly change small logits.
PROBE_LOGIT = 200.0
KINDS = frozenset({"full_attention", "sliding_attention"})
# Allowed RMS differences, relative to the model's own. The head is the same product twice. In half
# precision two attention kernels diverge from layer to layer, while a leak between documents moves
# a trained model's states by about their own size.
HEAD_TOLERANCE = 0.01
TOLERANCES = {torch.float32: 0.01}
HALF_TOLERANCE = 0.1
NOT_FINITE_FIX = (
    "check its weights, and if half precision is too narrow for it, set training.bf16 and"
    " training.fp16 to false"
)


class MixedDocuments(TrainingError):
    """Packed documents see each other; another route may separate them."""


@torch.no_grad()
def check_model(loss: PackedLoss) -> str:
    """Compare head and attention with the model's own forward pass; return the differences.

    Run it under training's autocast, before the model is compiled or wrapped. Raises TrainingError
    if training would change the model's results or mix documents.
    """
    lm = causal_lm(loss.model)
    family, device = lm.config.model_type, next(lm.parameters()).device
    kinds = getattr(lm.config.get_text_config(), "layer_types", None) or ()
    unknown = sorted(set(kinds) - KINDS)
    if unknown:
        raise TrainingError(
            f"{family} has {', '.join(unknown)} layers, which cannot keep packed documents"
            " separate; use another base model"
        )
    tolerance = TOLERANCES.get(product_dtype(device, lm.dtype), HALF_TOLERANCE)
    with keep_state(loss):
        loss.eval()
        head = _head_difference(lm)
        # Written so that a NaN is also rejected.
        if not head <= HEAD_TOLERANCE:
            raise TrainingError(
                f"{family} does more to its logits than its config says (off by {head:.1g}), so its"
                " loss would be wrong; use another base model"
            )
        documents = _document_difference(lm)
        if not documents <= tolerance:
            raise MixedDocuments(
                f"{family} does not keep packed documents separate (off by {documents:.1g}); set"
                " training.attention to sdpa, or use another base model"
            )
    return f"model checked: head off by {head:.1g}, packed documents by {documents:.1g}"


def _head_difference(lm: PreTrainedModel) -> float:
    head = find_head(lm)
    weight_VH = head.weight_VH
    probe_NH = torch.randn(4, weight_VH.shape[1], generator=torch.Generator().manual_seed(0))
    probe_NH = probe_NH.to(weight_VH.device, weight_VH.dtype)
    probe_NH *= PROBE_LOGIT / functional.linear(probe_NH, weight_VH).abs().max()

    def give_probe(_module: Any, _arguments: Any, out: Any) -> Any:
        out.last_hidden_state = probe_NH[None].to(out.last_hidden_state.dtype)
        return out

    hook = lm.base_model.register_forward_hook(give_probe)
    try:
        with own_attention(lm):
            ids = torch.arange(4, device=weight_VH.device)[None]
            logits_NV = lm(input_ids=ids, use_cache=False).logits[0]
    finally:
        hook.remove()
    return _difference(logits_NV, head.compute_logits(probe_NH))


def _document_difference(lm: PreTrainedModel) -> float:
    n_ids = lm.get_input_embeddings().weight.shape[0]
    # Steps of a prime, so that neighbors differ in small vocabularies, too.
    ids = (np.arange(2 * LENGTH) * 7919 + 1) % n_ids
    rows = PackedRows.from_lists(ids.reshape(2, LENGTH).astype(np.int32), LENGTHS, [[], []])
    batch = Collator(rows).batch(np.arange(2))
    try:
        packed_NH = hidden_states(lm, batch).flatten(0, 1)
    except TypeError as error:
        raise TrainingError(
            f"{lm.config.model_type} does not accept document bounds"
            f" ({single_line(error, 160)}); use another base model"
        ) from error
    ids_N = batch.input_ids_BL.flatten().to(packed_NH.device)
    worst = 0.0
    with own_attention(lm):
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            alone = lm.base_model(input_ids=ids_N[None, start:end], use_cache=False)
            alone_NH = alone.last_hidden_state[0]
            if not alone_NH.isfinite().all():
                dtype = str(product_dtype(alone_NH.device, lm.dtype)).removeprefix("torch.")
                raise TrainingError(
                    f"{lm.config.model_type} computes non-finite numbers in {dtype};"
                    f" {NOT_FINITE_FIX}"
                )
            found = _difference(packed_NH[start:end], alone_NH)
            # Not max(), which may drop a NaN.
            worst = worst if found <= worst else found
    return worst


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())


@contextmanager
def own_attention(lm: PreTrainedModel) -> Iterator[None]:
    name = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    try:
        yield
    finally:
        lm.set_attn_implementation(name)


@contextmanager
def keep_state(module: torch.nn.Module) -> Iterator[None]:
    """Restore random numbers at the end, and the mode part by part: training or evaluation."""
    modes = [(part, part.training) for part in module.modules()]
    device = next(module.parameters()).device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for part, training in modes:
            part.training = training
