"""The split of a step: stamps on a CPU, shares of sampled steps on a GPU, else null."""

from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.sections.time import split, time_section
from expertflow.train.records import MemoryRetry, SampledSteps


def test_gpu_steps_are_split_by_their_samples(gpu_inputs: ReportInputs) -> None:
    sampled = SampledSteps(n_steps=9, h2d_s=0.1, forward_s=0.3, backward_s=0.5, optimizer_s=0.1)
    time = split(replace(gpu_inputs.training, sampled_steps=sampled)).spent
    whole_s = gpu_inputs.training.time.train_s
    assert time.h2d_s == pytest.approx(0.1 * whole_s)
    assert time.train_s == pytest.approx(0.9 * whole_s)
    assert time.forward_s == pytest.approx(0.3 * whole_s)
    assert time.backward_s == pytest.approx(0.5 * whole_s)
    assert time.optimizer_s == pytest.approx(0.1 * whole_s)


def test_idle_time_is_an_estimate_and_says_so(gpu_inputs: ReportInputs) -> None:
    section = time_section(replace(gpu_inputs.training, n_sessions=1))
    # 2,712 s, less 75.6 s of evaluation and 1,800 steps of 1.383 s
    assert section["gpu_idle_s"] == pytest.approx(2_712 - 75.6 - 1_800 * 1.383)
    assert section["split_source"] == "sampled steps"
    assert section["gpu_idle_source"].startswith("estimate: ")


def test_busier_than_the_wall_is_not_idle(gpu_inputs: ReportInputs) -> None:
    sampled = replace(gpu_inputs.training.sampled_steps, backward_s=9.0)  # type: ignore[type-var]
    times = split(replace(gpu_inputs.training, sampled_steps=sampled, n_sessions=1))
    assert times.spent.gpu_idle_s == 0.0


RETRY = MemoryRetry(after_step=0, micro_batch_size=8, n_accumulation_steps=4, message="short")


@pytest.mark.parametrize("broken", [{"n_sessions": 2}, {"memory_retries": (RETRY,)}])
def test_work_that_was_thrown_away_is_not_idle(
    broken: dict[str, Any], gpu_inputs: ReportInputs
) -> None:
    training = replace(gpu_inputs.training, **{"n_sessions": 1, **broken})
    section = time_section(training)
    assert section["split_source"] == "sampled steps"
    assert section["gpu_idle_s"] is None and section["gpu_idle_source"] is None
    reasons = build_report(replace(gpu_inputs, training=training), {})["unavailable"]
    assert reasons["time.gpu_idle_s"] == "work that was thrown away is not timed"


NO_TIME = SampledSteps(n_steps=1, h2d_s=0.0, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)


@pytest.mark.parametrize("sampled", [None, NO_TIME])
def test_without_samples_nothing_is_split(
    sampled: SampledSteps | None, gpu_inputs: ReportInputs
) -> None:
    training = replace(gpu_inputs.training, sampled_steps=sampled)
    times = split(training)
    assert times.spent == training.time
    assert (times.split_source, times.gpu_idle_source) == (None, None)
