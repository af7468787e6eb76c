"""What a token, a document and a byte cost in each stage of data, measured on a small corpus.

The stages' own scripts run as the workflow runs them. Each is run at two sizes: what a token costs
is the slope between them, so that imports and the loading of a vocabulary, which do not grow, are
left out. What computes is measured in CPU time, so that neighbours on the machine do not count;
what waits for a disk, in wall time.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scale_figures import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from chain import Chain, prepare_model, sizes
from corpus import DATA, make_corpus
from measured import Processes

from expertflow.core.files import read_json_lines, remove, sha256_file

MODEL = "tokenizers/qwen"
ROW_LENGTH = 2048
HERE = "measured in this run"
MB, BLOCK = 1_000_000, 1 << 24
MEMORY = Path("/dev/shm")


class Timed(Processes):
    """Runs a chain's commands and adds up the CPU time of each stage."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.cpu_s: dict[str, float] = defaultdict(float)

    def _note(self, status: int, usage: Any, process: subprocess.Popen[bytes]) -> None:
        super()._note(status, usage, process)
        assert isinstance(process.args, list)
        self.cpu_s[stage_of(process.args)] += usage.ru_utime + usage.ru_stime


def stage_of(command: Any) -> str:
    """Name the stage that a command runs.

    >>> stage_of(["env", "A=1", "python", "scripts/pack_sequences.py", "--expert", "x"])
    'pack_sequences'
    """
    return next(Path(word).stem for word in command if str(word).endswith(".py"))


COSTS = {
    "fetch_s_per_token": "fetch_source",
    "prepare_s_per_token": "prepare_shard",
    "tokenise_s_per_token": "pretokenize_shard",
    "pack_s_per_token": "pack_sequences",
}


def chain_figures(folder: Path, megabytes: tuple[int, int], repeats: int) -> dict[str, Figure]:
    """Run the data stages at two sizes, some times; give what a token costs."""
    names = (*COSTS, "raw_bytes_per_token", "tokens_per_document", "row_bytes_per_token",
             "document_bytes_per_token", "token_bytes_per_token")  # fmt: skip
    if not (DATA / MODEL / "tokenizer.json").is_file():
        why = "the real data or the tokenizer that the corpus is made of is not here"
        return {name: Figure.unknown(why) for name in names}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    model = prepare_model(folder, DATA / MODEL)
    runs = []
    corpora = []
    for size in megabytes:
        path = folder / f"{size}.jsonl"
        made = make_corpus(path, n_bytes=size * MB, seed=0)
        corpora.append((path, made))
    for repeat in range(repeats):
        runs.append([_run(folder / f"{repeat}-{path.stem}", path, model) for path, _ in corpora])
    said = f"{HERE}: slope between {megabytes[0]} and {megabytes[1]} MB, {repeats} repeats"
    found = {
        name: Figure.of([_slope(*pair, name) for pair in runs], "CPU s/token", said)
        for name in COSTS
    }
    large, made = runs[0][1], corpora[1][1]
    n_tokens, said = large["n_tokens"], f"{HERE}: the corpus of {megabytes[1]} MB"
    counts = {
        "raw_bytes_per_token": (made["n_bytes"] / n_tokens, "B/token"),
        "tokens_per_document": (n_tokens / made["n_records"], "tokens"),
        "row_bytes_per_token": (large["row_bytes"] / n_tokens, "B/token"),
        "document_bytes_per_token": (large["document_bytes"] / n_tokens, "B/token"),
        "token_bytes_per_token": (large["token_bytes"] / n_tokens, "B/token"),
    }
    return found | {name: Figure(value, unit, said) for name, (value, unit) in counts.items()}


def _run(folder: Path, corpus: Path, model: Path) -> dict[str, float]:
    """Run the chain once."""
    folder.mkdir()
    chain = Chain(folder, corpus, model, processes=2, at_once=1)
    timed = Timed(folder / "log")
    chain.prepare(timed)
    chain.tokenise_and_pack(timed, length=ROW_LENGTH)
    found: dict[str, float] = {name: timed.cpu_s[stage] for name, stage in COSTS.items()}
    shards = [folder / f"{shard}.arrow" for shard in chain.shards()]
    found |= {
        "n_tokens": chain.described()["n_tokens"],
        "row_bytes": sum(sizes(chain.rows)),
        "document_bytes": sum(path.stat().st_size for path in shards),
        "token_bytes": sum(path.stat().st_size for path in folder.glob("*.ids")),
    }
    remove(folder)
    return found


def _slope(small: dict[str, float], large: dict[str, float], name: str) -> float:
    return max(0.0, large[name] - small[name]) / (large["n_tokens"] - small["n_tokens"])


