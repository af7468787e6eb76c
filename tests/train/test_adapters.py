"""Adapters: our forward pass equals peft's, and a training continues from a matching adapter."""

import copy
import json
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support import LORA, tiny_qwen3
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from expertflow.core.errors import ConfigError, TrainingError
from expertflow.core.records import read_record
from expertflow.plan.settings import ALL_LINEAR, LoraSpec
from expertflow.tokens.records import PackingRecord
from expertflow.train.job import fingerprint_run
from expertflow.train.model.adapters import use_own_forward
from expertflow.train.model.base import hash_weights
from expertflow.train.model.init_adapter import FILES, hash_adapter
from expertflow.train.model.load import add_adapter
from expertflow.train.model.weights import list_trained_parameters


def adapted(*, dora: bool, bias: bool, dropout: float) -> Any:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(96, 160, bias=bias), torch.nn.ReLU(), torch.nn.Linear(160, 32, bias))
    net = get_peft_model(
        torch.nn.Sequential(*layers),  # type: ignore[arg-type]
        LoraConfig(
            r=4, lora_alpha=12, lora_dropout=dropout, target_modules=["0", "2"], use_dora=dora
        ),
    )
    # A zero B would hide A's gradient.
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
def test_it_equals_pefts_output(dora: bool, bias: bool, dropout: float, training: bool) -> None:
    theirs = adapted(dora=dora, bias=bias, dropout=dropout)
    ours = copy.deepcopy(theirs)
    use_own_forward(ours)
    assert type(ours.base_model.model[0]) is not type(theirs.base_model.model[0])
    pairs = zip(run(ours, training=training), run(theirs, training=training), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("targets", [("v_proj", "q_proj", "o_proj", "down_proj"), (ALL_LINEAR,)])
def test_an_adapters_file_names_its_targets_in_order(tmp_path: Path, targets: Any) -> None:
    """Whoever continues from an adapter goes by this file's hash."""
    add_adapter(tiny_qwen3(vocab_size=97), replace(LORA, targets=targets)).save_pretrained(tmp_path)
    named = json.loads((tmp_path / FILES[0]).read_text())["target_modules"]
    assert len(named) >= 4 and named == sorted(named)


def test_each_target_names_a_layer() -> None:
    with pytest.raises(
        TrainingError, match=r"no layer v_prj; .*has down_proj, .*, q_proj.* v_proj"
    ):
        add_adapter(tiny_qwen3(vocab_size=97), replace(LORA, targets=("q_proj", "v_prj")))


def test_layers_with_the_same_input_share_its_dropout() -> None:
    first, second = (adapted(dora=False, bias=False, dropout=0.5) for _ in range(2))
    for net in (first, second):
        use_own_forward(net.train())
    one, other = (net.base_model.model[0] for net in (first, second))
    other.load_state_dict(one.state_dict())
    x = torch.randn(8, 96)
    torch.testing.assert_close(one(x), other(x))
    assert not torch.allclose(one(x), one(x.clone()))


def test_a_recomputed_layer_draws_its_dropout_again() -> None:
    net = adapted(dora=False, bias=False, dropout=0.5)
    use_own_forward(net)
    kept = run(net, training=True)
    # Its first layer reads the checkpoint's own input, as in a family without a norm there.
    net.forward = partial(checkpoint, net.forward, use_reentrant=False)
    torch.testing.assert_close(run(net, training=True), kept, rtol=0, atol=0)


def test_an_input_does_not_outlive_a_pass_without_dropout() -> None:
    layer = adapted(dora=False, bias=False, dropout=0.5).base_model.model[0]
    use_own_forward(layer.train())
    layer.lora_dropout["default"].p = 0.0
    x = torch.randn(8, 96)
    is_alive = weakref.ref(x)
    layer(x)
    del x
    assert is_alive() is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dora_compiles_without_a_break(dropout: float) -> None:
    net = adapted(dora=True, bias=False, dropout=dropout)
    use_own_forward(net)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(8, 96)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


FIRST = replace(LORA, dropout=0.0, modules_to_save=("embed_tokens",))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "run"
    inputs = tiny_run.made(folder, lora=FIRST, n_steps=20, learning_rate=1e-2)
    tiny_run.train(inputs)
    return next((folder / "state").glob("*/final"), folder / "state" / "final")


@pytest.fixture
def adapter(first: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first, tmp_path / "adapter")


def continued(adapter: Path, **changes: Any) -> LoraSpec:
    lora = replace(FIRST, init_from=str(adapter), **changes)
    return replace(lora, init_sha256=hash_adapter(lora))


def test_it_starts_with_the_adapters_weights_and_continues(adapter: Path, tmp_path: Path) -> None:
    saved = load_file(adapter / FILES[1])
    inputs = tiny_run.made(tmp_path / "run", lora=continued(adapter), n_steps=20)
    base = json.loads((adapter / FILES[0]).read_text())["base_model_name_or_path"]
    assert Path(base) != Path(inputs.model.path)
    weights = replace(inputs.model, weights_sha256=hash_weights(Path(base)))
    with tiny_run.assembled(replace(inputs, model=weights)) as run:
        found = list_trained_parameters(run.net)
        for name, parameter in found.items():
            short = name.replace(".modules_to_save", "").replace(".default", "")
            assert torch.equal(saved[short], parameter), name
        assert len(found) == len(saved) - 1, "the tied head is saved beside the embedding"
    again = tiny_run.train(replace(inputs, model=weights))
    fresh = tiny_run.train(tiny_run.made(tmp_path / "fresh", lora=FIRST, n_steps=20))
    assert again.loss_first < fresh.loss_first - 0.1


def test_what_decides_the_weights_names_the_state(adapter: Path, tmp_path: Path) -> None:
    inputs = tiny_run.made(tmp_path / "run", lora=continued(adapter))
    packing = read_record(PackingRecord, tmp_path / "run" / "packing.json")

    def fingerprint(place: Path, **changes: Any) -> str:
        plan = replace(inputs.plan, lora=continued(place), **changes)
        return fingerprint_run(plan=plan, packing=packing, model=inputs.model, code="c")

    moved = shutil.copytree(adapter, tmp_path / "moved")
    same = fingerprint(adapter)
    assert fingerprint(moved) == fingerprint(moved, hardware="H100 PCIe") == same
    assert fingerprint(moved, save_every_minutes=2.0) == same
    assert fingerprint(moved, learning_rate=1e-5) != same
    tensors = load_file(moved / FILES[1])
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, moved / FILES[1])
    assert fingerprint(moved) != same


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / FILES[0]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_other_settings_or_kinds_are_rejected_before_a_run(adapter: Path) -> None:
    for changes, message in (
        ({"r": 8}, "has r 4, but the settings have 8"),
        ({"alpha": 9}, "has lora_alpha 8, but the settings have 9"),
        ({"use_dora": True}, "has use_dora False, but the settings have True"),
    ):
        with pytest.raises(ConfigError, match=message):
            continued(adapter, **changes)
    for edits, message in (
        ({"init_lora_weights": "pissa_niter_4"}, "by pissa_niter_4, which also changes the base"),
        ({"peft_type": "LOHA"}, "has peft_type LOHA"),
    ):
        edit(adapter, **edits)
        with pytest.raises(ConfigError, match=message):
            continued(adapter)
    (adapter / FILES[1]).rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors.* hf download ORG"):
        continued(adapter)


