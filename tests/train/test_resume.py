"""Whatever happens to a trainer or to its copies of rows, the weights at the end are the same."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from support import LORA, write_tiny_run

from expertflow.core.errors import ExpertflowError, TrainingError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import read_record, write_record
from expertflow.hardware import disk
from expertflow.staging.content import read_content, rows_key, weights_key
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import PackingRecord
from expertflow.train import step_hooks
from expertflow.train.records import TrainingRecord
from expertflow.train.run import Diverged

N_STEPS = 12
Straight = tuple[Path, TrainingRecord]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    folder = tmp_path_factory.mktemp("straight")
    write_tiny_run(folder, lora=LORA, n_steps=N_STEPS)
    return folder, tiny_run.finish(folder)


def test_a_finished_state_is_published_again_without_training(straight: Straight) -> None:
    folder, expected = straight
    shutil.rmtree(folder / "checkpoint")
    (folder / "training.json").unlink()
    outcome = next(folder.glob("state/*/outcome.json"))
    stamp = outcome.stat().st_mtime_ns
    assert tiny_run.finish(folder) == expected
    assert outcome.stat().st_mtime_ns == stamp
    assert (folder / "checkpoint" / "adapter_model.safetensors").is_file()


def test_an_input_edited_during_training_is_noticed(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, n_steps=3)
    packing = json.loads((tmp_path / "packing.json").read_text())
    packing["train"]["sha256"] = "0" * 64
    (tmp_path / "packing.json").write_text(json.dumps(packing))
    with pytest.raises(TrainingError, match="changed during training"):
        tiny_run.finish(tmp_path)


def test_a_run_that_diverged_is_not_paid_for_twice(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, n_steps=6)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "learning_rate": 1e30}))
    with pytest.raises(Diverged) as first:
        tiny_run.finish(tmp_path)
    said = str(first.value)
    assert "lower training.learning_rate (1e+30)" in said
    assert "its rows are " in said and "the last good state is the start" in said
    (preflight,) = tmp_path.glob("state/*/preflight.json")
    preflight.unlink()
    with pytest.raises(TrainingError, match=r"^step 2 diverged.*it is the same run again$"):
        tiny_run.finish(tmp_path)
    assert not preflight.exists(), "a run begins with these checks"


on_a_disk = pytest.mark.skipif(
    disk.file_system(Path(tempfile.gettempdir())) in disk.IN_MEMORY,
    reason="temporary files lie in memory here, and are trained from in place",
)


def made_with_copies(folder: Path) -> Path:
    write_tiny_run(folder, lora=LORA, n_steps=N_STEPS)
    scratch, base = folder / "scratch", folder / "base_model"
    scratch.mkdir()
    packing = read_record(PackingRecord, folder / "packing.json")
    key = rows_key(packing.train.sha256, packing.held_out.sha256)
    weights = sha256_json([sha256_file(path) for path in sorted(base.glob("*.safetensors"))])
    model = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**model, "weights_sha256": weights}))
    record = plan_staging(
        expert="tiny",
        spec=StageSpec(scratch=str(scratch)),
        rows=read_content("rows", folder / "packed", key),
        weights=read_content("weights", base, weights_key(base, weights)),
    )
    write_record(folder / "staging.json", record)
    return scratch


def noted(folder: Path) -> dict[str, Any]:
    notes: dict[str, Any] = json.loads((folder / "preflight.json").read_text())["staging"]
    return notes


@on_a_disk
def test_copies_give_the_same_model(straight: Straight, tmp_path: Path) -> None:
    scratch = made_with_copies(tmp_path)
    assert tiny_run.finish(tmp_path).weights_sha256 == straight[1].weights_sha256
    notes = noted(tmp_path)
    for kind, note in notes.items():
        assert note["action"] == "reused", kind
        assert Path(note["target"]).is_relative_to(scratch)
    adapter = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "base_model")


@on_a_disk
def test_a_copy_lost_in_the_midst_is_an_error_and_a_retry_copies_again(
    straight: Straight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, save = made_with_copies(tmp_path), step_hooks.save_checkpoint

    def save_and_lose(run: Any) -> None:
        save(run)
        run.saver.wait()
        shutil.rmtree(scratch / f"expertflow-{os.geteuid()}", ignore_errors=True)

    with monkeypatch.context() as patched:
        patched.setattr(step_hooks, "save_checkpoint", save_and_lose)
        with pytest.raises(ExpertflowError, match="rows went away while they were read; run again"):
            tiny_run.finish(tmp_path)
    record = tiny_run.finish(tmp_path)
    assert record.weights_sha256 == straight[1].weights_sha256
    assert record.resumed_at_steps, "what was trained is not lost"
    assert {note["action"] for note in noted(tmp_path).values()} == {"copied"}
