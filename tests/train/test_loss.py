"""The chunked loss must be torch's cross-entropy over the targets: value and gradients."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from expertflow.tokens.packing import IGNORE
from expertflow.train.model import loss as loss_module
from expertflow.train.model.loss import Head

N_IDS, WIDTH = 301, 16
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def case(
    n_targets: int, *, frozen: bool = False, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Case:
    generator = torch.Generator().manual_seed(n_targets)
    labels = torch.full((2, 600), IGNORE, dtype=torch.int32)
    places = torch.randperm(2 * 599, generator=generator)[:n_targets]
    ids = torch.randint(0, N_IDS, (n_targets,), generator=generator, dtype=torch.int32)
    labels[places // 599, 1 + places % 599] = ids
    hidden = scale * torch.randn(2, 600, WIDTH, generator=generator).to(dtype)
    head = torch.randn(N_IDS, WIDTH, generator=generator).to(dtype)
    return hidden.requires_grad_(), head.requires_grad_(not frozen), labels, n_targets


def by_torch(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, smoothing: float):  # type: ignore[no-untyped-def]
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in (hidden, head)]
    logits = functional.linear(leaves[0][:, :-1], leaves[1]).float().flatten(0, 1)
    targets = labels[:, 1:].flatten().long()
    loss = functional.cross_entropy(
        logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )
    (loss / 100).backward()
    return loss.detach(), leaves[0].grad, leaves[1].grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("n_targets", "scale"),
    [(1, 1.0), (loss_module.CHUNK, 1.0), (2 * loss_module.CHUNK + 77, 1.0), (300, 40.0)],
)
def test_it_equals_torch(n_targets: int, scale: float, frozen: bool, smoothing: float) -> None:
    """Logits far from zero do not overflow, even in code compiled for a card."""
    how = {"label_smoothing": smoothing} if smoothing else {}
    for kernel in (None, loss_module.loss_and_gradient_to_compile):
        hidden, head, labels, n = case(n_targets, frozen=frozen, scale=scale)
        loss = loss_module.sum_loss(hidden, Head(head), labels, n_targets=n, kernel=kernel, **how)
        (loss / 100).backward()
        expected, to_hidden, to_head = by_torch(hidden, head, labels, smoothing)
        torch.testing.assert_close(loss.detach(), expected)
        torch.testing.assert_close(hidden.grad, to_hidden, atol=1e-6, rtol=1e-5)
        assert (head.grad is None) == frozen
        if not frozen:
            torch.testing.assert_close(head.grad, to_head, atol=1e-5 * scale, rtol=1e-5)
    way = f"supervised rows only, {loss_module.CHUNK} at a time with their gradients, head "
    way += "frozen" if frozen else "trained"
    way += ", labels smoothed by 0.1" if smoothing else ""
    assert loss_module.loss_route(Head(head), label_smoothing=smoothing) == way


@pytest.mark.parametrize(
    "kernel", [loss_module.loss_and_gradient, loss_module.loss_and_gradient_to_compile]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("scale", "cap"), [(0.125, None), (1.0, 4.0), (2.0, 3.0)])
def test_scale_cap_and_bias_match_autograd(
    scale: float, cap: float | None, smoothing: float, kernel: loss_module.Kernel
) -> None:
    found = []
    for fused in (True, False):
        hidden, weight, labels, n = case(300)
        bias = torch.randn(N_IDS, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head, how = Head(weight, bias, scale, cap), {"label_smoothing": smoothing}
        scaled = f", logits scaled by {scale:g}" if scale != 1 else ""
        capped = "" if cap is None else f", capped at {cap:g}"
        route = loss_module.loss_route(head, label_smoothing=0)
        assert route.endswith(f"head trained, with a bias{scaled}{capped}")
        if fused:
            loss = loss_module.sum_loss(hidden, head, labels, n_targets=n, kernel=kernel, **how)
        else:
            loss = loss_module.plain_loss(hidden, head, labels, **how)
        (loss / 100).backward()
        found.append((loss.detach(), hidden.grad, weight.grad, bias.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_affects_products_and_not_sums(frozen: bool, smoothing: float) -> None:
    hidden, head, labels, n = case(700, frozen=frozen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_module.sum_loss(
            hidden, Head(head), labels, n_targets=n, label_smoothing=smoothing
        )
        expected, to_hidden, to_head = by_torch(hidden, head, labels, smoothing)
        assert loss_module.product_dtype(head.device, head.dtype) == torch.bfloat16
    assert loss_module.product_dtype(head.device, head.dtype) == torch.float32
    (loss / 100).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), expected, atol=0, rtol=1e-5)
    torch.testing.assert_close(hidden.grad, to_hidden, atol=2e-3, rtol=2e-2)
    if not frozen:
        assert head.grad is not None and head.grad.dtype == torch.float32
        torch.testing.assert_close(head.grad, to_head, atol=5e-3, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_head_in_half_gives_a_loss_in_full_precision(dtype: torch.dtype) -> None:
    """Whatever the dtype of the hidden states."""
    hidden, head, labels, n = case(1000, frozen=True, dtype=dtype)
    loss = loss_module.sum_loss(hidden, Head(head.bfloat16()), labels, n_targets=n)
    expected, *_ = by_torch(hidden, head, labels, 0.0)
    torch.testing.assert_close(loss.detach(), expected, atol=0, rtol=1e-2)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == dtype


def test_gradients_in_half_are_summed_in_full_precision() -> None:
    hidden, weight, labels, n = case(1_190, dtype=torch.bfloat16)
    bias, summed = torch.zeros(N_IDS, dtype=torch.bfloat16, requires_grad=True), []

    def keep(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made = loss_module.loss_and_gradient(*arguments)
        summed.append(made[1].float().sum(0))
        return made

    loss_module.sum_loss(hidden, Head(weight, bias), labels, n_targets=n, kernel=keep).backward()
    expected = torch.stack(summed).sum(0).bfloat16()
    # Summed in half, a fourth of the sums of five chunks would differ.
    assert bias.grad is not None and (bias.grad == expected).float().mean() > 0.95


@pytest.mark.parametrize(
    ("frozen", "enabled", "n_products"), [(True, True, 2), (True, False, 1), (False, False, 1)]
)
def test_nothing_unneeded_is_computed(frozen: bool, enabled: bool, n_products: int) -> None:
    # In half, since the counter misses products that are added in place.
    hidden, head, labels, n = case(100, frozen=frozen, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(enabled):
        loss_module.sum_loss(hidden, Head(head), labels, n_targets=n)
    assert counter.get_total_flops() == n_products * 2 * n * N_IDS * WIDTH


@pytest.mark.parametrize("trained", [False, True])
def test_a_chunk_grows_with_card_memory(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    head: Any = MagicMock(is_cuda=True, requires_grad=trained)
    head.__len__.return_value = 151_936
    for card_bytes, n_rows in ((8 << 30, 1024 if trained else loss_module.CHUNK), (80 << 30, 2816)):
        card = SimpleNamespace(total_memory=card_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        assert loss_module.chunk_rows(head) == n_rows


def test_without_targets_the_loss_and_all_gradients_are_zero() -> None:
    hidden, head, labels, n = case(0)
    loss = loss_module.sum_loss(hidden, Head(head), labels, n_targets=n)
    loss.backward()
    assert loss.item() == 0
    for tensor in (hidden, head):
        assert tensor.grad is not None and not tensor.grad.any()
