"""Training side by side: our loop and TRL's SFTTrainer on the same rows, in turns.

Every run is a separate process. Losses of all steps are compared, to prove that the work is the
same; in half precision, a short run of both in fp32 proves it instead.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measured import Failed
from training_lines import FREE, OURS, PADDED, agreement, all_the_same, same_work, summary
from training_table import print_method
from turns import turns

PEERS = Path(__file__).resolve().parent
FORMS = {OURS: "ours", FREE: "padding_free", PADDED: "padded"}
METHODS = ("full", "lora")
# Of the short fp32 run: enough for weights to move.
N_PROOF_STEPS = 3
# By model: rows per micro-batch, micro-batches per step.
BATCHES = {"tiny": (4, 2), "small": (4, 2)}
USUAL_BATCH = (8, 2)
WANTED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger-kernel")
ASK = (
    "import json, importlib.metadata as m, trl, peft, datasets;"
    f"print(json.dumps({{d.name: d.version for n in {WANTED!r} for d in m.distributions(name=n)}}))"
)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """What to train: the model's size, the data, the duration, and the peer's Python.

    ``prove_in_fp32`` adds a short fp32 run of both sides per method; ``fp32`` marks such a run.
    """

    folder: Path
    model: str
    device: str
    n_repeats: int
    n_warmup_steps: int
    n_timed_steps: int
    micro_batch: int
    n_accumulation_steps: int
    peer: Path | None
    peer_problem: str | None
    methods: tuple[str, ...] = METHODS
    prove_in_fp32: bool = False
    fp32: bool = False


def measure_training(job: TrainingJob) -> Row:
    """Prepare the work, take turns, print a table per method; return all measurements.

    If our side fails at a method, it is listed with the reason, and the next one runs.

    Raises:
        Failed: the work could not be prepared.
    """
    work = prepare_job(job)
    batch = f"{job.micro_batch} x {job.n_accumulation_steps} rows of {work['row_length_tokens']}"
    print(f"\ntraining: {job.model}, {work['n_parameters']:,} parameters, {job.device}, {batch}")
    methods = {}
    for method in job.methods:
        try:
            methods[method] = measure_method(job, method, work["cases"][method])
        except Failed as error:
            methods[method] = {"problem": str(error)}
        print_method(method, methods[method])
    return {
        "model": job.model, "device": job.device, "n_parameters": work["n_parameters"],
        "row_length_tokens": work["row_length_tokens"], "micro_batch": job.micro_batch,
        "n_accumulation_steps": job.n_accumulation_steps, "n_repeats": job.n_repeats,
        "n_warmup_steps": job.n_warmup_steps, "n_timed_steps": job.n_timed_steps,
        "methods": methods, "same_work": all_the_same(map(same_work, methods.values())),
    }  # fmt: skip


def prepare_job(job: TrainingJob) -> Row:
    """Write model, rows and plans in a separate process."""
    names = ("model", "device", "micro_batch", "n_accumulation_steps", "n_warmup_steps",
             "n_timed_steps", "methods", "fp32")  # fmt: skip
    said = {name: getattr(job, name) for name in names}
    path = job.folder / "job.json"
    path.write_text(json.dumps({**said, "folder": str(job.folder)}), encoding="utf-8")
    run(Path(sys.executable), "step_work.py", "--job", path, device=job.device)
    work: Row = json.loads((job.folder / "work.json").read_text(encoding="utf-8"))
    return work


def measure_method(job: TrainingJob, method: str, case: Row) -> Row:
    """Run a method's lines in turns; a failed peer is not run again.

    Raises:
        Failed: our side failed.
    """
    runs: dict[str, dict[int, Row]] = {line: {} for line in FORMS}
    problems = {line: job.peer_problem for line in (FREE, PADDED) if job.peer_problem}
    for repeat, line in turns(tuple(FORMS), job.n_repeats):
        if line in problems:
            continue
        try:
            runs[line][repeat] = time_line(job, case, line, f"{method}-{repeat}")
        except Failed as error:
            if line == OURS:
                raise
            problems[line] = str(error)
    precision = case["precision"]
    row: Row = {
        "settings": case,
        "lines": {line: summary(line, runs, problems, precision) for line in FORMS},
    }
    if job.prove_in_fp32 and FREE not in problems:
        try:
            row["proof"] = proof(job, method)
        except Failed as error:
            row["proof"] = {"problem": str(error)}
    return row


def proof(job: TrainingJob, method: str) -> Row:
    """Train some steps on both sides in fp32, on the measured rows, and compare them.

    Raises:
        Failed: one of the sides failed.
    """
    n_timed = min(N_PROOF_STEPS, job.n_warmup_steps + job.n_timed_steps - 1)
    short = replace(
        job, folder=job.folder / f"proof-{method}", n_repeats=1, n_warmup_steps=1,
        n_timed_steps=n_timed, methods=(method,), fp32=True,
    )  # fmt: skip
    short.folder.mkdir()
    case = prepare_job(short)["cases"][method]
    ours, peer = ({0: time_line(short, case, line, "proof")} for line in (OURS, FREE))
    return {"n_steps": 1 + n_timed, **agreement(FREE, ours, peer, "fp32")}


def time_line(job: TrainingJob, case: Row, line: str, name: str) -> Row:
    path = job.folder / f"{name}-{FORMS[line]}.json"
    said = {
        **case, "folder": str(job.folder), "form": FORMS[line], "device": job.device,
        "n_warmup_steps": job.n_warmup_steps, "n_timed_steps": job.n_timed_steps,
    }  # fmt: skip
    path.write_text(json.dumps(said), encoding="utf-8")
    output = path.with_suffix(".result")
    python = Path(sys.executable) if line == OURS else job.peer
    program = "our_steps.py" if line == OURS else "trl_steps.py"
    places = ("--case", path, "--output", output)
    run(python or Path(sys.executable), program, *places, device=job.device)
    result: Row = json.loads(output.read_text(encoding="utf-8"))
    return result


def run(python: Path, program: str, *arguments: object, device: str) -> None:
    """Run a program of this folder quietly, on one thread if the CPU is measured.

    Raises:
        Failed: the program failed; with its last line.
    """
    command = [str(python), str(PEERS / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env=environment_of(program, device))  # fmt: skip
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = said[-1][:300] if said else "no output"
        raise Failed(f"{Path(program).stem} ended with {done.returncode}: {last}")


def environment_of(program: str, device: str) -> dict[str, str]:
    """Return a program's environment: one thread, or the first card alone.

    TRL refuses to train in a process that sees several cards. On a card it may download its
    attention kernel from the hub; everything else is local.
    """
    found = dict(os.environ)
    if device == "cpu":
        found["OMP_NUM_THREADS"] = "1"
    else:
        found["CUDA_VISIBLE_DEVICES"] = found.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if device == "cpu" or program != "trl_steps.py":
        found.setdefault("HF_HUB_OFFLINE", "1")
    return found


def peer_versions(python: Path) -> tuple[dict[str, str], str | None]:
    """Return a Python's versions of TRL's packages, or why it cannot be used."""
    try:
        done = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True, check=False)
    except OSError as error:
        return {}, f"{python} cannot be run: {error.strerror}"
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or ["no output"])[-1]
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions, None
