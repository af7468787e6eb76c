"""The header of a report, on its page and in the terminal: its subject, and eight figures."""

from collections.abc import Callable
from typing import NamedTuple

from expertflow.report import format as f
from expertflow.report.derive import MEASURED_ON_CPU
from expertflow.report.learned import best_baseline
from expertflow.report.measured import Measured, convert_value, is_measured
from expertflow.report.records import Evaluation, Report
from expertflow.report.run_records import Hardware, PlanRow

METHODS = {"lora": "LoRA", "qlora": "QLoRA", "full": "full fine-tuning"}


class Tile(NamedTuple):
    label: str
    value: Measured[str]
    note: str


def describe_subject(report: Report) -> str:
    run, model = report.run, report.model
    lora = f" r{model.lora.r}" if model.lora else ""
    parts = [run.expert, model.name, METHODS[model.method] + lora, f"preset {run.preset}"]
    return " \u00b7 ".join([*parts, "simulated hardware readings"] if run.simulated else parts)


def make_tiles(report: Report) -> tuple[Tile, ...]:
    rows = {row.quantity: row for row in report.plan_against_actual}
    usd, speed = report.cost.billed_usd, report.throughput
    before, after = report.evaluation.before, report.evaluation.after
    n_devices = report.training_parameters.world_size
    padding = "padding not counted" + (f", {n_devices} devices" if n_devices > 1 else "")
    goodput = convert_value(speed.goodput_fraction, f.percent)
    return (
        _score_tile(report.evaluation),
        Tile(
            "Held-out loss", f.loss(after.held_out_loss), f"before {f.loss(before.held_out_loss)}"
        ),
        Tile(
            "Training time",
            f.duration(report.time.wall_s),
            _planned(rows["Wall time"], f.hours),
        ),
        Tile("Training cost", convert_value(usd, f.usd), _planned(rows["Cost"], f.usd)),
        Tile("Useful tokens/s", convert_value(speed.useful_tokens_per_s, f.short), padding),
        Tile("MFU", convert_value(speed.mfu_fraction, f.percent), _peak(report)),
        Tile("Goodput", goodput, "time spent training"),
        _memory_tile(report.training_report.hardware),
    )


def _score_tile(evaluation: Evaluation) -> Tile:
    before, after = evaluation.before, evaluation.after
    if evaluation.task == "held_out_loss":
        return Tile("Perplexity", f.short(after.perplexity), f"before {f.short(before.perplexity)}")
    note = ""
    if is_measured(before.value_fraction):
        note = f"before {f.tenths(before.value_fraction)}"
        if best := best_baseline(evaluation):
            score = convert_value(best.value_fraction, f.tenths)
            note += f" \u00b7 {f.words(best.name)}{f.NBSP}{score}"
    # A metric that is Missing is falsy: the task's name is used instead.
    label = f.sentence(f.words(evaluation.metric or evaluation.task))
    return Tile(label, convert_value(after.value_fraction, f.tenths), note)


def _memory_tile(hardware: Hardware) -> Tile:
    # On a CPU only the process itself counts: other memory is not the run's.
    if hardware.n_gpus == 0:
        size = f.size(hardware.host_memory_peak_bytes)
        return Tile("Peak memory", size, "of the training process")
    total, peak, note = hardware.gpu.memory_total_bytes, hardware.memory_peak_reserved_bytes, ""
    if total:
        note = f"of {f.size(total)}"
        note += f" \u00b7 {f.percent(1 - peak / total)} free" if is_measured(peak) else ""
    return Tile("Peak GPU memory", convert_value(peak, f.size), note)


def _planned(row: PlanRow, show: Callable[[float], str]) -> str:
    if not is_measured(row.plan):
        return "no prediction"
    difference = row.difference_fraction
    more = f" \u00b7 {f.percent_with_sign(difference)}" if is_measured(difference) else ""
    return f"plan {show(row.plan)}{more}"


def _peak(report: Report) -> str:
    gpu = report.training_report.hardware.gpu
    if gpu.peak_source == MEASURED_ON_CPU:
        return f"of {MEASURED_ON_CPU}"
    flops_per_s = gpu.peak_flops_per_s
    settings = report.training_parameters
    full = "TF32" if settings.tf32 else "fp32"
    precision = "bf16" if settings.bf16 else "fp16" if settings.fp16 else full
    return f"of {f.flops(flops_per_s)} {precision}" if is_measured(flops_per_s) else ""
