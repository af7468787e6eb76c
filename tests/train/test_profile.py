"""Profiling some steps: its table and trace, and no effect on the run."""

import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_run import assigned, train
from tiny_run import made as made_tiny

from expertflow.core.errors import Interrupted
from expertflow.core.records import read_record
from expertflow.report.profile import sum_by_kind
from expertflow.train import loop, profiler
from expertflow.train.records import KernelProfile, RunSummary
from expertflow.train.run import TrainInputs

N_STEPS = 24
Watched = tuple[Path, RunSummary]


def made(folder: Path, **settings: Any) -> TrainInputs:
    """Make a run of one row per step: a profile costs time per operator."""
    return made_tiny(folder, batch_size=1, **settings)


def profile_of(folder: Path) -> KernelProfile:
    return read_record(KernelProfile, folder / profiler.PROFILE / profiler.KERNELS)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    inputs = made(tmp_path_factory.mktemp("w") / "run", n_steps=N_STEPS, profile_steps=5)
    return inputs.state, train(inputs)


def test_the_weights_are_those_of_a_run_without(tmp_path: Path, watched: Watched) -> None:
    alone = train(made(tmp_path / "run", n_steps=N_STEPS))
    assert watched[1].weights_sha256 == alone.weights_sha256
    assert watched[1].loss_last == alone.loss_last


def test_the_table_adds_up_and_the_trace_opens(watched: Watched) -> None:
    record = profile_of(watched[0])
    assert (record.n_steps, record.first_step, record.reason) == (5, 12, None)
    assert record.wall_s is not None and 0 < record.wall_s < watched[1].time.train_s
    assert record.pause_s and record.pause_s > 0
    totals = [kernel.total_s for kernel in record.kernels]
    assert totals == sorted(totals, reverse=True)
    assert not [kernel for kernel in record.kernels if kernel.name.startswith("ProfilerStep")]
    kinds = sum_by_kind(record)
    assert sum(kind.share_fraction for kind in kinds) == pytest.approx(1)
    assert {"matmul", "attention", "loss", "optimizer"} <= {kind.kind for kind in kinds}
    path = watched[0] / profiler.PROFILE / profiler.TRACE
    assert record.trace == profiler.TRACE and record.n_trace_bytes == path.stat().st_size
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "_ChunkedLoss" for event in events) == 5
    assert {file.name for file in path.parent.iterdir()} == {profiler.KERNELS, profiler.TRACE}


def test_a_failing_profiler_is_reported_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fault, reason in (
        ("profile.start", Mock(side_effect=RuntimeError("Can't\nstart")), "failed: Can't start"),
        ("profile.step", Mock(side_effect=MemoryError), "profiler failed: host memory ran out"),
        ("list_kernels", Mock(return_value=()), "recorded no kernels"),
    ):
        inputs = made(tmp_path / name, n_steps=8, profile_steps=2)
        with monkeypatch.context() as faulty:
            faulty.setattr(f"expertflow.train.profiler.{name}", fault)
            assert train(inputs).n_steps == 8
        record = profile_of(inputs.state)
        assert record.n_steps == 0 and reason in (record.reason or "")
        assert not torch.autograd._profiler_enabled()


def test_profiled_steps_are_not_timed_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = train(made(tmp_path / "run", n_steps=13, profile_steps=12))
    record = profile_of(tmp_path / "run" / "state")
    assert (record.first_step, record.n_steps, outcome.sampled_steps) == (3, 11, None)
    assert outcome.unavailable["sampled_steps"].endswith("timed was profiled")
    monkeypatch.setattr(profiler, "MAX_MICRO_BATCHES", 1)
    short = train(made(tmp_path / "short", n_steps=8, profile_steps=4))
    record = profile_of(tmp_path / "short" / "state")
    assert (record.first_step, record.n_steps) == (8, 1)
    assert "too few steps" in short.unavailable["sampled_steps"]


@pytest.mark.parametrize(("step", "n_profiled"), [(5, 5), (14, 0)])
def test_only_a_run_stopped_during_its_steps_is_not_profiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, n_profiled: int
) -> None:
    """Out of memory because of the profile, it would be killed each time."""
    inputs = made(tmp_path / "run", n_steps=N_STEPS, profile_steps=5)
    train_step = loop.train_step

    def stopped(run: Any, batches: Any) -> Any:
        if run.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(run, batches)

    monkeypatch.setattr(loop, "train_step", stopped)
    with pytest.raises(Interrupted):
        train(inputs)
    assert not torch.autograd._profiler_enabled()
    monkeypatch.setattr(loop, "train_step", train_step)
    assert train(assigned(tmp_path / "run")).resumed_at_steps == (step + 1,)
    record = profile_of(inputs.state)
    assert record.n_steps == n_profiled
    assert record.reason == (None if n_profiled else profiler.BEGUN)
    # Finished again from its last checkpoint, it keeps its profile.
    train(assigned(tmp_path / "run"))
    assert profile_of(inputs.state) == record


def test_a_lost_profile_affects_nothing_else(tmp_path: Path, watched: Watched) -> None:
    state, target = tmp_path / "state" / profiler.PROFILE, tmp_path / profiler.PROFILE
    shutil.copytree(watched[0] / profiler.PROFILE, state)

    def published(n_wanted: int = 5) -> KernelProfile:
        profiler.publish_profile(state.parent, target, device="cpu", n_wanted=n_wanted)
        return profile_of(tmp_path)

    assert published() == profile_of(watched[0])
    assert (target / profiler.TRACE).samefile(state / profiler.TRACE)
    (state / profiler.TRACE).unlink()
    assert published().reason == "its trace is missing from the state"
    (state / profiler.KERNELS).write_text("{")
    assert "cannot be read" in (published().reason or "")
    # A run without a profile is not trained again when one is requested later.
    (state / profiler.KERNELS).unlink()
    assert published().reason == profiler.NO_PROFILE
    assert published(0).reason == profiler.NOT_ASKED
    assert [file.name for file in target.iterdir()] == [profiler.KERNELS]
