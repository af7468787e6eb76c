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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import PEERS, Environment, environment, versions
from measured import Failed, Measured, measure
from turns import format_spread, ratios, spread, turns

BENCH = Path(__file__).resolve().parent
DATA = BENCH.parents[1] / "shared" / "data"
PACK = BENCH.parent / "workflow" / "scripts" / "pretokenize_files.py"
OURS = "ours"
KEPT = Path.home() / ".cache" / "expertflow" / "peers"
UNPACKED = {"datatrove"}
Row = dict[str, Any]


class Benchmark:
    """One corpus, and every way to turn it into rows."""

    def __init__(self, folder: Path, corpus: Path, args: argparse.Namespace) -> None:
        self.folder, self.corpus, self.args = folder, corpus, args
        self.runs: dict[str, dict[int, Measured]] = {}
        self.facts: dict[str, Row] = {}
        self.problems: dict[str, str] = {}
        self.ways: dict[str, Callable[[Path], list[str]]] = {OURS: self.ours}
        for name in args.peers:
            built = environment(PEERS[name][1], args.environments)
            for n in sorted({1, args.processes}):
                way = f"{name}, {n} process{'es' * (n > 1)}"
                self.ways[way] = self.peer(name, built, n)
                if built.problem:
                    self.problems[way] = f"not installed: {built.problem}"

    def ours(self, output: Path) -> list[str]:
        settings = ["--cores", str(self.args.processes), "--output", str(output / "rows")]
        return [sys.executable, str(PACK), "--text", "{text}", *settings, *self.shared_settings()]

    def peer(self, name: str, built: Environment, n: int) -> Callable[[Path], list[str]]:
        program = [str(built.python), str(BENCH / "peers" / PEERS[name][0])]
        return lambda output: [
            *program, "--processes", str(n), "--output", str(output), *self.shared_settings()
        ]  # fmt: skip

    def shared_settings(self) -> list[str]:
        given = {"input": self.corpus, "tokenizer": self.args.tokenizer, "length": self.args.length}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    def run(self, way: str, repeat: int) -> None:
        """Run a way once, unless it failed before. After its first run, count its rows."""
        if way in self.problems:
            return
        output = self.folder / "output"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        command = self.ways[way](output)
        try:
            took = measure(command, self.folder / "log")
            if way not in self.facts:
                self.facts[way] = count_rows(way, command, output)
        except Failed as error:
            self.problems[way] = str(error)
            return
        self.runs.setdefault(way, {})[repeat] = took

    def tabulate(self, n_bytes: int) -> list[Row]:
        print(
            f"{'way':>26} {'s':>20} {'x ours':>20} {'MB/s':>7} {'CPU s':>7} {'tree MB':>8}"
            f" {'out MB':>7} {'rows':>7} {'fill':>8}"
        )
        rows = []
        for way in self.ways:
            if reason := self.problems.get(way):
                print(f"{way:>26} {reason}")
                rows.append({"way": way, "problem": reason})
                continue
            rows.append(self.summarize(way, n_bytes))
            print_row(rows[-1])
        return rows

    def summarize(self, way: str, n_bytes: int) -> Row:
        walls = {name: {i: r.wall_s for i, r in runs.items()} for name, runs in self.runs.items()}
        wall, ratio = spread(list(walls[way].values())), ratios(walls[way], walls.get(OURS, {}))
        facts = self.facts[way]
        row: Row = {
            "way": way, "wall_s": asdict(wall), "ratio_to_ours": ratio and asdict(ratio),
            "megabytes_per_s": n_bytes / 1e6 / wall.median,
            "cpu_s": spread([run.cpu_s for run in self.runs[way].values()]).median,
            "peak_tree_bytes": max(run.peak_tree_bytes for run in self.runs[way].values()), **facts,
        }  # fmt: skip
        if way.partition(",")[0] not in UNPACKED:
            row["fill_fraction"] = facts["n_tokens"] / (facts["n_rows"] * self.args.length)
        return row


def count_rows(way: str, command: list[str], output: Path) -> Row:
    """Count the rows, tokens and bytes that a way wrote.

    Raises:
        Failed: the rows cannot be read.
    """
    if way == OURS:
        packing = json.loads((output / "rows" / "packing.json").read_text())
        splits = (packing["train"], packing["held_out"])
        facts = {
            "n_rows": sum(split["n_sequences"] for split in splits),
            "n_tokens": sum(split["n_tokens"] for split in splits),
        }
    else:
        done = subprocess.run([*command, "--read"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"its rows cannot be read: {done.stderr.strip().splitlines()[-1]}")
        facts = json.loads(done.stdout.splitlines()[-1])
    sizes = (path.stat().st_size for path in (output / "rows").rglob("*") if path.is_file())
    return {**facts, "n_output_bytes": sum(sizes)}


def print_row(row: Row) -> None:
    packed = "fill_fraction" in row
    n_rows, fill = (row["n_rows"], f"{row['fill_fraction']:.3%}") if packed else ("-", "-")
    wall, ratio = format_spread(row["wall_s"]), format_spread(row["ratio_to_ours"])
    print(
        f"{row['way']:>26} {wall:>20} {ratio:>20} {row['megabytes_per_s']:7.1f}"
        f" {row['cpu_s']:7.1f} {row['peak_tree_bytes'] / 1e6:8.0f}"
        f" {row['n_output_bytes'] / 1e6:7.1f} {n_rows:>7} {fill:>8}"
    )


def measure_size(megabytes: int, folder: Path, args: argparse.Namespace) -> Row:
    corpus = folder / "corpus.jsonl"
    n_bytes = write_corpus(corpus, megabytes * 1_000_000, args.input)
    print(f"\n{n_bytes / 1e6:.1f} MB", flush=True)
    bench = Benchmark(folder, corpus, args)
    for repeat, way in turns(list(bench.ways), args.repeats):
        bench.run(way, repeat)
    return {"n_bytes": n_bytes, "ways": bench.tabulate(n_bytes)}


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


def missing(args: argparse.Namespace) -> str | None:
    """Return which input of the measurement is missing."""
    if not (args.tokenizer / "tokenizer.json").is_file():
        return f"{args.tokenizer}: no tokenizer.json; choose another folder with --tokenizer"
    if not args.input and not DATA.is_dir():
        return f"the real data is missing: {DATA}; pass an --input"
    return None


def measure_all(args: argparse.Namespace) -> Row:
    """Measure every size; return the content of the last line."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.processes])
    measured = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            measured.append(measure_size(megabytes, Path(folder), args))
    names = sorted({PEERS[name][1] for name in args.peers})
    built = {name: environment(name, args.environments) for name in names}
    installed = {n: versions(e) for n, e in built.items() if e.problem is None}
    return {
        "length": args.length, "processes": args.processes, "installed": installed,
        "repeats": args.repeats, "sizes": measured,
    }  # fmt: skip


def main() -> None:
    args = options().parse_args()
    if reason := missing(args):
        sys.exit(f"skipped: {reason}")
    print(json.dumps(measure_all(args)))


if __name__ == "__main__":
    main()
