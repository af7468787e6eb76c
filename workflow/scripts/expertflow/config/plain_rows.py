"""Pack plain files without an expert, by running the chain's first half in its own folder.

``pretokenize_files.py`` uses it. An expert with these sources would get the same rows.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import canonical_json, hold_partial
from expertflow.core.format import percent
from expertflow.core.process import run_stoppable
from expertflow.core.records import read_record
from expertflow.core.settings import name_of
from expertflow.plan.settings import TrainingSection
from expertflow.tokens.records import PackingRecord

EXPERT = "rows"
SNAKEFILE = Path(__file__).parents[4] / "Snakefile"
# The model is never trained: as small as possible around the tokenizer.
LEAST = {
    "n_layers": 1,
    "hidden_size": 8,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
}
# References to files in the chain's folder, which is removed before anyone reads them.
OF_THE_FOLDER = re.compile(
    rf"^config/experts/{EXPERT}\.json(:\d+| with overrides)?: |; see [^;\s]+"
    r"|,? or check what was rejected in \S+"
)
REJECTED = "*.rejected.jsonl"


def make_rows(
    files: str,
    output: Path,
    *,
    tokenizer: Path,
    templates: dict[str, str],
    length: int | None,
    packing: str,
    n_cores: int,
) -> PackingRecord:
    """Write ``output`` with train, held_out and packing.json, completely or not at all.

    ``files`` is a path or a glob, ``tokenizer`` a folder; ``templates`` are keys of a source:
    prompt and completion, text, or messages. A null length takes the shortest rows that cut no
    document.

    Raises:
        ConfigError: the output exists, or the tokenizer does not.
        DataError: a stage failed; its message. Rejected records are in ``{output}.rejected``.
        SystemExit: a signal asked to stop.
    """
    if output.exists():
        raise ConfigError(f"{output} already exists; choose another folder, or delete it")
    if not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"{tokenizer}: contains no tokenizer.json; use a tokenizer's folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    # The next run does not remove it while any process of this one lives.
    with hold_partial(output) as (folder, lock):
        (folder / "config" / "experts").mkdir(parents=True)
        # Its own configuration: the user's experts and settings do not apply.
        (folder / "config" / "config.yaml").write_text(canonical_json({"experts": {EXPERT: {}}}))
        manifest = {
            "description": "Rows of plain files.",
            "model": "builtin:tiny-qwen3",
            "builtin": LEAST,
            "tokenizer": str(tokenizer.absolute()),
            "sources": [
                {"name": "files", "kind": "local", "path": str(Path(files).absolute()), **templates}
            ],
            "training": {
                name_of(TrainingSection.method): "full",
                name_of(TrainingSection.packing): packing,
                name_of(TrainingSection.max_seq_length): "auto" if length is None else length,
            },
            "evaluation": {"task": "held_out_loss"},
        }
        place = folder / "config" / "experts" / f"{EXPERT}.json"
        place.write_text(canonical_json(manifest))
        _run(folder, lock, output, n_cores=n_cores)
        results = folder / "results" / EXPERT
        # Snakemake's marker, in a folder that is no longer a rule's output.
        (results / "packed" / ".snakemake_timestamp").unlink(missing_ok=True)
        (results / "packing.json").rename(results / "packed" / "packing.json")
        (results / "packed").rename(output)
    return read_record(PackingRecord, output / "packing.json")


def describe_rows(record: PackingRecord) -> Iterator[str]:
    lengths = record.histogram
    for name, split in (("train", record.train), ("held_out", record.held_out)):
        places = split.n_tokens + split.n_padding_tokens
        yield (
            f"{name}: {split.n_documents:,} documents, {split.n_tokens:,} tokens,"
            f" {split.n_target_tokens:,} of them targets, in {split.n_sequences:,} rows of"
            f" {record.sequence_length_tokens}, {percent(split.n_tokens / places)} full"
        )
    yield (
        f"lengths in tokens: median {lengths.p50}, 90 % up to {lengths.p90}, 99 % up to"
        f" {lengths.p99}, longest {lengths.max}"
    )
    yield record.suggestion.reason


def _run(folder: Path, lock: IO[str], output: Path, *, n_cores: int) -> None:
    where = ["--snakefile", str(SNAKEFILE), "--directory", str(folder)]
    what = ["--cores", str(n_cores), f"results/{EXPERT}/packing.json"]
    done = run_stoppable(
        [sys.executable, "-m", "snakemake", *where, *what], keep_open=[lock.fileno()]
    )
    if done.returncode == 0:
        return
    kept = keep_rejected(folder, output)
    see = f"; the rejected records are in {kept}" if kept else ""
    lines = (done.stderr + done.stdout).splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not errors:
        # No stage ended with an error line: print everything.
        print(done.stderr, file=sys.stderr)
        raise DataError(f"Snakemake exited with {done.returncode}; its output is above{see}")
    raise DataError(OF_THE_FOLDER.sub("", errors[0]) + see)


def keep_rejected(folder: Path, output: Path) -> Path | None:
    """Move rejected records from a folder that will be removed to one next to ``output``."""
    found = sorted(path for path in folder.rglob(REJECTED) if path.stat().st_size)
    if not found:
        return None
    kept = output.with_name(f"{output.name}.rejected")
    kept.mkdir(exist_ok=True)
    # From an earlier attempt with the same output.
    for old in kept.glob(REJECTED):
        old.unlink()
    for path in found:
        path.rename(kept / path.name)
    return kept
