"""Measure how fast records become packed rows: our entire chain and other programs, in one run.

    python bench/data_path.py [--input FILE.jsonl] [--megabytes 5 50] [--repeats 5]
        [--peers source_method trl datatrove] [--length 2048] [--environments DIR] [--tokenizer DIR]

All read the same JSON Lines of ``text`` with the same tokenizer: --input, or the first megabytes of
the real data's texts. They alternate: every repeat runs each of them once, in fresh processes,
including imports, Snakemake's start and loading the tokenizer, with a warm page cache, on
--processes cores. The lines are
- ours: workflow/scripts/pretokenize_files.py, which runs the chain from validation to packed rows;
- peers: each in its own environment, built on demand under --environments, as its own
  documentation recommends, with one process and with --processes. They do not record where a
  completion starts; ours does.

A ratio is a line's time over ours, within a repeat. Peak memory is the sum of PSS over the process
tree, sampled. Rows are of both splits; fill is the share of a row's positions with a token.
A peer that is unavailable or fails is listed with the reason. Prints tables; the last line is JSON.
"""

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import KEPT, build_environment, installed_versions, list_requirements
from measured import (
    Failed,
    Row,
    format_spread,
    measure,
    ratios,
    run_in_turns,
    sample_memory,
    spread,
)

BENCH = Path(__file__).resolve().parent
DATA = BENCH.parents[1] / "shared" / "data"
PACK = BENCH.parent / "workflow" / "scripts" / "pretokenize_files.py"
OURS = "ours"
# By name of each peer in bench/peers/row_programs.py: the environment it runs in.
PEERS = {"source_method": "datasets", "trl": "trl", "datatrove": "datatrove"}
UNPACKED = {"datatrove"}