def speed_figures(folder: Path, n_bytes: int, repeats: int) -> dict[str, Figure]:
    """Measure how fast one process hashes, stages and writes checkpoints, and reads a log."""
    path = folder / "bytes"
    with path.open("wb") as stream:
        for _ in range(max(1, n_bytes // BLOCK)):
            stream.write(os.urandom(BLOCK))
    n_bytes = path.stat().st_size
    size = f"{n_bytes / MB:.0f} MB, {repeats} repeats"
    hashed = [n_bytes / s for s in timed_runs(lambda: sha256_file(path), repeats, cpu=True)]
    remove(path)
    log, n_lines = folder / "steps.jsonl", 20_000
    log.write_text(STEP * n_lines)
    read = [s / n_lines for s in timed_runs(lambda: read_json_lines(log), repeats, cpu=True)]
    return {
        "hash_bytes_per_s": Figure.of(hashed, "B/CPU s", f"{HERE}: SHA-256 of {size}, in memory"),
        "copy_bytes_per_s": _in_memory(_copied, folder, n_bytes, repeats),
        "checkpoint_bytes_per_s": _in_memory(_checkpoints, folder, n_bytes, repeats),
        "report_s_per_step": Figure.of(
            read, "CPU s/step", f"{HERE}: a log of {n_lines:,} steps, read as the report does"
        ),
    }


STEP = (
    '{"step": 1, "loss": 2.5, "learning_rate": 0.0003, "n_tokens": 4194304, "step_s": 1.5,'
    ' "data_wait_s": 0.0001, "grad_norm": 0.75, "n_target_tokens": 4100000, "elapsed_s": 1.5}\n'
)


def _in_memory(
    work: Callable[[Path, int, int], list[float]], folder: Path, n_bytes: int, repeats: int
) -> Figure:
    """Measure what one process does to bytes on their way; how fast a disk is, is assumed."""
    if not MEMORY.is_dir():
        return Figure.unknown(f"{MEMORY} is not there, so the disk would be measured")
    with tempfile.TemporaryDirectory(prefix="scale-", dir=MEMORY) as name:
        speeds = work(Path(name), n_bytes, repeats)
    return Figure.of(
        speeds, "B/CPU s", f"{HERE}: {n_bytes / MB:.0f} MB, {repeats} repeats, memory to memory"
    )


def _copied(folder: Path, n_bytes: int, repeats: int) -> list[float]:
    """Stage rows, one large file, to where they are, as if that were another disk."""
    from scale_staging import made_rows

    from expertflow.stage import make
    from expertflow.stage.store import open_store

    content = made_rows(folder / "rows", n_bytes)
    store, can_share = open_store(folder, None), make.can_share
    make.can_share = lambda *_: False

    def copy() -> None:
        remove(store.root / content.key)
        make.ensure_staged(content, store).hold.close()

    try:
        seconds = timed_runs(copy, repeats, cpu=True)
    finally:
        make.can_share = can_share
    return [content.n_bytes / s for s in seconds]


def _checkpoints(folder: Path, n_bytes: int, repeats: int) -> list[float]:
    """Write a checkpoint of so many bytes by the code of the training."""
    import torch

    from expertflow.train.saved.checkpoint import Snapshot, write
    from expertflow.train.saved.checkpoint_files import OURS

    tensors = {f"{i}": torch.full((BLOCK // 4,), float(i)) for i in range(n_bytes // BLOCK)}
    step = iter(range(1, repeats + 1))

    def save() -> None:
        progress = {"held_out_loss": None, OURS: {}}
        snapshot = Snapshot(
            step=next(step), weights=tensors, optimizer={}, progress=progress, is_whole=True
        )
        write(folder / "state", snapshot, keep=1)

    return [n_bytes / s for s in timed_runs(save, repeats, cpu=True)]


def timed_runs(work: Callable[[], Any], repeats: int, *, cpu: bool = False) -> list[float]:
    """Give the seconds of each repeat, or its CPU seconds."""
    clock = time.process_time if cpu else time.perf_counter
    seconds = []
    for _ in range(repeats):
        start = clock()
        work()
        seconds.append(clock() - start)
    return seconds


def measure_units(*, megabytes: tuple[int, int], n_bytes: int, repeats: int) -> dict[str, Figure]:
    """Measure all costs of a unit, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        found = speed_figures(folder, n_bytes, repeats)
        found |= chain_figures(folder, megabytes, repeats)
    for name, figure in found.items():
        print(f"  {name:28} {figure.words()}")
    return found
