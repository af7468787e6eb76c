"""Our side of bench/train_parity.py: runs of a tiny model, trained by the workflow's own script."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from support import LORA, keep_list, plan_spec, token_shard, write_tiny_run

from expertflow.core.records import from_json, write_record
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.tokens.arrow import INDEX, index_batch
from expertflow.tokens.pack import pack_sequences
from expertflow.tokens.ragged import ragged
from expertflow.tokens.records import PackingRecord, PackingSpec

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
N_STEPS, N_DOCUMENTS, LENGTH, VOCABULARY = 100, 400, 64, 97
MICRO_BATCH, ACCUMULATION, MAX_NORM = 2, 3, 0.5
LORA_SPEC = dataclasses.replace(
    LORA, dropout=0.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
)
TRAINER = ("--spec", "{}", "--code", "parity")
# Our runs by name: the peak rate and the weight decay of full and LoRA training.
OURS = {
    "full": {"method": "full", "learning_rate": 1e-2, "weight_decay": 0.0},
    "full, decay": {"method": "full", "learning_rate": 1e-2, "weight_decay": 0.3},
    "full, low rate": {"method": "full", "learning_rate": 1e-3, "weight_decay": 0.0},
    "LoRA": {"method": "lora", "learning_rate": 3e-2, "weight_decay": 0.0},
    "LoRA, decay": {"method": "lora", "learning_rate": 3e-2, "weight_decay": 0.3},
}


def train_ours(folder: Path, name: str) -> dict[str, Any]:
    """Train one of our runs; give its folder, plan, steps and adapter before the first step."""
    folder.mkdir()
    plan = write_run(folder, OURS[name])
    adapter = None
    if plan.lora is not None:
        # A run of one step at rate 0 ends with the adapter that every run of this plan begins with.
        still = dataclasses.replace(plan, learning_rate=0.0, n_steps=1, n_warmup_steps=0)
        run_trainer(folder, still, "still")
        adapter = folder / "still" / "checkpoint"
    run_trainer(folder, plan, "run")
    steps = [json.loads(line) for line in (folder / "run" / "steps.jsonl").open()]
    return {"folder": folder, "plan": plan, "steps": steps, "adapter": adapter}


def write_run(folder: Path, settings: dict[str, Any]) -> TrainPlan:
    """Write model, packed rows and plan of a run."""
    write_tiny_run(folder)
    widen_model(folder / "base_model")
    packing = pack(folder)
    facts = json.loads((folder / "model.json").read_text())["facts"]
    lora = LORA_SPEC if settings["method"] == "lora" else None
    spec = plan_spec(
        **settings, lora=lora, max_steps=N_STEPS, batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION, max_grad_norm=MAX_NORM, logging_steps=1,
        eval_steps=N_STEPS, save_steps=N_STEPS,
    )  # fmt: skip
    return plan_training(
        expert="tiny", spec=spec, packing=packing, facts=from_json(ModelFacts, facts),
        n_params=20_000, gpu=None,
    )  # fmt: skip


def widen_model(folder: Path) -> None:
    """Draw wider weights: with the usual ones an adapter under a frozen head learns nothing."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(folder)
    config.initializer_range = 0.2
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def pack(folder: Path) -> PackingRecord:
    """Pack documents whose supervised share runs from little to all, so that steps are uneven."""
    rng = np.random.default_rng(0)
    following = rng.integers(0, VOCABULARY, (VOCABULARY, 2))
    documents, spans = [], []
    for _ in range(N_DOCUMENTS):
        document = [int(rng.integers(VOCABULARY))]
        for _ in range(int(rng.integers(4, 60))):
            document.append(int(following[document[-1], int(rng.random() < 0.2)]))
        documents.append(document)
        spans.append([int(rng.integers(0, len(document) - 1)), len(document)])
    shard = token_shard(folder, documents, shard="001")
    with pa.OSFile(shard.index_path, "wb") as sink, pa.ipc.new_stream(sink, INDEX) as writer:
        lengths = np.array([len(document) for document in documents])
        n = len(documents)
        writer.write_batch(index_batch(lengths, ragged(spans), [False] * n, [None] * n))
    spec = PackingSpec(
        sequence_length_tokens=LENGTH, packing="bfd", overflow="split", seed=0,
        max_rejected_fraction=0.01,
    )  # fmt: skip
    keep = keep_list(folder, {"001": [i % 20 == 0 for i in range(N_DOCUMENTS)]})
    packing = pack_sequences(
        expert="tiny", spec=spec, shards=[shard], keep=keep, output=folder / "packed"
    )
    write_record(folder / "packing.json", packing)
    return packing


def run_trainer(folder: Path, plan: TrainPlan, name: str) -> None:
    """Train a plan as the workflow does, into a folder of its own."""
    place = folder / name
    place.mkdir()
    write_record(place / "plan.json", plan)
    command = [sys.executable, str(SCRIPTS / "train_expert.py"), *TRAINER]
    command += ["--plan", str(place / "plan.json"), "--output", str(place / "training.json")]
    for record in ("packing", "model", "staging"):
        command += [f"--{record}", str(folder / f"{record}.json")]
    command += ["--state", str(place / "state"), "--checkpoint", str(place / "checkpoint")]
    run(command)


def run(command: list[str]) -> None:
    """Run a program quietly; one that fails ends the comparison with its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {Path(command[1]).name}: {done.stderr.strip().splitlines()[-1]}")
