"""A bundle made on one machine and opened on another, which starts at staging."""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_boxes import BUNDLE, GPU_WORK, Box, make_box, make_bundle
from msgspec.structs import replace
from support import ROOT
from test_reruns import PACK, TRAIN
from workflow_space import REPORT, Workspace, copy_code, manifest

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.rental.bundle.pack import pack_bundle
from expertflow.rental.bundle.tar import read_index

pytestmark = [pytest.mark.chain, pytest.mark.long]
# The base model of an expert, in a box's home.
MODEL = "home/a model"


@pytest.fixture(scope="module")
def cheap(finished: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = finished.copy(tmp_path_factory.mktemp("cheap") / "space")
    make_bundle(space)
    return space


@pytest.fixture
def empty(cheap: Workspace, tmp_path: Path) -> Box:
    return make_box(tmp_path / "empty", cheap)


@pytest.fixture(scope="module")
def opened(cheap: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Box:
    box = make_box(tmp_path_factory.mktemp("opened") / "box", cheap)
    box.open(cheap.root / BUNDLE)
    assert box.planned() == GPU_WORK
    return box


@pytest.fixture
def box(opened: Box, tmp_path: Path) -> Box:
    return opened.copy(tmp_path / "box")


def test_a_bundle_contains_only_what_the_box_reads_wherever_it_is_made(
    finished: Workspace, cheap: Workspace, tmp_path: Path
) -> None:
    other = finished.copy(tmp_path / "a longer path" / "space")
    assert make_bundle(other).read_bytes() == (cheap.root / BUNDLE).read_bytes()
    names = {m.name.removeprefix("results/tiny/") for m in read_index(cheap.root / BUNDLE).members}
    assert {"plan.json", "keep.arrow", "documents/sums/000.arrow", ".plan.json.fingerprint"} < names
    assert "packed/train/data-00000-of-00001.arrow" in names
    assert "base_model/model.safetensors" in names
    unread = ("tokens/sums/000.ids", "rejected", "training", "checkpoint", "merged", "logs/")
    assert not [name for name in names for part in unread if part in name]


def test_damaged_results_are_not_packed(
    finished: Workspace, cheap: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_index(cheap.root / BUNDLE).spec
    assert spec is not None
    monkeypatch.chdir(finished.copy(tmp_path / "space").root)
    spec, results = replace(spec, files={}), Path("results/tiny")
    assert pack_bundle(spec)[0].expert == "tiny"
    for file in (
        "packed/train/data-00000-of-00001.arrow",
        "packed/held_out/data-00000-of-00001.arrow",
        "documents/sums/000.arrow",
        "keep.arrow",
        "tokenizer/tokenizer.json",
        "base_model/tokenizer.json",
        "base_model/model.safetensors",
        "plan.json",
    ):
        content = (results / file).read_bytes()
        (results / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=file):
            pack_bundle(spec)
        (results / file).write_bytes(content)
    # Where scoring is possible, references are judged before training.
    reason = {"unusable": [], "unavailable_reason": "no node"}
    (results / "references.json").write_text(json.dumps(reason))
    assert "results/tiny/references.json" not in pack_bundle(spec)[1]


def test_other_settings_there_rerun_the_rules_that_read_them(box: Box) -> None:
    override = "experts={tiny: {training: {learning_rate: 3e-6}}}"
    assert box.planned("--config", override) == TRAIN
    box.write_manifest("tiny", manifest(learning_rate=2e-3))
    assert box.planned() == TRAIN
    note = box.run("-n", REPORT)
    assert "note: tiny: its manifest in config/experts changed since its bundle was opened" in note
    # Packed documents are tokenized again.
    box.write_manifest("tiny", manifest(max_seq_length=48))
    assert box.planned() == {"pretokenize_shard"} | PACK


def test_settings_of_the_bundle_override_the_boxs(cheap: Workspace, empty: Box) -> None:
    empty.write_manifest("tiny", manifest(learning_rate=5e-3))
    config = empty.root / "config" / "config.yaml"
    config.write_text(config.read_text() + "training: {learning_rate: 0.5}\n")
    empty.open(cheap.root / BUNDLE)
    assert empty.planned() == GPU_WORK
    told = empty.run("-n", REPORT)
    assert "note: tiny: uses the manifest of its bundle" in told


def test_a_judge_of_a_bundle_gets_a_key_by_permission_only(cheap: Workspace, empty: Box) -> None:
    # No job reads a judge before scoring, so the bundle is the one at hand with another manifest.
    empty.open(cheap.root / BUNDLE)
    judge = {"endpoint": "https://elsewhere/v1", "model": "m", "api_key_env": "AWS_SECRET"}
    config = "experts={tiny: " + json.dumps({"evaluation": {"judge": judge}}) + "}"
    refused = empty.refused("-n", REPORT, "--config", config)
    assert "sends AWS_SECRET, a variable of your environment, to https://elsewhere/v1" in refused
    empty.open(cheap.root / BUNDLE, "--allow-judge", "--replace")
    assert empty.planned("--config", config) == GPU_WORK


def test_another_preset_and_other_raw_data_are_rejected(cheap: Workspace, box: Box) -> None:
    box.write_manifest("tiny", {**manifest(), "demo": {"description": "d"}})
    refused = box.refused("-n", REPORT, "--config", "preset=demo")
    assert "is an opened bundle of the full preset" in refused
    box.write_manifest("tiny", manifest())
    shutil.copytree(cheap.root / "data", box.root / "data")
    assert box.planned() == GPU_WORK
    box.write_data(first="one plus one")
    refused = box.refused("-n", REPORT)
    assert "data/sums.jsonl differs from the data in tiny's bundle" in refused
    shutil.rmtree(box.root / "data")
    assert box.planned() == GPU_WORK


def change_packing(box: Box) -> None:
    path = "workflow/scripts/expertflow/tokens/pack.py"
    box.edit(path, "default_rng(spec.", "default_rng(1 + spec.")


def test_other_code_is_rejected_and_named_or_runs_again(cheap: Workspace, empty: Box) -> None:
    change_packing(empty)
    refused = empty.refused_to_open(cheap.root / BUNDLE)
    assert "made by other code than this checkout's: " in refused
    assert " pack_sequences" in refused and "prepare_shard" not in refused
    empty.open(cheap.root / BUNDLE, "--accept-other-code")
    assert empty.planned() == {"pretokenize_shard"} | PACK


def test_existing_results_stay_by_default(cheap: Workspace, box: Box) -> None:
    bundle = cheap.root / BUNDLE
    before = sha256_file(box.root / "results/tiny/.bundle/opened.json")
    box.open(bundle)
    assert sha256_file(box.root / "results/tiny/.bundle/opened.json") == before
    plan = box.root / "results/tiny/plan.json"
    plan.write_text(plan.read_text() + " ")
    assert "contains an opened bundle, changed since" in box.refused_to_open(bundle)
    shutil.rmtree(box.root / "results/tiny/.bundle")
    assert "contains results; move it" in box.refused_to_open(bundle)
    box.open(bundle, "--replace")
    assert box.planned() == GPU_WORK
    assert [path.name for path in (box.root / "results").iterdir()] == ["tiny"]


@pytest.fixture
def there(finished: Workspace, tmp_path: Path) -> Box:
    there = Box(finished.copy(tmp_path / "there").root)
    shutil.copytree(there.root / "results/tiny/base_model", there.root / MODEL)
    (there.root / MODEL / "README.md").write_text("read by nobody")
    value = {**manifest(), "model": "~/a model"}
    value.pop("builtin")
    there.write_manifest("tiny", value)
    # Its only variant equals the plan, which is quick.
    (there.root / "config" / "ablations" / "mine.yaml").write_text(
        "variants: [{name: loose, label: Loose, training: {torch_compile: false}}]"
    )
    config = there.root / "config" / "config.yaml"
    config.write_text(config.read_text() + "ablate: true\nablation: {files: [mine]}\n")
    return there


def test_a_box_trains_the_same(finished: Workspace, there: Box, empty: Box, tmp_path: Path) -> None:
    """A bundle without weights identifies them; the box must have exactly the same."""
    bundle = make_bundle(there)
    assert str(there.root).encode() not in bundle.read_bytes()
    names = [member.name for member in read_index(bundle).members]
    assert "results/tiny/base_model/tokenizer.json" in names
    assert not [name for name in names if name.endswith(".safetensors")]
    open_with_other_weights_first(empty, bundle, there.root / MODEL, tmp_path / "elsewhere")
    shutil.move(tmp_path / "elsewhere", empty.root / MODEL)
    empty.open(bundle)
    assert not (empty.root / "config/ablations/mine.yaml").exists()
    assert empty.planned() == GPU_WORK | {"ablate_variant", "ablate_expert"}
    # Also if the bundle no longer counts, because its folder was removed.
    assert empty.record("model.json")["path"] == "results/tiny/base_model"
    (tmp_path / "scratch").mkdir()
    scratch = ("--config", f"scratch={tmp_path / 'scratch'}")
    empty.run(REPORT, *scratch)
    trained = [space.record("training.json")["weights_sha256"] for space in (empty, finished)]
    assert trained[0] == trained[1]
    assert empty.planned(*scratch) == set()
    assert empty.record("staging.json")["rows"]["action"] == "copied"
    land(empty, there)


def open_with_other_weights_first(box: Box, bundle: Path, model: Path, elsewhere: Path) -> None:
    assert "no such folder on this machine" in box.refused_to_open(bundle)
    shutil.copytree(model, elsewhere)
    weights = elsewhere / "model.safetensors"
    right = weights.read_bytes()
    weights.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert "its weights are not the bundle's" in box.refused_to_open(bundle, "--model", elsewhere)
    weights.write_bytes(right)
    box.open(bundle, "--model", elsewhere)
    assert (box.root / "results/tiny/base_model/model.safetensors").read_bytes() == right


def land(box: Box, home: Box) -> None:
    results, outcome = home.root / "results" / "tiny", box.outcome()
    assert "is not from this outcome" in home.refused_to_open(outcome, "--outcome")
    for path in ("merged", "checkpoint", "profile", "logs"):
        shutil.rmtree(results / path)
    for name in ("steps.jsonl", "gpu.jsonl", "report.html", "monitor.json", "preflight.json"):
        (results / name).unlink()
    for name in ("staging", "training", "generations", "evaluation", "export", "report"):
        (results / f"{name}.json").unlink()
        (results / f".{name}.json.fingerprint").unlink()
    assert "keep ablate=true" in home.script("open_bundle", outcome, "--outcome").stderr
    assert home.planned() == set()
    override = "experts={tiny: {training: {learning_rate: 3e-6}}}"
    assert home.planned("--config", override) >= TRAIN
    assert home.record("report.json")["comparison"]
    assert "Loose" in (results / "ablation.html").read_text()
    assert (results / "report.html").read_bytes() == (
        box.root / "results/tiny/report.html"
    ).read_bytes()
    # A repair must not make a paid training run again.
    assert home.script("verify_results").stdout.endswith(": intact\n")
    assert not (results / ".bundle").exists()
    assert "open it with --outcome" in home.refused_to_open(outcome)
    change_packing(home)
    told = home.script("open_bundle", outcome, "--outcome").stderr
    assert "made by other code" in told and "or a run here repeats these rules" in told


# Its settings travel with its bundle; at home they must be passed again. test_commands.py opens
# the bundle of a demo whose questions are scored.
DEMO = "repository"
FEW = {DEMO: {"sources": {"generated-repository": {"n_documents": 100}}}}
SHORT = ("--config", "training={max_steps: 2, logging_steps: 1}", f"experts={json.dumps(FEW)}")


def clone(root: Path) -> Box:
    copy_code(ROOT, root)
    (root / "home").mkdir()
    return Box(root)


def test_a_demo_opens_from_its_bundle(tmp_path: Path) -> None:
    home, box = clone(tmp_path / "home"), clone(tmp_path / "box")
    bundle, lock = f"results/{DEMO}/bundle.tar", f"results/{DEMO}/sources.lock.json"
    home.run(bundle, *SHORT)
    before = sha256_file(home.root / lock)
    box.open(home.root / bundle)
    assert set(box.jobs(f"results/{DEMO}/report.json")) == GPU_WORK
    assert sha256_file(box.root / lock) == before


@pytest.mark.parametrize("is_readable", [False, True])
def test_what_would_fail_again_is_tried_once(
    cheap: Workspace, tmp_path: Path, is_readable: bool
) -> None:
    space = cheap.copy(tmp_path / "space")
    if is_readable:
        main = "def main() -> None:\n"
        space.edit(
            "workflow/scripts/train_expert.py", main, f"{main}    raise SystemExit('error: no')\n"
        )
        make_bundle(space)
    else:
        (space.root / BUNDLE).write_text("no tar")
    for _ in range(2):
        done = space.snakemake("-s", "workflow/remote.smk", "results/tiny/outcome.tar")
        assert done.returncode == 1
        logged = (space.root / "results/tiny/logs/train_bundle.log").read_text().splitlines()
        told = done.stdout + done.stderr
        assert told.count("failed  train_bundle") == 1 and "restart job" not in told
        assert told.splitlines().count(logged[-1]) == 1 + is_readable, told


# The server on loopback accepts these from anyone.
SECRET = "not-a-secret-of-anybody"
BUCKET = "expertflow-test"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of an empty bucket; credentials come from the environment."""
    need = "is not installed: make s3, and make test-long for moto"
    pytest.importorskip("snakemake_storage_plugin_s3", reason=f"the S3 plugin {need}")
    moto_server = pytest.importorskip("moto.server", reason=f"moto {need}")
    boto3 = pytest.importorskip("boto3", reason=f"boto3 {need}")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SNAKEMAKE_STORAGE_S3_ENDPOINT_URL", endpoint)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=BUCKET)
    yield client
    server.stop()


def remote(box: Box, *arguments: str) -> str:
    place = ("--default-storage-provider", "s3", "--default-storage-prefix", f"s3://{BUCKET}/work")
    out = box.run("-s", "workflow/remote.smk", *place, "results/tiny/outcome.tar", *arguments)
    assert SECRET not in out
    return out


def test_bundles_go_through_s3(cheap: Workspace, empty: Box, storage: Any, tmp_path: Path) -> None:
    storage.upload_file(str(cheap.root / BUNDLE), BUCKET, f"work/{BUNDLE}")
    kept = tmp_path / "kept"
    remote(empty, "--config", f"guard=--idle-minutes 0 --push {shlex.quote(str(kept))}")
    assert [path.name for path in kept.iterdir()] == ["tiny"]
    assert "Nothing to be done" in remote(make_box(tmp_path / "another", cheap), "-n")

    storage.download_file(BUCKET, "work/results/tiny/outcome.tar", str(tmp_path / "outcome.tar"))
    home = Box(cheap.copy(tmp_path / "home").root)
    shutil.rmtree(home.root / "results")
    home.open(tmp_path / "outcome.tar", "--outcome")
    results = home.root / "results" / "tiny"
    assert "<html" in (results / "report.html").read_text()
    assert (results / "merged" / "model.safetensors").is_file()
    assert SECRET not in "".join(path.read_text() for path in results.glob("logs/*.log"))
