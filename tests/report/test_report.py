"""report.json: golden files, honest nulls, inputs from disk, and checks that reject a fault."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from made_up_runs import CPU, GPU
from msgspec.structs import fields, replace
from report_reading import changed, compare_with_golden
from support import ROOT

from expertflow.core.attempts import Attempts
from expertflow.core.errors import DataError
from expertflow.core.records import to_json, write_record
from expertflow.report.build import build_report
from expertflow.report.check import check_against_records, check_epochs, check_report
from expertflow.report.diagnose import MISSING
from expertflow.report.inputs import ReportInputs, read_inputs, read_lines
from expertflow.report.measured import to_plain
from expertflow.train.records import StepRecord

SCHEMA = yaml.safe_load((ROOT / "workflow/schemas/report.schema.yaml").read_text(encoding="utf-8"))

FIRST, LAST = GPU.inputs.training.epoch_summaries
LAST_WITHOUT_LOSS = (FIRST, replace(LAST, eval_loss=None))


@pytest.mark.parametrize("variant", ["gpu", "cpu"])
def test_report_equals_golden(variant: str) -> None:
    run = {"gpu": GPU, "cpu": CPU}[variant]
    check_report(run.report, run.inputs)
    plain = to_plain(run.report)[0]
    jsonschema.validate(plain, SCHEMA)
    text = json.dumps(_rounded(plain), indent=1, ensure_ascii=False) + "\n"
    compare_with_golden(f"report-{variant}.json", text)
    plain["time"]["wall_s"] = None
    with pytest.raises(jsonschema.ValidationError, match="None is not of type"):
        jsonschema.validate(plain, SCHEMA)


TRAINING, HARDWARE = "training_report.training", "training_report.hardware"


@pytest.mark.parametrize(
    ("record", "changes", "path", "reason"),
    [
        ("monitor", {"configured_interval_s": None}, f"{HARDWARE}.collection_interval_seconds",
         "automatic"),
        ("monitor", {"power_w": None, "unavailable": {"power_w": "denied"}}, f"{HARDWARE}.power_w",
         "denied"),
        ("training", {"sampled_steps": None, "unavailable": {"sampled_steps": "too few steps"}},
         "time.forward_s", "too few steps"),
        ("training", {"gpu_name": None}, f"{HARDWARE}.gpu.name", "did not report the card's name"),
        ("training", {"epoch_summaries": LAST_WITHOUT_LOSS},
         f"{TRAINING}.epoch_summaries[1].eval_loss", "no evaluation was run in this epoch"),
    ],
)  # fmt: skip
def test_a_missing_figure_has_a_reason(record: str, changes: Any, path: str, reason: str) -> None:
    inputs = GPU.change(**{record: changes})
    report = build_report(inputs, {})
    check_report(report, inputs)
    assert reason in report.unavailable[path]


def _rounded(value: Any) -> Any:
    """Keep ten digits of floats: the last ones depend on the machine's math library."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


