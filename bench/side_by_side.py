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

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in ("bench", "bench/peers", "workflow/scripts")
)

from environments import KEPT, build_environment, installed_versions
from measured import Failed, Row
from training_beside import TrainingJob, measure_training
from training_lines import failure

from expertflow.core.files import write_text

PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "pyarrow", "numpy", "snakemake", "fastokens",
    "tokenizers",
)  # fmt: skip
# Both sides must run on the same versions: another version is another comparison.
SHARED = ("torch", "transformers", "peft", "accelerate")
OF_TRL = (*SHARED, "trl", "datasets", "liger-kernel")


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    report: Row = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "bench/side_by_side.py", *sys.argv[1:]]),
        "machine": describe_machine(args.device),
        "versions": our_versions(),
    }
    sys.exit(run_parts(report, {name: PARTS[name] for name in args.parts}, args))


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
    add("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(words)
    args.parts = args.only.split(",") if args.only else list(PARTS)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: choose of {', '.join(PARTS)}")
    if min(args.repeats, args.timed_steps, args.warmup_steps) < 1:
        parser.error("--repeats, --timed-steps and --warmup-steps: at least 1")
    return args


def chain(args: argparse.Namespace) -> Row:
    # It imports packages that only our own environment has; the other parts do not need them.
    import data_path

    words = ["--repeats", str(args.repeats), "--environments", str(args.environments)]
    return data_path.measure_all(data_path.options().parse_args(words))


def compare_training(args: argparse.Namespace) -> Row:
    python, problem = args.peer_python, None
    if python is None:
        name = "trl_cuda" if args.device == "cuda" else "trl_peft"
        python, problem = build_environment(name, args.environments)
        problem = problem and f"not installed: {problem}"
    installed: dict[str, str] = {}
    if problem is None:
        try:
            installed = installed_versions(python, OF_TRL, "json, trl, peft, datasets")
        except Failed as error:
            problem = str(error)
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as folder:
        job = TrainingJob(
            folder=Path(folder), model=args.model, device=args.device, n_repeats=args.repeats,
            n_warmup_steps=args.warmup_steps, n_timed_steps=args.timed_steps,
            micro_batch=4 if args.model in ("tiny", "small") else 8, n_accumulation_steps=2,
            peer=python, peer_problem=problem, methods=("full", "lora"),
            prove_in_fp32=args.device == "cuda",
        )  # fmt: skip
        measured = measure_training(job)
    if reason := failure(measured, has_peer=problem is None):
        measured["failed"] = reason
    ours = our_versions()
    pairs = {name: (ours.get(name), installed.get(name)) for name in SHARED if installed}
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (own, peers) in differ.items():
        print(f"versions differ: {name} {own or 'none'}, TRL's {peers or 'none'}")
    # Null if the peer's are unknown.
    known = differ if installed else None
    return {**measured, "installed": installed, "versions_differ": known}


def orchestration(args: argparse.Namespace) -> Row:
    # Snakemake may be missing where only training is measured.
    import orchestration

    return orchestration.measure_orchestration(orchestration.TARGET, args.repeats)


PARTS: dict[str, Callable[[argparse.Namespace], Row]] = {
    "chain": chain,
    "training": compare_training,
    "orchestration": orchestration,
}


# Failures of the machine, an environment or a child process, but not bugs of the benchmark.
EXPECTED = (Failed, ImportError, OSError, subprocess.SubprocessError, json.JSONDecodeError)


def run_parts(
    report: Row, parts: dict[str, Callable[[argparse.Namespace], Row]], args: argparse.Namespace
) -> int:
    """Run parts one after another, print the report as a line, and return the exit code.

    A failed part is listed, and the others continue. The report is also written after each part, so
    that a crash of the next loses nothing.
    """
    report |= {"parts": {}, "not_run": list(parts)}
    for name, part in parts.items():
        try:
            report["parts"][name] = part(args)
        except EXPECTED as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            report["parts"][name] = {"failed": reason}
        report["not_run"].remove(name)
        report["machine"]["load_average_after"] = os.getloadavg()[0]
        line = json.dumps(report, allow_nan=False)
        if args.output:
            write_text(args.output, line + "\n")
        sys.stdout.flush()
    found = report["parts"].items()
    failed = {name: part["failed"] for name, part in found if "failed" in part}
    for name, reason in failed.items():
        print(f"\n{name}: failed: {reason}")
    print(line)
    return 1 if failed else 0


def describe_machine(device: str) -> Row:
    """Describe this machine and its load."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as stream:
        models = [line.partition(":")[2].strip() for line in stream if "model name" in line]
    gpu = None
    if device == "cuda":
        import torch

        found = torch.cuda.is_available()
        gpu = torch.cuda.get_device_name(0) if found else "none that torch sees"
    return {
        "cpu": models[0] if models else platform.machine(),
        "n_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu,
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def our_versions() -> dict[str, str]:
    return {d.name: d.version for name in PACKAGES for d in metadata.distributions(name=name)}


if __name__ == "__main__":
    main()
