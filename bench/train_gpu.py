"""Measure training on one GPU: the card's limits, the worth of each switch, and correctness.

    python bench/train_gpu.py --model 0.6B [--only lora,lora-no-compile] [--output result.json]
    python bench/train_gpu.py --device cpu --model tiny      # the same, small, to try the kit

Needs only torch >= 2.11, transformers, peft, accelerate, pyarrow and numpy. Random weights with a
Qwen3's shape learn random ids in documents of realistic lengths, packed by the project's own
packing and trained by its own loop, with a plan like the product's.

Parts, in the order they run until the budget is spent:
- ceilings: large matrix products and the model's own, copies on the device and from the host;
- lora, full, dora, qlora: the plan's own settings. As in a run, the model, its packed documents and
  the route are checked before the first step, with the result in words;
- resume: under deterministic kernels the same SHA-256 of all weights, stopped and resumed or not;
- packing: the logits of a row's documents do not change by one bit with the documents around them,
  and by how much they differ from those of each document alone in a row;
- trl, trl-compiled, unsloth: other trainers on the rows of lora, from its adapter and at its
  micro-batch, without padding; if not installed here, the reason;
- ...-no-compile, -sdpa-mask, -checkpointing: one switch the other way.

Tokens are those of documents, without padding. MFU counts the FLOPs that the default needs;
extra computation of a variant does not count. Every part runs in a separate process: if one fails
or does not fit, that is reported, and the others continue. Step times are those of the device. Data
wait (data_wait) is the host's wait for batches, not for the device. The first step compiles if
compilation is on; the kit has its own caches, empty at first and shared by the parts. A part steps
for --soak-s, so that the card is warm, and is measured for --measure-s, while clocks, power and
temperature are sampled. "Predicted" is the plan's model of the step for the same settings, on this
card.

To compare our losses with TRL's, in turns: bench/side_by_side.py --only training. A step's kernels:
``training.profile_steps``.

Prints a table; the last line is JSON. Exits with 1 if a part failed or a check did not pass.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in ("tests", "workflow/scripts", "bench", "bench/peers")
)

from gpu_kit import parts
from gpu_kit.fixtures import SIZES
from gpu_kit.peers import PEERS
from gpu_kit.table import table
from gpu_kit.training import Work

from expertflow.core.records import from_json
from expertflow.tokens.records import PackingRecord

# The most informative parts come first; a spent budget may leave out the one-switch variants.
ORDER = (
    *("ceilings", "lora", "resume", "packing", *PEERS, "full", "dora", "qlora"),
    *(name for name in parts.VARIANTS if "-" in name),
)


def main() -> None:
    args = parse_arguments()
    started_s = time.monotonic()
    # Compilers of a killed part may still write there; that must not lose a result.
    with tempfile.TemporaryDirectory(
        dir=args.scratch, prefix="train-gpu-", ignore_cleanup_errors=True
    ) as folder:
        # Empty, so that the first part that compiles shows the time it takes.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "compiled")
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "compiled" / "triton")
        work = Work(
            folder=Path(folder), device=args.device, model=args.model, sizes={},
            soak_s=args.soak_s, measure_s=args.measure_s,
        )  # fmt: skip
        made = launch_part("prepare", work, args)
        if "sizes" not in made:
            sys.exit(f"error: {made.get('failed') or made['out_of_memory']}")
        packing = from_json(PackingRecord, made.pop("packing"))
        work = msgspec.structs.replace(work, sizes=made.pop("sizes"), packing=packing)
        report = {**made, "model": args.model, "parts": {}, "left_out": [*args.parts]}
        run_parts(work, args, report, started_s)
    print(table(report))
    print(json.dumps(report))
    sys.exit(any(map(is_bad, report["parts"].values())))


def is_bad(result: dict[str, Any]) -> bool:
    """Return whether a part failed or found a fault; out of memory is neither."""
    return "failed" in result or False in (result.get("passed"), result.get("loss_is_finite"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--model", choices=tuple(SIZES), default="0.6B", help="shape (0.6B)")
    add("--only", help=f"parts, by commas: {', '.join(ORDER)}")
    add("--soak-s", type=float, default=10, help="seconds of steps before measuring (10)")
    add("--measure-s", type=float, default=20, help="seconds to measure (20)")
    add("--budget-s", type=float, default=480, help="seconds after which no part starts (480)")
    add("--part-limit-s", type=float, default=180, help="seconds after which a part is stopped")
    add("--scratch", type=Path, help="folder for the model and checkpoints")
    add("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.parts = args.only.split(",") if args.only else list(ORDER)
    if unknown := [name for name in args.parts if name not in parts.PARTS]:
        parser.error(f"--only {', '.join(unknown)}: choose of {', '.join(ORDER)}")
    return args


def run_parts(
    work: Work, args: argparse.Namespace, report: dict[str, Any], started_s: float
) -> None:
    """Run the parts that the budget allows, one after the other; add their results."""
    results, longest_s = report["parts"], 0.0
    for name in args.parts:
        begun_s = time.monotonic()
        if begun_s - started_s + longest_s > args.budget_s:
            return
        # The product's speed, and the micro-batch that fits.
        usual = results.get("full" if name.startswith("full") else "lora", {})
        known = msgspec.structs.replace(
            work,
            micro_batch=usual.get("micro_batch_size"),
            matmul_flops_per_s=results.get("ceilings", {}).get("matmul_flops_per_s"),
        )
        result = results[name] = launch_part(name, known, args)
        taken_s = result["part_s"] = time.monotonic() - begun_s
        longest_s = max(longest_s, taken_s)
        told = (result.get(key) for key in ("failed", "out_of_memory", "absent"))
        message = next(filter(None, told), "done")
        print(f"{name}: {message} ({taken_s:.0f} s)", file=sys.stderr, flush=True)
        report["left_out"].remove(name)
        report["wall_s"] = time.monotonic() - started_s
        # If the run is stopped, its measurements so far stay.
        if args.output:
            args.output.write_text(json.dumps(report) + "\n", encoding="utf-8")


def launch_part(name: str, work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a separate process; return its result, or why there is none."""
    # A forked process cannot use CUDA if its parent so much as asked for devices.
    context: Any = multiprocessing.get_context("fork" if work.device == "cpu" else "spawn")
    process = context.Process(target=child, args=(name, work))
    process.start()
    process.join(args.part_limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return {"failed": f"ended after {args.part_limit_s:.0f} s, see --part-limit-s"}
    result = work.folder / f"{name}.json"
    if process.exitcode == 0 and result.is_file():
        loaded: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return loaded
    written = work.folder / f"{name}.log"
    log = written.read_text(encoding="utf-8", errors="replace") if written.is_file() else ""
    lines = [line for line in log.splitlines() if line.strip()]
    print(log, file=sys.stderr)
    message = lines[-1][:300] if lines else "no message"
    return {"failed": f"exit {process.exitcode}: {message}"}


def child(name: str, work: Work) -> None:
    """Run a part, its messages in a file, and write its result."""
    # Left open: the error that ends the process is printed after this function.
    log = (work.folder / f"{name}.log").open("w", buffering=1, encoding="utf-8")
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = log
    result = parts.run(name, work)
    (work.folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
