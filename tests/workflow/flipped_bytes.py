"""Flip one byte in each kind of file of a finished chain, run what reads it, and print the outcome.

    PYTHONPATH=tests:tests/workflow:workflow/scripts python tests/workflow/flipped_bytes.py

Each has to be named, with what to do, or made again; none may be used silently.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from workflow_space import Workspace, make_workspace, manifest

INDEX = "results/index.html"
# A call of a stage's script, as a rule writes it.
CALL = re.compile(r'python "\$EXPERTFLOW"/(\w+)\.py .*?(?= 2> )')
FIXES = ("run make repair", "put it back, or take it in: snakemake", ": damaged, ")
# What reads a kind of file: a stage, ``snakemake`` where its main process does, ``verify`` where
# nothing but a user does.
READERS = {
    "data/sums.jsonl": "prepare_shard",
    "results/tiny/sources.lock.json": "snakemake",
    "results/tiny/sources/locked/sums.json": "fetch_source",
    "results/tiny/sources/fetched/sums.json": "find_datasets",
    "results/tiny/sources/fetched/.sums.json.fingerprint": "prepare_shard",
    "results/tiny/datasets.json": "build_report",
    "results/tiny/documents/sums/000.json": "deduplicate_documents",
    "results/tiny/documents/sums/000.arrow": "deduplicate_documents",
    "results/tiny/documents/sums/000.rejected.jsonl": "deduplicate_documents",
    "results/tiny/documents/sums/.000.json.fingerprint": "pretokenize_shard",
    "results/tiny/documents.json": "build_report",
    "results/tiny/keep.arrow": "pack_sequences",
    "results/tiny/.documents.json.fingerprint": "pack_sequences",
    "results/tiny/tokenizer.json": "pretokenize_shard",
    "results/tiny/tokenizer/tokenizer.json": "pretokenize_shard",
    "results/tiny/tokenizer/tokenizer_config.json": "prepare_model",
    "results/tiny/model.json": "plan_training",
    "results/tiny/base_model/model.safetensors": "stage_to_nvme",
    "results/tiny/base_model/config.json": "plan_training",
    "results/tiny/base_model/generation_config.json": "train_expert",
    "results/tiny/base_model/tokenizer.json": "train_expert",
    "results/tiny/tokens/sums/000.json": "pack_sequences",
    "results/tiny/tokens/sums/000.ids": "pack_sequences",
    "results/tiny/tokens/sums/000.arrow": "pack_sequences",
    "results/tiny/tokens/sums/.000.json.fingerprint": "pack_sequences",
    "results/tiny/packing.json": "plan_training",
    "results/tiny/packed/train/data-00000-of-00001.arrow": "train_expert",
    "results/tiny/packed/train/state.json": "stage_to_nvme",
    "results/tiny/packed/held_out/data-00000-of-00001.arrow": "generate_answers",
    "results/tiny/packed/held_out/dataset_info.json": "export_model",
    "results/tiny/plan.json": "train_expert",
    "results/tiny/staging.json": "train_expert",
    "results/tiny/.staging.json.fingerprint": "train_expert",
    "results/tiny/training.json": "generate_answers",
    "results/tiny/checkpoint/model.safetensors": "generate_answers",
    "results/tiny/checkpoint/config.json": "export_model",
    "results/tiny/steps.jsonl": "build_report",
    "results/tiny/gpu.jsonl": "build_report",
    "results/tiny/monitor.json": "export_model",
    "results/tiny/preflight.json": "build_report",
    "results/tiny/profile/kernels.json": "build_report",
    "results/tiny/generations.json": "evaluate_expert",
    "results/tiny/evaluation.json": "export_model",
    "results/tiny/answers.jsonl": "build_report",
    "results/tiny/export.json": "build_report",
    "results/tiny/merged/model.safetensors": "build_report",
    "results/tiny/merged/README.md": "build_report",
    "results/tiny/logs/train_expert.attempts.json": "build_report",
    "results/tiny/report.json": "compare_experts",
    "results/tiny/report.html": "compare_experts",
    "results/index.json": "verify",
    "results/index.html": "verify",
    "state/hashes.json": "snakemake",
    "state/.tokens/*/tokens.ids": "pretokenize_shard",
    "state/.tokens/*/index.arrow": "pretokenize_shard",
    "state/.tokens/*/record.json": "pretokenize_shard",
    "state/.tokens/*/.record.json.fingerprint": "pretokenize_shard",
    "state/.evaluations/tiny.jsonl": "verify",
    "state/tiny/*/plan.json": "verify",
    "state/tiny/*/outcome.json": "train_expert",
    "state/tiny/*/final/model.safetensors": "train_expert",
    "state/tiny/*/steps.jsonl": "train_expert",
    "state/tiny/*/checkpoints/*/weights.safetensors": "verify",
    "state/tiny/*/checkpoints/*/optimizer.safetensors": "verify",
    "state/tiny/*/checkpoints/*/progress.json": "verify",
}


class Flip(NamedTuple):
    path: str
    reader: str
    outcome: str
    line: str


def list_calls(space: Workspace) -> dict[str, str]:
    """Return the command of each stage, as a run of all of them would call it."""
    said = space.run("-n", "-p", "-F", "--logger-expertflow-snakemake", INDEX)
    return {match[1]: match[0] for match in CALL.finditer(said) if "results/tiny/" in match[0]}


def flip(path: Path) -> bytes:
    """Change one byte in the middle of a file, which keeps its links; return the content."""
    content = path.read_bytes()
    middle = len(content) // 2
    with path.open("r+b") as stream:
        stream.seek(middle)
        stream.write(bytes([content[middle] ^ 1]))
    return path.read_bytes()


def try_flip(space: Workspace, calls: dict[str, str], pattern: str, reader: str) -> Flip:
    """Flip a byte, run what reads the file, tell what came of it, and put the byte back."""
    [path] = space.root.glob(pattern)
    intact = path.read_bytes()
    flipped = flip(path)
    name = path.relative_to(space.root).as_posix()
    if reader == "verify":
        done = space.script("verify_results")
    elif reader == "snakemake":
        done = space.run_warm("-n", INDEX)
    else:
        scripts = space.root / "workflow" / "scripts"
        words = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = space.execute("bash", "-c", calls[reader], EXPERTFLOW=str(scripts), PATH=words)
    lines = (done.stdout + done.stderr).splitlines()
    told = [line for line in lines if name in line and "$EXPERTFLOW" not in line]
    # What names the folder, whole or of a checkpoint.
    said = re.compile(rf"{Path(name).parent}( is damaged|: damaged, {Path(name).name} )")
    told = told or [line for line in lines if said.search(line)]
    found = Flip(name, reader, "USED", " / ".join(lines[-3:]))
    if done.returncode == 0 and not (path.is_file() and path.read_bytes() == flipped):
        found = found._replace(outcome="made again", line=told[-1] if told else "")
    elif done.returncode and told and any(fix in told[-1] for fix in FIXES):
        found = found._replace(outcome="named", line=told[-1])
    if path.is_file() and path.read_bytes() == flipped:
        with path.open("r+b") as stream:
            stream.write(intact)
    return found


def show_outcomes(space: Workspace, cases: dict[str, str]) -> Counter[str]:
    """Try all cases on a finished chain, each with a line; count what came of them."""
    calls, counts = list_calls(space), Counter[str]()
    for pattern, reader in cases.items():
        found = try_flip(space, calls, pattern, reader)
        counts[found.outcome] += 1
        line = f"{found.path:56} {found.reader:22} {found.outcome:10} {found.line:.150}"
        print(line, flush=True)
    return counts


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        space = make_workspace(Path(scratch, "space"))
        with (space.root / "data" / "sums.jsonl").open("a", encoding="utf-8") as stream:
            stream.write('{"question": "rejected, as it has no answer"}\n')
        value = manifest()
        value["data"]["max_rejected_fraction"] = 0.1
        space.write_manifest("tiny", value)
        space.write_manifest("other", value)
        space.run(INDEX)
        counts = show_outcomes(space, READERS)
    print(f"{len(READERS)} kinds of files: {dict(counts)}")
    sys.exit("USED" in counts)


if __name__ == "__main__":
    main()
