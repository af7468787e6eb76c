"""Whatever happens to a trainer or to its copies of rows, the weights at the end are the same."""

import json
import os
import shutil
import signal
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

N_STEPS = 40


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("state/*/checkpoints/step-*"))


def stop_midway(folder: Path, number: signal.Signals) -> int:
    process = start_resting(folder)
    wait_for_checkpoints(folder, process)
    process.send_signal(number)
    process.communicate(timeout=180)
    return process.returncode


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("straight")
    write_tiny_run(folder, lora=LORA, n_steps=N_STEPS)
    return folder, run_trainer(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_ends_with_the_same_weights(
    straight: tuple[Path, dict[str, object]], tmp_path: Path, number: signal.Signals
) -> None:
    _, expected = straight
    write_tiny_run(tmp_path, lora=LORA, n_steps=N_STEPS)
    code = stop_midway(tmp_path, number)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 143)
    assert not (tmp_path / "training.json").exists()
    stopped_at = int(checkpoints(tmp_path)[-1].name.removeprefix("step-"))
    assert 0 < stopped_at < N_STEPS
    record = run_trainer(tmp_path)
    assert record["resumed_at_steps"] == [stopped_at]
    assert record["weights_sha256"] == expected["weights_sha256"]
    assert record["n_tokens"] == expected["n_tokens"]
    time_ = record["time"]
    assert isinstance(time_, dict) and time_["wall_s"] > 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").open()]
    assert steps == list(range(1, N_STEPS + 1))


def test_a_finished_state_is_published_again_without_training(
    straight: tuple[Path, dict[str, object]],
) -> None:
    folder, expected = straight
    shutil.rmtree(folder / "checkpoint")
    (folder / "training.json").unlink()
    outcome = next(folder.glob("state/*/outcome.json"))
    stamp = outcome.stat().st_mtime_ns
    assert run_trainer(folder) == expected
    assert outcome.stat().st_mtime_ns == stamp
    assert (folder / "checkpoint" / "adapter_model.safetensors").is_file()


def test_an_input_edited_during_training_is_noticed(
    straight: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    write_tiny_run(tmp_path, n_steps=3)
    packing = json.loads((tmp_path / "packing.json").read_text())
    packing["train"]["sha256"] = "0" * 64
    (tmp_path / "packing.json").write_text(json.dumps(packing))
    process = start_trainer(tmp_path)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "changed during training" in stderr.splitlines()[-1]


def test_time_parts_add_up(straight: tuple[Path, dict[str, object]]) -> None:
    _, record = straight
    time_ = record["time"]
    assert isinstance(time_, dict)
    parts = ("startup_s", "data_wait_s", "train_s", "checkpoint_s", "eval_s", "other_s")
    assert sum(time_[p] for p in parts) == pytest.approx(time_["wall_s"], rel=0.01)
    assert all(time_[p] >= 0 for p in parts)
    assert time_["forward_s"] + time_["backward_s"] < time_["train_s"]


def test_a_run_that_diverged_is_not_paid_for_twice(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, n_steps=6)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "learning_rate": 1e30}))
    errors = []
    for _ in range(2):
        process = start_trainer(tmp_path)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 1
        errors.append(stderr)
    last = errors[0].splitlines()[-1]
    assert "lower training.learning_rate (1e+30)" in last
    assert "its rows are " in last and "the last good state is the start" in last
    assert "held-out loss" in errors[0] and "held-out loss" not in errors[1]
    again = errors[1].splitlines()[-1]
    assert again.startswith("error: step 2 diverged") and again.endswith("it is the same run again")


on_a_disk = pytest.mark.skipif(
    disk.file_system(Path(tempfile.gettempdir())) in disk.IN_MEMORY,
    reason="temporary files lie in memory here, and are trained from in place",
)


def made_with_copies(folder: Path, **spec: Any) -> Path:
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


@on_a_disk
def test_copies_give_the_same_model(
    straight: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    scratch = made_with_copies(tmp_path)
    record = run_trainer(tmp_path)
    assert record["weights_sha256"] == straight[1]["weights_sha256"]
    notes = noted(tmp_path)
    for kind, note in notes.items():
        assert note["action"] == "reused", kind
        assert Path(note["target"]).is_relative_to(scratch)
    adapter = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "base_model")


@on_a_disk
def test_a_copy_lost_in_the_midst_is_one_line_and_a_retry_copies_again(
    straight: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    scratch = made_with_copies(tmp_path)
    process = start_resting(tmp_path)
    wait_for_checkpoints(tmp_path, process)
    shutil.rmtree(scratch / f"expertflow-{os.geteuid()}")
    (tmp_path / GO_ON).touch()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "rows went away while they were read; run again" in stderr
    assert "Traceback" not in stderr
    record = run_trainer(tmp_path)
    assert record["weights_sha256"] == straight[1]["weights_sha256"]
    assert record["resumed_at_steps"], "what was trained is not lost"
    assert {note["action"] for note in noted(tmp_path).values()} == {"copied"}
