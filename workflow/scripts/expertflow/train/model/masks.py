"""Masks that keep the documents of a packed row apart, for the kernels of transformers.

Shapes: B rows, L tokens a row.
"""

from collections.abc import Callable
from typing import Any

import torch

from expertflow.core.errors import TrainingError

FLEX = "flex_attention"


def check_flex(device: torch.device) -> None:
    """Refuse flex attention where it cannot be trained.

    Raises:
        TrainingError: it has no backward pass on this device.
    """
    if device.type == "cpu":
        raise TrainingError("training.attention flex has no backward pass on a CPU; use auto")


def masks(attention: str, config: Any, position_ids_BL: torch.Tensor, dtype: torch.dtype) -> Any:
    """Give the mask that a kernel of transformers needs, one for each kind of layer if it varies.

    Args:
        attention: what transformers calls the kernel.
        config: the config of the text model; says which layers have a sliding window.
        position_ids_BL: 0 where a document starts.
        dtype: of the mask where it is added to the scores.

    Raises:
        TrainingError: the kernel cannot be trained on this device.
    """
    make: Callable[[torch.Tensor, int | None], Any]
    if attention == FLEX:
        check_flex(position_ids_BL.device)
        make = _block_mask
    elif attention == "sdpa":
        make = document_mask
    else:
        make = _Additive(dtype)
    kinds, window = layer_kinds(config), getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds:
        windows = {"full_attention": None, "sliding_attention": window}
        return {kind: make(position_ids_BL, windows[kind]) for kind in sorted(kinds)}
    # Families that do not tell their layers apart have the window in all of them.
    return make(position_ids_BL, None if kinds else window)


def layer_kinds(config: Any) -> frozenset[str]:
    """Give the kinds of attention that a config lists for its layers; empty if it lists none."""
    return frozenset(getattr(config, "layer_types", None) or ())


def document_mask(position_ids_BL: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Give the [B, 1, L, L] mask that is true where a query may look at a key.

    A position starts a document where it is 0; queries see keys of their own document up to
    themselves, as far back as the window reaches.
    """
    document_BL = (position_ids_BL == 0).cumsum(dim=1)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    causal_LL = causal_mask(position_ids_BL.shape[1], window, position_ids_BL.device)
    return (same_BLL & causal_LL)[:, None]


def causal_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Give the [L, L] mask that is true where a query may look at a key of its document."""
    mask_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask_LL if window is None else mask_LL.triu(1 - window)


class _Additive:
    """Makes masks of 0 and the lowest number, which the eager kernels add to the scores."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, position_ids_BL: torch.Tensor, window: int | None) -> torch.Tensor:
        mask = document_mask(position_ids_BL, window)
        zeros = torch.zeros_like(mask, dtype=self.dtype)
        return zeros.masked_fill(~mask, torch.finfo(self.dtype).min)


def _block_mask(position_ids_BL: torch.Tensor, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    document_BL = (position_ids_BL == 0).cumsum(dim=1)
    batch, length = position_ids_BL.shape
    reach = length if window is None else window

    def may_look(
        row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        same = document_BL[row, query] == document_BL[row, key]
        return same & (query >= key) & (query - key < reach)

    return create_block_mask(may_look, batch, None, length, length, device=str(document_BL.device))
