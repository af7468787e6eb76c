"""Train some steps with the project's own loop and measure them."""

import gc
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from msgspec import field
from msgspec.structs import replace
from support import plan_spec

from expertflow.core.files import read_json_lines
from expertflow.core.records import Record, to_json
from expertflow.hardware.gpu_table import describe_unlisted, gpu_by_name
from expertflow.hardware.records import GpuFacts
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.plan.settings import LoraSpec
from expertflow.tokens.records import PackingRecord
from expertflow.train import loop
from expertflow.train.feed.loader import load_batches
from expertflow.train.memory import OutOfMemory
from expertflow.train.processes import Processes, start_processes
from expertflow.train.run import TrainingRun, TrainInputs
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.start import assemble_run, note_compilation, try_batches
from expertflow.train.step_hooks import flush_steps
from expertflow.train.timing import mark_time, seconds_between
from gpu_kit.card_watch import watch_card
from gpu_kit.fixtures import SIZES, model_record

TABLE = Path(__file__).resolve().parents[2] / "config" / "hardware" / "gpus.yaml"
# Steps at least before and while it is measured; micro-batches whose shapes are compiled before.
WARM_UP, MEASURED, WARMED_UP = 2, 3, 64
LORA = LoraSpec(
    r=16, alpha=32, dropout=0.05, use_dora=False, use_rslora=False,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip


def describe_card(name: str, memory_bytes: int) -> GpuFacts:
    """Look up a card by the driver's name; an unknown one has no peaks."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["gpus"]
    facts = gpu_by_name(name, table) or describe_unlisted(name)
    return replace(facts, memory_total_bytes=memory_bytes)


class Work(Record, frozen=True, kw_only=True):
    """The input of every part: the machine, the model, and results of earlier parts."""

    folder: Path
    device: str
    model: str
    sizes: dict[str, int]
    packing: PackingRecord | None = None
    soak_s: float
    measure_s: float
    micro_batch: int | None = None
    matmul_flops_per_s: float | None = None

    def gpu(self) -> GpuFacts | None:
        if self.device == "cpu":
            return None
        memory = torch.cuda.get_device_properties(0).total_memory
        return describe_card(torch.cuda.get_device_name(0), memory)


class Variant(Record, frozen=True, kw_only=True):
    """A way to train: settings that differ from the plan's."""

    method: str = "lora"
    use_dora: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    flip_checkpointing: bool = False
    micro_batch: int | None = None


def plan_of(work: Work, variant: Variant, **changes: Any) -> TrainPlan:
    """Plan a variant as the product would.

    Micro-batch, checkpointing and compilation are those of the method's default, so that a variant
    differs from it only in the settings it lists.
    """
    lora = None if variant.method == "full" else replace(LORA, use_dora=variant.use_dora)
    settings: dict[str, Any] = {
        "method": variant.method, "lora": lora,
        "max_steps": 10_000, "batch_size": None, "gradient_accumulation_steps": None,
        "learning_rate": 1e-4, "save_steps": 10_000, "eval_steps": 10_000, "logging_steps": 10,
        "n_threads": 1 if work.device == "cpu" else None, "warmup_ratio": 0.01,
    }  # fmt: skip
    usual = _resolved(work, plan_spec(**settings))
    settings["batch_size"] = variant.micro_batch or work.micro_batch or usual.batch_size
    settings["gradient_checkpointing"] = usual.gradient_checkpointing != variant.flip_checkpointing
    settings["torch_compile"] = usual.torch_compile
    return _resolved(work, plan_spec(**{**settings, **variant.changes, **changes}))


def _resolved(work: Work, spec: Any) -> TrainPlan:
    draft = PlanDraft(
        expert="kit", spec=spec, packing=work.packing, facts=SIZES[work.model].facts,
        n_params=work.sizes["n_parameters"], gpu=work.gpu(),
    )  # fmt: skip
    return plan_training(draft)


class Session(Record, frozen=True):
    """A run assembled as in a training job, and stepped by hand."""

    run: TrainingRun
    batches: Any

    def step(self) -> None:
        """Run one step of the loop, and fetch losses as often as the plan says."""
        run = self.run
        run.pending.append(loop.train_step(run, self.batches))
        if run.progress.step == 1:
            note_compilation(run)
        if run.progress.step % run.plan.logging_steps == 0:
            flush_steps(run)

    def step_for(self, seconds: float, *, least: int) -> list[Any]:
        """Step until the time is over; return the marks around each step."""
        cuda, start_s = self.run.device.type == "cuda", time.perf_counter()
        marks = [mark_time(cuda=cuda)]
        while len(marks) <= least or time.perf_counter() - start_s < seconds:
            self.step()
            marks.append(mark_time(cuda=cuda))
        return marks


@contextmanager
def open_session(
    work: Work, plan: TrainPlan, *, name: str, processes: Processes | None = None,
    checkpoint: Path | None = None,
) -> Iterator[Session]:  # fmt: skip
    state = work.folder / "states" / name
    state.mkdir(parents=True, exist_ok=True)
    model = model_record(work.folder / "model", work.model, work.sizes)
    inputs = TrainInputs(plan=plan, model=model, rows=work.folder / "packed", state=state)
    processes = processes or start_processes(plan)
    with Saver(state, keep=2) as saver:
        run = assemble_run(
            inputs, processes=processes, saver=saver, stop=lambda: False, directory=checkpoint
        )
        run.loss.train()
        run.clock.book_startup()
        with load_batches(run.feed, run.progress.step, plan=plan, device=run.device) as batches:
            yield Session(run, batches)


def train(work: Work, variant: Variant, name: str) -> dict[str, Any]:
    """Measure a variant; out of memory is a result.

    Continue with half the micro-batch where the product would.
    """
    if variant.method == "qlora" and find_spec("bitsandbytes") is None:
        return {"absent": "bitsandbytes is not installed"}
    plan = plan_of(work, variant)
    processes = start_processes(plan)
    tried: list[int] = []
    while True:
        try:
            measured = _train(work, plan, name, processes)
            return {**measured, "out_of_memory_at": tried}
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            tried.append(plan.batch_size)
            message = " ".join(str(error).split())[:300]
        # It keeps a reference to an optimizer that it wraps, and so to the model.
        processes.accelerator.free_memory()
        gc.collect()
        if work.device == "cuda":
            torch.cuda.empty_cache()
        if plan.batch_size == 1 or variant.micro_batch or work.micro_batch:
            return {"out_of_memory": message, "micro_batch_size": plan.batch_size}
        plan = plan_of(work, variant, batch_size=plan.batch_size // 2)
        name = f"{name}-{plan.batch_size}"


def _train(work: Work, plan: TrainPlan, name: str, processes: Processes) -> dict[str, Any]:
    # In its own frame, which does not keep the memory of a run that did not fit.
    with open_session(work, plan, name=name, processes=processes) as session:
        return measure(work, session)


def measure(work: Work, session: Session) -> dict[str, Any]:
    """Warm up, measure, and return settings and figures."""
    cuda, run = work.device == "cuda", session.run
    wait = torch.cuda.synchronize if cuda else lambda: None
    plan, progress = run.plan, run.progress
    loaded = torch.cuda.memory_allocated() if cuda else None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start_s = time.perf_counter()
    try_batches(run)
    session.step()
    wait()
    first_s = time.perf_counter() - start_s
    try_batches(run, WARMED_UP)
    session.step_for(work.soak_s, least=WARM_UP)
    flush_steps(run)
    wait()
    before = progress.n_tokens, progress.n_padding_tokens, run.clock.seconds["data_wait"]
    with watch_card(work.device, run.state / "card.jsonl") as seen:
        start_s = time.perf_counter()
        marks = session.step_for(work.measure_s, least=MEASURED)
        wait()
        wall_s = time.perf_counter() - start_s
    waited_s = run.clock.seconds["data_wait"] - before[2]
    flush_steps(run)
    losses = [line["loss"] for line in read_json_lines(run.state / "steps.jsonl")]
    n_tokens, n_padding = progress.n_tokens - before[0], progress.n_padding_tokens - before[1]
    return {
        "method": plan.method,
        "micro_batch_size": plan.batch_size,
        "n_accumulation_steps": plan.gradient_accumulation_steps,
        "row_length": plan.sequence_length_tokens,
        "attention": plan.attention,
        "torch_compile": plan.torch_compile,
        "checkpoint_activations": plan.gradient_checkpointing,
        "activated": list(run.activated),
        "fallbacks": [to_json(fallback) for fallback in progress.fallbacks],
        "n_steps": len(marks) - 1,
        "tokens_per_s": n_tokens / wall_s,
        "padding_share": n_padding / max(1, n_padding + n_tokens),
        **utilization(work, plan, n_tokens / wall_s),
        **step_spread([seconds_between(a, b) for a, b in pairwise(marks)]),
        "predicted": plan.cost.step and to_json(plan.cost.step),
        "card": seen,
        "first_step_s": first_s,
        "data_wait_share": waited_s / wall_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "loaded_memory_bytes": loaded,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "loss_is_finite": all(map(math.isfinite, losses)),
    }


def utilization(work: Work, plan: TrainPlan, tokens_per_s: float) -> dict[str, Any]:
    """Return MFU by the table's peak and by the measured product; null if either is unknown.

    FLOPs are the model's per token, the same for all variants of a method: a variant's wasted
    computation (a dense mask, recomputation) does not count.
    """
    flops = tokens_per_s * plan_of(work, Variant(method=plan.method)).flops_per_token_model
    peak = plan.gpu.peak_bf16_flops_per_s if plan.gpu else None
    ceiling = work.matmul_flops_per_s
    return {
        "model_flops_per_s": flops,
        "mfu": flops / peak if peak else None,
        "mfu_of_measured_matmul": flops / ceiling if ceiling else None,
    }


def step_spread(steps_s: list[float]) -> dict[str, float]:
    ordered = sorted(steps_s)
    return {
        "step_s": statistics.median(ordered),
        "step_low_s": ordered[len(ordered) // 20],
        "step_high_s": ordered[-1 - len(ordered) // 20],
    }
