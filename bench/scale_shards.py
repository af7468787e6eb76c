"""An expert of many shards, planned by Snakemake and run with jobs that do next to nothing.

A manifest allows 200 shards a source, so more shards are more sources. Data, settings and rules are
real; only the scripts of the data stages are replaced by one that makes the files it is asked for,
so that what is timed is Snakemake, the Snakefile's own work and the start of a process.
"""

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from scale_apart import Failed

ROOT = Path(__file__).resolve().parents[1]
CODE = ("Snakefile", "workflow", "profiles", "envs", "config")
MAX_SHARDS = 200
STAGES = (
    "fetch_source", "find_datasets", "prepare_shard", "deduplicate_documents", "prepare_model",
    "pretokenize_shard", "pack_sequences",
)  # fmt: skip
# What exists already is an input: Snakemake removes a job's outputs before it starts.
STUB = """
import sys
from pathlib import Path

MADE = {"--output", "--documents", "--rejected", "--ids", "--index", "--keep", "--directory"}
for name, value in zip(sys.argv, sys.argv[1:]):
    path = Path(value)
    if name in MADE and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name == "--directory" else path.write_text("{}")
"""
Row = dict[str, Any]


def make_workspace(folder: Path, n_shards: int) -> None:
    """Lay out the workflow with one expert of so many shards, and scripts that do nothing."""
    folder.mkdir(parents=True)
    for name in CODE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    for name in STAGES:
        (folder / "workflow" / "scripts" / f"{name}.py").write_text(STUB)
    sources = []
    for number, first in enumerate(range(0, n_shards, MAX_SHARDS)):
        path = Path("data", f"source-{number}.jsonl")
        (folder / path).parent.mkdir(exist_ok=True)
        lines = [json.dumps({"question": f"{number} {i}", "answer": str(i)}) for i in range(400)]
        (folder / path).write_text("\n".join(lines) + "\n")
        sources.append({
            "name": f"source-{number}", "kind": "local", "path": str(path), "licence": "CC0-1.0",
            "prompt": "{question}", "completion": "{answer}",
            "n_shards": min(MAX_SHARDS, n_shards - first),
        })  # fmt: skip
    manifest = {
        "description": "Many shards.", "model": "builtin:tiny-qwen3", "sources": sources,
        "training": {"method": "full", "max_steps": 2}, "evaluation": {"task": "exact_match"},
    }  # fmt: skip
    (folder / "config" / "experts" / "scale.yaml").write_text(yaml.safe_dump(manifest))
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump({"experts": {"scale": {}}}))


def snakemake(folder: Path, *arguments: str) -> tuple[float, float, str]:
    """Run Snakemake in a folder; give seconds, CPU seconds with all its jobs, and what it said.

    Raises:
        Failed: it ended with an error.
    """
    command = [str(Path(sys.executable).with_name("snakemake")), "--cores", "2", *arguments]
    # Jobs are started as python, whichever comes first.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    start, before = time.perf_counter(), cpu_s()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if done.returncode:
        raise Failed(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    return seconds, cpu_s() - before, done.stdout + done.stderr


def measure_shards(folder: Path, n_shards: int, *, repeats: int, with_jobs: bool) -> Row:
    """Time dry runs of an expert of so many shards, and a run of all its shards' jobs."""
    make_workspace(folder, n_shards)
    whole, data = "results/scale/report.json", "results/scale/packing.json"
    cold_s, cold_cpu_s, said = snakemake(folder, "-n", whole)
    again = [snakemake(folder, "-n", whole)[:2] for _ in range(repeats)]
    walls, cpus = zip(*again, strict=True)
    row: Row = {
        "n_shards": n_shards, "n_sources": -(-n_shards // MAX_SHARDS), "n_jobs": n_jobs(said),
        "cold_s": cold_s, "cold_cpu_s": cold_cpu_s, "dry_run_s": statistics.median(walls),
        "dry_run_cpu_s": statistics.median(cpus), "dry_run_cpu_s_max": max(cpus),
    }  # fmt: skip
    if with_jobs:
        n_planned = n_jobs(snakemake(folder, "-n", data)[2])
        run_s, run_cpu_s, _ = snakemake(folder, data, "--quiet", "all")
        no_op_s, no_op_cpu_s, said = snakemake(folder, "-n", data)
        if n_jobs(said):
            raise Failed(f"{n_jobs(said)} jobs would run again after a run of {n_shards} shards")
        row |= {
            "n_jobs_run": n_planned, "run_s": run_s, "run_cpu_s": run_cpu_s,
            "no_op_s": no_op_s, "no_op_cpu_s": no_op_cpu_s,
        }  # fmt: skip
    print(f"  {n_shards:>5} shards, {row['n_jobs']:>5} jobs: dry run {row['dry_run_s']:.1f} s,"
          f" {row['dry_run_cpu_s']:.1f} CPU s", flush=True)  # fmt: skip
    return row


def cpu_s() -> float:
    """Give the CPU time of all children that have ended, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def n_jobs(said: str) -> int:
    """Count the jobs that a dry run tells of."""
    return len(re.findall(r"^(?:local)?rule \w+:", said, re.MULTILINE))
