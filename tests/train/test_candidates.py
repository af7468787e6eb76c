"""A run publishes its best weights, and all others that it keeps as models of their own."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import LORA
from tiny_run import assembled, made, train

from expertflow.train import loop, publish
from expertflow.train.model.load import load_trained
from expertflow.train.model.weights import list_trained_parameters
from expertflow.train.publish import LOGS, read_outcome, write_outcome
from expertflow.train.records import RunSummary
from expertflow.train.saved import checkpoint_files


def saved(state: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_files.directory_of(state, step) / checkpoint_files.WEIGHTS)


def held(folder: Path, state: Path) -> dict[str, torch.Tensor]:
    net = load_trained(
        folder, base=str(state.parent / "base_model"), dtype=torch.float32, attention_name="sdpa"
    )
    if hasattr(net, "peft_config"):
        return {n: p.detach() for n, p in net.named_parameters() if "lora_" in n}
    return {name: p.detach() for name, p in list_trained_parameters(net).items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_each_kept_checkpoint_is_a_model_of_its_own(tmp_path: Path, lora: Any) -> None:
    inputs = made(tmp_path, lora=lora, n_steps=16, eval_steps=5)
    outcome = train(inputs)
    state = inputs.state
    kept = [checkpoint_files.step_of(path) for path in checkpoint_files.complete_checkpoints(state)]
    found = outcome.candidates
    assert [c.step for c in found] == kept and len(kept) >= 2
    assert [c.path for c in found] == [f"steps/step-{s:08d}" for s in kept[:-1]] + ["."]
    for candidate in found:
        folder = state / "final" / candidate.path
        assert_equal(held(folder, state), saved(state, candidate.step))
        top = {path.name for path in (state / "final").iterdir()} - {"steps"}
        assert {path.name for path in folder.iterdir()} - {"steps"} == top
    assert len({c.weights_sha256 for c in found}) == len(found)
    assert outcome.weights_sha256 == found[-1].weights_sha256
    losses = {point.step: point.loss for point in outcome.eval_points}
    assert [c.held_out_loss for c in found] == [losses.get(step) for step in kept]


# Random documents are learned by heart, so the held-out loss rises soon.
BY_HEART: dict[str, Any] = {
    "learning_rate": 3e-2, "eval_steps": 2, "n_steps": 60, "patience": 3,
    "load_best_model_at_end": True,
}  # fmt: skip


def test_a_run_stops_early_and_publishes_its_best_weights_whatever_else_it_keeps(
    tmp_path: Path,
) -> None:
    few, many = (made(tmp_path / str(n), save_total_limit=n, **BY_HEART) for n in (1, 9))
    outcome, other = train(few), train(many)
    losses = {point.step: point.loss for point in outcome.eval_points}
    lowest = min(losses, key=losses.__getitem__)
    assert outcome.stopped_early_at_step == outcome.n_steps == lowest + 6 < 60
    # The untrained model is not there to be published, however good it is.
    best = min(set(losses) - {0}, key=losses.__getitem__)
    assert outcome.published_step == other.published_step == best < outcome.n_steps
    assert_published(few.state, best)
    assert outcome.weights_sha256 == other.weights_sha256
    assert 2 <= len(outcome.candidates) < len(other.candidates)


def assert_published(state: Path, step: int) -> None:
    assert checkpoint_files.best_checkpoint(state) == checkpoint_files.directory_of(state, step)
    assert_equal(held(state / "final", state), saved(state, step))


def test_a_damaged_best_checkpoint_is_not_passed_off_as_published(tmp_path: Path) -> None:
    inputs = made(tmp_path, **BY_HEART)
    with assembled(inputs, keep=60) as run:
        loop.train(run)
        run.saver.wait()
        best = run.progress.best
        assert best is not None and best.step < run.progress.step
        directory = checkpoint_files.directory_of(inputs.state, best.step)
        (directory / checkpoint_files.OPTIMIZER).write_bytes(b"cut")
        outcome = publish.finish_run(run)
    assert outcome.published_step != best.step
    assert_published(inputs.state, outcome.published_step)


def test_a_spoilt_checkpoint_is_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut in an earlier session leaves files of the right size and full of zeros."""
    others = publish._others

    def spoil(run: Any, published: int) -> list[Path]:
        path = checkpoint_files.directory_of(run.state, 5) / checkpoint_files.WEIGHTS
        path.write_bytes(bytes(path.stat().st_size))
        return others(run, published)

    monkeypatch.setattr(publish, "_others", spoil)
    inputs = made(tmp_path, n_steps=15, save_total_limit=9)
    with caplog.at_level(logging.WARNING):
        outcome = train(inputs)
    assert [c.step for c in outcome.candidates] == [10, 15]
    assert "step-00000005 is no candidate: weights.safetensors does not hold" in caplog.text


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return train(made(tmp_path_factory.mktemp("run"), n_steps=2))


@pytest.fixture
def state(tmp_path: Path, summary: RunSummary) -> Path:
    (tmp_path / "final" / "deep").mkdir(parents=True)
    for name in ("final/model.safetensors", "final/deep/config.json", *LOGS):
        (tmp_path / name).write_text(f"what is in {name}")
    write_outcome(tmp_path, summary)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("outcome.json", b'{"n_steps": ', "outcome.json cannot be read"),
        ("final/model.safetensors", bytes(34), "model.safetensors does not hold what was written"),
        ("final/deep/config.json", None, "final/deep/config.json is missing"),
        ("steps.jsonl", b"wh", "steps.jsonl has 2 bytes"),
    ],
)
def test_a_damaged_one_gives_nothing_and_says_why(
    state: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes | None, why: str
) -> None:
    (state / name).unlink()
    if content is not None:
        (state / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read_outcome(state) is None
    assert why in caplog.text and "ended once more from its last checkpoint" in caplog.text
