"""Extrapolate the chain to 10 billion and a trillion tokens, and say what stops growing first.

    python bench/scale.py [--tokens 10e9 1e12] [--nodes 1 8 64] [--gpus-per-node 8]
        [--gpu "H100 SXM"] [--models 0.6B 1.7B 8B] [--quick] [--only PART ...] [--measured FILE ...]
        [--assume NAME=VALUE ...] [--output result.json]

What a token, a document or a byte costs is measured here, with the library's own code on small
samples; training follows from the plan's FLOPs, the card's peak and the plan's band of 20 to 45 %
of it. Parts, all of them by default:

- units: costs of the stages of data, of hashing, copying, checkpoints, the log
- documents: deduplication, packing, planning and opening rows at up to 10 million documents
- shards: Snakemake over an expert of 1,000 shards
- staging: 64 processes that stage at once
- arithmetic: tables for every size, and the limits; always done

``--measured`` takes the ``--output`` of earlier runs for parts that are not measured in this one.
Figures that nobody measured are assumed, say so, and can be set with ``--assume``. Every figure is
printed with its source; one that is not known leaves null, with a reason. The last line is JSON.
"""

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from scale_figures import Figure, fit_exponent, fit_line, fit_shares
from scale_model import Curves, Size, n_passes
from scale_tables import print_limits, print_tables, result_of
from side_by_side import machine, versions

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("units", "documents", "shards", "staging", "arithmetic")
SCHEMA = "workflow/schemas/expert.schema.yaml, its default"
# Neither measured here nor by anybody on a cluster of ours.
ASSUMED = {
    "cores_per_node": Figure.assumed(96, "cores", "of a node with eight cards"),
    "node_memory_bytes": Figure.assumed(1e12, "B", "of a node with eight cards"),
    "nvme_bytes": Figure.assumed(7.68e12, "B", "local disks of a node"),
    "shared_disk_bytes_per_s": Figure.assumed(10e9, "B/s", "all nodes together"),
    "disk_write_bytes_per_s": Figure.assumed(2e9, "B/s", "one process, to NVMe or a shared disk"),
    "random_reads_per_s": Figure.assumed(10_000, "1/s", "one process, one read at a time, NVMe"),
    "n_sources": Figure.assumed(5, "sources", "1,000 shards at 200 a source"),
    "global_batch_tokens": Figure.assumed(2**22, "tokens", "of one optimiser step"),
    "eval_fraction": Figure(0.02, "of the documents", SCHEMA),
    "save_every_minutes": Figure(10.0, "min", SCHEMA),
}
MEASURED = (
    "hash_bytes_per_s", "copy_bytes_per_s", "checkpoint_bytes_per_s", "report_s_per_step",
    "fetch_s_per_token", "prepare_s_per_token", "tokenise_s_per_token", "pack_s_per_token",
    "raw_bytes_per_token", "tokens_per_document", "row_bytes_per_token",
    "document_bytes_per_token", "token_bytes_per_token",
)  # fmt: skip
Simulations = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, nargs="+", default=[10e9, 1e12])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", default="H100 SXM", help="name in config/hardware/gpus.yaml")
    parser.add_argument("--models", nargs="+", default=["0.6B", "1.7B", "8B"])
    parser.add_argument("--quick", action="store_true", help="small samples: a check, no result")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=[], help="results of earlier runs"
    )
    parser.add_argument("--assume", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def check(args: argparse.Namespace, models: set[str]) -> None:
    """Refuse, before anything is measured, what could not be used after it."""
    if unknown := sorted(set(args.models) - models):
        sys.exit(f"--models {' '.join(unknown)}: the shapes known are {', '.join(sorted(models))}")
    names = sorted({*ASSUMED, *MEASURED, "mean_context_tokens"})
    for word in args.assume:
        name, _, value = word.partition("=")
        if name not in names:
            sys.exit(f"--assume {word}: no such figure; they are {', '.join(names)}")
        try:
            is_positive = 0 < float(value) < math.inf
        except ValueError:
            is_positive = False
        if not is_positive:
            sys.exit(f"--assume {word}: give a number above 0, e.g. {name}=2.5")


def measure(parts: list[str], *, quick: bool) -> tuple[dict[str, Figure], Simulations]:
    """Measure what is asked for."""
    figures: dict[str, Figure] = {}
    found: Simulations = {}
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        if "units" in parts:
            from scale_units import measure_units

            sizes = (2, 6) if quick else (10, 50)
            n_bytes = (1 << 25) if quick else (1 << 28)
            print("costs of a unit:", flush=True)
            figures = measure_units(megabytes=sizes, n_bytes=n_bytes, repeats=2 if quick else 3)
        if "documents" in parts:
            from scale_grow import STAGES, grow, planning

            million = 1_000_000
            sizes = [100_000, 300_000] if quick else [million, 3 * million, 10 * million]
            print("stages of one process:", flush=True)
            for stage, make in STAGES.items():
                # Deduplication goes over all keys once for each million documents: one size more.
                more = [30 * million] if stage == "deduplicate" and not quick else []
                found[stage] = grow(stage, sizes + more, folder, make)
            found["plan_rows"] = planning(sizes, 1 if quick else 3)
        if "shards" in parts:
            from scale_shards import measure_shards

            print("Snakemake:", flush=True)
            found["shards"] = [
                measure_shards(folder / f"{n}", n, repeats=2, with_jobs=True)
                for n in ((5, 40) if quick else (200, 1000))
            ]
        if "staging" in parts:
            from scale_staging import contention

            n_processes, n_bytes = (8, 1 << 24) if quick else (64, 1 << 28)
            print("staging at once:", flush=True)
            found["staging"] = contention(folder, n_processes=n_processes, n_bytes=n_bytes)
    return figures, found


def earlier(paths: list[Path]) -> tuple[dict[str, Figure], Simulations]:
    """Read what other runs measured; of two that measured the same, the later one counts."""
    figures: dict[str, Figure] = {}
    found: Simulations = {}
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, values in result["figures"].items():
            figure = Figure(**values)
            if name in MEASURED and figure.value is not None:
                source = figure.source.replace("measured in this run", f"measured, {path.name}")
                figures[name] = replace(figure, source=source)
        found |= result["simulations"]
    return figures, found


def all_figures(
    measured: dict[str, Figure], assumed: list[str], gpu: str
) -> tuple[dict[str, Figure], float | None]:
    """Put all figures together, those that are set by hand last; give the card's peak, too."""
    from expertflow.hardware.gpu_table import gpu_by_name
    from expertflow.plan.cost import peak_flops_per_s

    nobody = Figure.unknown("not measured in this run, and no --measured names a run that did")
    figures = {**ASSUMED, **dict.fromkeys(MEASURED, nobody), **measured}
    figures["mean_context_tokens"] = mean_context()
    for word in assumed:
        name, _, value = word.partition("=")
        figures[name] = Figure(float(value), figures[name].unit, "set with --assume")
    table = yaml.safe_load((ROOT / "config" / "hardware" / "gpus.yaml").read_text())["gpus"]
    card = gpu_by_name(gpu, table)
    peak = peak_flops_per_s(card, "bf16", use_tf32=False)
    why = (
        "config/hardware/gpus.yaml" if card is None else f"config/hardware/gpus.yaml: {card.source}"
    )
    unknown = Figure.unknown(f"{gpu} has no peak in {why}")
    figures["peak_flops_per_s"] = unknown if peak is None else Figure(peak, "FLOP/s", why)
    return figures, peak


def mean_context() -> Figure:
    """Give half the mean length of a token's document, of lengths as packing's benchmark draws."""
    from plan_rows import MEDIAN_TOKENS, SPREAD

    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SPREAD, 1_000_000)
    lengths = np.clip(drawn, 1, 2048)
    value = float((lengths**2).sum() / (2 * lengths.sum()))
    return Figure(value, "tokens", "lengths of bench/plan_rows.py, cut to 2048 tokens")


