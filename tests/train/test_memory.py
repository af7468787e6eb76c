"""Out of memory: the message, the retries, and unchanged weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import LORA, SCRIPTS
from tiny_run import assembled, made, train
from transformers import AutoModelForCausalLM

from expertflow.core.attempts import process_age_s
from expertflow.core.errors import TrainingError, TransientError
from expertflow.plan.records import TrainPlan
from expertflow.train import loop, memory, start
from expertflow.train.feed.loader import Feed, load_batches
from expertflow.train.memory import OutOfMemory, describe_shortage
from expertflow.train.model.packed import PackedLoss
from expertflow.train.model.weights import list_trained_parameters
from expertflow.train.run import TrainInputs
from expertflow.train.saved import checkpoint, checkpoint_files

CPU = torch.device("cpu")


def small(folder: Path, **changes: Any) -> TrainInputs:
    lora = replace(LORA, dropout=0.0)
    return made(folder, **{"lora": lora, "n_steps": 12, "save_steps": 4, **changes})


def test_advice_states_batch_prediction_and_change(plan: TrainPlan) -> None:
    message = describe_shortage(replace(plan, predicted_peak_bytes=3 << 30), CPU)
    assert message == (
        "out of memory at micro-batch 4 (predicted 3.0 GiB, unknown free); set training.batch_size"
        " to 2 and gradient_accumulation_steps to 2 (the global batch stays the same)"
    )
    odd = replace(plan, batch_size=9)
    assert "to 3 and gradient_accumulation_steps to 3 (the" in describe_shortage(odd, CPU)
    one = replace(plan, batch_size=1)
    assert "gradient_checkpointing to true" in describe_shortage(one, CPU)
    checkpointed = replace(one, gradient_checkpointing=True)
    assert "method qlora" in describe_shortage(checkpointed, CPU)
    # No remedy is suggested that is already in use or would be rejected.
    for change in ({"method": "qlora"}, {"parallel": "fsdp"}):
        message = describe_shortage(replace(checkpointed, **change), CPU)
        assert message.endswith("; use a shorter max_seq_length, a larger card or a smaller model")


def test_a_peak_is_not_inherited_from_a_larger_program() -> None:
    """Linux passes ``ru_maxrss`` on across exec."""
    show = "from expertflow.core.process import peak_resident_bytes; print(peak_resident_bytes())"
    large = "import os, sys; b'x' * (300 << 20); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", large, sys.executable, "-c", show]
    peak = int(subprocess.check_output(command, env={"PYTHONPATH": str(SCRIPTS)}))
    assert 1 << 20 < peak < 100 << 20


def test_others_run_out_of_memory(plan: TrainPlan) -> None:
    for message, error, match in (
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", OutOfMemory, "at micro-batch 4 "),
        ("Triton Error [CUDA]: out of memory", OutOfMemory, "at micro-batch 4 "),
        ("CUDA error: device-side assert triggered", RuntimeError, "device-side"),
    ):
        with pytest.raises(error, match=match), memory.memory_advice(plan, CPU):
            raise RuntimeError(message)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, *, most_rows: int, from_call: int) -> None:
    calls = {"n": 0}
    forward = PackedLoss.forward

    def limited(self: PackedLoss, batch: Any) -> torch.Tensor:
        calls["n"] += self.training
        if self.training and calls["n"] >= from_call and len(batch.rows) > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, batch)

    monkeypatch.setattr(PackedLoss, "forward", limited)


@pytest.mark.parametrize("from_call", [1, 7])
def test_smaller_micro_batches_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_call: int
) -> None:
    """Micro-batches chosen by the plan (8 on a CPU) shrink until they fit; losses stay the same."""
    auto: dict[str, Any] = {"batch_size": None, "gradient_accumulation_steps": 1}
    straight = train(small(tmp_path / "a", **auto))
    inputs = small(tmp_path / "b", **auto)
    short_of_memory(monkeypatch, most_rows=2, from_call=from_call)
    outcome = train(inputs)
    assert outcome.micro_batch_size == 2
    assert outcome.n_accumulation_steps == 4
    retries = outcome.memory_retries
    assert [retry.micro_batch_size for retry in retries] == [4, 2]
    # Call 7 is in step 7; the previous checkpoint is from step 4.
    assert [retry.after_step for retry in retries] == ([0, 0] if from_call == 1 else [4, 4])
    # A second attempt continues the first one's clock and counts no time twice.
    assert outcome.time.wall_s <= process_age_s()
    assert (outcome.n_sessions, outcome.resumed_at_steps) == (1, ())
    assert outcome.n_tokens == straight.n_tokens
    assert outcome.loss_last == pytest.approx(straight.loss_last, abs=1e-5)


def test_no_smaller_micro_batch_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that was asked for is not changed, and one row is the least."""
    for batch_size, most_rows, match, n_retries in (
        (4, 2, r"set training\.batch_size to 2", 0),
        (None, 0, "at micro-batch 1 ", memory.MAX_RETRIES),
    ):
        folder = tmp_path / str(batch_size)
        inputs = small(folder, batch_size=batch_size, gradient_accumulation_steps=1)
        with monkeypatch.context() as limited, pytest.raises(OutOfMemory, match=match):
            short_of_memory(limited, most_rows=most_rows, from_call=1)
            train(inputs)
        assert len(memory.read_retries(inputs.state)) == n_retries


