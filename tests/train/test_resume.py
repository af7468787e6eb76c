"""Whatever happens to a trainer or its copies of rows, the final weights are the same."""

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from msgspec.structs import replace
from soak import N_STEPS, Straight, assert_same, kill_until_done
from support import LORA, write_tiny_run
from trainers import Fault, Trainers

from expertflow.core.errors import ExpertflowError, Interrupted, TrainingError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.process import stop_group
from expertflow.core.records import read_record, write_record, write_sealed
from expertflow.data.layout import chatml_layout
from expertflow.hardware import disk
from expertflow.staging.content import read_content, rows_key, weights_key
from expertflow.staging.ensure import plan_staging
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import PackingRecord
from expertflow.train import job, run, step_hooks
from expertflow.train.job import PLAN, warn_of_unused_progress
from expertflow.train.model.packed import compute_held_out_loss
from expertflow.train.model.weights import Diverged
from expertflow.train.saved.checkpoint_files import last_seen_s, newest_checkpoint, read_progress

KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
EIGHT_BIT = pytest.mark.extra("bitsandbytes")
# Points between which the files on disk differ, and how often a session gets there first. Those
# of a chain each kill one session of the same run.
CHAINS = (
    {"enter:data_wait": 1, "enter:eval": 2, "exit:eval": 1},
    {"exit:take": 2, "exit:backward": 7, "enter:checkpoint": 2},
    {"enter:save_file": 1, "exit:save_file": 5, "enter:sync_directory": 2},
    {"exit:sync_directory": 3, "exit:prune": 2, "enter:hide": 1},
    {"exit:hide": 1, "enter:export": 1, "exit:candidate": 1, "exit:export": 1, "enter:publish": 1,
     "exit:publish": 1},
)  # fmt: skip
OfMethod = Callable[[str], Straight]


@pytest.fixture(scope="module")
def straight(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> OfMethod:
    return cache(lambda method: Straight(trainers, tmp_path_factory.mktemp(method), method))


def stopped_and_resumed(
    trainers: Trainers, straight: Straight, folder: Path, *faults: Fault
) -> dict[str, Any]:
    shutil.copytree(straight.inputs, folder, dirs_exist_ok=True)
    for fault in faults:
        died = trainers.train(folder, fault)
        assert died["fired"], f"{fault} was never reached"
        code = -KILL if fault[2] == KILL else 143
        # A run stopped while it writes its last checkpoint may already be finished.
        is_done = fault[2] != KILL and died["code"] == 0 and (folder / "training.json").is_file()
        assert died["code"] == code or is_done, (folder / "log").read_text()
    record = trainers.finish(folder)
    assert_same(folder, record, straight.record)
    return record


def test_a_killed_run_resumes(trainers: Trainers, straight: OfMethod, tmp_path: Path) -> None:
    # The checkpoint of step 5 is on disk before the one of step 10 is taken.
    fault = ("exit:optimizer", 11, KILL)
    record = stopped_and_resumed(trainers, straight("lora"), tmp_path, fault)
    assert record["resumed_at_steps"] in ([5], [10])
    time_ = record["time"]
    parts = ("startup_s", "data_wait_s", "train_s", "checkpoint_s", "eval_s", "other_s")
    assert sum(time_[part] for part in parts) == pytest.approx(time_["wall_s"], rel=0.01)
    assert all(time_[part] >= 0 for part in parts)
    assert 0 < time_["forward_s"] + time_["backward_s"] < time_["train_s"]


def test_sessions_without_a_checkpoint_or_steps_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run.made(tmp_path, n_steps=2, save_steps=2)
    (tmp_path / "state/gpu.jsonl").write_text('{"elapsed_s": 9.5}\n')
    first = tiny_run.train(tiny_run.assigned(tmp_path))
    assert (first.n_sessions, first.resumed_at_steps) == (2, (0,))
    assert first.time.other_s > 9
    # One without steps has the peaks of earlier ones.
    monkeypatch.setattr(run, "peak_resident_bytes", lambda: 1)
    again = tiny_run.train(tiny_run.assigned(tmp_path))
    assert again.resumed_at_steps == (0, 2)
    assert 1 << 20 < again.peak_host_rss_bytes <= first.peak_host_rss_bytes


def test_progress_unused_because_of_another_setting_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = tiny_run.made(tmp_path, n_steps=2, save_steps=2)
    write_sealed(inputs.state / PLAN, inputs.plan)
    tiny_run.train(inputs)
    new = tmp_path / "new"
    new.mkdir()
    warn_of_unused_progress(replace(inputs.plan, learning_rate=1e-5), new)
    assert caplog.messages == [
        f"{inputs.state}: an unfinished training at step 2 is not resumed: learning_rate"
        f" {inputs.plan.learning_rate}, now 1e-05"
    ]
    warn_of_unused_progress(inputs.plan, new)
    assert caplog.messages[1].endswith("is not resumed: different data, model or code")
    warn_of_unused_progress(inputs.plan, inputs.state)
    assert len(caplog.messages) == 2


def test_a_signal_ends_an_evaluation_and_the_next_session_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"n_steps": 4, "eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True}
    straight = tiny_run.train(tiny_run.made(tmp_path / "straight", **settings))
    n_left = 0

    def told(*args: Any, **options: Any) -> tuple[float, int]:
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            os.kill(os.getpid(), TERM)
        return compute_held_out_loss(*args, **options)

    for n in (1, 2, 3):
        n_left, inputs = n, tiny_run.made(tmp_path / str(n), **settings)
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(step_hooks, "compute_held_out_loss", told)
            tiny_run.train(inputs)
        saved = newest_checkpoint(inputs.state)
        assert (saved and read_progress(saved)["step"]) == (2 * (n - 1) or None)
        record = tiny_run.train(replace(inputs, seen_s=last_seen_s(inputs.state)))
        losses = [[(point.step, point.loss) for point in r.eval_points] for r in (straight, record)]
        assert losses[1] == losses[0]
        assert record.weights_sha256 == straight.weights_sha256
        assert record.published_step == straight.published_step


@pytest.mark.long
@pytest.mark.parametrize(
    "faults",
    [
        *([(point, n, KILL) for point, n in chain.items()] for chain in CHAINS),
        [("enter:eval", 1, TERM), ("enter:data_wait", 2, TERM), ("exit:forward", 6, INT),
         ("enter:eval", 1, INT)],
        [("enter:take", 2, INT), ("enter:optimizer", 3, HUP)],
        [("exit:save_file", 3, TERM)],
        [("enter:prune", 2, TERM)],
    ],
    ids=lambda faults: " ".join(point for point, *_ in faults),
)  # fmt: skip
def test_killed_or_told_to_stop_anywhere(
    trainers: Trainers, straight: OfMethod, tmp_path: Path, faults: list[Fault]
) -> None:
    stopped_and_resumed(trainers, straight("lora"), tmp_path, *faults)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        "full", "dora", "accumulation", "checkpointing", "pure_bf16",
        pytest.param("adamw_8bit", marks=EIGHT_BIT), pytest.param("qlora", marks=EIGHT_BIT),
    ],
)  # fmt: skip
def test_every_method(trainers: Trainers, straight: OfMethod, tmp_path: Path, method: str) -> None:
    faults = [("exit:backward", 7, KILL), ("enter:optimizer", 2, TERM), ("exit:sync", 2, KILL)]
    stopped_and_resumed(trainers, straight(method), tmp_path, *faults)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_kills(trainers: Trainers, straight: OfMethod, tmp_path: Path, seed: int) -> None:
    """Rounds of ``make soak``."""
    generator = random.Random(seed)
    method = generator.choice(["lora", "full", "accumulation"])
    kill_until_done(trainers, straight(method), tmp_path, generator)


