"""Extrapolation: units, curves, crossings, unknown figures; and the command, without measuring."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import scale_limits
import scale_model
from scale_figures import Figure, Line, crossing, fit_exponent, fit_line, fit_shares
from scale_model import Curves, Estimate, Size, Values, estimates

from expertflow.plan.records import ModelFacts

FACTS = ModelFacts(
    n_layers=2, hidden_size=100, n_heads=2, n_kv_heads=2, head_dim=50, intermediate_size=300,
    vocab_size=1000, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
SIZE = Size(
    n_tokens=1e9, n_nodes=2, gpus_per_node=8, facts=FACTS, peak_flops_per_s=1e15
)  # fmt: skip
VALUES: Values = {
    "cores_per_node": 100.0, "node_memory_bytes": 1e12, "nvme_bytes": 8e12,
    "shared_disk_bytes_per_s": 1e10, "random_reads_per_s": 1e4, "n_sources": 1.0,
    "disk_write_bytes_per_s": 2e9,
    "global_batch_tokens": 1e6, "eval_fraction": 0.02, "save_every_minutes": 10.0,
    "mean_context_tokens": 300.0, "hash_bytes_per_s": 1e9, "copy_bytes_per_s": 5e8,
    "checkpoint_bytes_per_s": 5e8, "report_s_per_step": 1e-5, "fetch_s_per_token": 1e-9,
    "prepare_s_per_token": 1e-6, "tokenise_s_per_token": 1e-6, "pack_s_per_token": 1e-8,
    "raw_bytes_per_token": 4.0, "tokens_per_document": 400.0, "row_bytes_per_token": 4.0,
    "document_bytes_per_token": 2.0, "token_bytes_per_token": 4.0,
}  # fmt: skip
CURVES = Curves(
    deduplicate_costs=(1e-7, 1e-9),
    deduplicate_bytes=Line(0.0, 40.0, 1e6, 1e7),
    pack_bytes=Line(0.0, 100.0, 1e6, 1e7),
    open_bytes=Line(0.0, 50.0, 1e6, 1e7),
    dry_run_s=Line(4.0, 0.01, 200, 1000),
)


def stage(name: str, size: Size = SIZE, values: Values = VALUES) -> Estimate:
    return next(e for e in estimates(size, values, CURVES) if e.stage == name)


def test_an_exponent_is_that_of_the_power_law() -> None:
    points = [(n, 3e-7 * n**1.3) for n in (1e6, 3e6, 1e7)]
    assert fit_exponent(points) == pytest.approx(1.3)


def test_costs_of_a_document_and_of_a_pass_are_told_apart() -> None:
    points = [
        ((n, n * scale_model.n_passes(n)), 1e-7 * n + 2e-9 * n * scale_model.n_passes(n))
        for n in (1e6, 3e6, 1e7, 3e7)
    ]
    assert fit_shares(points) == pytest.approx([1e-7, 2e-9])


def test_no_cost_is_below_zero() -> None:
    assert fit_shares([((1, 1), 1.0), ((2, 4), 1.9), ((4, 16), 3.7)])[1] == 0.0


def test_passes_follow_the_librarys_own() -> None:
    np = pytest.importorskip("numpy")
    from expertflow.data import buckets

    for n in (1000, buckets.PASS_ROWS, 3 * buckets.PASS_ROWS):
        n_passes = sum(1 for _ in buckets._passes(np.zeros(n, np.uint64)))
        assert n_passes == scale_model.n_passes(n)


def test_a_crossing_is_found_where_it_is() -> None:
    assert crossing(lambda n: n * n, 1e8) == pytest.approx(1e4, rel=2e-3)
    assert crossing(lambda n: 5.0, 10.0) is None
    assert crossing(lambda n: 50.0, 10.0, low=7.0) == 7.0
    assert crossing(lambda n: None, 10.0) is None


def test_work_is_shared_by_as_many_cores_as_there_are_jobs() -> None:
    assert stage("prepare").seconds == pytest.approx(1e9 * 1e-6 / 200)
    one_node, many = replace(SIZE, n_nodes=1), replace(SIZE, n_nodes=64)
    assert stage("prepare", one_node).seconds == pytest.approx(1e9 * 1e-6 / 100)
    assert stage("prepare", many).seconds == stage("prepare").seconds
    # 200 shards are 13 token shards of four threads each.
    assert stage("tokenise", many).seconds == pytest.approx(1e9 * 1e-6 / 52)


def test_training_takes_flops_over_peak_and_the_plans_band() -> None:
    train = stage("train")
    assert train.seconds is not None and train.low_s is not None and train.high_s is not None
    assert train.seconds / train.low_s == pytest.approx(0.45 / 0.30)
    assert train.high_s / train.seconds == pytest.approx(0.30 / 0.20)
    weights = 2 * (4 * 100 * 100 + 3 * 100 * 300) + 100 * 1000
    flops = 6 * weights + 12 * 2 * 2 * 50 * 300
    assert train.seconds == pytest.approx(flops * 1e9 / (16 * 1e15 * 0.30))


def test_staging_waits_for_one_hash_or_for_the_shared_disk() -> None:
    assert stage("stage rows to NVMe").seconds == pytest.approx(4e9 / 5e8)
    many = replace(SIZE, n_nodes=100)
    assert stage("stage rows to NVMe", many).seconds == pytest.approx(100 * 4e9 / 1e10)


def test_packing_reads_from_a_disk_what_memory_does_not_hold() -> None:
    large = replace(SIZE, n_tokens=1e12)
    assert stage("pack").seconds == pytest.approx(10.0)
    assert stage("pack", large).seconds == pytest.approx(1e12 / 400 / 1e4)


def test_memory_is_that_of_the_documents() -> None:
    assert stage("deduplicate").memory_bytes == pytest.approx(1e9 / 400 * 40)
    assert stage("train").memory_bytes == pytest.approx(1e9 / 400 * 50)


def test_limits_stand_in_the_order_in_which_they_are_reached() -> None:
    found = scale_limits.limits(SIZE, VALUES, CURVES)
    places = [limit.at for limit in found]
    assert all(place is not None for place in places)
    assert places == sorted(places, key=lambda place: place or 0.0)
    by_name = {limit.what: limit.at for limit in found}
    assert by_name["pack, one process, needs 64 GB"] == pytest.approx(64e9 / 100 * 400)
    assert by_name["pieces of documents outnumber int32 (packing)"] == (2**31 - 1) * 400
    first = scale_limits.first_limit(found)
    assert first is not None and first.at == places[0]


def test_a_stage_of_one_process_overtakes_training_at_a_number_of_nodes() -> None:
    values = {**VALUES, "pack_s_per_token": 1e-10}
    found = {n.what: n.at for n in scale_limits.node_limits(SIZE, values, CURVES)}
    at = found["pack: longer than training"]
    assert at is not None and at > 1
    for n_nodes, is_longer in ((int(at), True), (int(at) - 1, False)):
        train = stage("train", replace(SIZE, n_nodes=n_nodes)).seconds
        assert train is not None and (train < 0.1) is is_longer


def test_a_dry_run_takes_a_minute_where_its_line_does() -> None:
    assert [limit.at for limit in scale_limits.shard_limits(CURVES)] == [200, 5600.0]


def test_what_is_computed_from_an_unknown_figure_is_unknown() -> None:
    values = {**VALUES, "pack_s_per_token": None, "tokens_per_document": None}
    assert stage("pack", values=values).seconds is None
    assert "pack_s_per_token" in (stage("pack", values=values).reason or "")
    assert stage("deduplicate", values=values).seconds is None
    no_peak = replace(SIZE, peak_flops_per_s=None)
    assert stage("train", no_peak).seconds is None
    assert scale_limits.longest_beside_training(no_peak, values, CURVES) is None


def test_a_figure_says_where_it_comes_from() -> None:
    assert Figure.of([3.0, 1.0, 2.0], "s", "here").words() == "2 (1 to 3) s; here"
    assert Figure.unknown("no card").words() == "unknown: no card"
    assert Figure.assumed(1.0, "B/s", "a disk").words() == "1 B/s; assumed: a disk"
    assert fit_line([(0, 1), (10, 21)]).reaches(41) == 20


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_without_measurements_the_command_gives_null_and_reasons(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run("--only", "arithmetic", "--models", "8B", "--nodes", "4", "--output", str(output))
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(output.read_text())
    assert result["machine"]["n_cores"] and result["versions"]["numpy"] and result["date"]
    assert result["parts_measured"] == []
    assert [case["n_tokens"] for case in result["cases"]] == [10e9, 1e12]
    by_stage = {one["stage"]: one for one in result["cases"][0]["stages"]}
    assert by_stage["pack"]["seconds"] is None and by_stage["pack"]["reason"]
    assert by_stage["train"]["seconds"] > 0
    assert result["figures"]["shared_disk_bytes_per_s"]["source"].startswith("assumed")
    again = run("--only", "arithmetic", "--measured", str(output), "--assume", "pack_s_per_token=1")
    later = json.loads(again.stdout.splitlines()[-1])
    assert later["figures"]["pack_s_per_token"]["source"] == "set with --assume"


def test_a_figure_that_there_is_not_is_named() -> None:
    done = run("--only", "arithmetic", "--assume", "cores=4")
    assert done.returncode == 1
    assert done.stderr.startswith("--assume cores=4: no such figure")


@pytest.mark.parametrize(
    "words",
    [["--models", "9B"], ["--assume", "cores_per_node"], ["--assume", "n_sources=many"],
     ["--assume", "nvme_bytes=-1"], ["--assume", "nvme_bytes=nan"]],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_before_anything_is_measured(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 1
    assert done.stderr.startswith(" ".join(words)) and len(done.stderr.splitlines()) == 1
    assert not done.stdout
