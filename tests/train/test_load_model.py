"""What is loaded for training: in which precision, and what learns."""

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support import LORA, write_tiny_run

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.train.model.load import load_base, load_for_training, loaded_words
from expertflow.train.records import ModelRecord

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainPlan, ModelRecord]:
    folder = tmp_path_factory.mktemp("run")
    write_tiny_run(folder, lora=LORA)
    plan = read_record(TrainPlan, folder / "plan.json")
    return plan, read_record(ModelRecord, folder / "model.json")


def test_a_frozen_base_is_held_in_half_under_an_adapter_in_fp32(
    run: tuple[TrainPlan, ModelRecord],
) -> None:
    plan = replace(run[0], precision="bf16")
    net = load_for_training(plan, run[1], CPU)
    found = {("lora" in name, p.requires_grad, p.dtype) for name, p in net.named_parameters()}
    assert found == {(True, True, torch.float32), (False, False, torch.bfloat16)}
    assert loaded_words(net, plan) == "base frozen in bf16, adapter in fp32"


def test_weights_that_learn_are_in_fp32_under_half_precision(
    run: tuple[TrainPlan, ModelRecord],
) -> None:
    plan = replace(run[0], precision="bf16", method="full", lora=None)
    net = load_for_training(plan, run[1], CPU)
    assert {(p.requires_grad, p.dtype) for p in net.parameters()} == {(True, torch.float32)}
    assert loaded_words(net, plan) == "all weights trained, in fp32"


def test_activation_checkpointing_is_on_in_every_layer(run: tuple[TrainPlan, ModelRecord]) -> None:
    net = load_for_training(replace(run[0], gradient_checkpointing=True), run[1], CPU)
    layers = net.get_base_model().model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, True]


def test_weights_that_are_quantised_already_are_refused(
    run: tuple[TrainPlan, ModelRecord], tmp_path: Path
) -> None:
    config = json.loads((Path(run[1].path) / "config.json").read_text())
    text = json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TrainingError, match="quantised already; use the original ones"):
        load_base(str(tmp_path), dtype=torch.float32, attention_name="sdpa")
