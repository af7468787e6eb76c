"""Cross-entropy over supervised tokens only, in chunks whose logits are never kept.

Hidden states that predict a target are selected *before* the head. Losses are sums: the caller
divides by the number of targets in the global batch.

Each chunk propagates its logits' gradient to the hidden states and the head at once: three products
with the head instead of four, two if the head is frozen. Torch's own fused operation sums the loss
in the type of the hidden states, wrong in the third digit in bf16, and has no label smoothing.

Shapes: B rows, L tokens, H width, T targets, C targets of a chunk, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from expertflow.plan.memory import loss_chunk_rows
from expertflow.tokens.packing import IGNORE

# Rows of a chunk on a CPU.
CHUNK = 256


class Head(NamedTuple):
    """A family's head: a product, plus a bias, times a scale, and softly capped."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def compute_logits(self, rows_CH: torch.Tensor) -> torch.Tensor:
        """Return the logits [C, V] in fp32."""
        logits_CV = functional.linear(rows_CH, self.weight_VH, self.bias_V).float()
        if self.scale != 1:
            logits_CV = logits_CV * self.scale
        return logits_CV if self.cap is None else torch.tanh(logits_CV / self.cap) * self.cap

    @property
    def is_plain(self) -> bool:
        return self.scale == 1 and self.cap is None

    def compute_slope(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """Return each logit's derivative with respect to its own product."""
        if self.cap is None:
            return self.scale
        return self.scale * (1 - (logits_CV / self.cap).square())


# From hidden states [C, H], head, targets [C, 1] and smoothing: the summed loss, and the gradient
# of the head's product [C, V].
Kernel = Callable[[torch.Tensor, Head, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def sum_loss(
    hidden_BLH: torch.Tensor,
    head: Head,
    labels_BL: torch.Tensor,
    *,
    n_targets: int,
    label_smoothing: float = 0.0,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Sum the cross-entropy in nats over all targets, as a float32 scalar.

    Products use autocast's type if it is on. The backward pass can run only once.
    """
    positions_T, targets_T = targets_of(labels_BL, n_targets)
    hidden_TH = hidden_BLH.flatten(0, 1).index_select(0, positions_T)
    is_on = torch.is_grad_enabled()
    arguments = (targets_T, label_smoothing, is_on, kernel or loss_and_gradient)
    loss: torch.Tensor = _ChunkedLoss.apply(hidden_TH, *head, *arguments)  # type: ignore[no-untyped-call]
    return loss


def plain_loss(
    hidden_BLH: torch.Tensor,
    head: Head,
    labels_BL: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum the same loss by torch's own operations, with all its logits in memory."""
    labels_N = labels_BL[:, 1:].flatten()
    is_target_N = labels_N != IGNORE
    logits_TV = head.compute_logits(hidden_BLH[:, :-1].flatten(0, 1)[is_target_N])
    targets_T = labels_N[is_target_N].long()
    return functional.cross_entropy(
        logits_TV, targets_T, reduction="sum", label_smoothing=label_smoothing
    )


def targets_of(labels_BL: torch.Tensor, n_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat positions that predict a target, and the targets, both [T].

    The host passes their number, since asking the device would stall its queue.
    """
    # Labels are unshifted: position i predicts label i + 1, and the last of a row predicts none.
    shifted_N = functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORE).flatten()
    positions_T = torch.nonzero_static(shifted_N != IGNORE, size=n_targets)[:, 0]
    return positions_T, shifted_N.index_select(0, positions_T).long()


def chunk_rows(head_VH: torch.Tensor) -> int:
    """Return how many targets a chunk has: more on a card, the more memory it has."""
    if not head_VH.is_cuda:
        return CHUNK
    card_bytes = torch.cuda.get_device_properties(head_VH.device).total_memory
    return loss_chunk_rows(len(head_VH), card_bytes, trained=head_VH.requires_grad)


def loss_route(head: Head, *, label_smoothing: float) -> str:
    state = "trained" if head.weight_VH.requires_grad else "frozen"
    more = ", with a bias" if head.bias_V is not None else ""
    more += f", logits scaled by {head.scale:g}" if head.scale != 1 else ""
    more += f", capped at {head.cap:g}" if head.cap is not None else ""
    more += f", labels smoothed by {label_smoothing:g}" if label_smoothing else ""
    return (
        f"supervised rows only, {chunk_rows(head.weight_VH)} at a time with their gradients, head"
        f" {state}{more}"
    )


def product_dtype(device: torch.device, own: torch.dtype) -> torch.dtype:
    """Return the type of products: autocast's, or the weights' own."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss; gradients are computed in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        scale: float,
        cap: float | None,
        targets_T: torch.Tensor,
        smoothing: float,
        is_on: bool,
        kernel: Kernel,
    ) -> torch.Tensor:
        dtype, chunk = product_dtype(weight_VH.device, weight_VH.dtype), chunk_rows(weight_VH)
        loss = hidden_TH.new_zeros((), dtype=torch.float32)
        # Autograd is off in here, hence the flag from outside: evaluation computes no gradients.
        wants = [is_on and needed for needed in ctx.needs_input_grad]
        to_hidden = torch.empty_like(hidden_TH) if wants[0] else None
        to_head = _zeros_like(weight_VH) if wants[1] else None
        to_bias = _zeros_like(bias_V) if wants[2] and bias_V is not None else None
        with torch.autocast(hidden_TH.device.type, enabled=False):
            bias = None if bias_V is None else bias_V.to(dtype)
            head = Head(weight_VH.to(dtype), bias, scale, cap)
            for start in range(0, len(targets_T), chunk):
                part = slice(start, start + chunk)
                rows_CH, targets_C1 = hidden_TH[part].to(dtype), targets_T[part, None]
                more, gradient_CV = kernel(rows_CH, head, targets_C1, smoothing)
                loss += more
                if to_hidden is not None:
                    to_hidden[part] = gradient_CV @ head.weight_VH
                if to_head is not None:
                    _add_product(to_head, gradient_CV.T, rows_CH)
                if to_bias is not None:
                    to_bias += gradient_CV.sum(0, dtype=torch.float32)
                # Freed before the next logits are made, so that the peak is one chunk, not two.
                del gradient_CV
        ctx.gradients = (
            to_hidden,
            None if to_head is None else to_head.to(weight_VH.dtype),
            None if to_bias is None or bias_V is None else to_bias.to(bias_V.dtype),
        )
        return loss

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Scaled in place, as the head's gradient may be the largest tensor of a step.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if g is None else g.mul_(scale) for g in gradients)
        return *scaled, None, None, None, None, None, None


def loss_and_gradient(
    rows_CH: torch.Tensor, head: Head, targets_C1: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute in place, in fp32, with a single copy of the logits.

    With smoothing e a target is 1 - e on its token and e / V on every token.
    """
    logits_CV = head.compute_logits(rows_CH)
    slope = head.compute_slope(logits_CV)
    # Leaves softmax unchanged, and keeps exp() from overflowing.
    logits_CV -= logits_CV.amax(1, keepdim=True)
    # Taken before exp_() overwrites the logits: the loss is log(sum exp) - (1 - e) target - e mean.
    loss_C1 = logits_CV.gather(1, targets_C1).mul_(smoothing - 1)
    if smoothing:
        loss_C1 -= smoothing * logits_CV.mean(1, keepdim=True)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    loss_C1 += sums_C1.log()
    logits_CV /= sums_C1
    if smoothing:
        logits_CV -= smoothing / logits_CV.shape[1]
    # One index per row makes this deterministic, unlike a scattered addition.
    logits_CV.scatter_(1, targets_C1, logits_CV.gather(1, targets_C1) - (1 - smoothing))
    if not head.is_plain:
        logits_CV *= slope
    return loss_C1.sum(), logits_CV.to(rows_CH.dtype)


def loss_and_gradient_to_compile(
    rows_CH: torch.Tensor, head: Head, targets_C1: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same for a compiler, which reads the logits twice and writes the gradient."""
    logits_CV = head.compute_logits(rows_CH)
    shifted_CV = logits_CV - logits_CV.amax(1, keepdim=True)
    sums_C1 = shifted_CV.exp().sum(1, keepdim=True)
    loss_C1 = sums_C1.log() - (1 - smoothing) * shifted_CV.gather(1, targets_C1)
    gradient_CV = shifted_CV.exp() / sums_C1
    if smoothing:
        loss_C1 = loss_C1 - smoothing * shifted_CV.mean(1, keepdim=True)
        gradient_CV = gradient_CV - smoothing / len(head.weight_VH)
    # No scattered write: that would need the gradient in memory twice.
    is_target_CV = torch.arange(len(head.weight_VH), device=rows_CH.device) == targets_C1
    gradient_CV = torch.where(is_target_CV, gradient_CV - (1 - smoothing), gradient_CV)
    if not head.is_plain:
        gradient_CV = gradient_CV * head.compute_slope(logits_CV)
    return loss_C1.sum(), gradient_CV.to(rows_CH.dtype)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=torch.float32)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        # In fp32 throughout: rounding each chunk's product to half would lose small gradients.
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right