def test_an_input_edited_during_training_is_noticed(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, n_steps=3)
    packing = json.loads((tmp_path / "packing.json").read_text())
    packing["train"]["sha256"] = "0" * 64
    (tmp_path / "packing.json").write_text(json.dumps(packing))
    with pytest.raises(TrainingError, match="changed during training"):
        tiny_run.finish(tmp_path)


def test_a_run_that_diverged_is_not_paid_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_run(tmp_path, n_steps=6)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "learning_rate": 1e30}))

    def stop_and_die(monitor: Any, **how: Any) -> None:
        stop_group(monitor, **how)
        raise SystemExit(143)

    # The launcher stops one of several processes while it waits for the monitor.
    monkeypatch.setattr(job, "stop_group", stop_and_die)
    with pytest.raises(SystemExit) as ended:
        tiny_run.finish(tmp_path)
    first = ended.value.__context__
    assert isinstance(first, Diverged)
    message = str(first)
    assert "lower training.learning_rate (1e+30)" in message
    assert "its rows are " in message and "the last good state is the start" in message
    (preflight,) = tmp_path.glob("state/*/preflight.json")
    preflight.unlink()
    with pytest.raises(TrainingError, match=r"^step 2 diverged.*this run would repeat it$"):
        tiny_run.finish(tmp_path)
    assert not preflight.exists(), "a run begins with these checks"


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


def actions(preflight: Path, scratch: Path) -> set[str]:
    notes = json.loads(preflight.read_text())["staging"].values()
    assert all(Path(note["target"]).is_relative_to(scratch) for note in notes)
    return {note["action"] for note in notes}


@pytest.mark.skipif(
    disk.file_system(Path(tempfile.gettempdir())) in disk.IN_MEMORY,
    reason="temporary files are in memory here, and are used in place",
)
def test_copies_yield_the_same_model_and_one_lost_midway_is_copied_again(
    straight: OfMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, save = made_with_copies(tmp_path), step_hooks.save_checkpoint

    def save_and_lose(run: Any) -> None:
        save(run)
        run.saver.wait()
        shutil.rmtree(scratch / f"expertflow-{os.geteuid()}", ignore_errors=True)

    with monkeypatch.context() as patched:
        patched.setattr(step_hooks, "save_checkpoint", save_and_lose)
        with pytest.raises(ExpertflowError, match="rows vanished while being read; run again"):
            tiny_run.finish(tmp_path)
    (preflight,) = tmp_path.glob("state/*/preflight.json")
    assert actions(preflight, scratch) == {"reused"}
    record = tiny_run.finish(tmp_path)
    assert record.weights_sha256 == straight("lora").record["weights_sha256"]
    assert record.resumed_at_steps, "what was trained is not lost"
    assert actions(tmp_path / "preflight.json", scratch) == {"copied"}
    adapter = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "base_model")
    template = (tmp_path / "checkpoint" / "chat_template.jinja").read_text()
    assert template == chatml_layout().chat_template
