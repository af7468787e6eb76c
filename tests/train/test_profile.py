"""Profiling some steps: its table and trace, and no effect on the run."""

import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_run import assigned, train
from tiny_run import made as made_tiny

from expertflow.core.errors import Interrupted
from expertflow.core.records import read_record, write_record
from expertflow.plan.records import TrainPlan
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


def watched_run(folder: Path, **settings: Any) -> KernelProfile:
    inputs = made(folder, **{"n_steps": 8, **settings})
    assert train(inputs).n_steps == inputs.plan.n_steps
    return profile_of(inputs.state)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    inputs = made(tmp_path_factory.mktemp("w") / "run", n_steps=N_STEPS, profile_steps=5)
    return inputs.state, train(inputs)


def test_the_weights_are_those_of_a_run_without(tmp_path: Path, watched: Watched) -> None:
    alone = train(made(tmp_path / "run", n_steps=N_STEPS))
    assert watched[1].weights_sha256 == alone.weights_sha256
    assert watched[1].loss_last == alone.loss_last


def test_the_table_adds_up(watched: Watched) -> None:
    record = profile_of(watched[0])
    assert (record.n_steps, record.device, record.reason) == (5, "cpu", None)
    assert record.first_step is not None and record.first_step > 10
    assert record.wall_s is not None and 0 < record.wall_s < watched[1].time.train_s
    assert record.neighbor_step_s and record.neighbor_step_s > 0
    assert record.pause_s and record.pause_s > 0
    assert (
        record.device_busy_fraction is None
        and "CUDA" in (record.unavailable["device_busy_fraction"])
    )
    totals = [kernel.total_s for kernel in record.kernels]
    assert totals == sorted(totals, reverse=True)
    assert sum(totals) == pytest.approx(record.kernels_s)
    assert (len(totals), record.rest.n_calls, record.notes) == (record.n_kernels, 0, ())
    kinds = sum_by_kind(record)
    assert sum(kind.share_fraction for kind in kinds) == pytest.approx(1)
    assert {"matmul", "attention", "loss", "optimizer"} <= {kind.kind for kind in kinds}


def test_the_trace_opens_and_names_neither_machine_nor_place(watched: Watched) -> None:
    state, record = watched[0], profile_of(watched[0])
    path = state / profiler.PROFILE / profiler.TRACE
    assert record.trace == profiler.TRACE and record.n_trace_bytes == path.stat().st_size
    text = gzip.decompress(path.read_bytes()).decode()
    events = json.loads(text)["traceEvents"]
    assert sum(event.get("name") == "_ChunkedLoss" for event in events) == 5
    assert '"host_name"' not in text and str(state) not in text
    assert {file.name for file in path.parent.iterdir()} == {profiler.KERNELS, profiler.TRACE}


def no_start(_: Any) -> None:
    raise RuntimeError("Can't initialize\nCUPTI")


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("profile.start", no_start, "the profiler did not start: Can't initialize CUPTI"),
        ("supported_activities", set, "this build of torch cannot profile CPU"),
        ("operator_spans", lambda _: [], "recorded no kernels"),
        ("write_trace", no_memory, "the profiler failed: host memory ran out"),
    ],
)
def test_a_failing_profiler_is_reported_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, reason: str
) -> None:
    monkeypatch.setattr(f"expertflow.train.profiler.{name}", value)
    record = watched_run(tmp_path / "run", profile_steps=2)
    assert record.n_steps == 0 and record.reason is not None and reason in record.reason


def test_profiled_steps_avoid_saves_and_evaluations(plan: TrainPlan) -> None:
    plan = replace(plan, n_steps=200, profile_steps=5, eval_steps=100)
    window = profiler.choose_window(replace(plan, save_steps=13), 0)
    assert window is not None
    assert (window.steps, window.neighbors) == (range(13, 18), range(8, 13))
    # With a save after each step, only steps timed on the device are avoided.
    window = profiler.choose_window(replace(plan, save_steps=1), 0)
    assert window is not None and window.steps == range(11, 16)
    assert profiler.choose_window(plan, 199) is None


def test_profiled_steps_are_not_timed_on_the_device(tmp_path: Path) -> None:
    outcome = train(made(tmp_path / "run", n_steps=13, profile_steps=12))
    record = profile_of(tmp_path / "run" / "state")
    assert (record.first_step, record.n_steps, outcome.sampled_steps) == (2, 12, None)
    assert outcome.unavailable["sampled_steps"].endswith("timed was profiled")
    short = train(made(tmp_path / "short", n_steps=8))
    assert "too few steps" in short.unavailable["sampled_steps"]