def curves_of(found: Simulations) -> Curves:
    """Lay curves through what was measured."""

    def memory(name: str) -> Any:
        rows = found.get(name, [])
        points = [(row["n_documents"], row["peak_bytes"]) for row in rows]
        return fit_line(points) if len(points) > 1 else None

    rows, shards = found.get("deduplicate", []), found.get("shards", [])
    points = [((row["n_documents"], row["n_documents"] * n_passes(row["n_documents"])),
               row["cpu_s"]) for row in rows]  # fmt: skip
    dry_runs = [(row["n_shards"], row["dry_run_cpu_s"]) for row in shards]
    one, per_pass = fit_shares(points) if len(points) > 1 else (None, None)
    return Curves(
        deduplicate_costs=None if one is None or per_pass is None else (one, per_pass),
        deduplicate_bytes=memory("deduplicate"),
        pack_bytes=memory("pack"),
        open_bytes=memory("open_rows"),
        dry_run_s=fit_line(dry_runs) if len(dry_runs) > 1 else None,
    )


def exponents(found: Simulations) -> dict[str, dict[str, float]]:
    """Fit how time and memory grow with the number of documents, over the measured range."""
    fits: dict[str, dict[str, float]] = {}
    for name in ("deduplicate", "pack", "open_rows", "plan_rows"):
        rows = found.get(name, [])
        if len(rows) < 2:
            continue
        seconds = "plan_s" if name == "plan_rows" else "cpu_s"
        n = [row["n_documents"] for row in rows]
        fits[name] = {
            "time_exponent": fit_exponent([(r["n_documents"], r[seconds]) for r in rows]),
            "memory_exponent": fit_exponent([(r["n_documents"], r["peak_bytes"]) for r in rows]),
            "n_documents_low": min(n), "n_documents_high": max(n),
        }  # fmt: skip
        print(f"  {name:12} time n^{fits[name]['time_exponent']:.2f}, memory"
              f" n^{fits[name]['memory_exponent']:.2f}, {min(n):,} to {max(n):,}")  # fmt: skip
    return fits


