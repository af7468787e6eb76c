"""TRL: ``SFTTrainer`` trains arranged rows, padding-free; tells each step's loss, norm and rate.

Runs in TRL's environment, on the cases that bench/train_parity.py writes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=Path, required=True, help="JSON list of cases")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    # As ours: so small a model gains nothing by more.
    torch.set_num_threads(1)
    cases = json.loads(args.cases.read_text())
    args.output.write_text(json.dumps([train(case, args.output.parent) for case in cases]))


def train(case: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Train one case; give its log, one entry a step."""
    config = SFTConfig(
        output_dir=str(folder / "trained"), save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, disable_tqdm=True, log_level="error", logging_steps=1,
        gradient_checkpointing=False, max_length=None, padding_free=True,
        train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": True},
        **case["settings"],
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(
        case["model"], attn_implementation="sdpa", dtype="float32"
    )
    if case["adapter"]:
        model = PeftModel.from_pretrained(model, case["adapter"], is_trainable=True)
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=load_from_disk(case["rows"]),
        processing_class=AutoTokenizer.from_pretrained(case["tokenizer"]),
    )
    trainer.remove_callback(PrinterCallback)
    if case["rates"]:
        # The optimiser stays the trainer's own; the scheduler asks for one rate beyond the last.
        rates = [*case["rates"], 0.0]
        peak = config.learning_rate
        trainer.lr_scheduler = LambdaLR(trainer.create_optimizer(), lambda i: rates[i] / peak)
    trainer.train()
    names = ("loss", "grad_norm", "learning_rate")
    return [{n: e[n] for n in names} for e in trainer.state.log_history if "loss" in e]


if __name__ == "__main__":
    main()
