"""A dry run's forecast of a training: from the plan, tokens or bytes, or why there is none."""

import gzip
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support import QWEN3_CONFIG

from expertflow.config import forecast
from expertflow.config.expert import RunContext
from expertflow.config.forecast import CPU_SHARE
from expertflow.config.machine import export_memory_mb, runtime_minutes
from expertflow.config.workflow import Workflow
from expertflow.core.records import write_record
from expertflow.core.sidecars import write_sidecar
from expertflow.data.records import DataFile, SourceRecord
from expertflow.hardware import probe
from expertflow.plan.flops import flops_per_token
from expertflow.plan.records import CostPlan
from expertflow.tokens.records import PackedSplit
from expertflow.train.model.base import read_facts

COST = {
    "price_usd_per_hour": 2.5, "price_as_of": "2026-11-01", "predicted_hours": 1.5,
    "predicted_hours_low": 1.0, "predicted_hours_high": 2.25, "predicted_usd": 3.75,
    "predicted_usd_low": 2.5, "predicted_usd_high": 5.625, "reason": "a prior",
}  # fmt: skip
H100_FLOPS_PER_S = 989.5e12
MANIFEST = """
description: d
model: model
sources: [{name: s, kind: local, path: x.jsonl, text: "{t}"}]
training: {method: full, num_train_epochs: 2.0, gradient_checkpointing: false}
data: {eval_fraction: 0.1}
evaluation: {task: held_out_loss}
"""


class Place:
    """A folder with its own expert, and queries about it."""

    def __init__(self, root: Path) -> None:
        self.manifest: dict[str, Any] = yaml.safe_load(MANIFEST)
        self.config: dict[str, Any] = {"preset": "full", "hardware": "H100 SXM"}
        for folder in ("config/experts", "config/hardware", "model", "results/e/sources/fetched"):
            (root / folder).mkdir(parents=True)
        Path("model/config.json").write_text(json.dumps(QWEN3_CONFIG))
        Path("x.jsonl").write_text("x" * 9_000_000)
        prices = {"H100 SXM": {"usd_per_hour": 2.5, "as_of": "2026-11-01"}}
        Path("config/hardware/prices.yaml").write_text(yaml.safe_dump({"prices": prices}))

    @property
    def workflow(self) -> Workflow:
        Path("config/experts/e.yaml").write_text(yaml.safe_dump(self.manifest))
        return Workflow(RunContext(config={"experts": {"e": {}}, **self.config}, looks=True))

    def record(self, rule: str, name: str, value: Any, **of: str) -> None:
        """Write a record as the rule would with the current settings and code."""
        path = Path("results/e", name)
        write_record(path, value)
        wildcards = SimpleNamespace(expert="e", **of)
        spec = self.workflow.spec(rule)(wildcards)
        write_sidecar(path, spec=spec, code=self.workflow.code(rule)(wildcards), rule=rule)

    def plan(self, **cost: Any) -> None:
        value = {"cost": CostPlan(**{**COST, **cost}), "hardware": "H100 SXM", "world_size": 1}
        self.record("plan_training", "plan.json", value)

    def packing(self) -> None:
        self.record("prepare_model", "model.json", {"facts": read_facts(Path("model"))})
        counts = {"n_tokens_in": 1_000_000, "n_tokens": 1_000_000, "n_target_tokens": 500_000,
                  "n_sequences": 500, "sum_len_sq": 400_000_000}  # fmt: skip
        fields = dict.fromkeys(PackedSplit.__struct_fields__, 0) | {"path": "p", "sha256": ""}
        value = {"train": fields | counts, "sequence_length_tokens": 2048}
        self.record("pack_sequences", "packing.json", value)

    def told(self, rule: str) -> Any:
        return self.workflow.forecast(rule)(SimpleNamespace(expert="e", source="s", shard="000"))

    def parts(self) -> list[str]:
        told = self.told("train_expert")
        hours, dollars, *rest = told.split("; ", 3)
        return [hours.removesuffix(" hours"), dollars.removesuffix(" dollars"), *rest]

    def basis(self) -> str:
        return self.parts()[3]

    def hours(self) -> tuple[float, float]:
        low, high = self.parts()[0].split(" to ")
        return float(low), float(high)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-cache"))
    return Place(tmp_path)


