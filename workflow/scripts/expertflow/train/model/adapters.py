"""The forward pass of LoRA and DoRA layers, equal to peft's in fewer passes over memory.

peft's own breaks a compiled graph at every DoRA layer, builds the product of a layer's adapters in
full for its norm, and scales each layer's output where scaling the much smaller B will do.
Weights, names and files stay peft's; only the layers' class changes.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch.nn import functional

from expertflow.plan.settings import ADAPTER

DROPPED = "_dropped_out"


def use_own_forward(model: Any) -> None:
    """Replace peft's forward pass in all adapters on plain linear layers; 4-bit ones keep it."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is torch.nn.Linear:
            module.__class__ = AdaptedLinear
            if ADAPTER in module.lora_magnitude_vector:
                # The base is frozen; summing in each pass would read it once more.
                squares_O = module.base_layer.weight.detach().float().square().sum(1)
                module.register_buffer("base_squares_O", squares_O, persistent=False)


class AdaptedLinear(Linear):  # type: ignore[misc]
    """A linear layer with one LoRA or DoRA adapter, in training: neither merged nor disabled.

    LoRA adds ``s B A d(x)`` to ``W x``, with dropout d and scaling s. DoRA (arXiv 2402.09353) has
    ``W (x - d(x)) + m / |W + s B A| * (W + s B A) d(x)``, where the norm of each output's row is
    taken as a constant.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        a_RI, b_OR = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        # Outside autocast with another type of input, use peft's.
        if not torch.is_autocast_enabled(x.device.type) and x.dtype != a_RI.dtype:
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        base: torch.nn.Linear = self.base_layer
        scaling = self.scaling[ADAPTER]
        dropped = self._drop_out(x)
        narrow, scaled_b_OR = functional.linear(dropped, a_RI), b_OR * scaling
        if ADAPTER not in self.lora_magnitude_vector:
            return product_onto(functional.linear(narrow, scaled_b_OR, base.bias), x, base.weight)
        magnitude_O = self.lora_magnitude_vector[ADAPTER].weight
        norm_O = norm_of_rows(base.weight, self.base_squares_O, a_RI, scaled_b_OR)
        changed = product_onto(functional.linear(narrow, scaled_b_OR), dropped, base.weight)
        changed = (magnitude_O / norm_O).to(changed.dtype) * changed
        if dropped is not x:
            # The base adds its bias here.
            changed = changed + base(x - dropped)
        elif base.bias is not None:
            changed = changed + base.bias
        return changed  # type: ignore[no-any-return]

    def _drop_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with dropout: one copy for all layers that read this input."""
        dropout = self.lora_dropout[ADAPTER]
        # Dropout of 0 returns the input itself, which would then keep itself alive.
        if not self.training or not getattr(dropout, "p", 0.0):
            return x
        # Kept with the input, so that both are freed together. The layer that made it draws again:
        # it sees the same input twice when a checkpointed layer is recomputed.
        maker, dropped = getattr(x, DROPPED, (self, x))
        if maker is self:
            dropped = dropout(x)
            setattr(x, DROPPED, (self, dropped))
        return dropped


def product_onto(start: torch.Tensor, x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return ``start + x W'`` in one product, without a separate pass to add them.

    If it is the last product of a checkpointed layer, recomputation stops before it.
    """
    total = torch.addmm(start.flatten(0, -2), x.flatten(0, -2), weight_OI.T)
    return total.view_as(start)


@torch.no_grad()
def norm_of_rows(
    weight_OI: torch.Tensor, squares_O: torch.Tensor, a_RI: torch.Tensor, scaled_b_OR: torch.Tensor
) -> torch.Tensor:
    """Return the norm of each row of ``W + s B A`` in fp32, without making that matrix.

    Its square is ``|w|^2 + 2 s b (A w) + s^2 b (A A') b'`` for a row w of W and b of B.
    """
    with torch.autocast(weight_OI.device.type, enabled=False):
        a_RI, scaled_b_OR = a_RI.float(), scaled_b_OR.float()
        cross_OR = functional.linear(weight_OI, a_RI.to(weight_OI.dtype)).float()
        gram_RR = a_RI @ a_RI.T
        return (squares_O + (scaled_b_OR * (2 * cross_OR + scaled_b_OR @ gram_RR)).sum(1)).sqrt()
