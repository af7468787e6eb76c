"""The rerun table: edit this, and exactly these rules run again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workflow_space import Workspace, make_workspace, manifest

from expertflow.data.layout import CHATML

pytestmark = pytest.mark.chain

REPORT = {"build_report"}
JUDGE = {"evaluate_expert", "export_model"} | REPORT
SCORE = {"generate_answers"} | JUDGE
TRAIN = {"plan_training", "stage_to_nvme", "train_expert"} | SCORE
PACK = {"pack_sequences"} | TRAIN
MODEL = {"prepare_model"} | TRAIN
TOKENS = {"prepare_tokenizer", "pretokenize_shard", "check_references"} | PACK | MODEL
SELECT = {"deduplicate_documents"} | TOKENS
DATA = {"prepare_shard"} | SELECT
ALL = {"fetch_source", "find_datasets"} | DATA
LIBRARY = "workflow/scripts/expertflow"


Edit = Callable[[Workspace], object]


def touched(pattern: str) -> Edit:
    return lambda space: [os.utime(path) for path in space.root.glob(pattern)]


def edited(module: str, old: str, new: str) -> Edit:
    return lambda space: space.edit(f"{LIBRARY}/{module}", old, new)


def deleted(name: str) -> Edit:
    return lambda space: (space.root / "results" / "tiny" / name).unlink()


def written(name: str, text: str) -> Edit:
    return lambda space: (space.root / "data" / name).write_text(text)


def changed(path: str, setting: object, expert: str = "tiny") -> Edit:
    """Change one setting of a manifest, as ``training.learning_rate``."""

    def change(space: Workspace) -> None:
        value = manifest()
        *way, last = path.replace("source.", "sources.0.").split(".")
        holder: Any = value
        for key in way:
            holder = holder[int(key) if key.isdigit() else key]
        holder[last] = setting
        space.write_manifest(expert, value)

    return change


edit_packing = edited("tokens/pack.py", "default_rng(spec.seed)", "default_rng(spec.seed + 1)")
NEW_CODE = "def _new() -> int:\n    return 1\n\n\ndef "
# All at once, because none of them reruns anything.
IDLE: tuple[Edit, ...] = (
    touched("data/*.jsonl"),
    edited("tokens/packing.py", "class Filled(", "# rows\nclass Filled("),
    edited("tokens/packing.py", '"""', '"""Rows: '),
    touched("workflow/scripts/**/*.py"),
    changed("training.learning_rate", 5e-3, expert="other"),
    deleted("tokens/sums/000.json"),
    deleted("plan.json"),
)
TABLE: dict[str, tuple[Edit, set[str]]] = {
    "packing": (edit_packing, PACK),
    "report": (edited("report/build.py", "def ", NEW_CODE), REPORT),
    "learning rate": (changed("training.learning_rate", 2e-3), TRAIN),
    "questions": (changed("evaluation.max_examples", 5), {"check_references"} | SCORE),
    "baselines": (changed("evaluation.baselines", False), JUDGE),
    "record": (lambda space: space.write_data(first="one plus one"), ALL),
    "question template": (changed("source.prompt", "{question}?"), DATA),
    "weight": (changed("source.weight", 0.5), SELECT),
    "license": (changed("source.license", "MIT"), {"find_datasets", "export_model"} | REPORT),
    "chat template": (written("chat.jinja", CHATML + "{# a remark #}"), TOKENS),
    "tokenizer": (changed("builtin.vocab_size", 310), TOKENS),
    "weights": (changed("builtin.hidden_size", 48), MODEL),
}


def test_idle_edits_rerun_nothing(space: Workspace) -> None:
    for edit in IDLE:
        edit(space)
    assert space.planned() == set()


@pytest.mark.parametrize(("edit", "rules"), TABLE.values(), ids=TABLE.keys())
def test_edit_reruns_exactly(space: Workspace, edit: Edit, rules: set[str]) -> None:
    edit(space)
    assert space.planned() == rules


def test_settings_from_the_command_line_count_as_changes(finished: Workspace) -> None:
    override = "experts={tiny: {training: {learning_rate: 3e-6}}}"
    assert finished.planned("--config", override) == TRAIN


def test_the_other_preset_is_rejected_and_can_be_previewed(space: Workspace) -> None:
    shutil.copy(space.root / "data" / "sums.jsonl", space.root / "data" / "demo.jsonl")
    demo = {"sources": [{**manifest()["sources"][0], "path": "data/demo.jsonl"}]}
    space.write_manifest("tiny", {**manifest(), "demo": demo})
    target = "results/tiny/report.json"
    refused = space.refused(target)
    assert "is of the full preset and this run is demo; move it" in refused
    looked = space.run("-n", target)
    assert "; a run replaces it only with --config allow_preset_change=true" in looked
    space.run("-n", target, "--config", "allow_preset_change=true")
    # Neither dry run changed what the results were made from.
    assert space.planned("--config", "preset=full") == set()


# Possible content of a Snakemake metadata file after a power failure; null: all but the last byte.
SPOILED = (bytes(99), None, b"\xff{}", b"[1]")


def spoiled_metadata(space: Workspace) -> None:
    for i, path in enumerate(sorted((space.root / ".snakemake" / "metadata").rglob("*"))):
        if path.is_file():
            path.write_bytes(SPOILED[i % len(SPOILED)] or path.read_bytes()[:-1])


def copied_without_times(space: Workspace) -> None:
    """Leave results/ like ``cp -r`` without .snakemake: records older than their inputs."""
    shutil.rmtree(space.root / ".snakemake")
    stages = sorted((space.root / "results").rglob("*"), key=lambda path: -path.stat().st_mtime)
    for i, path in enumerate(stages):
        os.utime(path, (NEW_YEAR + i, NEW_YEAR + i))


NEW_YEAR = 1_767_225_600
LOST: dict[str, Edit] = {
    "folder": lambda space: shutil.rmtree(space.root / ".snakemake"),
    "spoiled": spoiled_metadata,
    "copied": copied_without_times,
}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST.keys())
def test_sidecars_replace_lost_metadata(space: Workspace, lose: Edit) -> None:
    lose(space)
    assert space.planned() == set()
    changed("training.learning_rate", 2e-3)(space)
    assert space.planned() == TRAIN


def test_without_metadata_code_sources_and_inputs_count(space: Workspace) -> None:
    shutil.rmtree(space.root / ".snakemake")
    edit_packing(space)
    assert space.planned() == PACK
    space.write_data(first="one plus one")
    assert space.planned() == ALL
    value = manifest()
    value["sources"].append({**value["sources"][0], "name": "more"})
    space.write_manifest("tiny", value)
    assert {"find_datasets", "deduplicate_documents"} <= space.planned()


def test_copied_results_are_adopted_and_verified(space: Workspace, tmp_path: Path) -> None:
    """A clone with results/ and no .snakemake: nothing runs, whether timestamps are kept or not."""
    clone = make_workspace(tmp_path / "clone")
    shutil.copytree(space.root / "results", clone.root / "results")
    assert "train_expert" not in clone.planned()
    done = clone.script("verify_results")
    assert done.returncode == 0 and done.stdout.endswith(": intact\n")
    edit_packing(clone)
    made_otherwise = (
        "records made by other code: 1, first results/tiny/packing.json; a dry run lists"
    )
    assert made_otherwise in clone.script("verify_results").stdout
    plan = clone.root / "results/tiny/plan.json"
    plan.write_text(plan.read_text() + " ")
    done = clone.script("verify_results")
    assert done.returncode == 1
    assert "results/tiny/plan.json: damaged, does not match its sidecar" in done.stdout


def test_a_lost_result_is_published_from_its_state(space: Workspace) -> None:
    """Deleting training.json does not cause training: the state is published, not remade."""
    (space.root / "results/tiny/training.json").unlink()
    shutil.rmtree(space.root / "results/tiny/checkpoint")
    (outcome,) = space.root.glob("state/tiny/*/outcome.json")
    made_ns = outcome.stat().st_mtime_ns
    space.run("results/tiny/training.json")
    assert outcome.stat().st_mtime_ns == made_ns


def test_a_trainer_run_by_hand_tokenizes_unpacked_documents(space: Workspace) -> None:
    shutil.rmtree(space.root / "results/tiny/packed")
    words = ["--spec", "{}", "--state", "state/tiny", "--output", "results/tiny/training.json"]
    for name in ("plan", "packing", "model", "staging"):
        words += [f"--{name}", f"results/tiny/{name}.json"]
    words += ["--checkpoint", "results/tiny/checkpoint"]
    refused = space.script("train_expert", *words)
    assert refused.returncode == 1
    assert "the packed rows are missing" in refused.stderr.splitlines()[-1]
    words += ["--shards", "results/tiny/documents/sums/000.json"]
    done = space.script("train_expert", *words, "--keep", "results/tiny/keep.arrow")
    assert done.returncode == 0, done.stderr
    assert "data tokenized on the fly" in done.stderr
    record = space.record("training.json")
    assert any(line.startswith("data tokenized on the fly") for line in record["activated"])
    assert record["loss_last"] < record["loss_first"]
    assert "loader in the trainer, no workers" in record["activated"]
