"""Measure Snakemake's cost: dry runs, runs with nothing to do, and a run against plain scripts.

    python bench/orchestration.py [--target results/small/report.json] [--repeats 3]

The target's commands are read from Snakemake's own records of one run, and run again in that order
by a shell script in a fresh copy of the project, with the sources locked beforehand. Workflow and
script alternate on one core, and their results are compared byte by byte. Prints a table; the last
line is JSON. Features that plain scripts lack are not counted: they redo everything.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from measured import Failed, Row, format_spread, measure, ratios, run_in_turns, spread

ROOT = Path(__file__).resolve().parents[1]
CODE = ("Snakefile", "workflow", "profiles", "envs", "config")
SKIPPED = shutil.ignore_patterns("__pycache__")
TARGET = "results/small/report.json"
EMPTY, COLD, NOTHING, AGAIN = "empty Snakefile", "cold dry run", "nothing to do", "same, dry run"
WHOLE, SCRIPTS = "whole run", "plain scripts"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Files that must be the same, however the jobs were started, if the target makes them.
SAME = ("packing.json", "plan.json", "keep.arrow", "checkpoint/model.safetensors")
ROWS = "packed/**/*.arrow"


class Copies:
    """Fresh copies of the project as of the start of the benchmark."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.target = folder, target
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        for name in CODE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.code / name, ignore=SKIPPED)
            else:
                shutil.copy2(source, self.code / name)

    def make_fresh(self, name: str, source: Path | None = None) -> Path:
        """Copy the code, or a planned folder, to a place where nothing has run."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source or self.code, path, symlinks=True, ignore=SKIPPED)
        return path

    def prepare_scripts(self) -> int:
        """Run the target once, unmeasured; write its commands as a script and return their number.

        The script is in a copy whose sources are locked and whose folders exist.
        """
        planned, finished = self.make_fresh("planned"), self.make_fresh("finished")
        run_workflow(planned, "-n", self.target)
        run_workflow(finished, self.target)
        commands = read_commands(finished)
        for path in sorted((finished / "results").rglob("*")):
            if path.is_file():
                (planned / path.relative_to(finished)).parent.mkdir(parents=True, exist_ok=True)
        script = "\n".join(["set -euo pipefail", *(f"( {c} )" for c in commands)])
        (planned / "run.sh").write_text(script + "\n", encoding="utf-8")
        return len(commands)

    def lines(self) -> dict[str, Callable[[int], Row]]:
        """Return what runs each line, in a fresh copy where something is made."""
        empty, finished = self.folder / "empty", self.folder / "finished"
        empty.mkdir()
        (empty / "Snakefile").write_text("rule all:\n    input: []\n", encoding="utf-8")
        target, script = self.target, ["bash", "run.sh"]
        return {
            EMPTY: lambda _: run_workflow(empty, "-n"),
            COLD: lambda _: run_workflow(self.make_fresh("cold"), "-n", target),
            NOTHING: lambda _: run_workflow(finished, target),
            AGAIN: lambda _: run_workflow(finished, "-n", target),
            WHOLE: lambda _: run_workflow(self.make_fresh("flow"), target),
            SCRIPTS: lambda _: run(script, self.make_fresh("scripts", self.folder / "planned")),
        }

    def list_compared_results(self) -> list[str]:
        """List the files by which the last runs of both ways are compared.

        Raises:
            Failed: there is none, or a file differs.
        """
        flow, scripts = (self.folder / n / Path(self.target).parent for n in ("flow", "scripts"))
        names = [name for name in SAME if (flow / name).exists()]
        names += sorted(str(path.relative_to(flow)) for path in flow.glob(ROWS))
        if not names:
            raise Failed(f"{self.target}: no result to compare; make one of {', '.join(SAME)}")
        for name in names:
            other = scripts / name
            if not other.exists() or other.read_bytes() != (flow / name).read_bytes():
                raise Failed(f"{name}: the workflow and the plain scripts made different results")
        return names


def run_workflow(folder: Path, *arguments: str) -> Row:
    return run([sys.executable, "-m", "snakemake", "--cores", "1", *arguments], folder)


def run(command: list[str], folder: Path) -> Row:
    """Run a command to its end; if it fails, the benchmark ends with its error line."""
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EXPERTFLOW": str(folder / "workflow" / "scripts"),
    }
    return measure(command, cwd=folder, env=environment)


def read_commands(folder: Path) -> list[str]:
    """Read the shell commands of a run from Snakemake's records, in the order they ran."""
    found: dict[str, float] = {}
    for path in (folder / ".snakemake" / "metadata").rglob("*"):
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["shellcmd"]:
                found[record["shellcmd"]] = record["starttime"]
    return sorted(found, key=lambda command: found[command])


def measure_orchestration(target: str, n_repeats: int) -> Row:
    """Measure every line in turns, print the table and return its figures."""
    with tempfile.TemporaryDirectory(prefix="orchestration-") as name:
        copies = Copies(Path(name) / "copies", target)
        n_jobs = copies.prepare_scripts()
        lines = copies.lines()
        runs = run_in_turns(lines, n_repeats, {}, required=lines)
        files = copies.list_compared_results()
    walls = {line: {i: run["wall_s"] for i, run in of.items()} for line, of in runs.items()}
    result: Row = {"target": target, "n_jobs": n_jobs, "compared": files}
    print(f"{'':>18} {'seconds':>24} {'CPU s':>24}")
    for line, of in runs.items():
        wall, cpu = (spread([run[key] for run in of.values()]) for key in ("wall_s", "cpu_s"))
        print(f"{line:>18} {format_spread(wall):>24} {format_spread(cpu):>24}")
        result[line] = {"wall_s": wall, "cpu_s": cpu}
    for first, second in ((COLD, EMPTY), (WHOLE, SCRIPTS)):
        ratio = result[f"{first} / {second}"] = ratios(walls[first], walls[second])
        print(f"{first} / {second}: {format_spread(ratio)}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default=TARGET, help=f"what is made both ways ({TARGET})")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(measure_orchestration(args.target, args.repeats)))


if __name__ == "__main__":
    main()
