"""TRL: time the steps of ``SFTTrainer`` on the rows of our steps, in a separate process.

    PEER/python bench/peers/trl_steps.py --case CASE.json --output RESULT.json [--form compiled]

Runs in TRL's environment. ``padding_free`` trains on packed rows as its documentation recommends;
``padded`` is its default: one document per row, padded to the longest of the batch, with as many
documents per micro-batch as our rows have on average. Nothing is logged, saved or
evaluated. Losses and tokens are kept on the device and fetched at the end. Everything that TRL
computes and fetches in every micro-batch (tokens, entropy, accuracy) stays, logged or not.

``--form compiled`` only sets ``torch_compile``. With ``--form unsloth``, Unsloth loads
the model and adds a new random adapter of the same shape; it has not been run on a card.
"""

import argparse
import ctypes
import json
import signal
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))

# It patches transformers and TRL, and so must be imported first.
if "unsloth" in sys.argv:
    if find_spec("unsloth") is None:
        sys.exit("error: unsloth is not installed in this Python; it needs a CUDA card")
    from unsloth import FastLanguageModel

import torch
from datasets import Dataset, load_from_disk
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.integrations.hub_kernels import load_and_register_attn_kernel
from transformers.utils import (
    is_flash_attn_2_available,
    is_kernels_available,
    is_liger_kernel_available,
)
from trl import SFTConfig, SFTTrainer

# Needs nothing that TRL's environment lacks.
from expertflow.core.process import peak_resident_bytes

# As in TRL's documentation.
HUB_KERNEL = "kernels-community/flash-attn2"
PR_SET_PDEATHSIG = 1
Case = dict[str, Any]


class Marks(TrainerCallback):  # type: ignore[misc]
    """Marks the end of each timed step; syncs the device before the first and after the last.

    Warms up for a number of steps and ``soak_s``, and ends training after another number of steps
    and ``measure_s``.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.device = case, case["device"]
        self.marks: list[Any] = []
        self.n_warmup_steps = 0
        self.begun_s = self.first_step_s = 0.0
        self.start_s = self.timed_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        case, step = self.case, state.global_step
        if step == 1:
            wait(self.device)
            self.first_step_s = time.perf_counter() - self.begun_s
        if not self.marks:
            warm_s = time.perf_counter() - self.begun_s - self.first_step_s
            if step < case["n_warmup_steps"] or warm_s < case.get("soak_s", 0):
                return
            self.n_warmup_steps = step
            wait(self.device)
            self.start_s = time.perf_counter()
        self.marks.append(mark(self.device))
        measured_s = time.perf_counter() - self.start_s
        n_timed = step - self.n_warmup_steps
        if n_timed >= case["n_timed_steps"] and measured_s >= case.get("measure_s", 0):
            wait(self.device)
            self.timed_s = time.perf_counter() - self.start_s
            control.should_training_stop = True


def mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


class Kept(SFTTrainer):  # type: ignore[misc]
    """Keeps each micro-batch's step, its tokens and its share of the loss (on the device)."""

    kept: list[tuple[int, torch.Tensor | int, torch.Tensor]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **named: Any) -> torch.Tensor:
        # Without padding there is no mask, and every id belongs to a document.
        mask = inputs.get("attention_mask")
        n_tokens = inputs["input_ids"].numel() if mask is None else mask.sum()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **named)
        self.kept.append((self.state.global_step, n_tokens, loss.detach().clone()))
        return loss


