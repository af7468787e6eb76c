"""A user's mistake ends in one line that names it and the fix, and leaves no result."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from support import ROOT
from workflow_space import REPORT, SNAKEMAKE, Workspace, make_workspace, manifest

from expertflow.config.expert import check_writable
from expertflow.core import disk
from expertflow.core.errors import ConfigError, HardwareError

pytestmark = pytest.mark.chain
MANIFEST = """\
description: Answers questions in one word.
model: builtin:tiny-qwen3
sources:
  - name: mine
    kind: local
    path: data/mine.jsonl
    prompt: "{question}"
    completion: "{answer}"
evaluation: {task: exact_match}
training: {num_train_epochs: 2}
"""
EPOCHS = "num_train_epochs: 2"


class Fault(NamedTuple):
    """In the manifest ``old`` becomes ``new``; the run's last output contains ``line``.

    tests/config/test_load.py has more faults.
    """

    old: str
    new: str
    line: str
    config: tuple[str, ...] = ()


def told(line: str, *config: str) -> Fault:
    return Fault("", "", line, config)


FAULTS = [
    Fault(
        EPOCHS, "num_train_epoch: 2", "mine.yaml:10: unknown key 'training.num_train_epoch'; did"
    ),
    Fault("mine.jsonl", "my.jsonl", "source mine: no file at data/my.jsonl; correct"),
    Fault("tiny-qwen3", "tiny-qwen", "which is not known; did you mean 'builtin:tiny-qwen3'?"),
    Fault("builtin:tiny-qwen3", "dat/", "model is 'dat/', but there is no such folder; did you"),
    Fault("builtin:tiny-qwen3", "gpt2", "no such folder; correct the path, or write owner/name of"),
    Fault("builtin:tiny-qwen3", "data", "data: no config.json; use a model directory or a hub"),
    Fault("builtin:tiny-qwen3", "results/mine/merged", "model is results/mine/merged, which this"),
    Fault(EPOCHS, "lora: {init_from: results/mine/checkpoint}", "checkpoint, which this run repl"),
    Fault(EPOCHS, "attention: varlen", "training.attention varlen needs a CUDA card; use auto"),
    Fault(EPOCHS, "tuned: a.json", "training.tuned names a.json, which does not exist"),
    Fault(EPOCHS, "max_hours: 1", "max_hours is set but cannot be checked: the speed of this hard"),
    Fault(EPOCHS, "max_usd: 1", "but cannot be checked: no price is", ("hardware=H100 SXM",)),
    told("did you mean 'H100 SXM'", "hardware=H100 SMX"),
    told("key 'preset' is 'ful': it must be one of ['demo', 'full']; did you mean", "preset=ful"),
    told("price_usd_per_hour is inf; use a finite number, or null", "price_usd_per_hour=inf"),
]
if find_spec("wandb") is None:
    FAULTS.append(Fault(EPOCHS, "report_to: wandb", "package wandb is not installed; pip install"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("faults")
    for folder in ("config/experts", "data"):
        (place / folder).mkdir(parents=True)
    record = json.dumps({"question": "q", "answer": "a"})
    (place / "data" / "mine.jsonl").write_text(f"{record}\n" * 20)
    return place


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.line[-40:])
def test_a_fault_is_one_line(place: Path, fault: Fault) -> None:
    assert fault.old in MANIFEST
    written = MANIFEST.replace(fault.old, fault.new, 1)
    (place / "config" / "experts" / "mine.yaml").write_text(written, encoding="utf-8")
    arguments = ["-s", str(ROOT / "Snakefile"), "-n", "results/mine/report.json"]
    arguments += ["--config", *fault.config] if fault.config else []
    assert fault.line in Workspace(place).refused(*arguments, CUDA_VISIBLE_DEVICES="")
    made = {path.name for path in place.glob("results/*/*.json.fingerprint")}
    # The source lock is written while the workflow is read.
    assert made <= {".sources.lock.json.fingerprint"}


def test_a_duplicate_setting_is_one_line(place: Path) -> None:
    path = place / "config" / "twice.yaml"
    path.write_text("experts: {mine: {}}\ntraining: {seed: 1}\ntraining: {lr: 1}\n")
    arguments = ["-n", "results/mine/report.json", "--configfile", str(path)]
    line = Workspace(place).refused("-s", str(ROOT / "Snakefile"), *arguments)
    assert "twice.yaml:3: key 'training' appears twice; remove one" in line


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(ConfigError, match="results: is not a folder; correct its permissions"):
        check_writable(tmp_path / "results" / "mine")
    check_writable(tmp_path / "state" / "mine")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda place: 24 << 10)
    with pytest.raises(HardwareError, match=r"state: .* free, 1.* needed for logs and records; "):
        check_writable(tmp_path / "state")
    check_writable(tmp_path / "state", needs_room=False)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("config/experts", "config/experts: cannot be read; correct its permissions"),
        ("config/config.yaml", "config/config.yaml: permission denied; correct its"),
        ("config/experts/tiny.yaml", "tiny.yaml: cannot be read (Permission denied); correct"),
    ],
)
def test_another_users_file_is_one_line(fresh: Workspace, place: str, line: str) -> None:
    """Even root is denied without the capability to read everything."""
    (fresh.root / place).chmod(0)
    as_somebody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may read everything here: setpriv, of util-linux, is missing")
    command = [*as_somebody * (os.getuid() == 0), str(SNAKEMAKE), "-n", REPORT]
    done = fresh.execute(*command)
    assert done.returncode != 0 and line in done.stderr.splitlines()[-1], done.stderr


@pytest.fixture
def fresh(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path / "space")


def test_an_unusable_source(fresh: Workspace) -> None:
    rejected = "source sums: 5 of 5 records rejected: missing_field 5; first: data/sums.jsonl"
    for text, output in (
        ("", "data/sums.jsonl is empty"),
        ('{"question": "x", "answer": "y"}\n', "too few documents to hold one out: 1 left"),
        ('{"q": "x"}\n' * 5, rejected),
    ):
        (fresh.root / "data" / "sums.jsonl").write_text(text)
        assert output in fresh.refused()
        assert not (fresh.root / REPORT).exists()
    output = fresh.snakemake(REPORT, "--quiet", "all").stderr.splitlines()
    assert [line for line in output if line.startswith("note: tiny: training on cpu should take ")]
    assert output[-2:] == ["results/tiny/logs/deduplicate_documents.log", output[-1]]
    assert output[-1].startswith(f"error: {rejected}")
    rejects = fresh.root / "results" / "tiny" / "documents" / "sums" / "000.rejected.jsonl"
    assert len(rejects.read_text().splitlines()) == 5


def test_a_failed_download(fresh: Workspace) -> None:
    value = {**manifest(), "model": "nobody/nothing"}
    value["sources"][0] |= {"name": "h", "kind": "hub", "id": "nobody/nothing"}
    del value["sources"][0]["path"]
    fresh.write_manifest("other", {**manifest(), "model": "nobody/nothing"})
    fresh.write_manifest("tiny", value)
    line = fresh.refused("results/other/model.json", HF_HUB_OFFLINE="1")
    assert "model is 'nobody/nothing': neither a local folder nor in the cache" in line
    line = fresh.refused("results/tiny/datasets.json", HF_HUB_OFFLINE="1")
    assert "error: source h: data set nobody/nothing" in line


def test_auto_is_the_cpu_without_a_card(finished: Workspace, tmp_path: Path) -> None:
    space = finished.copy(tmp_path / "copy")
    arguments = ("results/tiny/plan.json", "--config", "hardware=auto")
    space.run(*arguments, CUDA_VISIBLE_DEVICES="")
    assert space.record("plan.json")["hardware"] == "cpu"
    space.run(*arguments[:-1], "hardware=H100 SXM")
    assert space.record("plan.json")["hardware"] == "H100 SXM"


def test_a_demo_next_to_others_says_that_it_uses_no_card(fresh: Workspace) -> None:
    fresh.write_manifest("tiny", {**manifest(), "demo": {"description": "d"}})
    out = fresh.run("-n", REPORT, "results/other/report.json", "--config", "hardware=H100 SXM")
    assert "note: tiny: hardware=H100 SXM has no effect in a demo; add preset=full" in out


def test_forbidden_runs_are_rejected_before_any_job(fresh: Workspace) -> None:
    unknown = fresh.refused("results/tinny/report.json")
    assert "no manifest for expert 'tinny'" in unknown and "did you mean 'tiny'?" in unknown
    kept = fresh.refused(REPORT, "--keep-incomplete")
    assert "--keep-incomplete would record half-written outputs" in kept
    unlimited = fresh.refused(REPORT, "--resources", "gpu=0")
    assert "resource gpu" in unlimited and "--resources gpu=1" in unlimited
    assert not list(fresh.root.glob("results/*/sources/fetched"))
