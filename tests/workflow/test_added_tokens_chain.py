"""A run with added tokens, from records that contain them to plain transformers elsewhere."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from bundle_boxes import GPU_WORK, make_box, make_bundle
from support import tiny_qwen3, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from workflow_space import REPORT, Workspace, make_workspace, manifest, write_jsonl

pytestmark = [pytest.mark.chain, pytest.mark.long]
ADDED = ["<|sql|>", "<|sum|>"]
LORA = {"method": "lora", "lora": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}}
N_RECORDS = 81


def write_expert(space: Workspace, *, n_spare: int, **training: Any) -> int:
    """Write records with both tokens, and a model; return the size of its vocabulary."""
    sums = {f"<|sql|>what is {a} plus {b}<|sum|>": a + b for a in range(9) for b in range(9)}
    write_jsonl(space.root / "data" / "sums.jsonl", sums)
    base = tiny_tokenizer(space.root / "a model")
    n_known = len(AutoTokenizer.from_pretrained(base))
    tiny_qwen3(vocab_size=n_known + n_spare, scale=2.0).save_pretrained(base)
    value = manifest(**(training or LORA))
    value["model"] = "a model"
    value["data"] |= {"added_tokens": ADDED, "text_special_tokens": "reject"}
    space.write_manifest("tiny", value)
    return n_known


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = make_workspace(tmp_path_factory.mktemp("grown") / "space")
    write_expert(space, n_spare=0)
    space.run(REPORT)
    return space


def read_rows(space: Workspace) -> np.ndarray:
    found = []
    for path in sorted((space.root / "results/tiny/packed").glob("*/*.arrow")):
        with pa.memory_map(str(path)) as stream:
            table = pa.ipc.open_stream(stream).read_all()
        found.append(np.concatenate(table["input_ids"].to_pylist()))
    return np.concatenate(found)


def test_they_are_tokenized_trained_exported_and_loaded_elsewhere(grown: Workspace) -> None:
    results = grown.root / "results" / "tiny"
    known = len(AutoTokenizer.from_pretrained(grown.root / "a model"))
    model = grown.record("model.json")
    assert model["path"] == "results/tiny/base_model" and model["kind"] == "local"
    assert model["facts"]["vocab_size"] == known + 2
    assert grown.record("packing.json")["n_special_text_documents"] == 0
    ids = read_rows(grown)
    assert [int((ids == known + i).sum()) for i in range(2)] == [N_RECORDS] * 2
    tokenizer: Any = AutoTokenizer.from_pretrained(results / "merged")
    assert tokenizer(ADDED).input_ids == [[known], [known + 1]]
    merged: Any = AutoModelForCausalLM.from_pretrained(results / "merged")
    rows = merged.get_input_embeddings().weight
    base: Any = AutoModelForCausalLM.from_pretrained(results / "base_model")
    assert len(rows) == len(merged.lm_head.weight) == known + 2
    assert not torch.equal(rows[known:], base.get_input_embeddings().weight[known:])
    assert grown.record("export.json")["max_logit_difference"] < 1e-4
    assert (
        "Added tokens, recognized in any text: &lt;\\|sql\\|&gt;"
        in (results / "merged" / "README.md").read_text()
    )
    assert "after `resize_token_embeddings(" in (results / "merged" / "README.md").read_text()
    assert grown.planned() == set()


def test_a_bundle_carries_rows_that_exist_nowhere_else(grown: Workspace, tmp_path: Path) -> None:
    cheap = grown.copy(tmp_path / "cheap")
    bundle = make_bundle(cheap)
    box = make_box(tmp_path / "box", cheap)
    box.open(bundle)
    assert box.planned() == GPU_WORK
    box.run("results/tiny/training.json")
    trained = [s.record("training.json")["weights_sha256"] for s in (box, grown)]
    assert trained[0] == trained[1]


def test_a_model_with_spare_rows_is_read_in_place(tmp_path: Path) -> None:
    space = make_workspace(tmp_path / "space")
    known = write_expert(space, n_spare=9, method="full")
    bundle = make_bundle(space)
    model = space.record("model.json")
    assert model["facts"]["vocab_size"] == known + 9
    weights = space.root / model["path"] / "model.safetensors"
    assert weights.is_symlink() and weights.samefile(space.root / "a model" / weights.name)
    assert int((read_rows(space) == known).sum()) == N_RECORDS
    assert space.script("verify_results").stdout.endswith(": intact\n")
    # The box must have these weights.
    box = make_box(tmp_path / "box", space)
    assert "no such folder on this machine" in box.refused_to_open(bundle)
    shutil.copytree(space.root / "a model", box.root / "elsewhere")
    box.open(bundle, "--model", "elsewhere")
    assert box.planned() == GPU_WORK
    # The first tokenizer does not belong to another model with the same rows.
    tiny_qwen3(vocab_size=known + 9, seed=1).save_pretrained(space.root / "a model")
    assert "prepare_model" in space.planned() and "pretokenize_shard" not in space.planned()
