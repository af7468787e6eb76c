"""Our forward pass of adapters computes what peft's does, and compiles in one piece."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from expertflow.train.model.adapters import use_own_forward


def adapted(*, dora: bool, bias: bool, dropout: float) -> Any:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(96, 160, bias=bias), torch.nn.ReLU(), torch.nn.Linear(160, 32, bias))
    net = get_peft_model(
        torch.nn.Sequential(*layers),  # type: ignore[arg-type]
        LoraConfig(
            r=4, lora_alpha=12, lora_dropout=dropout, target_modules=["0", "2"], use_dora=dora
        ),
    )
    # At zero, B would hide the gradient of A.
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return net


def run(net: Any, *, training: bool) -> list[torch.Tensor]:
    """Return the output and the gradients of all that is trained."""
    net.train(training).zero_grad()
    torch.manual_seed(1)
    out = net(torch.randn(48, 96, generator=torch.Generator().manual_seed(2)))
    out.square().mean().backward()
    return [out, *(p.grad for p in net.parameters() if p.requires_grad)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_it_equals_pefts(dora: bool, bias: bool, dropout: float, training: bool) -> None:
    theirs = adapted(dora=dora, bias=bias, dropout=dropout)
    ours = copy.deepcopy(theirs)
    use_own_forward(ours)
    assert type(ours.base_model.model[0]) is not type(theirs.base_model.model[0])
    pairs = zip(run(ours, training=training), run(theirs, training=training), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dora", [True, False])
def test_merged_or_switched_off_it_is_pefts(dora: bool) -> None:
    net = adapted(dora=dora, bias=True, dropout=0.1)
    use_own_forward(net)
    net.eval()
    x = torch.randn(8, 96)
    base = net.base_model.model[0].base_layer(x).relu()
    with net.disable_adapter():
        torch.testing.assert_close(net(x), net.base_model.model[2].base_layer(base))
    adapted_out = net(x)
    net.merge_adapter()
    torch.testing.assert_close(net(x), adapted_out, rtol=1e-4, atol=1e-5)


def test_layers_that_read_one_input_share_its_dropout() -> None:
    first, second = (adapted(dora=False, bias=False, dropout=0.5) for _ in range(2))
    for net in (first, second):
        use_own_forward(net.train())
    one, other = (net.base_model.model[0] for net in (first, second))
    other.load_state_dict(one.state_dict())
    x = torch.randn(8, 96)
    torch.testing.assert_close(one(x), other(x))
    assert not torch.allclose(one(x), one(x.clone()))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dora_compiles_without_a_break(dropout: float) -> None:
    net = adapted(dora=True, bias=False, dropout=dropout)
    use_own_forward(net)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(8, 96)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