def test_a_current_plan_is_trusted(place: Place) -> None:
    place.plan()
    basis = "plan; $2.50/h of 2026-11-01"
    assert place.parts() == ["1.0 to 2.2", "2.5 to 5.6", "1 x H100 SXM", basis]
    place.plan(calibrated=True)
    assert place.basis() == "calibrated plan; $2.50/h of 2026-11-01"
    place.plan(predicted_hours_low=None, predicted_hours_high=None, reason="no peak")
    assert place.parts() == ["unknown", "unknown", "H100 SXM", "plan: no peak"]
    place.manifest["training"]["learning_rate"] = 5e-6
    basis = place.basis()
    assert basis.startswith("estimate from bytes; ")
    assert basis.endswith("; plan.json is from other settings or code")


def test_a_plan_that_cannot_be_read_does_not_count_and_ends_no_run(place: Place) -> None:
    for damaged in ("plan.json", ".plan.json.fingerprint"):
        place.plan()
        Path("results/e", damaged).write_text("{")
        assert place.basis().startswith("estimate from bytes; ")
    for plan in ({"cost": {"old": 1}}, {"costs": 1}):
        place.record("plan_training", "plan.json", plan)
        *known, basis = place.parts()
        assert known == ["unknown", "unknown", "H100 SXM"]
        assert basis.startswith("results/e/plan.json")


def test_packed_tokens_take_the_time_of_their_steps(place: Place) -> None:
    place.packing()
    hidden, q, kv = 1024, 16 * 128, 8 * 128
    layers = 28 * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * 3072)
    head, attention = hidden * 151936 * 0.5, 28 * q * 200
    flops = 2 * 1_000_000 * (6 * (layers + head) + 12 * attention)
    low, high = once = place.hours()
    # Slower than all products at their share of the peak, but not by much.
    products = flops / (H100_FLOPS_PER_S * 0.57) / 3600
    assert low < high < 3 * products and low > products
    basis = "estimate from packed tokens; $2.50/h of 2026-11-01; bound by matrix products"
    assert place.basis() == basis
    # Recomputed layers take time.
    place.manifest["training"]["gradient_checkpointing"] = "auto"
    assert place.hours()[0] == once[0] and place.hours()[1] > 1.1 * once[1]
    # Small steps take longer for the same tokens; the rows' length is packing's.
    place.manifest["training"] |= {"batch_size": 1, "gradient_accumulation_steps": 1}
    in_small_steps = place.hours()
    assert in_small_steps > once
    place.manifest["training"]["max_seq_length"] = 2048
    place.packing()
    assert place.hours() == in_small_steps


def test_full_precision_takes_twice_as_long_and_shares_are_updated_at_once(place: Place) -> None:
    place.packing()
    place.manifest["training"] |= {"method": "lora", "num_train_epochs": 100.0}
    half = place.hours()
    place.manifest["training"] |= {"bf16": False}
    # TF32 has half the peak of bf16, and its values twice the bytes.
    assert place.hours() == pytest.approx([2 * hours for hours in half], rel=0.05)
    place.manifest["training"] |= {"method": "full", "world_size": 8}
    whole = place.hours()
    place.manifest["training"]["parallel"] = "fsdp"
    assert place.hours() < whole


