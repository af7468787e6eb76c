"""Variants of a tiny plan, timed for real; test_ablation_reruns.py runs the rules' scripts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, SCRIPTS, tiny_inputs, wait_for

from expertflow.core.records import read_record, to_json
from expertflow.studies.ablate_variant import ablate_variant
from expertflow.studies.records import Variant, VariantJob, VariantRecord, VariantSpec
from expertflow.tokens.records import PackingRecord

pytestmark = pytest.mark.long


def spec_of(n_timed_steps: int = 4, max_timed_s: float = 20.0, **changes: Any) -> VariantSpec:
    settings: dict[str, Any] = {"name": "v", "label": "", "rows": "packed", "training": {}}
    return VariantSpec(
        variant=Variant(**{**settings, **changes}), n_repeats=3, n_warmup_steps=1,
        n_timed_steps=n_timed_steps, max_timed_s=max_timed_s,
    )  # fmt: skip


def measured(folder: Path, scratch: Path, **changes: Any) -> VariantRecord:
    job = VariantJob(
        spec=spec_of(**changes), plan=folder / "plan.json", model=folder / "model.json",
        packing=read_record(PackingRecord, folder / "packing.json"), rows=folder / "packed",
        scratch=scratch / "scratch",
    )  # fmt: skip
    record = ablate_variant(job)
    assert not (scratch / "scratch").exists()
    return record


def test_variants_are_timed_against_the_plan(tiny: Path, tmp_path: Path) -> None:
    loose = measured(tiny, tmp_path, rows="unpacked")
    assert loose.outcome == "measured" and loose.is_sane
    assert len(loose.timings) == len(loose.plan_timings) == 3
    # The same documents in as many steps have nearly as many tokens; padding differs.
    own, plain = loose.timings[0], loose.plan_timings[0]
    assert own.n_tokens == pytest.approx(plain.n_tokens, rel=0.25)
    assert loose.ratio is not None and loose.ratio.low < loose.ratio.value < loose.ratio.high
    assert own.device == "cpu" and own.activated and loose.versions["torch"]
    saves = measured(tiny, tmp_path, metric="hours", saves=0.5)
    assert saves.ratio is not None and saves.ratio.value > 1
    assert saves.plan_timings[0].save_s and "hours by arithmetic" in (saves.reason or "")
    # Flex attention is not trained on a CPU, which only the trainer knows.
    flex = measured(tiny, tmp_path, training={"attention": "flex"})
    assert flex.outcome == "not measurable" and "flex" in (flex.reason or "")
    assert flex.ratio is None and not flex.plan_timings


def test_a_signal_ends_it_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(rows="unpacked", n_timed_steps=10**6, max_timed_s=1e6)
    scratch, output = tmp_path / "scratch", tmp_path / "v.json"
    words = ["--spec", json.dumps(to_json(spec)), *tiny_inputs(tiny, "plan", "packing", "model")]
    words += ["--scratch", scratch, "--output", output]
    process = subprocess.Popen(
        [sys.executable, SCRIPTS / "ablate_variant.py", *map(str, words)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for((scratch / "trial").exists, during=process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143 and "signal 15; this variant starts anew" in said
    assert not scratch.exists() and not output.exists()