FAULTS = [
    ("run.color", "blue", "run"),
    ("data.documents", MISSING, "documents"),
    ("run.preset", None, "run.preset"),
    ("throughput.mfu_fraction", 1.4, "throughput.mfu_fraction"),
    (f"{TRAINING}.epoch_summaries.1", MISSING, "epoch_summaries: 1 entries for 2 epochs"),
    (f"{TRAINING}.epochs", 2.01, "epoch_summaries: 2 entries for 3 epochs"),
    ("training_parameters.warmup_steps", 1800, "training_parameters.warmup_steps"),
    ("time.train_s", 2_450.0, "time: the parts"),
    ("time.other_s", 40.0, "time: the parts"),
    ("data.trained_tokens", 86_400_001, "tokens add up to 86,400,000, not to 86,400,001"),
    (f"{TRAINING}.steps", 1_799, "epoch_summaries: steps add up to 1,800, not to 1,799"),
    ("data.useful_tokens", 43_200_001, "epoch_summaries[0].tokens: 43,200,000 in 900 of 900"),
    ("training_report.hardware.power_w", None, "hardware.power_w: null without a reason"),
    ("data.sources.1.license", None, "data.sources[1].license"),
    ("unavailable", {"model.revision": ""}, "unavailable"),
    ("comparison", [{"anything": 1}], "comparison"),
    ("export.published_step", 1800, "but step 1200 was evaluated; run export_model again"),
    ("evaluation.earlier", None, "evaluation.earlier: null without a reason"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS)
def test_fault_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^report\.json.*{re.escape(message)}"):
        check_report(changed(GPU.report, {path: value}), GPU.inputs)


def test_no_faults() -> None:
    for changes in (
        {"training_parameters.total_steps": 1, "training_parameters.warmup_steps": 0},
        {"time.other_s": 3.0 + 0.009 * 2_712.0},
        # Epochs in another order, and documents on the fly, are not checked against the rows.
        {"data.useful_tokens": 1, f"{TRAINING}.epochs": 1.5},
        {"data.useful_tokens": 1, f"{TRAINING}.on_the_fly": True},
    ):
        check_report(changed(GPU.report, changes), GPU.inputs)


def test_part_of_an_epoch_holds_at_most_its_rows() -> None:
    """The second epoch has 100 steps only."""
    for n_more in (0, 1):
        tokens = 100 * 32 * 1_536 + n_more
        last = {
            f"{TRAINING}.epoch_summaries.1.{k}": n for k, n in (("steps", 100), ("tokens", tokens))
        }
        run = {f"{TRAINING}.steps": 1_000, f"{TRAINING}.epochs": 1_000 / 900}
        report = changed(GPU.report, {**last, **run, "data.trained_tokens": 43_200_000 + tokens})
        if n_more == 0:
            check_epochs(report)
    with pytest.raises(DataError, match=r"epoch_summaries\[1\]\.tokens: 4,915,201 in 100 of 900"):
        check_epochs(report)
    held_out = replace(GPU.inputs.packing.held_out, sha256="00" * 32)
    with pytest.raises(DataError, match="different rows than packing"):
        check_against_records(GPU.report, GPU.change(packing={"held_out": held_out}))


def test_monitor_and_loop_agree_on_the_time() -> None:
    *others, last = GPU.inputs.samples

    def check(seen_s: float, **monitor: Any) -> None:
        samples = (*others, replace(last, elapsed_s=seen_s))
        check_against_records(GPU.report, GPU.change(samples=samples, monitor=monitor))

    # The last step is at 2,628.5 s of 2,712 s, and 1 % is 27.12 s; 5 s are allowed for exiting.
    for seen_s in (2_602.0, 2_744.0):
        check(seen_s)
    for seen_s in (2_601.0, 2_745.0):
        with pytest.raises(DataError, match="the monitor's last reading"):
            check(seen_s)
        # A dead monitor does not count, and short runs are allowed two intervals.
        check(seen_s, monitor_cpu_fraction=None)
        check(seen_s, effective_interval_s=40.0)
    check_against_records(GPU.report, replace(GPU.inputs, samples=()))


def test_documents_that_the_model_cannot_write_are_not_counted() -> None:
    packing = GPU.inputs.packing
    rows, refused = replace(packing.train, n_documents=19_700), {"chat_template": 100}
    data = GPU.report_with(packing={"train": rows, "n_dropped_by_reason": refused}).data
    assert data.documents_train == 19_700
    long = {"n_dropped_held_out": 2, "n_dropped_by_reason": {"longer_than_row": 102}}
    long |= {"n_dropped_by_source": {"text-to-sql": (100, 2)}}
    data = GPU.report_with(packing=long).data
    assert data.documents_train == 19_700
    for total, name in ((19_700, "n_train"), (198, "n_held_out"), (2_102, "n_left_out")):
        assert sum(getattr(source, name) for source in data.sources) == total


FILES = {"steps": "steps.jsonl", "samples": "gpu.jsonl", "profile": "profile/kernels.json"}


def _write(folder: Path, inputs: ReportInputs) -> None:
    for field in fields(inputs):
        record = getattr(inputs, field.name)
        path = folder / FILES.get(field.name, f"{field.name}.json")
        path.parent.mkdir(exist_ok=True)
        if field.name == "attempts":
            for stage, (attempts,) in record.items():
                write_record(folder / f"logs/{stage}.attempts.json", Attempts(attempts=attempts))
        elif isinstance(record, tuple):
            lines = [json.dumps(to_json(item)) for item in record]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif field.name not in ("spec", "ablation"):
            write_record(path, record)


def test_inputs_survive_a_round_trip_and_those_of_another_expert_are_rejected(
    tmp_path: Path,
) -> None:
    _write(tmp_path, CPU.inputs)
    assert read_inputs(CPU.inputs.spec, tmp_path, ledger=tmp_path / "ledger.json") == CPU.inputs
    write_record(tmp_path / "export.json", replace(CPU.inputs.export, expert="expert-json"))
    with pytest.raises(DataError, match=r"export: is for expert 'expert-json'"):
        read_inputs(CPU.inputs.spec, tmp_path, ledger=tmp_path / "ledger.json")


def test_a_bad_line_is_named_and_a_blank_one_ignored(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = json.dumps(to_json(CPU.inputs.steps[0]))
    path.write_text(f"{line}\n\n{line}", encoding="utf-8")
    assert len(read_lines(StepRecord, path)) == 2
    for bad in ("{", '{"step": 1}', "[]"):
        path.write_text(f"{line}\n{bad}", encoding="utf-8")
        with pytest.raises(DataError, match=r"steps\.jsonl:2"):
            read_lines(StepRecord, path)
    with pytest.raises(DataError, match="series is missing"):
        read_lines(StepRecord, tmp_path / "gpu.jsonl")
