"""Training from copies: same weights, and a copy that is lost or cannot be made costs no result."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from resting import GO_ON, start_resting, wait_for_checkpoints
from support import LORA, run_trainer, start_trainer, write_tiny_run

from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import read_record, write_record
from expertflow.hardware import disk
from expertflow.staging.content import read_content, rows_key, weights_key
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import PackingRecord

N_STEPS = 30
pytestmark = pytest.mark.skipif(
    disk.file_system(Path(tempfile.gettempdir())) in disk.IN_MEMORY,
    reason="temporary files lie in memory here, and are trained from in place",
)


def made(folder: Path, **spec: Any) -> Path:
    folder.mkdir(exist_ok=True)
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
        spec=StageSpec(scratch=str(scratch), **spec),
        rows=read_content("rows", folder / "packed", key),
        weights=read_content("weights", base, weights_key(base, weights)),
    )
    write_record(folder / "staging.json", record)
    return scratch


def noted(folder: Path) -> dict[str, Any]:
    notes: dict[str, Any] = json.loads((folder / "preflight.json").read_text())["staging"]
    return notes


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("in-place")
    write_tiny_run(folder, lora=LORA, n_steps=N_STEPS)
    return folder, run_trainer(folder)


def test_copies_give_the_same_model(in_place: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    scratch = made(tmp_path)
    record = run_trainer(tmp_path)
    assert record["weights_sha256"] == in_place[1]["weights_sha256"]
    notes = noted(tmp_path)
    for kind, note in notes.items():
        assert note["action"] == "reused", kind
        assert Path(note["target"]).is_relative_to(scratch)
    adapter = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "base_model")


def test_a_copy_lost_in_the_midst_is_one_line_and_a_retry_copies_again(
    in_place: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    scratch = made(tmp_path)
    process = start_resting(tmp_path)
    wait_for_checkpoints(tmp_path, process)
    shutil.rmtree(scratch / f"expertflow-{os.geteuid()}")
    (tmp_path / GO_ON).touch()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "rows went away while they were read; run again" in stderr
    assert "Traceback" not in stderr
    record = run_trainer(tmp_path)
    assert record["weights_sha256"] == in_place[1]["weights_sha256"]
    assert record["resumed_at_steps"], "what was trained is not lost"
    assert {note["action"] for note in noted(tmp_path).values()} == {"copied"}


def test_without_room_training_reads_the_source(
    in_place: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    scratch = made(tmp_path)
    shutil.rmtree(scratch)
    process = start_trainer(tmp_path)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "rows are read where they are: scratch" in stderr
    assert all(note["is_fallback"] for note in noted(tmp_path).values())
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["weights_sha256"] == in_place[1]["weights_sha256"]