def test_a_card_too_small_for_the_weights_is_rejected(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run() -> None:
        place.workflow.priority("train_expert")(SimpleNamespace(expert="e"))

    dry_run()
    Path("model/config.json").write_text(json.dumps(QWEN3_CONFIG | {"num_hidden_layers": 500}))
    too_large = (
        "e: weights, gradients and optimizer take 119.5 GiB and H100 SXM has 74.5 GiB; set"
        " pure_bf16 to true and optim to adamw_8bit, or use a larger card"
    )
    with pytest.raises(SystemExit, match=too_large):
        dry_run()
    # In close cases only the plan's trace can decide.
    Path("model/config.json").write_text(json.dumps(QWEN3_CONFIG | {"num_hidden_layers": 280}))
    capsys.readouterr()
    dry_run()
    assert "H100 SXM has 74.5 GiB; whether activations fit is not known" in capsys.readouterr().err
    # Frozen weights in half precision fit.
    place.manifest["training"]["method"] = "lora"
    dry_run()


@pytest.mark.parametrize(
    ("training", "n_tokens"),
    [
        # A step has more rows than an epoch.
        ({"max_steps": 3, "batch_size": 1_000, "gradient_accumulation_steps": 1}, 3_000_000),
        # Rows of 2,000 tokens, two per step.
        ({"max_steps": 100, "batch_size": 2, "gradient_accumulation_steps": 1}, 400_000),
        ({"target_tokens": 500_000, "min_epochs": None}, 500_000),
        ({"target_tokens": 500_000, "min_epochs": 3.0}, 3_000_000),
    ],
)
def test_a_bound_of_steps_counts(place: Place, training: dict[str, Any], n_tokens: int) -> None:
    place.packing()
    two_epochs = place.hours()[0]
    place.manifest["training"] |= training
    assert place.hours()[0] == pytest.approx(two_epochs * n_tokens / 2_000_000, rel=0.2)


def test_the_band_from_bytes_contains_the_packed_tokens(place: Place) -> None:
    # Four bytes per token, all but a tenth of them for training.
    Path("x.jsonl").write_text("x" * (4 * 1_000_000 * 10 // 9))
    wide = place.hours()
    place.packing()
    narrow = place.hours()
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_twice_the_bytes_take_twice_the_hours_and_compressed_ones_more(place: Place) -> None:
    once = place.hours()
    Path("x.jsonl").write_text("x" * 18_000_000)
    assert place.hours() == pytest.approx((2 * once[0], 2 * once[1]), rel=0.1)
    Path("x.jsonl.gz").write_bytes(gzip.compress(random.Random(0).randbytes(9_000_000), 1))
    place.manifest["sources"][0]["path"] = "x.jsonl.gz"
    assert place.hours()[0] > 4 * once[0]


def test_a_record_of_a_source_counts_if_it_is_current(place: Place) -> None:
    now = place.parts()
    path = Path("results/e/sources/fetched/s.json")
    path.write_text('{"of": "another version"}')
    assert place.parts() == now
    place.manifest["sources"] = [{"name": "s", "kind": "hub", "id": "a/b", "text": "{t}"}]
    assert place.basis() == "source s is not fetched yet"
    file = DataFile(
        path="x", format="jsonl", compression=None, n_bytes=9_000_000, n_records=None, sha256=""
    )
    record = SourceRecord(
        name="s", preset="full", kind="hub", revision=None, card_license=None, n_shards=1,
        files=(file,), artifacts={},
    )  # fmt: skip
    place.record("fetch_source", "sources/fetched/s.json", record, source="s")
    assert place.basis().startswith("estimate from bytes; ")


def test_an_unknown_forecast_has_a_reason(place: Place) -> None:
    place.manifest["data"]["max_documents"] = 10
    assert place.basis().startswith("estimate from bytes before limits on documents; ")
    place.manifest["training"] = {"max_steps": 5, "batch_size": "auto"}
    reason = "max_steps is set and batch_size is auto, so the plan decides on tokens"
    assert place.parts() == ["unknown", "unknown", "1 x H100 SXM", reason]
    place.manifest["model"] = "a/b"
    reason = "model a/b is neither a local folder, nor downloaded, nor available from the hub"
    assert place.basis() == reason
    row = {"name": "Own", "driver_names": [], "memory_gb": 8, "source": "s"}
    unknown = ("bf16_tflops", "fp16_tflops", "tf32_tflops", "bandwidth_gb_per_s", "power_w")
    table = {"gpus": [row | dict.fromkeys(unknown)]}
    Path("config/hardware/gpus.yaml").write_text(yaml.safe_dump(table))
    Path("config/hardware/prices.yaml").write_text("prices: {}\n")
    place.config |= {"hardware": "Own", "compare": []}
    place.manifest |= {"model": "model", "training": {"batch_size": 1}}
    assert place.basis() == "no estimate: the bf16 peak of Own is unknown"


def test_other_jobs_are_modeled_by_their_work(place: Place) -> None:
    """Bytes over speed, questions over batches; but not the time of a network or a judge."""

    def ends(rule: str) -> tuple[float, float]:
        low, high = place.told(rule).removesuffix(" s").split(" to ")
        return float(low), float(high)

    place.manifest["sources"][0]["n_shards"] = 3
    assert ends("prepare_shard") == pytest.approx((0.1 + 9 / 20 / 3, 2 + 9 / 2 / 3), rel=0.01)
    assert ends("pack_sequences") == pytest.approx((0.1 + 0.09, 2 + 0.9), rel=0.01)
    n_weights = 596e6  # Qwen3-0.6B, by its card
    assert ends("export_model") == pytest.approx(
        (3 + 2 * n_weights / 1e9, 30 + 4 * n_weights / 5e7), rel=0.01
    )
    asked = {"task": "exact_match", "max_examples": 100, "n_selection_examples": 0}
    place.manifest["evaluation"] = asked | {"batch_size": 50, "max_new_tokens": 10}
    del place.manifest["sources"][0]["text"]
    place.manifest["sources"][0] |= {"prompt": "{q}", "completion": "{a}"}
    few = ends("generate_answers")
    place.manifest["evaluation"]["max_new_tokens"] = 1010
    many = ends("generate_answers")
    # Four batches, 28 layers, 1,000 tokens more.
    more = (4 * 28 * 1000 * 2e-4 * 0.2, 4 * 28 * 1000 * 2e-3)
    assert (many[0] - few[0], many[1] - few[1]) == pytest.approx(more, rel=0.05)
    assert place.told("tune_expert") is None
    place.manifest["evaluation"]["lm_eval"] = {"tasks": ["x"]}
    assert place.told("generate_answers") is None
    place.manifest["sources"] = [{"name": "s", "kind": "hub", "id": "a/b"}]
    place.manifest["sources"][0] |= {"prompt": "{q}", "completion": "{a}"}
    assert place.told("prepare_shard") is None


def test_a_source_that_is_not_yet_generated_has_a_size(place: Place) -> None:
    made = {"name": "s", "kind": "generated", "generator": "facts", "n_documents": 25}
    place.manifest["sources"] = [{**made, "seed": 1, "text": "{answer}"}]
    assert place.basis().startswith("estimate from bytes; ")


@pytest.mark.parametrize("config", [{"hardware": "cpu"}, {"hardware": "auto"}, {"preset": "demo"}])
def test_a_cpus_speed_is_a_share_of_its_matrix_products(
    place: Place, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.packing()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(probe, "cpu_flops_per_s", lambda: H100_FLOPS_PER_S)
    monkeypatch.setattr(forecast, "CPU_START_S", (0.0, 0.0))
    place.config = {"hardware": "H100 SXM", **config}
    if "preset" in config:
        place.manifest["demo"] = {"training": place.manifest["training"]}
    on_cpu = place.hours()
    assert place.parts()[2:] == ["cpu", "estimate from packed tokens; no price set"]
    least, most = CPU_SHARE[1e8]
    assert on_cpu[1] / on_cpu[0] == pytest.approx(most / least, rel=0.2)
    flops = flops_per_token(
        read_facts(Path("model")), lora=None, mean_context_tokens=200.0, supervised_fraction=0.5,
        checkpoint_activations=False,
    ).hardware  # fmt: skip
    fastest_s = 2 * 1_000_000 * flops / (most * H100_FLOPS_PER_S)
    assert on_cpu[0] == pytest.approx(fastest_s / 3600, rel=0.05)


def test_the_saved_step_of_an_unfinished_training_is_reported(place: Place) -> None:
    place.packing()
    told = place.basis()
    for run, step in (("a", 20), ("b", 310), ("b", 300)):
        files = Path("state/e", run, f"checkpoints/step-{step:08d}/progress.json")
        files.parent.mkdir(parents=True)
        files.write_text(json.dumps({"checkpoint": {"n_bytes": {}, "xxh3": {}}}))
    assert place.basis() == f"{told}; an unfinished one is saved at step 310"
    Path("state/e/b/outcome.json").touch()
    assert place.basis() == f"{told}; an unfinished one is saved at step 20"


def test_a_cluster_is_asked_for_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runtime_minutes("e") == 24 * 60
    path = Path("results/e/plan.json")
    path.parent.mkdir(parents=True)
    for plan, minutes in (
        # One and a half times the plan's upper end, plus an hour.
        (json.dumps({"cost": {**COST, "predicted_hours_high": 10.0}}), 60 + 15 * 60),
        (json.dumps({"cost": {**COST, "predicted_hours_high": None}}), 24 * 60),
        ("\0" * 9, 24 * 60),
    ):
        path.write_text(plan)
        assert runtime_minutes("e") == minutes


def test_an_export_is_given_memory_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_memory_mb("e") == 64000
    path = Path("results/e/model.json")
    path.parent.mkdir(parents=True)
    for n_parameters, mb in ((10**6, 8006), (8 * 10**9, 8000 + 48000)):
        path.write_text(json.dumps({"n_parameters": n_parameters}))
        assert export_memory_mb("e") == mb
