"""Measure the product against its peers, in turns, on this machine: one command, three parts.

    python bench/side_by_side.py --environments DIR [--only chain,training,orchestration]
        [--device cpu|cuda] [--model tiny|small|0.6B] [--repeats 5] [--output result.json]

- chain: records become packed rows, by our chain and three others (bench/data_path.py);
- training: steps of our loop and of TRL's SFTTrainer on the same rows and weights, full and LoRA,
  along with TRL's padded default (bench/peers/training_beside.py);
- orchestration: the workflow and its own commands as plain scripts (bench/orchestration.py).

Every peer gets its own environment under --environments, built on demand from pinned
requirements; --peer-python sets an existing one for TRL. An unavailable peer is listed
with the reason. On a card the training part needs, on our side, only torch, transformers, peft,
accelerate and pyarrow: --only training --device cuda --model 0.6B.

Prints tables; the last line is JSON. --output is written after each part. If a part or an
installed peer fails, it is listed, and the exit code is 1.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import environment
from measured import Failed
from training_beside import (
    BATCHES,
    USUAL_BATCH,
    TrainingJob,
    measure_training,
    peer_versions,
)
from training_lines import failure

KEPT = Path.home() / ".cache" / "expertflow" / "peers"
PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "pyarrow", "numpy", "snakemake", "fastokens",
    "tokenizers",
)  # fmt: skip
# Both sides must run on the same versions: another version is another comparison.
SHARED = ("torch", "transformers", "peft", "accelerate")
Row = dict[str, Any]


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    before = machine(args.device)
    report: Row = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "bench/side_by_side.py", *sys.argv[1:]]),
        "machine": before,
        "versions": versions(),
    }

    def note(parts: dict[str, Row]) -> None:
        load = {**before, "load_average_after": os.getloadavg()[0]}
        left = [name for name in args.parts if name not in parts]
        report.update(machine=load, parts=parts, not_run=left)
        write(report, args.output)

    run_parts(args.parts, PARTS, args, note)
    sys.exit(finish_report(report, args.output))


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--only", help=f"parts, by commas: {', '.join(PARTS)}")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where training runs (cpu)")
    add("--model", choices=("tiny", "small", "0.6B", "1.7B", "8B"), default="tiny")
    add("--environments", type=Path, default=KEPT, help=f"folder of environments ({KEPT})")
    add("--peer-python", type=Path, help="a Python with TRL, in place of an environment")
    add("--repeats", type=int, default=5, help="turns of every line (5)")
    add("--warmup-steps", type=int, default=5, help="training steps not timed (5)")
    add("--timed-steps", type=int, default=20, help="training steps timed (20)")
    add("--micro-batch", type=int, help="rows (4; 0.6B and larger 8)")
    add("--accumulation", type=int, help="micro-batches per step (2)")
    add("--methods", default="full,lora", help="full, lora or both, by commas")
    add("--input", type=Path, help="JSON Lines of text for the chain part; else the real data")
    add("--target", default="results/small/report.json", help="of the orchestration part")
    add("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(words)
    args.parts = args.only.split(",") if args.only else list(PARTS)
    args.methods = tuple(args.methods.split(","))
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: choose of {', '.join(PARTS)}")
    if unknown := [name for name in args.methods if name not in ("full", "lora")]:
        parser.error(f"--methods {','.join(unknown)}: choose of full, lora")
    if min(args.repeats, args.timed_steps, args.warmup_steps) < 1:
        parser.error("--repeats, --timed-steps and --warmup-steps: at least 1")
    return args


def chain(args: argparse.Namespace) -> Row:
    # It imports packages that only our own environment has; the other parts do not need them.
    import data_path

    words = ["--repeats", str(args.repeats), "--environments", str(args.environments)]
    words += ["--input", str(args.input)] if args.input else []
    options = data_path.options().parse_args(words)
    if reason := data_path.missing(options):
        raise Failed(reason)
    allowed = os.sched_getaffinity(0)
    try:
        return data_path.measure_all(options)
    finally:
        # It limits itself and its children to a number of cores.
        os.sched_setaffinity(0, allowed)


def compare_training(args: argparse.Namespace) -> Row:
    micro, n_accumulation = BATCHES.get(args.model, USUAL_BATCH)
    python, problem, installed = trl(args)
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name:
        job = TrainingJob(
            folder=Path(name), model=args.model, device=args.device, n_repeats=args.repeats,
            n_warmup_steps=args.warmup_steps, n_timed_steps=args.timed_steps,
            micro_batch=args.micro_batch or micro,
            n_accumulation_steps=args.accumulation or n_accumulation,
            peer=python, peer_problem=problem, methods=args.methods,
            prove_in_fp32=args.device == "cuda",
        )  # fmt: skip
        measured = measure_training(job)
    if reason := failure(measured, has_peer=problem is None):
        measured["failed"] = reason
    differ = versions_differ(versions(), installed)
    for name, (ours, theirs) in (differ or {}).items():
        print(f"versions differ: {name} {ours or 'none'}, TRL's {theirs or 'none'}")
    return {**measured, "installed": installed, "versions_differ": differ}


def versions_differ(
    ours: dict[str, str], theirs: dict[str, str]
) -> dict[str, tuple[str | None, str | None]] | None:
    """Return the packages whose versions differ; null if the peer's are unknown."""
    if not theirs:
        return None
    pairs = {name: (ours.get(name), theirs.get(name)) for name in SHARED}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def trl(args: argparse.Namespace) -> tuple[Path | None, str | None, dict[str, str]]:
    """Find or build TRL's environment: its Python, or why it is missing, and its versions."""
    python = args.peer_python
    if python is None:
        name = "trl_cuda" if args.device == "cuda" else "trl_peft"
        built = environment(name, args.environments)
        if built.problem:
            return None, f"not installed: {built.problem}", {}
        python = built.python
    installed, problem = peer_versions(python)
    return python, problem and f"{python}: {problem}", installed