def test_other_layers_are_rejected_before_the_first_step(adapter: Path, tmp_path: Path) -> None:
    edit(adapter, base_model_name_or_path="tiny")
    inputs = tiny_run.made(tmp_path / "run", lora=continued(adapter))
    for changes, message in (
        ({"targets": ("q_proj",)}, r"v_proj\.lora_A\.weight, but training.lora makes none"),
        ({"targets": ("q_proj", "v_proj", "o_proj")}, r"has none as .*o_proj\.lora_A"),
        ({"modules_to_save": ()}, r"lm_head\.weight, but training.lora makes none"),
    ):
        plan = replace(inputs.plan, lora=continued(adapter, **changes))
        with pytest.raises(TrainingError, match=message):
            tiny_run.train(replace(inputs, plan=plan))


def test_another_base_or_a_changed_adapter_is_rejected(adapter: Path, tmp_path: Path) -> None:
    edit(adapter, base_model_name_or_path="Qwen/Qwen3-0.6B")
    inputs = tiny_run.made(tmp_path / "run", lora=continued(adapter))
    message = "is an adapter of Qwen/Qwen3-0.6B, but the model is tiny"
    with pytest.raises(TrainingError, match=message):
        tiny_run.train(inputs)
    edit(adapter, base_model_name_or_path="tiny", revision="a1")
    with pytest.raises(TrainingError, match="changed since the plan was made"):
        tiny_run.train(inputs)
