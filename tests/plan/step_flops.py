"""Count the FLOPs of a training step with torch's counter, for what the formula is held against.

Attention counts as the convention has it: causal, within documents, and twice the forward pass for
the backward one. Torch's own figures are of full attention, and have the scores that a fused kernel
computes again.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from expertflow.train.feed.batches import Batch
from expertflow.train.model.packed import PackedLoss

ATEN, OWN = torch.ops.aten, torch.ops.torch_attn


def count_step_flops(net: Any, batch: Batch, *, sum_len_sq: int) -> int:
    """Run a micro-batch forward and backward and count what is computed, recomputation included.

    ``sum_len_sq`` sums the squared lengths of its documents, which tensors without data do not say.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_formulas(sum_len_sq))
    with counter:
        PackedLoss(net)(batch).backward()
    return counter.get_total_flops()


def _formulas(sum_len_sq: int) -> dict[Any, Any]:
    """Give the FLOPs of attention by kernel, and of a product in place, which torch leaves out."""

    def one_document(factor: int) -> Any:
        def formula(*shapes: Any, **_: Any) -> int:
            query = next(shape for shape in shapes if shape is not None and len(shape) == 4)
            rows, heads, length, width = query
            return int(factor * rows * heads * length * length * width)

        return formula

    def all_documents(factor: int) -> Any:
        def formula(*shapes: Any, **_: Any) -> int:
            _total, heads, width = next(shape for shape in shapes if shape is not None)
            return int(factor * heads * width * sum_len_sq)

        return formula

    def in_place(_total: Any, left: Any, right: Any, **_: Any) -> int:
        return int(2 * left[0] * left[1] * right[1])

    return {
        ATEN.addmm_: in_place,
        ATEN._scaled_dot_product_flash_attention_for_cpu: one_document(2),
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward: one_document(4),
        OWN._varlen_attn: all_documents(2),
        OWN._varlen_attn_backward: all_documents(4),
    }
