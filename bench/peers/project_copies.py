"""Fresh copies of the project, run by Snakemake or as plain scripts, and timed job by job."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from measured import Failed, cpu_s

ROOT = Path(__file__).resolve().parents[2]
CODE = ("Snakefile", "workflow", "profiles", "envs", "config")
SKIPPED = shutil.ignore_patterns("__pycache__")
THREADS = (
    "OMP_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
# In place of ``python`` in the shell of every job: notes when a program began and ended.
SHIM = """#!/bin/bash
start=$EPOCHREALTIME
{python} "$@"
code=$?
times="$start $EPOCHREALTIME"
# Some languages write a comma.
echo "${{times//,/.}}" >> "$JOB_TIMES"
exit $code
"""
# Which of a run's files have to be the same, whoever started the jobs, where it made them.
SAME = ("packing.json", "plan.json", "keep.arrow", "checkpoint/model.safetensors")
ROWS = "packed/**/*.arrow"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What a run took, and the time of it in which a program of a job ran.

    ``cpu_s`` is that of all its processes.
    """

    wall_s: float
    jobs_s: float
    cpu_s: float


class Copies:
    """Copies of the project as it was when this began."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, folder / "code"
        self.times = folder / "times"
        self.commands: list[str] = []
        self.targets = Path()
        self.code.mkdir(parents=True)
        for name in CODE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.code / name, ignore=SKIPPED)
            else:
                shutil.copy2(source, self.code / name)
        shim = folder / "bin" / "python"
        shim.parent.mkdir()
        shim.write_text(SHIM.format(python=shlex.quote(sys.executable)), encoding="utf-8")
        shim.chmod(0o755)
        # Every shell reads this as it starts, after the Snakefile has put Python's folder first.
        (folder / "shell").write_text(
            f'export PATH={shlex.quote(str(shim.parent))}:"$PATH"\n', encoding="utf-8"
        )

    @property
    def learnt(self) -> Path:
        """Give the folder of the run from which the commands were taken."""
        return self.folder / "learnt"

    def set_shards(self, expert: str, n_shards: int) -> None:
        """Cut the generated source of an expert's demo into shards."""
        path = self.code / "config" / "experts" / f"{expert}.yaml"
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
        manifest["demo"]["sources"][0]["n_shards"] = n_shards
        path.write_text(yaml.safe_dump(manifest), encoding="utf-8")

    def fresh(self, name: str, source: Path | None = None) -> Path:
        """Copy the code, or a folder that was planned, to where nothing has run."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source or self.code, path, symlinks=True, ignore=SKIPPED)
        return path

    def nothing(self) -> Timed:
        """Time Snakemake on a Snakefile with one rule and nothing to do."""
        folder = self.folder / "nothing"
        folder.mkdir(exist_ok=True)
        (folder / "Snakefile").write_text("rule all:\n    input: []\n", encoding="utf-8")
        return self.workflow(folder, "-n")

    def workflow(self, folder: Path, *arguments: str) -> Timed:
        """Run Snakemake on one core."""
        return self._timed([sys.executable, "-m", "snakemake", "--cores", "1", *arguments], folder)

    def learn(self, target: str) -> None:
        """Run a target once, not measured; keep its commands, and a copy that is only planned."""
        planned = self.fresh("planned")
        self.workflow(planned, "-n", target)
        self.workflow(self.fresh("learnt"), target)
        self.commands = commands_of(self.learnt)
        for path in sorted((self.learnt / "results").rglob("*")):
            if path.is_file():
                (planned / path.relative_to(self.learnt)).parent.mkdir(parents=True, exist_ok=True)
        self.targets = Path(target).parent
        script = "\n".join(["set -euo pipefail", *(f"( {c} )" for c in self.commands)])
        (planned / "run.sh").write_text(script + "\n", encoding="utf-8")

    def scripts(self) -> Timed:
        """Run the learnt commands one after another, in a copy that is only planned."""
        return self._timed(["bash", "run.sh"], self.fresh("scripts", self.folder / "planned"))

    def compared_results(self) -> list[str]:
        """Name the files of the last runs of both ways that are compared, byte by byte.

        Raises:
            Failed: there is none, so that nothing would be shown.
        """
        flow = self.folder / "flow" / self.targets
        found = [name for name in SAME if (flow / name).exists()]
        found += sorted(str(path.relative_to(flow)) for path in flow.glob(ROWS))
        if not found:
            raise Failed(f"{self.targets}: no result to compare; make one of {', '.join(SAME)}")
        return found

    def same_results(self) -> bool:
        """Tell whether the last run as scripts made what the last run of the workflow made."""
        flow, scripts = (self.folder / n / self.targets for n in ("flow", "scripts"))
        return all(
            (scripts / name).exists()
            and (scripts / name).read_bytes() == (flow / name).read_bytes()
            for name in self.compared_results()
        )

    def _timed(self, command: list[str], folder: Path) -> Timed:
        self.times.write_text("", encoding="utf-8")
        environment = {
            **os.environ,
            **dict.fromkeys(THREADS, "1"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BASH_ENV": str(self.folder / "shell"),
            "JOB_TIMES": str(self.times),
            "EXPERTFLOW": str(folder / "workflow" / "scripts"),
        }
        before_s, start = cpu_s(), time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        wall_s = time.perf_counter() - start
        if done.returncode:
            raise Failed(f"{' '.join(command[1:])}: {why(done.stdout + done.stderr)}")
        return Timed(
            wall_s=wall_s,
            jobs_s=covered_s(self.times.read_text(encoding="utf-8")),
            cpu_s=cpu_s() - before_s,
        )


def why(said: str) -> str:
    """Give the line that tells of an error, or the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if "Error" in line or "Exception" in line), lines[-1])


def covered_s(times: str) -> float:
    """Add up the time that the noted programs cover; one that started another counts once."""
    total = end = 0.0
    for first, last in sorted(tuple(map(float, line.split())) for line in times.splitlines()):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def commands_of(folder: Path) -> list[str]:
    """Read the shell commands of a run from Snakemake's own records, in their order."""
    found: dict[str, float] = {}
    for path in (folder / ".snakemake" / "metadata").rglob("*"):
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["shellcmd"]:
                found[record["shellcmd"]] = record["starttime"]
    return sorted(found, key=lambda command: found[command])