def test_truncation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("MAX_MICRO_BATCHES", 1), ("N_KERNELS", 3), ("MAX_TRACE_BYTES", 1000)):
        monkeypatch.setattr(profiler, name, bound)
    record = watched_run(tmp_path / "run", profile_steps=4)
    assert (record.n_wanted_steps, record.n_steps, len(record.kernels)) == (4, 1, 3)
    listed_s = sum(kernel.total_s for kernel in record.kernels)
    assert record.rest.n_calls and record.rest.total_s + listed_s == pytest.approx(record.kernels_s)
    assert record.notes[0].startswith("at most 1 of the 4 requested steps")
    assert record.notes[1].endswith("names are added up as one")
    assert record.trace is None and "lower training.profile_steps" in record.unavailable["trace"]
    folder = tmp_path / "run" / "state" / profiler.PROFILE
    assert [file.name for file in folder.iterdir()] == [profiler.KERNELS]


@pytest.mark.parametrize("error", [Interrupted, ValueError, MemoryError])
def test_a_run_interrupted_during_its_steps_is_profiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Except when memory ran out, which profiling may have caused."""
    inputs = made(tmp_path / "run", n_steps=N_STEPS, profile_steps=5, save_steps=4)
    step = loop.train_step

    def breaks(run: Any, batches: Any) -> Any:
        if run.progress.step == 14:
            assert profile_of(inputs.state).reason == profiler.BEGUN
            if error is not Interrupted:
                raise error
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, batches)

    monkeypatch.setattr(loop, "train_step", breaks)
    window = profiler.choose_window(inputs.plan, 0)
    assert window is not None and 14 in window.steps[:-1]
    with pytest.raises(error):
        train(inputs)
    assert (inputs.state / profiler.PROFILE / profiler.KERNELS).exists() == (error is MemoryError)
    monkeypatch.setattr(loop, "train_step", step)
    outcome = train(assigned(tmp_path / "run"))
    assert outcome.resumed_at_steps == (15 if error is Interrupted else 12,)
    first = profile_of(inputs.state)
    if error is MemoryError:
        assert "memory ran out" in (first.reason or "")
        return
    assert first.first_step is not None and first.first_step > 13
    # Finished again from its last checkpoint, it keeps its profile.
    train(assigned(tmp_path / "run"))
    assert profile_of(inputs.state) == first


def test_a_run_killed_during_its_steps_is_not_profiled_again(tmp_path: Path) -> None:
    """Out of memory, it would be killed each time."""
    inputs = made(tmp_path / "run", n_steps=8, profile_steps=4)
    begun = KernelProfile(n_wanted_steps=4, device="cpu", reason=profiler.BEGUN)
    write_record(inputs.state / profiler.PROFILE / profiler.KERNELS, begun)
    assert train(inputs).n_steps == 8
    assert profile_of(inputs.state) == begun


def test_a_lost_profile_affects_nothing_else(tmp_path: Path, watched: Watched) -> None:
    shutil.copytree(watched[0] / profiler.PROFILE, tmp_path / "state" / profiler.PROFILE)
    state = tmp_path / "state" / profiler.PROFILE

    def published(n_wanted: int = 5, **changes: int) -> KernelProfile:
        outcome = replace(watched[1], **changes)
        profiler.publish_profile(
            state.parent, tmp_path / profiler.PROFILE, outcome, n_wanted=n_wanted
        )
        return profile_of(tmp_path)

    assert published() == profile_of(watched[0])
    assert (tmp_path / profiler.PROFILE / profiler.TRACE).samefile(state / profiler.TRACE)
    (state / profiler.TRACE).unlink()
    again = published()
    assert (again.n_steps, again.trace) == (5, None)
    assert "no longer complete" in again.unavailable["trace"]
    (state / profiler.KERNELS).write_text("{")
    assert "cannot be read" in (published().reason or "")
    (state / profiler.KERNELS).unlink()
    assert published().reason == "it is missing from the state"
    # A run without a profile is not trained again when one is requested later.
    assert published(0, profile_steps=0).reason == profiler.NOT_ASKED
    assert published(2, profile_steps=0).reason == profiler.AFTERWARDS
    assert [file.name for file in (tmp_path / profiler.PROFILE).iterdir()] == [profiler.KERNELS]
