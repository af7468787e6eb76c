"""The comparison with peers: turns and ratios, the same work and training."""

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from bare_python import bare_python
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "peers"))

import training_beside
from measured import ratios, run_in_turns
from training_beside import TrainingJob
from training_lines import FREE, OURS, PADDED, same_work, summary


def test_a_machine_that_slows_down_changes_no_ratio_of_equals() -> None:
    clock = itertools.count()

    def line(_: int) -> float:
        return 100.0 * 0.9 ** next(clock)

    speed = run_in_turns({"ours": line, "peer": line}, 4, {})
    found = ratios(speed["ours"], speed["peer"])
    assert found is not None
    assert found["median"] == pytest.approx(1, abs=0.01)
    assert (found["least"], found["most"]) == pytest.approx((0.9, 1 / 0.9))
    # Repeats that one side lacks are left out.
    found = ratios({0: 6.0, 1: 8.0, 2: 9.0}, {0: 3.0, 2: 3.0})
    assert found is not None
    assert (found["median"], found["n"]) == (2.5, 2)
    assert ratios({0: 1.0}, {1: 1.0}) is None


ABSENT = (
    "orjson", "fastokens", "snakemake", "datasets", "trl", "pytest", "jsonschema", "bitsandbytes",
)  # fmt: skip


def made_up(*, s: list[float], losses: list[float], n_tokens: int = 1200) -> dict[str, Any]:
    return {
        "n_tokens": n_tokens, "timed_s": sum(s), "steps_s": s,
        "losses": losses, "words": ["w"], "peak_host_rss_bytes": 2, "peak_memory_bytes": None,
    }  # fmt: skip


def summed(runs: dict[str, Any], line: str) -> Any:
    return summary(line, {OURS: {}, FREE: {}, PADDED: {}} | runs, {}, "fp32")


def test_ratios_are_taken_within_a_repeat() -> None:
    ours = {i: made_up(s=[t, t], losses=[2.0]) for i, t in enumerate((1.0, 2.0, 3.0))}
    peer = {i: made_up(s=[t, t], losses=[2.0]) for i, t in enumerate((2.0, 6.0, 6.0))}
    row = summed({OURS: ours, FREE: peer}, FREE)
    assert row["tokens_per_s"]["median"] == 100
    assert row["ours_over_peer"] == {"median": 2.0, "least": 2.0, "most": 3.0, "n": 3}
    assert row["same_work"]


def test_different_or_non_finite_losses_or_tokens_are_different_work() -> None:
    def compared(ours: float, peer: float, line: str, n_tokens: int = 1200) -> Any:
        runs = {
            OURS: {0: made_up(s=[1.0], losses=[4.0, ours])},
            line: {0: made_up(s=[1.0], losses=[4.0, peer], n_tokens=n_tokens)},
        }
        row = summed(runs, line)
        assert same_work({"lines": {line: row}}) is row["same_work"]
        return row

    for apart, n_tokens, same in ((0.9e-4, 1200, True), (1.1e-4, 1200, False), (0, 1199, False)):
        assert compared(2.0 * (1 + apart), 2.0, FREE, n_tokens)["same_work"] is same
    for pair in ((math.nan, 2.0), (2.0, math.nan), (2.0, math.inf)):
        for line in (FREE, PADDED):
            row = compared(*pair, line)
            assert (row["same_work"], row["loss_apart"]) == (False, None)


@pytest.mark.long
def test_the_peer_gets_our_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And our side needs few packages."""
    from datasets import load_from_disk

    monkeypatch.setattr(sys, "executable", str(bare_python(tmp_path, ABSENT)))
    asked = TrainingJob(
        folder=tmp_path, model="tiny", device="cpu", n_repeats=2, n_warmup_steps=1,
        n_timed_steps=3, micro_batch=2, n_accumulation_steps=2, peer=Path("peer"),
        peer_problem=None, methods=("lora",),
    )  # fmt: skip
    case = training_beside.prepare_job(asked)["cases"]["lora"]
    ours = training_beside.time_line(asked, case, OURS, 0)
    rows = [len(ids) for ids in load_from_disk(case["rows"])["input_ids"]]
    first, last = 1 * 4, (1 + 3) * 4
    assert len(rows) == last
    assert ours["n_tokens"] == sum(rows[first:last])
    assert len(ours["losses"]) == 1 + 3
    # Every step has a figure, and the peak is not that of the parent process.
    assert len(ours["steps_s"]) == 3
    assert ours["peak_host_rss_bytes"] > 0
    assert (Path(case["adapter"]) / "adapter_model.safetensors").is_file()
    assert case["rate"] == pytest.approx(3e-3)
