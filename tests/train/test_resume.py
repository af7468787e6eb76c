"""Whatever happens to a trainer, the weights at the end are the same, bit for bit."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from resting import start_resting, wait_for_checkpoints
from support import LORA, run_trainer, start_trainer, write_tiny_run

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


def test_a_second_trainer_waits_for_the_first(
    straight: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    """Then there is nothing left to train; killed Snakemakes leave such a first one behind."""
    _, expected = straight
    write_tiny_run(tmp_path, lora=LORA, n_steps=N_STEPS)
    first = start_trainer(tmp_path)
    while not (tmp_path / "state").is_dir() or not checkpoints(tmp_path):
        assert first.poll() is None or checkpoints(tmp_path)
        time.sleep(0.005)
    second = start_trainer(tmp_path)
    _, stderr = first.communicate(timeout=300)
    assert first.returncode == 0, stderr
    _, stderr = second.communicate(timeout=300)
    assert second.returncode == 0, stderr
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["weights_sha256"] == expected["weights_sha256"]
    assert record["n_sessions"] == 1


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