def main() -> None:
    """Train one case and write its measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--form", choices=("eager", "compiled", "unsloth"), default="eager")
    args = parser.parse_args()
    # Ends with its parent, so that no abandoned process keeps a card.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    case = json.loads(args.case.read_text(encoding="utf-8"))
    if case["device"] == "cpu":
        torch.set_num_threads(1)
    rows = load_from_disk(case["rows"])
    micro = case["batch_size"]
    if case["form"] == "padded":
        per_row = sum(map(len, rows["seq_lengths"])) / len(rows)
        rows, micro = documents_of(rows), max(1, round(micro * per_row))
    marks = Marks(case)
    unsloth = args.form == "unsloth"
    kernel, why = ("unsloth's own", "") if unsloth else attention(case)
    words = {
        "form": args.form, "attention": f"{kernel}{why}",
        "liger": "off: unsloth's own" if unsloth else liger(case), "micro_batch_size": micro,
    }  # fmt: skip
    trainer = assemble(case, rows, marks, {**words, "kernel": kernel}, args.output)
    trainer.train()
    # By step; the last one of an epoch may have fewer micro-batches.
    losses, n_tokens = ([0.0] * (trainer.kept[-1][0] + 1) for _ in range(2))
    for step, tokens, share in trainer.kept:
        losses[step] += float(share)
        n_tokens[step] += float(tokens)
    cuda = case["device"] == "cuda"
    said = {
        "outcome": "measured",
        "timed_s": marks.timed_s,
        "first_step_s": marks.first_step_s,
        "steps_s": [a.elapsed_time(b) / 1000 if cuda else b - a for a, b in pairwise(marks.marks)],
        "n_tokens": int(sum(n_tokens[marks.n_warmup_steps :])),
        "losses": losses,
        "peak_memory_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_host_rss_bytes": peak_resident_bytes(),
        "words": [f"{name}: {value}" for name, value in words.items()],
    }
    args.output.write_text(json.dumps(said), encoding="utf-8")


def assemble(case: Case, rows: Dataset, marks: Marks, words: dict[str, Any], output: Path) -> Kept:
    config = SFTConfig(
        output_dir=str(output.with_suffix(".trained")), save_strategy="no", report_to="none",
        logging_strategy="no", eval_strategy="no", disable_tqdm=True, log_level="error",
        use_cpu=case["device"] == "cpu", bf16=case["precision"] == "bf16", packing=False,
        padding_free=case["form"] == "padding_free", max_length=None,
        train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": True},
        # ``Marks`` ends it before.
        max_steps=1_000_000, torch_compile=words["form"] == "compiled",
        per_device_train_batch_size=words["micro_batch_size"],
        gradient_accumulation_steps=case["gradient_accumulation_steps"],
        gradient_checkpointing=case["gradient_checkpointing"],
        use_liger_kernel=words["liger"].startswith("on"),
        learning_rate=case["rate"], lr_scheduler_type="constant", warmup_steps=0,
        **{name: case[name] for name in ("weight_decay", "max_grad_norm", "adam_beta1",
                                         "adam_beta2", "adam_epsilon", "optim", "seed")},
    )  # fmt: skip
    model = load_model(case, words, max(map(len, rows["input_ids"])))
    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    trainer = Kept(
        model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[marks]
    )
    trainer.kept = []
    trainer.remove_callback(PrinterCallback)
    return trainer


def load_model(case: Case, words: dict[str, Any], longest: int) -> Any:
    """Load trained weights in fp32 and a frozen base in training's precision, like ours."""
    if words["form"] == "unsloth":
        lora = PeftConfig.from_pretrained(case["adapter"])
        model, _ = FastLanguageModel.from_pretrained(
            case["model"], max_seq_length=longest, dtype=torch.bfloat16, load_in_4bit=False
        )
        return FastLanguageModel.get_peft_model(
            model, r=lora.r, lora_alpha=lora.lora_alpha, lora_dropout=lora.lora_dropout,
            target_modules=list(lora.target_modules), max_seq_length=longest,
            use_gradient_checkpointing=case["gradient_checkpointing"],
        )  # fmt: skip
    half = case["precision"] == "bf16" and case["adapter"]
    model: Any = AutoModelForCausalLM.from_pretrained(
        case["model"], attn_implementation=words["kernel"],
        dtype="bfloat16" if half else "float32",
    )  # fmt: skip
    if case["adapter"]:
        model = PeftModel.from_pretrained(model, case["adapter"], is_trainable=True)
    return model


def documents_of(rows: Dataset) -> Dataset:
    """Split rows into their documents, in arbitrary order."""
    apart = []
    for row in rows:
        at = 0
        for n in row["seq_lengths"]:
            part = slice(at, at + n)
            apart.append({"input_ids": row["input_ids"][part], "labels": row["labels"][part]})
            at += n
    return Dataset.from_list(apart).shuffle(seed=0)


def attention(case: Case) -> tuple[str, str]:
    """Choose the kernel, and explain if it is not the recommended one."""
    if case["device"] == "cpu" or case["precision"] == "fp32":
        return "sdpa", ""
    if is_flash_attn_2_available():
        return "flash_attention_2", ""
    reason = "kernels is not installed, or not in the version this transformers needs"
    if is_kernels_available():
        try:
            load_and_register_attn_kernel(HUB_KERNEL)
        except (ImportError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
        else:
            return HUB_KERNEL, ""
    return "sdpa", f", without flash attention: not TRL's recommended setting ({reason})"


def liger(case: Case) -> str:
    """Return whether Liger's kernels are on, or why not."""
    if case["device"] == "cpu":
        return "off: its kernels are Triton's and need a GPU"
    if case["form"] == "padded":
        return "off: not TRL's default"
    # TRL turns Liger's fused loss off, whatever is requested.
    on = "on: layer kernels only; TRL's own chunked head"
    return on if is_liger_kernel_available() else "off: not installed"


if __name__ == "__main__":
    main()
