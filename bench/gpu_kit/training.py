"""Train some steps with the project's own loop and measure them."""

import gc
import math
import statistics
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from msgspec import field
from msgspec.structs import replace
from support import plan_spec

from expertflow.core.files import read_json_lines
from expertflow.core.records import Record, from_json, to_json
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
from expertflow.train.run import TrainInputs
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.start import assemble_run, note_compilation, try_batches
from expertflow.train.step_hooks import flush_steps
from gpu_kit.card_watch import watch_card
from gpu_kit.cards import card
from gpu_kit.fixtures import SIZES, model_record
from gpu_kit.losses import AllRowsLoss
from gpu_kit.marks import mark, seconds_between, wait

# Steps at least before and while it is measured; micro-batches whose shapes are compiled before.
WARM_UP, MEASURED, WARMED_UP = 2, 3, 64
LORA = LoraSpec(
    r=16, alpha=32, dropout=0.05, use_dora=False, use_rslora=False,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip


class Work(Record, frozen=True, kw_only=True):
    """The input of every part: the machine, the model, and results of earlier parts."""

    folder: Path
    device: str
    model: str
    sizes: dict[str, int]
    packings: dict[str, Any]
    peak_tflops: float | None
    soak_s: float
    measure_s: float
    micro_batch: int | None = None
    matmul_flops_per_s: float | None = None

    def packing(self, name: str) -> PackingRecord:
        record: PackingRecord = from_json(PackingRecord, self.packings[name])
        return record

    def gpu(self) -> GpuFacts | None:
        if self.device == "cpu":
            return None
        memory = torch.cuda.get_device_properties(0).total_memory
        return card(torch.cuda.get_device_name(0), memory, peak_tflops=self.peak_tflops)


class Variant(Record, frozen=True, kw_only=True):
    """A way to train: settings that differ from the plan's."""

    method: str = "lora"
    use_dora: bool = False
    packing: str = "bfd"
    changes: dict[str, Any] = field(default_factory=dict)
    all_rows_loss: bool = False
    flip_checkpointing: bool = False
    micro_batch: int | None = None


def plan_of(work: Work, variant: Variant, **changes: Any) -> TrainPlan:
    """Plan a variant as the product would.

    Micro-batch, checkpointing and compilation are those of the method's default, so that a variant
    differs from it only in the settings it lists.
    """
    packing = work.packing(variant.packing)
    lora = None if variant.method == "full" else replace(LORA, use_dora=variant.use_dora)
    settings: dict[str, Any] = {
        "method": variant.method, "lora": lora,
        "max_steps": 10_000, "batch_size": None, "gradient_accumulation_steps": None,
        "learning_rate": 1e-4, "save_steps": 10_000, "eval_steps": 10_000, "logging_steps": 10,
        "n_threads": 1 if work.device == "cpu" else None, "warmup_ratio": 0.01,
    }  # fmt: skip
    usual = _resolved(work, plan_spec(**settings), work.packing("bfd"))
    settings["batch_size"] = variant.micro_batch or work.micro_batch or usual.batch_size
    settings["gradient_checkpointing"] = usual.gradient_checkpointing != variant.flip_checkpointing
    settings["torch_compile"] = usual.torch_compile
    return _resolved(work, plan_spec(**{**settings, **variant.changes, **changes}), packing)


def _resolved(work: Work, spec: Any, packing: PackingRecord) -> TrainPlan:
    draft = PlanDraft(
        expert="kit", spec=spec, packing=packing, facts=SIZES[work.model].facts,
        n_params=work.sizes["n_parameters"], gpu=work.gpu(),
    )  # fmt: skip
    return plan_training(draft)


class Session:
    """A run assembled as in a training job, and stepped by hand."""

    def __init__(
        self, work: Work, variant: Variant, plan: TrainPlan, *, name: str, processes: Processes,
        checkpoint: Path | None = None,
    ) -> None:  # fmt: skip
        self.stack = ExitStack()
        state = work.folder / "states" / name
        state.mkdir(parents=True, exist_ok=True)
        inputs = TrainInputs(
            plan=plan,
            model=model_record(work.folder / "model", work.model, work.sizes),
            rows=work.folder / variant.packing / "packed",
            state=state,
        )
        saver = self.stack.enter_context(Saver(state, keep=2))
        self.run = assemble_run(
            inputs, processes=processes, saver=saver, stop=lambda: False, directory=checkpoint
        )
        if variant.all_rows_loss:
            self.run.loss = AllRowsLoss(self.run.net)
        if variant.packing == "none":
            # Batches of one document per row are cut to their longest row; this prevents it.
            self.run.feed.collator.cuts = False
        self.run.loss.train()
        self.run.clock.book_startup()
        first, device = self.run.progress.step, self.run.device
        loader = load_batches(self.run.feed, first, plan=plan, device=device)
        self.batches = self.stack.enter_context(loader)

    def step(self) -> None:
        """Run one step of the loop, and fetch losses as often as the plan says."""
        run = self.run
        run.pending.append(loop.train_step(run, self.batches))
        if run.progress.step == 1:
            note_compilation(run)
        if run.progress.step % run.plan.logging_steps == 0:
            flush_steps(run)

    def losses(self) -> list[float]:
        """Fetch pending losses; return those of all steps so far."""
        flush_steps(self.run)
        return [line["loss"] for line in read_json_lines(self.run.state / "steps.jsonl")]

    def close(self) -> None:
        self.stack.close()


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
            measured = _train(work, variant, plan, name, processes)
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


def _train(
    work: Work, variant: Variant, plan: TrainPlan, name: str, processes: Processes
) -> dict[str, Any]:
    session = Session(work, variant, plan, name=name, processes=processes)
    try:
        measured = _measured(work, plan, session)
        return {**settings_of(session), **measured}
    finally:
        session.close()


def settings_of(session: Session) -> dict[str, Any]:
    plan = session.run.plan
    return {
        "method": plan.method,
        "micro_batch_size": plan.batch_size,
        "n_accumulation_steps": plan.gradient_accumulation_steps,
        "row_length": plan.sequence_length_tokens,
        "attention": plan.attention,
        "torch_compile": plan.torch_compile,
        "checkpoint_activations": plan.gradient_checkpointing,
        "activated": list(session.run.activated),
        "fallbacks": [to_json(fallback) for fallback in session.run.progress.fallbacks],
    }


def _measured(work: Work, plan: TrainPlan, session: Session) -> dict[str, Any]:
    cuda, run = work.device == "cuda", session.run
    loaded = torch.cuda.memory_allocated() if cuda else None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start_s = time.perf_counter()
    try_batches(run)
    session.step()
    wait(work.device)
    first_s = time.perf_counter() - start_s
    try_batches(run, WARMED_UP)
    _steps_for(session, work.soak_s, least=WARM_UP)
    flush_steps(run)
    wait(work.device)
    before = run.progress.n_tokens, run.progress.n_padding_tokens, run.clock.seconds["data_wait"]
    with watch_card(work.device) as seen:
        start_s = time.perf_counter()
        marks = _steps_for(session, work.measure_s, least=MEASURED)
        wait(work.device)
        wall_s = time.perf_counter() - start_s
    waited_s = run.clock.seconds["data_wait"] - before[2]
    losses = session.losses()
    n_tokens = run.progress.n_tokens - before[0]
    return {
        "n_steps": len(marks) - 1,
        "tokens_per_s": n_tokens / wall_s,
        "padding_share": _share(run.progress.n_padding_tokens - before[1], n_tokens),
        **utilization(work, plan, n_tokens / wall_s),
        **step_spread(seconds_between(marks, work.device)),
        "predicted": _predicted(plan),
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


def _steps_for(session: Session, seconds: float, *, least: int) -> list[Any]:
    """Step until the time is over; return the marks around each step."""
    device, start_s = session.run.device.type, time.perf_counter()
    marks = [mark(device)]
    while len(marks) <= least or time.perf_counter() - start_s < seconds:
        session.step()
        marks.append(mark(device))
    return marks


def _predicted(plan: TrainPlan) -> dict[str, Any] | None:
    """Return the step model's seconds for the plan's step and its parts."""
    return plan.cost.step and to_json(plan.cost.step)


def _share(n_padding: int, n_tokens: int) -> float:
    return n_padding / max(1, n_padding + n_tokens)


def utilization(work: Work, plan: TrainPlan, tokens_per_s: float) -> dict[str, Any]:
    """Return MFU by the table's peak and by the measured product; null if either is unknown."""
    flops = tokens_per_s * useful_flops(work, plan)
    peak = plan.gpu.peak_bf16_flops_per_s if plan.gpu else None
    ceiling = work.matmul_flops_per_s
    return {
        "model_flops_per_s": flops,
        "mfu": flops / peak if peak else None,
        "mfu_of_measured_matmul": flops / ceiling if ceiling else None,
    }


def useful_flops(work: Work, plan: TrainPlan) -> float:
    """Return the model FLOPs per token, the same for all variants of a method.

    A variant's wasted computation (all rows of the head, a dense mask, padding, recomputation)
    does not count.
    """
    usual = plan_of(work, Variant(method=plan.method))
    return usual.flops_per_token_model


def step_spread(steps_s: list[float]) -> dict[str, float]:
    ordered = sorted(steps_s)
    return {
        "step_s": statistics.median(ordered),
        "step_low_s": ordered[len(ordered) // 20],
        "step_high_s": ordered[-1 - len(ordered) // 20],
    }