def main() -> None:
    """Measure, extrapolate, print."""
    args = arguments()
    from gpu_kit.fixtures import SIZES

    check(args, set(SIZES))
    machine_before = machine("cpu")
    known, before = earlier(args.measured)
    figures, found = measure(args.only, quick=args.quick)
    found = {**before, **found}
    figures, peak = all_figures({**known, **figures}, args.assume, args.gpu)
    print("\nfigures (measured ones on this machine's cores, shared with whatever ran beside):")
    for name, figure in sorted(figures.items()):
        print(f"  {name:28} {figure.words()}")
    fits, curves = exponents(found), curves_of(found)
    values = {name: figure.value for name, figure in figures.items()}
    sizes = [
        Size(n_tokens=n_tokens, n_nodes=n_nodes, gpus_per_node=args.gpus_per_node,
             facts=SIZES[model].facts, peak_flops_per_s=peak)
        for n_tokens in args.tokens for model in args.models for n_nodes in args.nodes
    ]  # fmt: skip
    names = [model for _ in args.tokens for model in args.models for _ in args.nodes]
    cases = list(zip(names, sizes, strict=True))
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "bench/scale.py", *sys.argv[1:]]),
        "machine": {**machine_before, "load_average_after": os.getloadavg()[0]},
        "versions": versions(), "parts_measured": [p for p in args.only if p != "arithmetic"],
        "quick": args.quick, "gpu": args.gpu, "gpus_per_node": args.gpus_per_node,
        "figures": {name: asdict(figure) for name, figure in figures.items()},
        "simulations": found, "exponents": fits, "curves": asdict(curves),
        **result_of(cases, values, curves),
    }  # fmt: skip
    print_tables(result)
    print_limits(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
