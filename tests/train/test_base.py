"""Models on disk: what a record says of one, what is downloaded, what is loaded to train."""

import json
import os
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from loopback_hub import Handler, Hub, Repository
from msgspec.structs import replace
from safetensors.torch import save_file
from support import LORA, SCRIPTS, write_tiny_run
from transformers import Qwen3Config, Qwen3ForCausalLM, Starcoder2Config

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record, to_json
from expertflow.data.layout import CHATML
from expertflow.plan.records import TrainPlan
from expertflow.train.model.base import (
    prepare_model,
    read_facts,
    save_tokenizer,
    train_tokenizer,
    wanted_files,
)
from expertflow.train.model.load import (
    ADAPTER_FILE,
    load_base,
    load_for_training,
    loaded_words,
    name_base,
)
from expertflow.train.records import ModelRecord, ModelSpec

TEXTS = ("LICENSE", "LICENCE.md", "License-en", "NOTICE", "COPYING", "USE_POLICY.md")

FETCH = """
import sys
from expertflow.core.records import from_json, to_json
from expertflow.train.model.base import prepare_model
from expertflow.train.records import ModelSpec
from pathlib import Path
import json
spec = from_json(ModelSpec, json.loads(sys.argv[1]), where="spec")
print(prepare_model(spec, [], Path("made")).path)
"""

CPU = torch.device("cpu")


def spec(model: str) -> ModelSpec:
    return ModelSpec(
        model=model, revision=None, licence=None, vocab_size=300, n_layers=1, hidden_size=16,
        n_heads=2, n_kv_heads=1, head_dim=8, intermediate_size=32, tokenizer=None, content={},
        chat_template="auto", text_special_tokens="plain", seed=0,
    )  # fmt: skip


def test_the_builtin_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    made = [prepare_model(spec("builtin:tiny-qwen3"), ["a b"], tmp_path / n) for n in "ab"]
    assert made[0].weights_sha256 == made[1].weights_sha256
    assert made[0].tokenizer_sha256 == made[1].tokenizer_sha256
    assert made[0].facts.n_layers == 1


def test_a_tied_head_that_is_stored_twice_counts_once(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    save_tokenizer(train_tokenizer(["a"], vocab_size=300), tmp_path)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    assert "lm_head.weight" in weights
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({"x": torch.zeros(5)}, tmp_path / "consolidated.safetensors")
    record = prepare_model(spec(str(tmp_path)), [], tmp_path / "out")
    assert record.n_parameters == sum(p.numel() for p in model.parameters())


def test_a_plain_mlp_has_two_matrices(tmp_path: Path) -> None:
    for config, n in ((Qwen3Config(), 3), (Starcoder2Config(), 2)):
        config.save_pretrained(tmp_path)
        assert read_facts(tmp_path).n_mlp_matrices == n


def test_the_record_says_how_the_model_writes_chats(tmp_path: Path) -> None:
    record = prepare_model(spec("builtin:tiny-qwen3"), ["a b"], tmp_path / "made")
    assert record.layout.chat_template == CHATML
    assert (record.layout.turn_end, record.layout.text_end) == ("<|im_end|>", "<|endoftext|>")


class ModelHandler(Handler):
    """Serve models by the interface of data sets."""

    def answer(self) -> None:
        path = self.path.replace("/api/models/", "/api/datasets/")
        self.path = path if path.startswith("/api/") else f"/datasets{path}"
        super().answer()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Give the files of a tiny model, with terms, and with what is of no use."""
    prepare_model(spec("builtin:tiny-qwen3"), ["a b"], tmp_path / "model")
    found = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    others = dict.fromkeys(("README.md", "pytorch_model.bin", "tokenizer.model"), b"x")
    return {**found, **others, **{name: name.encode() for name in TEXTS}}


def test_licence_texts_and_tokenizer_models_are_downloaded_and_packed(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    hub = Hub({"maker/model": Repository(files)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (ModelHandler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", FETCH, json.dumps(to_json(spec("maker/model")))],
            env={
                **clean, "HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300",
                "PYTHONPATH": str(SCRIPTS), "HF_HOME": str(tmp_path / "home"),
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            },
            capture_output=True, text=True, timeout=300, cwd=tmp_path,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip())
    wanted = files.keys() - {"README.md", "pytorch_model.bin"}
    assert {path.name for path in folder.iterdir()} == wanted
    # A bundle packs these.
    assert {path.name for path in wanted_files(folder)} == wanted
    assert (folder / "LICENSE").read_bytes() == b"LICENSE"


@pytest.mark.parametrize(
    ("kind", "named"), [("hub", ("maker/model", "abc")), ("local", ("results/e/base_model", None))]
)
def test_an_adapter_names_a_hub_model_by_its_id(
    tmp_path: Path, kind: str, named: tuple[str, str | None]
) -> None:
    saved = {"base_model_name_or_path": "results/e/base_model", "r": 8, "revision": None}
    (tmp_path / ADAPTER_FILE).write_text(json.dumps(saved))
    model: Any = SimpleNamespace(kind=kind, name="maker/model", revision="abc")
    name_base(tmp_path, cast(ModelRecord, model))
    value = json.loads((tmp_path / ADAPTER_FILE).read_text())
    assert (value["base_model_name_or_path"], value["revision"]) == named
    assert value["r"] == 8


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