def orchestration(args: argparse.Namespace) -> Row:
    # Snakemake may be missing where only training is measured.
    import orchestration

    return orchestration.measure_orchestration(args.target, args.repeats)


PARTS: dict[str, Callable[[argparse.Namespace], Row]] = {
    "chain": chain,
    "training": compare_training,
    "orchestration": orchestration,
}


# Failures of the machine, an environment or a child process, but not bugs of the benchmark.
EXPECTED = (Failed, ImportError, OSError, subprocess.SubprocessError, json.JSONDecodeError)


def run_parts(
    names: list[str], parts: dict[str, Callable[[argparse.Namespace], Row]],
    args: argparse.Namespace, note: Callable[[dict[str, Row]], None] = lambda _: None,
) -> dict[str, Row]:  # fmt: skip
    """Run parts one after another; a failed one is reported, and the others continue.

    ``note`` receives the results after each part, so that a crash of the next loses nothing.
    """
    results: dict[str, Row] = {}
    for name in names:
        try:
            results[name] = parts[name](args)
        except EXPECTED as error:
            results[name] = {"failed": " ".join(str(error).split()) or type(error).__name__}
        note(results)
        sys.stdout.flush()
    return results


def finish_report(report: Row, output: Path | None) -> int:
    """Report failures, write and print the JSON line; return the exit code."""
    failed = {name: part["failed"] for name, part in report["parts"].items() if "failed" in part}
    for name, reason in failed.items():
        print(f"\n{name}: failed: {reason}")
    print(write(report, output))
    return 1 if failed else 0


def write(report: Row, output: Path | None) -> str:
    """Write the report atomically; return its line."""
    line = json.dumps(report, allow_nan=False)
    if output:
        part = output.with_name(f"{output.name}.part")
        part.write_text(line + "\n", encoding="utf-8")
        part.replace(output)
    return line


def machine(device: str) -> Row:
    """Describe this machine and its load."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as stream:
        models = [line.partition(":")[2].strip() for line in stream if "model name" in line]
    return {
        "cpu": models[0] if models else platform.machine(),
        "n_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu_name() if device == "cuda" else None,
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def gpu_name() -> str:
    """Return torch's name of the card, or a text if there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch sees"


def versions() -> dict[str, str]:
    """Return the versions that our side runs on."""
    return {d.name: d.version for name in PACKAGES for d in metadata.distributions(name=name)}


if __name__ == "__main__":
    main()
