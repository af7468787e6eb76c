"""Training side by side: our loop and TRL's SFTTrainer on the same rows, in turns.

Every run is a separate process. Losses of all steps are compared, to prove that the work is the
same; in half precision, a short run of both in fp32 proves it instead.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from measured import Failed, Row, run, run_in_turns
from training_lines import (
    FREE,
    OURS,
    PADDED,
    agreement,
    print_method,
    same_work,
    summary,
)

PEERS = Path(__file__).resolve().parent
FORMS = {OURS: "ours", FREE: "padding_free", PADDED: "padded"}
# Of the short fp32 run: enough for weights to move.
N_PROOF_STEPS = 3


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
    methods: tuple[str, ...]
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
    same = [same_work(found) for found in methods.values()]
    names = ("model", "device", "micro_batch", "n_accumulation_steps", "n_repeats",
             "n_warmup_steps", "n_timed_steps")  # fmt: skip
    return {
        **{name: getattr(job, name) for name in names},
        "n_parameters": work["n_parameters"],
        "row_length_tokens": work["row_length_tokens"],
        "methods": methods,
        # False takes precedence, then unknown.
        "same_work": False if False in same else None if None in same else True,
    }


def prepare_job(job: TrainingJob) -> Row:
    """Write model, rows and plans in a separate process."""
    path = job.folder / "job.json"
    path.write_text(json.dumps(asdict(job), default=str), encoding="utf-8")
    run_program(Path(sys.executable), "step_work.py", "--job", path, device=job.device)
    work: Row = json.loads((job.folder / "work.json").read_text(encoding="utf-8"))
    return work


def measure_method(job: TrainingJob, method: str, case: Row) -> Row:
    """Run a method's lines in turns; a failed peer is not run again.

    Raises:
        Failed: our side failed.
    """
    problems = {line: job.peer_problem for line in (FREE, PADDED) if job.peer_problem}
    lines = {line: partial(time_line, job, case, line) for line in FORMS}
    runs = run_in_turns(lines, job.n_repeats, problems, required=(OURS,))
    row: Row = {
        "settings": case,
        "lines": {line: summary(line, runs, problems, case["precision"]) for line in FORMS},
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
    ours, peer = ({0: time_line(short, case, line, 0)} for line in (OURS, FREE))
    return {"n_steps": 1 + n_timed, **agreement(FREE, ours, peer, "fp32")}


def time_line(job: TrainingJob, case: Row, line: str, repeat: int) -> Row:
    path = job.folder / f"{case['method']}-{repeat}-{FORMS[line]}.json"
    said = {
        **case, "folder": str(job.folder), "form": FORMS[line], "device": job.device,
        "n_warmup_steps": job.n_warmup_steps, "n_timed_steps": job.n_timed_steps,
    }  # fmt: skip
    path.write_text(json.dumps(said), encoding="utf-8")
    output = path.with_suffix(".result")
    python, program = Path(sys.executable), "our_steps.py"
    if line != OURS and job.peer:
        python, program = job.peer, "trl_steps.py"
    run_program(python, program, "--case", path, "--output", output, device=job.device)
    result: Row = json.loads(output.read_text(encoding="utf-8"))
    return result


def run_program(python: Path, program: str, *arguments: object, device: str) -> None:
    """Run a program of this folder, on one thread if the CPU is measured.

    Raises:
        Failed: the program failed.
    """
    command = [str(python), str(PEERS / program), *map(str, arguments)]
    run(command, env=environment_of(program, device))


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