def list_ways(args: argparse.Namespace) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the program of every way to make rows, and why some are missing."""
    ours = [sys.executable, str(PACK), "--text", "{text}", "--cores", str(args.processes)]
    ways, problems = {OURS: ours}, {}
    for name in args.peers:
        python, problem = build_environment(PEERS[name], args.environments)
        for n in sorted({1, args.processes}):
            way = f"{name}, {n} process{'es' * (n > 1)}"
            program = [str(python), str(BENCH / "peers" / "row_programs.py"), name]
            ways[way] = [*program, "--processes", str(n)]
            if problem:
                problems[way] = f"not installed: {problem}"
    return ways, problems


def measure_size(megabytes: int, folder: Path, args: argparse.Namespace) -> Row:
    corpus, rows = folder / "corpus.jsonl", folder / "output" / "rows"
    n_bytes = write_corpus(corpus, megabytes * 1_000_000, args.input)
    print(f"\n{n_bytes / 1e6:.1f} MB", flush=True)
    ways, problems = list_ways(args)
    given = {"input": corpus, "tokenizer": args.tokenizer, "length": args.length, "output": rows}
    shared = [word for name, value in given.items() for word in (f"--{name}", str(value))]

    def run(program: list[str], _repeat: int) -> Row:
        shutil.rmtree(rows.parent, ignore_errors=True)
        rows.parent.mkdir()
        with sample_memory() as sums:
            took = measure([*program, *shared])
        return {**took, "peak_tree_bytes": max(sums), "facts": count_rows(rows)}

    lines = {way: partial(run, program) for way, program in ways.items()}
    runs = run_in_turns(lines, args.repeats, problems)
    print(
        f"{'way':>26} {'s':>20} {'x ours':>20} {'MB/s':>7} {'CPU s':>7} {'tree MB':>8}"
        f" {'out MB':>7} {'rows':>7} {'fill':>8}"
    )
    measured = []
    for way in ways:
        if way in problems:
            measured.append({"way": way, "problem": problems[way]})
            print(f"{way:>26} {problems[way]}")
        else:
            measured.append(summarize(way, runs, n_bytes, args.length))
            print_row(measured[-1])
    return {"n_bytes": n_bytes, "ways": measured}


def count_rows(rows: Path) -> Row:
    """Count the rows, tokens and bytes that a way wrote."""
    if (record := rows / "packing.json").is_file():
        packing = json.loads(record.read_text())
        splits = (packing["train"], packing["held_out"])
        n_rows = sum(split["n_sequences"] for split in splits)
        n_tokens = sum(split["n_tokens"] for split in splits)
    elif tables := sorted(rows.glob("*.arrow")):
        lengths = [
            pc.list_value_length(
                pa.ipc.open_stream(pa.memory_map(str(path))).read_all()["input_ids"]
            )
            for path in tables
        ]
        n_rows, n_tokens = sum(map(len, lengths)), sum(pc.sum(one).as_py() for one in lengths)
    else:
        # datatrove's: a document's last token by number, and all tokens.
        n_rows = sum(np.fromfile(path, np.uint64).size for path in rows.glob("*.index"))
        n_tokens = sum(np.fromfile(path, np.uint32).size for path in rows.glob("*.ds"))
    n_bytes = sum(path.stat().st_size for path in rows.rglob("*") if path.is_file())
    return {"n_rows": n_rows, "n_tokens": n_tokens, "n_output_bytes": n_bytes}


def summarize(way: str, runs: dict[str, dict[int, Row]], n_bytes: int, length: int) -> Row:
    ours, own = ({i: run["wall_s"] for i, run in runs[name].items()} for name in (OURS, way))
    done = list(runs[way].values())
    wall, facts = spread(list(own.values())), done[0]["facts"]
    row = {
        "way": way,
        "wall_s": wall,
        "ratio_to_ours": ratios(own, ours),
        "megabytes_per_s": n_bytes / 1e6 / wall["median"],
        "cpu_s": spread([run["cpu_s"] for run in done])["median"],
        "peak_tree_bytes": max(run["peak_tree_bytes"] for run in done),
        **facts,
    }
    if way.partition(",")[0] not in UNPACKED:
        row["fill_fraction"] = facts["n_tokens"] / (facts["n_rows"] * length)
    return row


def print_row(row: Row) -> None:
    packed = "fill_fraction" in row
    n_rows, fill = (row["n_rows"], f"{row['fill_fraction']:.3%}") if packed else ("-", "-")
    wall, ratio = format_spread(row["wall_s"]), format_spread(row["ratio_to_ours"])
    print(
        f"{row['way']:>26} {wall:>20} {ratio:>20} {row['megabytes_per_s']:7.1f}"
        f" {row['cpu_s']:7.1f} {row['peak_tree_bytes'] / 1e6:8.0f}"
        f" {row['n_output_bytes'] / 1e6:7.1f} {n_rows:>7} {fill:>8}"
    )


def write_corpus(path: Path, most_bytes: int, given: Path | None) -> int:
    """Write the first records of a file, or of the real data; return their bytes."""
    n_bytes = 0
    with path.open("wb") as output:
        for line in given.open("rb") if given else real_texts(DATA):
            n_bytes += output.write(line)
            if n_bytes >= most_bytes:
                break
    return n_bytes


def real_texts(data: Path) -> Iterator[bytes]:
    """Return all strings of each record of the real data, joined, as lines of JSON."""
    for path in sorted(data.rglob("*.jsonl*")):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                if text := "\n".join(strings(json.loads(line))):
                    yield (json.dumps({"text": text}, ensure_ascii=False) + "\n").encode()


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--input", type=Path, help="JSON Lines of text")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizers" / "qwen")
    parser.add_argument("--environments", type=Path, default=KEPT)
    return parser


def measure_all(args: argparse.Namespace) -> Row:
    """Measure every size; return the content of the last line.

    Raises:
        Failed: an input of the measurement is missing.
    """
    if not (args.tokenizer / "tokenizer.json").is_file():
        raise Failed(f"{args.tokenizer}: no tokenizer.json; choose another folder with --tokenizer")
    if not args.input and not DATA.is_dir():
        raise Failed(f"the real data is missing: {DATA}; pass an --input")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: args.processes])
    measured = []
    try:
        for megabytes in args.megabytes:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                measured.append(measure_size(megabytes, Path(folder), args))
    finally:
        os.sched_setaffinity(0, allowed)
    installed = {}
    for name in sorted({PEERS[name] for name in args.peers}):
        python, problem = build_environment(name, args.environments)
        if problem is None:
            installed[name] = installed_versions(python, list_requirements(name))
    return {
        "length": args.length, "processes": args.processes, "installed": installed,
        "repeats": args.repeats, "sizes": measured,
    }  # fmt: skip


def main() -> None:
    try:
        print(json.dumps(measure_all(options().parse_args())))
    except Failed as error:
        sys.exit(f"skipped: {error}")


if __name__ == "__main__":
    main()
