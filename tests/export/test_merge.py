"""The exported model agrees with the trained one, in the base's type."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from support import LORA
from tiny_models import TARGETS, export, held_out_rows, load, train_adapter, trained, write_base
from transformers import AutoModelForCausalLM

from expertflow.core.errors import TrainingError
from expertflow.export import merge
from expertflow.export.model_files import find_dtype
from expertflow.train.model import load as loading
from expertflow.train.model.load import load_base
from expertflow.train.model.weights import weights_sha256

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def plain(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


needs_bitsandbytes = pytest.mark.extra("bitsandbytes")
KINDS = {
    "lora": replace(LORA, targets=TARGETS),
    "dora": replace(LORA, targets=TARGETS, use_dora=True),
    "rslora": replace(LORA, targets=TARGETS, use_rslora=True),
}


@pytest.mark.parametrize(
    ("method", "kind"),
    [*(("lora", kind) for kind in KINDS), pytest.param("qlora", "dora", marks=needs_bitsandbytes)],
)
def test_a_merged_adapter_has_the_same_logits(
    base: Path, tmp_path: Path, method: str, kind: str
) -> None:
    what = train_adapter(base, tmp_path / "adapter", method=method, lora=KINDS[kind])
    record = export(what, tmp_path / "merged")
    ids = torch.arange(20)[None]
    merged = plain(tmp_path / "merged")
    untrained = load(replace(what, folder=base), "lora")(input_ids=ids).logits
    expected = load(what)(input_ids=ids).logits
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - untrained).abs().max() > 0.1
    assert record.merged_into == ("base" if method == "lora" else "dequantized base")
    assert record.max_logit_difference < 1e-3
    assert record.loss_after_merge == pytest.approx(record.loss_before_merge, abs=1e-5)
    assert (record.n_rows_compared, record.published_step) == (4, 3)


def test_merging_is_done_in_fp32_rounded_once_and_measured(tmp_path: Path) -> None:
    half_base = write_base(tmp_path / "half", dtype=torch.bfloat16)
    what = train_adapter(half_base, tmp_path / "adapter")
    rounded = export(what, tmp_path / "rounded")
    exact = load(what).merge_and_unload().state_dict()
    written = load_file(tmp_path / "rounded" / "model.safetensors")
    assert len(written) > 20
    for name, tensor in written.items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name
    whole = export(what, tmp_path / "exact", dtype="fp32")
    assert abs(whole.loss_after_merge - whole.loss_before_merge) < 1e-5
    # The base's own dtype, or the one that is set.
    for record, folder, dtype in ((rounded, "rounded", "bfloat16"), (whole, "exact", "float32")):
        saved = {str(p.dtype) for p in plain(tmp_path / folder, dtype="auto").parameters()}
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert saved == {f"torch.{dtype}"} and dtype == record.dtype == config["dtype"]
    # Without a dtype, transformers computes in that of the files; here everything is exact.
    loaded = load_base(str(tmp_path / "rounded"), dtype=torch.float32, attention_name="sdpa")
    again = merge.compute_outputs(loaded, merge.sample_rows(held_out_rows()))
    assert again.loss == rounded.loss_after_merge != rounded.loss_before_merge


@needs_bitsandbytes
def test_the_export_reads_the_base_in_the_precision_of_training(base: Path, tmp_path: Path) -> None:
    """The 4-bit codes depend on it, and an adapter fits only those it was trained on."""
    what = train_adapter(base, tmp_path / "adapter", method="qlora", precision="bf16")
    loaded = load(what)
    half = load_base(str(base), dtype=torch.bfloat16, attention_name="sdpa", quantized=True)
    codes = [dict(loading.list_quantized_layers(m)) for m in (loaded.unload(), half)]
    assert all(torch.equal(codes[0][name].weight, layer.weight) for name, layer in codes[1].items())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32, torch.uint8}


def test_large_models_split(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = train_adapter(base, tmp_path / "adapter")
    export(what, tmp_path / "one")
    monkeypatch.setattr(merge, "MAX_SHARD", "40KB")
    record = export(what, tmp_path / "many")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and record.n_bytes == sum(path.stat().st_size for path in files)
    one, many = (plain(tmp_path / name).state_dict() for name in ("one", "many"))
    assert all(torch.equal(tensor, many[name]) for name, tensor in one.items())


def test_a_fully_trained_model_is_written_in_the_bases_dtype(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        folder = write_base(tmp_path / str(dtype), dtype=dtype)
        sha256 = weights_sha256(load_base(str(folder), dtype=dtype, attention_name="sdpa"))
        merged = tmp_path / f"{dtype}-merged"
        record = export(trained(folder, base, sha256, method="full"), merged)
        assert (record.merged_into, record.dtype) == (None, "bfloat16")
    # Nothing is rounded if training had the same precision.
    assert record.loss_before_merge == record.loss_after_merge


def test_damage_is_rejected(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = train_adapter(base, tmp_path / "adapter")
    with pytest.raises(TrainingError, match=f"evaluation scored {'0' * 12}; run train_expert"):
        export(trained(what.folder, base, "0" * 64), tmp_path / "merged")
    with pytest.raises(TrainingError, match="none: no such weights; run train_expert again"):
        export(trained(tmp_path / "none", base, "0" * 64), tmp_path / "merged")
    for limit in ("MAX_LOSS_DIFFERENCE", "MAX_LOGIT_DIFFERENCE"):
        with monkeypatch.context() as patched:
            patched.setattr(merge, limit, -1.0)
            with pytest.raises(TrainingError, match="merging changed the held-out loss"):
                export(what, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def said(loss: float, *values: float) -> merge.RowOutputs:
    return merge.RowOutputs(loss, 100, (torch.tensor([list(values)]),))


def test_the_bounds_are_as_stated() -> None:
    before, nan = said(2.0, 10.0, -20.0), float("nan")
    for after, dtype, holds in (
        (said(2.0005, 10.0, -20.0), "float32", True),
        (said(2.002, 10.0, -20.0), "float32", False),
        # 0.001 + 0.1 / sqrt(100) for rounded weights
        (said(2.0105, 10.0, -20.0), "bfloat16", True),
        (said(2.012, 10.0, -20.0), "bfloat16", False),
        (said(2.0, 10.0, -19.7), "float32", False),
        (said(2.0, 10.0, -19.7), "bfloat16", True),
        (said(2.0, 10.0, -17.9), "bfloat16", False),
        (said(nan, 10.0, -20.0), "bfloat16", False),
        (said(2.0, nan, -20.0), "bfloat16", False),
    ):
        assert merge.compare_outputs(before, after, n_rows=1, dtype=dtype).holds == holds


def test_probes_are_the_beginnings_of_held_out_documents() -> None:
    rows = merge.sample_rows(held_out_rows())
    ids = rows.take_ids(torch.arange(4).numpy())
    asked = merge.make_probes(rows)
    assert [list(tensor.shape) for tensor in asked] == [[1, 14]] * 4
    assert asked[2][0].tolist() == ids[2][:14].tolist()
    [whole, *others] = merge.make_probes(merge.sample_rows(held_out_rows(3)))
    assert [tensor.shape[1] for tensor in (whole, *others)] == [14, 14, 10, 10]
    assert others[-1][0].tolist() == ids[1][14:24].tolist()


def test_a_config_may_contain_the_decoders_own(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's config does, and has no top-level vocabulary size."""

    def nested(model: Any) -> Any:
        config = SimpleNamespace(model_type="nested", get_text_config=lambda: model.config)
        return SimpleNamespace(config=config)

    monkeypatch.setattr(merge, "causal_lm", nested)
    model = load_base(str(base), dtype=torch.float32, attention_name="sdpa")
    assert merge.compute_outputs(model, merge.sample_rows(held_out_rows())).n_targets > 0


def test_the_sample_is_bounded_by_rows_and_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(merge.sample_rows(held_out_rows(50))) == 32
    monkeypatch.setattr(merge, "MAX_TOKENS", 24 * 3 + 5)
    assert len(merge.sample_rows(held_out_rows(50))) == 3
    monkeypatch.setattr(merge, "MAX_TOKENS", 5)
    assert len(merge.sample_rows(held_out_rows(50))) == 1


def test_a_base_dtype_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": torch.zeros(3, dtype=torch.float16).numpy()}, tmp_path / "model.safetensors")
    assert find_dtype("auto", tmp_path) is torch.float16
    assert find_dtype("bf16", tmp_path) is torch.bfloat16
    save_file({"w": torch.zeros(3, dtype=torch.int8).numpy()}, tmp_path / "model.safetensors")
    with pytest.raises(TrainingError, match=r"are I8; set export\.dtype to fp32 or bf16"):
        find_dtype("auto", tmp_path)
