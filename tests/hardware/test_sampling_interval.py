import json
from pathlib import Path

import pytest

from expertflow.hardware.sampler import SamplingInterval


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def log(path: Path, step_s: float, n: int, *, every: int = 1) -> Path:
    """Write a trainer's log, a line every so many steps, after ten seconds of start-up."""
    steps = range(every, n * every + 1, every)
    lines = [json.dumps({"step": s, "elapsed_s": 10 + s * step_s, "loss": 1.0}) for s in steps]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_alone_it_reads_once_a_second() -> None:
    assert SamplingInterval().next_s() == 1.0


def test_it_reads_densely_until_it_knows_an_epoch(path: Path) -> None:
    interval = SamplingInterval(steps=path, n_steps_per_epoch=10)
    assert interval.next_s() == 0.1
    log(path, 0.5, 1)
    assert (interval.next_s(), interval.epoch_s) == (0.1, None)
    log(path, 0.5, 2)
    assert interval.next_s() < 5 / 20
    assert interval.epoch_s == pytest.approx(5)


@pytest.mark.parametrize(
    ("step_s", "n_steps", "least", "most"),
    [(1.0, 1000, 1.0, 1.0), (0.6, 10, 0.2, 0.3), (0.01, 5, 0.1, 0.1)],
)
def test_an_epoch_gets_twenty_readings_within_bounds(
    path: Path, step_s: float, n_steps: int, least: float, most: float
) -> None:
    log(path, step_s, 30)
    assert least <= SamplingInterval(steps=path, n_steps_per_epoch=n_steps).next_s() <= most


def test_what_the_floor_does_not_reach_is_said(path: Path) -> None:
    log(path, 0.1, 30)
    interval = SamplingInterval(steps=path, n_steps_per_epoch=5)
    interval.next_s()
    assert list(interval.remarks()) == [
        "an epoch takes 0.5 s: at most 5 of the 20 samples wanted, at 0.1 s each"
    ]


def test_logging_intervals_are_as_good_as_steps(path: Path) -> None:
    interval = SamplingInterval(steps=log(path, 0.5, 4, every=10), n_steps_per_epoch=10)
    interval.next_s()
    assert interval.epoch_s == pytest.approx(5)


def test_a_pause_for_an_evaluation_does_not_make_steps_longer(path: Path) -> None:
    log(path, 0.5, 10)
    late = [{"step": s, "elapsed_s": 100 + s * 0.5} for s in range(11, 16)]
    with path.open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in late)
        stream.write('{"step": 16, "elap')
    interval = SamplingInterval(steps=path, n_steps_per_epoch=10)
    interval.next_s()
    assert interval.epoch_s == pytest.approx(5)


def test_an_explicit_interval_is_kept_whatever_the_epoch(path: Path) -> None:
    interval = SamplingInterval(5.0, steps=log(path, 0.01, 30), n_steps_per_epoch=5)
    assert interval.next_s() == 5.0
    assert list(interval.remarks()) == []
