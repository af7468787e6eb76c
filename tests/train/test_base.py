"""Models on disk: their records, downloads and loading, also in 4 bits."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loopback_hub import Hub, Repository, serving_models
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from support import LORA, SCRIPTS, tiny_tokenizer, train_on
from transformers import CONFIG_MAPPING

from expertflow.core.errors import DataError, TrainingError
from expertflow.core.records import to_json
from expertflow.data.layout import CHATML
from expertflow.plan.flops import KNOWN_TYPES
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.records import TokenizerSpec
from expertflow.tokens.tokenizer import prepare_tokenizer
from expertflow.train.model import load as loading
from expertflow.train.model.base import (
    TIED,
    count_parameters,
    hash_weights,
    list_model_files,
    prepare_model,
    read_facts,
)
from expertflow.train.model.packed import PackedLoss, causal_lm, compute_held_out_loss
from expertflow.train.model.weights import load_trainable_state, trainable_state
from expertflow.train.records import ModelRecord, ModelSpec
from expertflow.train.run import TrainInputs

TEXTS = ("LICENSE", "LICENCE.md", "License-en", "NOTICE", "COPYING", "USE_POLICY.md")

FETCH = """
import json, sys
from pathlib import Path
from expertflow.core.records import from_json
from expertflow.tokens.records import TokenizerSpec
from expertflow.tokens.tokenizer import prepare_tokenizer
from expertflow.train.records import ModelSpec
told = json.loads(sys.argv[1])
tokenizer = prepare_tokenizer(from_json(TokenizerSpec, told[0]), [], Path("tokenizer"))
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
from expertflow.train.model.base import prepare_model
print(prepare_model(from_json(ModelSpec, told[1]), tokenizer, Path("made")).path)
"""

CPU = torch.device("cpu")


def spec(model: str) -> ModelSpec:
    return ModelSpec(
        model=model, revision=None, license=None, n_layers=1, hidden_size=16, n_heads=2,
        n_kv_heads=1, head_dim=8, intermediate_size=32, content={}, seed=0,
    )  # fmt: skip


def tokenizer_spec(model: str, **changes: Any) -> TokenizerSpec:
    settings: dict[str, Any] = {
        "model": model, "revision": None, "tokenizer": None, "vocab_size": 300,
        "chat_template": "auto", "text_special_tokens": "plain", "content": {},
    }  # fmt: skip
    return TokenizerSpec(**{**settings, **changes})


def prepare(model: str, folder: Path) -> ModelRecord:
    """Prepare a model and its tokenizer below a folder."""
    tokenizer = prepare_tokenizer(tokenizer_spec(model), ["a b"], folder / "tokenizer")
    return prepare_model(spec(model), tokenizer, folder / "model")


def test_the_builtin_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    one, other = (prepare("builtin:tiny-qwen3", tmp_path / name) for name in "ab")
    assert one.weights_sha256 == other.weights_sha256
    assert one.tokenizer.sha256 == other.tokenizer.sha256
    assert (one.facts.vocab_size, one.facts.n_layers) == (one.tokenizer.vocab_size, 1)
    assert one.license == "apache-2.0"
    known, model = prepare("builtin:tiny-qwen3", tmp_path), tmp_path / "model"
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    save_file({"x": torch.zeros(5)}, model / "consolidated.safetensors")
    assert prepare(str(model), tmp_path / "out").n_parameters == known.n_parameters


CONFIG = {
    "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 4,
    "vocab_size": 9, "model_type": "llama",
}  # fmt: skip


def test_an_invalid_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no config\.json"):
        read_facts(tmp_path)
    for text, message in (
        ("3", "not a JSON object"),
        ("[" * 99_999, "not a JSON object"),
        (json.dumps({**CONFIG, "num_attention_heads": 0}), "num_attention_heads is 0, not a count"),
        (json.dumps({**CONFIG, "vocab_size": "9"}), "vocab_size is '9', not a count"),
        (json.dumps({"model_type": ["llama"]}), "no key 'num_attention_heads'"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(TrainingError, match=message):
            read_facts(tmp_path)


def tensor(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("family", sorted(KNOWN_TYPES | TIED))
def test_a_config_without_tied_embeddings_is_read_like_transformers(family: str) -> None:
    assert CONFIG_MAPPING[family]().tie_word_embeddings == (family in TIED)


def test_weights_with_a_wrong_header_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    wrong = ({"a": tensor([40], 0, 160)}, {"a": tensor([1 << 62, 1 << 62], 0, 16)})
    for text in (b"", b"[" * 9_999, *(json.dumps(header).encode() for header in wrong)):
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        with pytest.raises(TrainingError, match=r"not a safetensors file \(.*; fetch or save"):
            count_parameters([file], tied=False)


def test_a_model_that_changes_while_it_is_read_is_reported(
    tiny: TrainInputs, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.model.path, folder)
    model = replace(tiny.model, path=str(folder), weights_sha256=hash_weights(folder))
    assert {path.name for path in model.files_outside} > {"config.json", "model.safetensors"}
    (folder / "model.safetensors").write_bytes(b"other")
    with pytest.raises(DataError, match="its weights changed while they were read; run again"):
        _ = model.files_outside


def test_a_tokenizers_record_does_not_contain_its_origin(tmp_path: Path) -> None:
    """So other weights with the same tokenizer change no tokens."""
    own, records = tmp_path / "tokenizer", []
    for folder in (tiny_tokenizer(tmp_path / "a"), tiny_tokenizer(tmp_path / "b")):
        for told in (tokenizer_spec(str(folder)),
                     tokenizer_spec("builtin:tiny-qwen3", tokenizer=str(folder))):  # fmt: skip
            records.append(prepare_tokenizer(told, [], own))
    assert records == records[:1] * 4
    (tmp_path / "a" / "chat_template.jinja").write_text(CHATML + "{# own #}")
    changed = prepare_tokenizer(tokenizer_spec(str(tmp_path / "a")), [], own)
    assert (changed.sha256, changed.layout) != (records[0].sha256, records[0].layout)


def test_a_bad_tokenizer_is_reported(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "mine")
    for name, text, message in (
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: is not a JSON object"),
        ("tokenizer_config.json", b'{"a', "tokenizer_config.json: damaged ("),
        ("tokenizer.json", b"", "tokenizer.json: damaged (EOF"),
        ("tokenizer.json", None, "no tokenizer.json; set the folder or hub id"),
    ):
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_bytes(text)
        with pytest.raises(DataError) as refused:
            prepare_tokenizer(tokenizer_spec(str(folder)), [], tmp_path / "tokenizer")
        assert message in str(refused.value) and str(folder) in str(refused.value)


def test_a_changed_tokenizer_is_rejected(tmp_path: Path) -> None:
    prepare("builtin:tiny-qwen3", tmp_path)
    model = tmp_path / "model"
    tokenizer = prepare_tokenizer(tokenizer_spec(str(model)), [], tmp_path / "own")
    with (model / "tokenizer.json").open("a") as stream:
        stream.write(" ")
    with pytest.raises(TrainingError, match=r"changed since .*own was made from it"):
        prepare_model(spec(str(model)), tokenizer, tmp_path / "made")


def test_licenses_and_tokenizers_are_downloaded(tmp_path: Path) -> None:
    prepare("builtin:tiny-qwen3", tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    files |= dict.fromkeys(("README.md", "pytorch_model.bin", "tokenizer.model"), b"x")
    files |= {name: name.encode() for name in TEXTS}
    # First, the weights differ from the listed ones.
    repository = Repository(files, sent={"model.safetensors": files["model.safetensors"] + b"x"})
    told = [tokenizer_spec("maker/model"), spec("maker/model")]
    command = [sys.executable, "-c", FETCH, json.dumps(to_json(told))]
    environment = {
        **os.environ, "HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300",
        "PYTHONPATH": str(SCRIPTS), "HF_HOME": str(tmp_path / "home"),
    }  # fmt: skip
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
    with serving_models(Hub({"maker/model": repository})) as environment["HF_ENDPOINT"]:
        refused = subprocess.run(command, env=environment, **how).stderr.splitlines()[-1]
        [blob] = re.findall(r"model\.safetensors: is not its commit's file.* delete (\S+)", refused)
        Path(blob).unlink()
        repository.sent.clear()
        done = subprocess.run(command, env=environment, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip())
    wanted = files.keys() - {"README.md", "pytorch_model.bin"}
    assert {path.name for path in folder.iterdir()} == wanted
    # A bundle packs these.
    assert {path.name for path in list_model_files(folder)} == wanted
    assert (folder / "LICENSE").read_bytes() == b"LICENSE"


def test_an_adapter_names_a_hub_model_by_its_id(tmp_path: Path) -> None:
    saved = {"base_model_name_or_path": "results/e/base_model", "r": 8, "revision": None}
    (tmp_path / loading.ADAPTER_FILE).write_text(json.dumps(saved))
    model: Any = SimpleNamespace(kind="hub", name="maker/model", revision="abc")
    loading.name_base(tmp_path, model)
    expected = {**saved, "base_model_name_or_path": "maker/model", "revision": "abc"}
    assert json.loads((tmp_path / loading.ADAPTER_FILE).read_text()) == expected


def test_trained_weights_are_in_fp32_and_layers_checkpointed(tiny: TrainInputs) -> None:
    half = replace(tiny.plan, precision="bf16")
    adapted = {(True, True, torch.float32), (False, False, torch.bfloat16)}
    whole = {(False, True, torch.float32)}
    pure = replace(half, method="full", lora=None, pure_bf16=True)
    for plan, held, message in (
        (half, adapted, "base frozen in bf16, adapter in fp32"),
        (replace(half, method="full", lora=None), whole, "all weights trained, in fp32"),
        (pure, {(False, True, torch.bfloat16)}, "all weights trained, in bf16"),
    ):
        net = loading.load_for_training(plan, tiny.model, CPU)
        found = {("lora" in name, p.requires_grad, p.dtype) for name, p in net.named_parameters()}
        assert found == held
        assert loading.describe_weights(net, plan) == message
    net = loading.load_for_training(
        replace(tiny.plan, gradient_checkpointing=True), tiny.model, CPU
    )
    layers = net.get_base_model().model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, True]


def test_quantized_or_absent_weights_are_rejected(tiny: TrainInputs, tmp_path: Path) -> None:
    config = json.loads((Path(tiny.model.path) / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    for value, match in (
        (quantized, "already quantized; use the original ones"),
        (config, "cannot be loaded"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(value))
        with pytest.raises(TrainingError, match=match):
            loading.load_base(str(tmp_path), dtype=torch.float32, attention_name="sdpa")


needs_bitsandbytes = pytest.mark.extra("bitsandbytes")
Load = Callable[..., Any]


@pytest.fixture
def run(tiny: TrainInputs) -> TrainInputs:
    # Every kind of layer of Qwen3 that is quantized; the LoRA of the demos has two.
    lora = replace(LORA, targets=("q_proj", "o_proj", "down_proj"))
    return replace(tiny, plan=replace(tiny.plan, method="qlora", lora=lora))


@pytest.fixture
def load(run: TrainInputs) -> Load:
    def load_(**changes: Any) -> Any:
        torch.manual_seed(1)
        assert run.plan.lora is not None
        plan = replace(run.plan, lora=replace(run.plan.lora, **changes))
        return loading.load_for_training(plan, run.model, torch.device("cpu"))

    return load_


@pytest.fixture
def rows() -> PackedRows:
    ids = np.random.default_rng(0).integers(0, 97, (2, 32)).astype(np.int32)
    return PackedRows.from_lists(ids, [[20, 12], [32]], [[2, 20, 22, 32], [2, 32]])


def held_out_loss(net: Any, rows: PackedRows) -> Any:
    return compute_held_out_loss(PackedLoss(net).eval(), rows, micro_batch_size=2)


@needs_bitsandbytes
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_only_the_adapter_learns(load: Load, rows: PackedRows, changes: dict[str, bool]) -> None:
    net = load(**changes)
    frozen = {n: p.clone() for n, p in net.named_parameters() if not p.requires_grad}
    losses = train_on(net, rows, n_steps=25)
    assert losses[-1] < losses[0] - 0.2
    after = dict(net.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in frozen.items())
    learnt = {name: p for name, p in after.items() if p.requires_grad}
    assert learnt and all("lora_" in name for name in learnt)
    assert {p.dtype for p in learnt.values()} == {torch.float32}


@needs_bitsandbytes
def test_layers_are_in_4_bits_and_embeddings_and_head_are_not(load: Load, run: TrainInputs) -> None:
    net = load()
    lm = causal_lm(net)
    assert len(loading.list_quantized_layers(lm)) == 2 * 7
    state = lm.model.layers[0].self_attn.k_proj.weight.quant_state
    assert (state.quant_type, state.nested) == ("nf4", True)
    assert type(lm.get_output_embeddings()) is torch.nn.Linear
    assert lm.get_output_embeddings().weight.dtype == torch.float32
    assert loading.describe_weights(net, run.plan).startswith(
        "base in NF4, double quantized, fp32 compute: 14 layers;"
    )


@needs_bitsandbytes
def test_adapters_reload(load: Load, rows: PackedRows, run: TrainInputs, tmp_path: Path) -> None:
    net = load()
    train_on(net, rows, n_steps=5)
    expected = held_out_loss(net, rows)
    save_file(trainable_state(net), tmp_path / "weights.safetensors")
    fresh = load()
    load_trainable_state(fresh, load_file(tmp_path / "weights.safetensors"))
    assert held_out_loss(fresh, rows) == expected
    net.save_pretrained(tmp_path / "checkpoint")
    scored = loading.load_for_scoring(
        tmp_path / "checkpoint", model=run.model, plan=run.plan, fallbacks=()
    )
    assert held_out_loss(scored, rows) == expected


@needs_bitsandbytes
def test_the_base_is_scored_in_4_bits_too(load: Load, rows: PackedRows, run: TrainInputs) -> None:
    untrained = held_out_loss(load(), rows)
    for method in ("qlora", "lora"):
        plan = replace(run.plan, method=method)
        before = loading.load_for_scoring(None, model=run.model, plan=plan, fallbacks=())
        assert (held_out_loss(before, rows) == untrained) is (method == "qlora")


def test_a_missing_package_has_one_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=r"run pip install -r envs/requirements-bitsandbytes"):
        load()
