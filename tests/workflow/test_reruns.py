"""The rerun table: edit this, and exactly these rules run again."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from workflow_space import Workspace, make_workspace, manifest

pytestmark = pytest.mark.chain

REPORT = {"build_report"}
SCORE = {"evaluate_expert", "export_model"} | REPORT
TRAIN = {"plan_training", "stage_to_nvme", "train_expert"} | SCORE
PACK = {"pack_sequences"} | TRAIN
TOKENS = {"prepare_model", "pretokenize_shard"} | PACK
SELECT = {"deduplicate_documents"} | TOKENS
DATA = {"prepare_shard"} | SELECT
ALL = {"fetch_source", "find_datasets"} | DATA
LIBRARY = "workflow/scripts/expertflow"


def touch_scripts(space: Workspace) -> None:
    for path in (space.root / "workflow" / "scripts").rglob("*.py"):
        os.utime(path)


def touch_source(space: Workspace) -> None:
    os.utime(space.root / "data" / "sums.jsonl")


def edit_comment(space: Workspace) -> None:
    space.edit(f"{LIBRARY}/tokens/packing.py", "class Filled(", "# rows\nclass Filled(")


def edit_docstring(space: Workspace) -> None:
    space.edit(f"{LIBRARY}/tokens/packing.py", '"""Permute rows', '"""Shuffle the rows')


def edit_packing(space: Workspace) -> None:
    space.edit(f"{LIBRARY}/tokens/packing.py", "default_rng(seed)", "default_rng(seed + 1)")


def edit_report(space: Workspace) -> None:
    space.edit(f"{LIBRARY}/report/verdict.py", "def ", "def _new() -> int:\n    return 1\n\n\ndef ")


def edit_page_style(space: Workspace) -> None:
    space.edit(f"{LIBRARY}/report/templates/style.css", "{", " {")


def change_learning_rate(space: Workspace) -> None:
    space.write_manifest("tiny", manifest(learning_rate=2e-3))


def change_record(space: Workspace) -> None:
    space.write_records(first="one plus one")


def change_tokenizer(space: Workspace) -> None:
    value = manifest()
    value["builtin"]["vocab_size"] = 310
    space.write_manifest("tiny", value)


def change_question_template(space: Workspace) -> None:
    value = manifest()
    value["sources"][0]["prompt"] = "{question}?"
    space.write_manifest("tiny", value)


def change_source(space: Workspace, **settings: object) -> None:
    value = manifest()
    value["sources"][0] |= settings
    space.write_manifest("tiny", value)


def add_check(space: Workspace) -> None:
    change_source(space, checks=[{"field": "answer", "check": "length", "max_chars": 99}])


def change_weight(space: Workspace) -> None:
    change_source(space, weight=0.5)


def change_licence(space: Workspace) -> None:
    change_source(space, licence="MIT")


def change_benchmark(space: Workspace) -> None:
    (space.root / "data" / "benchmark.jsonl").write_text('{"question": "a question of no use"}\n')


def touch_benchmark(space: Workspace) -> None:
    os.utime(space.root / "data" / "benchmark.jsonl")


def change_chat_template(space: Workspace) -> None:
    path = space.root / "data" / "chat.jinja"
    path.write_text(path.read_text() + "{# a remark #}")


def change_text_special_tokens(space: Workspace) -> None:
    value = manifest()
    value["data"]["text_special_tokens"] = "reject"
    space.write_manifest("tiny", value)


def change_other_expert(space: Workspace) -> None:
    space.write_manifest("other", manifest(learning_rate=5e-3))


def change_acceptance(space: Workspace) -> None:
    rule = {"path": "data.padding_fraction", "op": "<", "value": 0.5}
    space.write_manifest("tiny", {**manifest(), "acceptance": [rule]})


def delete_plan(space: Workspace) -> None:
    (space.root / "results/tiny/plan.json").unlink()


def delete_token_record(space: Workspace) -> None:
    (space.root / "results/tiny/tokens/sums/000.json").unlink()


def delete_report(space: Workspace) -> None:
    (space.root / "results/tiny/report.json").unlink()


TABLE: list[tuple[Callable[[Workspace], None], set[str]]] = [
    (touch_scripts, set()),
    (touch_source, set()),
    (edit_comment, set()),
    (edit_docstring, set()),
    (edit_packing, PACK),
    (edit_report, REPORT),
    (edit_page_style, REPORT),
    (change_learning_rate, TRAIN),
    (change_acceptance, REPORT),
    (change_record, ALL),
    (change_question_template, DATA),
    (add_check, DATA),
    (change_weight, SELECT),
    (change_licence, {"find_datasets", "export_model", "build_report"}),
    (change_benchmark, DATA),
    (touch_benchmark, set()),
    (change_chat_template, TOKENS),
    (change_text_special_tokens, TOKENS),
    (change_tokenizer, TOKENS),
    (change_other_expert, set()),
    (delete_token_record, set()),
    (delete_plan, set()),
    (delete_report, REPORT),
]


@pytest.mark.parametrize(("edit", "rules"), TABLE, ids=lambda v: getattr(v, "__name__", ""))
def test_edit_reruns_exactly(
    space: Workspace, edit: Callable[[Workspace], None], rules: set[str]
) -> None:
    edit(space)
    assert space.planned() == rules


def test_a_second_dry_run_has_nothing_to_do(finished: Workspace) -> None:
    assert finished.planned() == set()


def test_settings_from_the_command_line_count_as_changes(finished: Workspace) -> None:
    override = "experts={tiny: {training: {learning_rate: 3e-6}}}"
    assert finished.planned("--config", override) == TRAIN


def test_the_other_preset_is_refused(finished: Workspace) -> None:
    done = finished.snakemake("-n", "results/tiny/report.json", "--config", "preset=full")
    assert done.returncode != 0
    assert "holds the demo preset and this run is full" in done.stderr.splitlines()[-1]
    allowed = finished.snakemake(
        "-n", "results/tiny/report.json", "--config", "preset=full", "allow_preset_change=true"
    )
    assert allowed.returncode == 0


def test_copied_results_are_taken_over_without_training(
    finished: Workspace, tmp_path: Path
) -> None:
    """A clone with results/ and no .snakemake: nothing runs, time stamps kept or not."""
    clone = make_workspace(tmp_path / "clone")
    shutil.copytree(finished.root / "results", clone.root / "results")
    assert "train_expert" not in clone.planned()


def test_copied_results_can_be_verified(space: Workspace) -> None:
    script = space.root / "workflow" / "scripts" / "verify_results.py"
    shutil.rmtree(space.root / ".snakemake")

    def verify() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(script)], cwd=space.root, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    code, out = verify()
    assert code == 0 and "CHANGED" not in out
    assert "results/tiny/packing.json: whole\n" in out
    edit_packing(space)
    assert "results/tiny/packing.json: whole; made by other code\n" in verify()[1]
    plan = space.root / "results/tiny/plan.json"
    plan.write_text(plan.read_text() + " ")
    code, out = verify()
    assert code == 1
    assert "results/tiny/plan.json: CHANGED since it was written" in out


def test_a_lost_result_is_published_from_its_state(space: Workspace) -> None:
    """Deleting training.json costs no training: the state is published, not made again."""
    (space.root / "results/tiny/training.json").unlink()
    shutil.rmtree(space.root / "results/tiny/checkpoint")
    before = {p: p.stat().st_mtime_ns for p in space.root.glob("state/tiny/*/outcome.json")}
    done = space.snakemake("results/tiny/training.json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert before == {p: p.stat().st_mtime_ns for p in space.root.glob("state/tiny/*/outcome.json")}


def test_a_trainer_run_by_hand_tokenises_what_is_not_packed(space: Workspace) -> None:
    results = space.root / "results" / "tiny"
    shutil.rmtree(results / "packed")
    (results / "training.json").unlink()
    command = [sys.executable, "workflow/scripts/train_expert.py", "--spec", "{}"]
    for name in ("plan", "packing", "model", "staging"):
        command += [f"--{name}", f"results/tiny/{name}.json"]
    command += ["--state", "state/tiny", "--checkpoint", "results/tiny/checkpoint"]
    command += ["--output", "results/tiny/training.json"]

    def train(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=space.root, capture_output=True, text=True)

    refused = train()
    assert refused.returncode == 1
    assert "the packed rows are missing" in refused.stderr.splitlines()[-1]
    done = train(
        "--shards", "results/tiny/documents/sums/000.json", "--keep", "results/tiny/keep.arrow"
    )
    assert done.returncode == 0, done.stderr
    assert "data tokenised on the fly" in done.stderr
    record = json.loads((results / "training.json").read_text())
    assert any(line.startswith("data tokenised on the fly") for line in record["activated"])
    assert record["loss_last"] < record["loss_first"]
    assert "loader in the trainer, no workers" in record["activated"]
