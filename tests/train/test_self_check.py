"""The check before the first step must see what would go wrong, and leave no trace."""

from typing import Any

import pytest
import torch
from test_families import FAMILIES, made

from expertflow.core.errors import TrainingError
from expertflow.train.model import attention
from expertflow.train.model.packed import PackedLoss
from expertflow.train.model.self_check import check_model


def test_nothing_is_changed_by_the_check() -> None:
    net = made(FAMILIES["qwen3"], "packed", adapter=True, checkpointing=True)
    net.get_base_model().model.layers[0].eval()
    loss = PackedLoss(net)
    modes = [module.training for module in loss.modules()]
    weights = [p.detach().clone() for p in net.parameters()]
    random = torch.random.get_rng_state()
    check_model(loss)
    assert [module.training for module in loss.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert net.config._attn_implementation == attention.NAME
    assert not net.get_base_model().base_model._forward_hooks


def test_modes_and_attention_come_back_after_a_refusal() -> None:
    import transformers
    from test_families import SMALL

    net = made(transformers.GraniteConfig(**SMALL, logits_scaling=8.0), "packed")
    with pytest.raises(TrainingError):
        check_model(PackedLoss(net))
    assert net.training and net.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("autocast", [False, True])
def test_documents_that_see_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    def whole_rows(batch: Any, device: torch.device) -> torch.Tensor:
        n_rows, length = batch.input_ids_BL.shape
        return torch.arange(n_rows + 1, dtype=torch.int32) * length

    loss = PackedLoss(made(FAMILIES["qwen3"], "packed"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        check_model(loss)
        monkeypatch.setattr("expertflow.train.model.packed.padded_bounds", whole_rows)
        with pytest.raises(TrainingError, match="qwen3 does not keep packed documents apart"):
            check_model(loss)


def test_a_model_that_sees_the_future_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def not_causal(*tensors: Any, **options: Any) -> Any:
        return sdpa(*tensors, **{**options, "is_causal": False})

    loss = PackedLoss(made(FAMILIES["llama"], "packed"))
    monkeypatch.setattr("expertflow.train.model.attention.scaled_dot_product_attention", not_causal)
    with pytest.raises(TrainingError, match="llama does not keep packed documents apart"):
        check_model(loss)


def test_states_that_are_no_numbers_are_refused() -> None:
    net = made(FAMILIES["llama"], "packed")
    with torch.no_grad():
        net.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="off by nan"):
        check_model(PackedLoss(net))


def test_an_adapter_on_the_head_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    net = get_peft_model(made(FAMILIES["llama"], "packed"), config)
    with pytest.raises(TrainingError, match=r"not a plain linear map; take it out of"):
        check_model(PackedLoss(net))