def test_a_save_that_runs_out_of_memory_is_not_tried_with_a_smaller_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(checkpoint, "take_snapshot", gather)
    inputs = small(tmp_path, batch_size=None, gradient_accumulation_steps=1)
    with pytest.raises(TrainingError, match=r"to save step 4; use .*larger card") as caught:
        train(inputs)
    assert not isinstance(caught.value, OutOfMemory) and not memory.read_retries(inputs.state)


@pytest.mark.parametrize(
    # Raised outside torch's allocator; hidden by transformers while quantizing.
    ("said", "counted"), [("CUDA error: out of memory", {}), ("conversion", {"num_ooms": 1})]
)  # fmt: skip
def test_a_model_too_large_for_the_card_has_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, counted: dict[str, int]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counted)
    with pytest.raises(TrainingError, match=r"alone does not fit .* larger card"):
        train(small(tmp_path))


def test_gradients_that_cuda_graphs_would_overwrite_stay_in_place(tmp_path: Path) -> None:
    with assembled(small(tmp_path, torch_compile_mode="reduce-overhead")) as run:
        run.loss.train()
        start.try_batches(run)
        places = [p.grad.data_ptr() for p in list_trained_parameters(run.net).values()]
        with load_batches(run.feed, 0, plan=run.plan, device=run.device) as batches:
            assert loop.train_step(run, batches).grad_norm > 0
        gradients = [p.grad for p in list_trained_parameters(run.net).values()]
        assert [g.data_ptr() for g in gradients] == places
        assert not any(g.any() for g in gradients)


def test_a_retry_of_other_cards_makes_no_micro_batch_larger(
    plan: TrainPlan, tmp_path: Path
) -> None:
    first = replace(plan, batch_size=16, gradient_accumulation_steps=1, may_halve_micro_batch=True)
    for _ in range(2):
        with pytest.raises(TransientError, match="run again"):
            memory.note_retry(replace(first, world_size=2), tmp_path, OutOfMemory("out of memory"))
    (retry,) = memory.read_retries(tmp_path)
    assert retry.micro_batch_size == 8, "processes that run out of memory together count once"

    def split(micro: int, n_accumulation: int) -> tuple[int, int]:
        now = replace(first, batch_size=micro, gradient_accumulation_steps=n_accumulation)
        made = memory.apply_oom_retries(now, tmp_path)
        return made.batch_size, made.gradient_accumulation_steps

    assert split(16, 1) == (8, 2)
    # A smaller card, whose plan already has fewer rows; and one card with the work of two.
    assert split(4, 4) == (4, 4)
    assert split(16, 2) == (8, 4)


def test_the_longest_rows_or_each_shape_are_tried_first_and_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked rows differ in length; the probe runs the longest and forgets it."""
    with assembled(small(tmp_path, lora=LORA)) as run:
        seen: list[tuple[int, ...]] = []
        forward = run.loss.forward
        run.loss.forward = lambda batch: seen.append(batch.rows) or forward(batch)
        run.feed.collator.cuts = True
        before = torch.get_rng_state()
        run.loss.train()
        start.try_batches(run)
        assert checkpoint_files.complete_checkpoints(run.state) == []
        longest = int(run.feed.collator.n_tokens_N.argmax())
        assert longest in seen[0] and len(seen) == 1
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in run.net.parameters())
        # A sharded model's processes would wait for each other's further batches.
        parts = [np.arange(2), np.arange(1), np.arange(1, 3)]
        monkeypatch.setattr(Feed, "micro_batches", lambda *_: parts)
        run.feed.collator.cuts, run.route.used["compilation"] = False, "on"
        for world_size, tried in ((1, [(0, 1), (0,)]), (2, [(0, 1)])):
            seen.clear()
            run.plan = replace(run.plan, world_size=world_size)
            start.try_batches(run)
            assert seen == tried
