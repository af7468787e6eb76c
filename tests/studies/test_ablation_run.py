"""Variants of a tiny plan, timed by the real scripts of the rules."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S, SCRIPTS, run_script, tiny_inputs, wait_for

from expertflow.core.records import read_record, to_json
from expertflow.studies.records import AblationRecord, VariantRecord

pytestmark = pytest.mark.long

SHORT = {"n_repeats": 3, "n_warmup_steps": 1, "n_timed_steps": 4, "max_timed_s": 20.0}


def words(folder: Path, spec: dict[str, Any], name: str) -> list[object]:
    given = ["--spec", json.dumps(spec), *tiny_inputs(folder, "plan", "packing", "model")]
    return [*given, "--scratch", folder / f".{name}", "--output", folder / f"{name}.json"]


def spec_of(name: str, **changes: Any) -> dict[str, Any]:
    variant = {"name": name, "label": "", "rows": "packed", "training": {}}
    return {**SHORT, "variant": {**variant, **changes}}


def measured(folder: Path, name: str, **changes: Any) -> VariantRecord:
    done = run_script("ablate_variant", *words(folder, spec_of(name, **changes), name))
    assert done.returncode == 0, done.stderr
    assert not (folder / f".{name}").exists()
    return read_record(VariantRecord, folder / f"{name}.json")


def test_variants_are_timed_against_the_plan_and_joined(tiny: Path) -> None:
    loose = measured(tiny, "loose", rows="unpacked")
    assert loose.outcome == "measured" and loose.is_sane
    assert len(loose.timings) == len(loose.plan_timings) == 3
    # The same documents in as many steps have nearly as many tokens; padding differs.
    own, plain = loose.timings[0], loose.plan_timings[0]
    assert own.n_tokens == pytest.approx(plain.n_tokens, rel=0.25)
    assert loose.ratio is not None and loose.ratio.low < loose.ratio.value < loose.ratio.high
    assert own.device == "cpu" and own.activated and loose.versions["torch"]
    nothing = measured(tiny, "nothing", training={"bf16": False})
    assert nothing.outcome == "is the plan" and nothing.ratio is None and not nothing.timings
    saves = measured(tiny, "saves", metric="hours", saves=0.5)
    assert saves.ratio is not None and saves.ratio.value > 1
    assert saves.plan_timings[0].save_s and "hours by arithmetic" in (saves.reason or "")
    record = joined(tiny, loose, nothing, saves)
    assert [bar.outcome for bar in record.bars] == ["measured", "is the plan", "measured"]
    assert record.claims[0].verdict != "not measurable"


def joined(folder: Path, *records: VariantRecord) -> AblationRecord:
    claim = {"claim": "c", "by": "A", "said": "s", "of": "plan", "to": "loose"}
    variants = [to_json(record.variant) for record in records]
    spec = {"preset": "demo", "variants": variants, "claims": [claim], **SHORT}
    given = ["--spec", json.dumps(spec), "--plan", folder / "plan.json"]
    given += ["--model", folder / "model.json", "--output", folder / "ablation.json"]
    given += ["--html", folder / "ablation.html", "--variants"]
    given += [folder / f"{record.variant.name}.json" for record in records]
    done = run_script("ablate_expert", *given)
    assert done.returncode == 0, done.stderr
    assert "<html" in (folder / "ablation.html").read_text()
    assert (folder / ".ablation.json.fingerprint").is_file()
    return read_record(AblationRecord, folder / "ablation.json")


def test_what_only_a_trial_finds_out_is_not_measurable(tiny: Path) -> None:
    # Flex attention is not trained on a CPU, which only the trainer knows.
    found = measured(tiny, "flex", training={"attention": "flex"})
    assert found.outcome == "not measurable" and "flex" in (found.reason or "")
    assert found.ratio is None and not found.plan_timings


def test_a_signal_ends_it_and_leaves_nothing(tiny: Path) -> None:
    spec = {**spec_of("stopped", rows="unpacked"), "n_timed_steps": 10**6, "max_timed_s": 1e6}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPTS / "ablate_variant.py", *words(tiny, spec, "stopped")]
    process = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment
    )
    wait_for((tiny / ".stopped" / "trial").exists, during=process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143 and "signal 15; this variant starts anew" in said
    assert not (tiny / ".stopped").exists() and not (tiny / "stopped.json").exists()
