"""Measure what Snakemake costs: dry runs, runs with nothing to do, and the time around each job.

    python bench/orchestration.py [--target results/small/report.json] [--repeats 3]
        [--shards 100] [--output FILE]

The demo of an expert, or a part of it, runs on one core through the workflow, and as plain
scripts: the very commands of that run, in its order, in one shell script, in a fresh copy of the
project. Sources are locked beforehand for the scripts; Snakemake locks them itself. Both take
turns.

- around a job, in one run: Snakemake's wall time less the time in which a program of a job ran,
  over the number of jobs. What the machine does besides touches only the first;
- around a job, by difference: wall time of the workflow less that of the script, over jobs.
- by CPU: the same difference in the CPU time of all processes, which hardly depends on what else
  runs;
- with --shards: 100 shards of a generated source up to packed rows, one pair of runs.

What plain scripts lack is not counted: they redo everything, or leave it to whoever starts them.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from project_copies import Copies, Timed
from turns import Spread, ratios, spread, turns

TARGET = "results/small/report.json"
SNAKEMAKE, SCRIPTS = "snakemake", "plain scripts"
# Generated here in documents enough for 100 shards; only its data stages are run.
SHARDED = "expert-json"
AN_HOUR_S = 3600
Row = dict[str, Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default=TARGET, help=f"what is made both ways ({TARGET})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shards", type=int, default=100, help="0: leave them out")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    measured = measure_orchestration(args.target, args.repeats, args.shards)
    line = json.dumps(measured)
    if args.output:
        args.output.write_text(line + "\n", encoding="utf-8")
    print(line)


def measure_orchestration(target: str, n_repeats: int, n_shards: int) -> Row:
    """Measure a chain that trains, and one of many shards; print tables."""
    with tempfile.TemporaryDirectory(prefix="orchestration-") as name:
        copies = Copies(Path(name) / "chain")
        waits = cold(copies, f"results/{SHARDED}/report.json", n_repeats)
        chain = measure_chain(copies, target, n_repeats, n_repeats)
        result: Row = {
            "n_repeats": n_repeats,
            f"dry_run_of_{SHARDED}": {name: asdict(value) for name, value in waits.items()},
            "chain": chain,
        }
        wall, cpu = waits.values()
        print(f"\ncold dry run of {SHARDED}: {words(wall)}, CPU {words(cpu)}", flush=True)
        print_chain(target, chain)
        if n_shards:
            copies = Copies(Path(name) / "shards")
            copies.set_shards(SHARDED, n_shards)
            target = f"results/{SHARDED}/packing.json"
            result["shards"] = measure_chain(copies, target, n_repeats, 1)
            print_chain(f"{SHARDED}, {n_shards} shards, up to packed rows", result["shards"])
    return result


def cold(copies: Copies, target: str, n_repeats: int) -> dict[str, Spread]:
    """Time the first dry run in a fresh copy, by the clock and by its CPU time."""
    runs = [copies.workflow(copies.fresh("cold"), "-n", target) for _ in range(n_repeats)]
    return {
        "cold_dry_run_s": spread([run.wall_s for run in runs]),
        "cold_dry_run_cpu_s": spread([run.cpu_s for run in runs]),
    }


def measure_chain(copies: Copies, target: str, n_repeats: int, n_runs: int) -> Row:
    """Run a target both ways, in turns, and then with nothing to do."""
    floor = spread([copies.nothing().wall_s for _ in range(n_repeats)])
    first = cold(copies, target, n_repeats)
    copies.learn(target)
    done: dict[str, dict[int, Timed]] = {SNAKEMAKE: {}, SCRIPTS: {}}
    for repeat, line in turns((SNAKEMAKE, SCRIPTS), n_runs):
        done[line][repeat] = (
            copies.workflow(copies.fresh("flow"), target) if line == SNAKEMAKE else copies.scripts()
        )
    finished = copies.learnt
    again: dict[str, list[Timed]] = {"noop_run": [], "noop_dry_run": []}
    for _, line in turns(tuple(again), n_repeats):
        arguments = ["-n", target] if line == "noop_dry_run" else [target]
        again[line].append(copies.workflow(finished, *arguments))
    return {
        "target": target,
        "n_jobs": len(copies.commands),
        "empty_snakefile_s": asdict(floor),
        **{name: asdict(value) for name, value in first.items()},
        **{f"{n}_s": asdict(spread([run.wall_s for run in runs])) for n, runs in again.items()},
        **{f"{n}_cpu_s": asdict(spread([run.cpu_s for run in runs])) for n, runs in again.items()},
        **compared(done, len(copies.commands)),
        "compared_results": copies.compared_results(),
        "same_results": copies.same_results(),
    }


def compared(done: dict[str, dict[int, Timed]], n_jobs: int) -> Row:
    """Put the runs of both ways side by side."""
    wall = {line: {i: run.wall_s for i, run in runs.items()} for line, runs in done.items()}
    around = [run.wall_s - run.jobs_s for run in done[SNAKEMAKE].values()]
    longer = [wall[SNAKEMAKE][i] - wall[SCRIPTS][i] for i in sorted(wall[SNAKEMAKE])]
    ratio = ratios(wall[SNAKEMAKE], wall[SCRIPTS])
    cpu = {line: {i: run.cpu_s for i, run in runs.items()} for line, runs in done.items()}
    more = [cpu[SNAKEMAKE][i] - cpu[SCRIPTS][i] for i in sorted(cpu[SNAKEMAKE])]
    return {
        "workflow_s": asdict(spread(list(wall[SNAKEMAKE].values()))),
        "scripts_s": asdict(spread(list(wall[SCRIPTS].values()))),
        "workflow_over_scripts": ratio and asdict(ratio),
        "around_jobs_s": asdict(spread(around)),
        "around_a_job_s": asdict(spread([value / n_jobs for value in around])),
        "longer_a_job_s": asdict(spread([value / n_jobs for value in longer])),
        "workflow_cpu_s": asdict(spread(list(cpu[SNAKEMAKE].values()))),
        "scripts_cpu_s": asdict(spread(list(cpu[SCRIPTS].values()))),
        "more_cpu_s": asdict(spread(more)),
        "more_cpu_a_job_s": asdict(spread([value / n_jobs for value in more])),
        "share_of_an_hour": spread(around).median / (AN_HOUR_S + spread(around).median),
    }


def words(value: Spread) -> str:
    """Write a spread of seconds."""
    return f"{value.median:.2f} s ({value.least:.2f}-{value.most:.2f}, n={value.n})"


def print_chain(title: str, chain: Row) -> None:
    """Print a table of a chain."""
    print(f"\n{title}: {chain['n_jobs']} jobs")
    names = {
        "empty_snakefile_s": "Snakemake with an empty Snakefile", "cold_dry_run_s": "cold dry run",
        "cold_dry_run_cpu_s": "... CPU",
        "noop_dry_run_s": "dry run, nothing to do", "noop_dry_run_cpu_s": "... CPU",
        "noop_run_s": "run, nothing to do", "noop_run_cpu_s": "... CPU",
        "workflow_s": "whole run", "scripts_s": "the same as plain scripts",
        "around_jobs_s": "around all jobs", "around_a_job_s": "around a job, in one run",
        "longer_a_job_s": "around a job, by difference",
        "workflow_cpu_s": "whole run, CPU", "scripts_cpu_s": "plain scripts, CPU",
        "more_cpu_s": "more CPU, in all", "more_cpu_a_job_s": "more CPU, a job",
    }  # fmt: skip
    for key, name in names.items():
        print(f"{name:>34} {words(Spread(**chain[key]))}")
    ratio = chain["workflow_over_scripts"]
    print(f"{'whole run over plain scripts':>34} {ratio['median']:.3f}"
          f" ({ratio['least']:.3f}-{ratio['most']:.3f})")  # fmt: skip
    print(f"{'share, were the jobs an hour':>34} {chain['share_of_an_hour']:.2%}")


if __name__ == "__main__":
    main()
