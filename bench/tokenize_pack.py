"""Measure how fast documents become packed rows: our stages beside other programs, in one run.

    python bench/tokenize_pack.py [--megabytes 20 200 2000] [--peers source_method trl datatrove]
        [--repeats 3] [--length 2048] [--environments DIR] [--tokenizer DIR]

All read the same JSON Lines of prompt and completion (see ``corpus.py``) as ChatML with the same
tokenizer, and take turns: every repeat runs each of them once, in fresh processes, imports and
loading of the tokenizer included, the page cache warm, on --processes cores. The lines are
- tokenize and pack: pretokenize_shard for every shard, then pack_sequences. The
  ratio of each line is to this one; it reads documents that were prepared before.
- whole chain: the stages before it as well: lock, fetch_source, find_datasets, prepare_shard,
  deduplicate_documents. prepare_tokenizer does not count.
- peers: each in its own environment, built on demand under --environments, as its own
  documentation recommends. They keep no account of where a completion starts; ours does.

Peak memory is the sum of PSS over the tree of processes, sampled. Rows are of both splits; fill is
the share of a row's places that hold a token. A peer that cannot be had or fails is listed with the
reason. Prints tables; the last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from chain import Chain, prepare_tokenizer, sizes
from corpus import DATA, make_corpus
from environments import PEERS, Environment, environment, versions
from measured import Failed, Measured, measure

BENCH = Path(__file__).resolve().parent
OURS, WHOLE = "tokenize and pack", "whole chain"
KEPT = Path.home() / ".cache" / "expertflow" / "peers"
UNPACKED = {"datatrove"}
Row = dict[str, Any]


class Benchmark:
    """One corpus, and every way to turn it into rows."""

    def __init__(self, folder: Path, corpus: Path, args: argparse.Namespace) -> None:
        self.folder, self.corpus, self.args = folder, corpus, args
        self.tokenizer: Path | None = None
        self.runs: dict[str, list[Measured]] = {}
        self.facts: dict[str, Row] = {}
        self.problems: dict[str, str] = {}

    def ours(self) -> None:
        if self.tokenizer is None:
            self.tokenizer = prepare_tokenizer(self.folder, self.args.tokenizer)
        at = self.fresh("ours")
        log = at / "log"
        chain = Chain(at, self.corpus, self.tokenizer, processes=self.args.processes)
        before = measure(chain.prepare, log)
        after = measure(lambda p: chain.tokenize_and_pack(p, length=self.args.length), log)
        self.runs.setdefault(OURS, []).append(after)
        self.runs.setdefault(WHOLE, []).append(together(before, after))
        facts = {**chain.count_tokens(), "n_output_bytes": sum(sizes(chain.rows))}
        self.facts[OURS] = self.facts[WHOLE] = facts

    def peer(self, name: str, built: Environment) -> None:
        """Run a peer once; after its first run count its rows."""
        at = self.fresh(name)
        command = self.program(built.python, PEERS[name][0], at)
        took = measure(lambda p: p.run(command), at / "log")
        self.runs.setdefault(name, []).append(took)
        if name not in self.facts:
            done = subprocess.run([*command, "--read"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise Failed(f"its rows cannot be read: {done.stderr.strip().splitlines()[-1]}")
            facts = json.loads(done.stdout.splitlines()[-1])
            self.facts[name] = {**facts, "n_output_bytes": sum(sizes(at / "rows"))}

    def program(self, python: Path, name: str, output: Path) -> list[str]:
        """Write the command line of a program among the peers."""
        settings = {
            "--input": self.corpus, "--tokenizer": self.args.tokenizer, "--output": output,
            "--length": self.args.length, "--processes": self.args.processes,
        }  # fmt: skip
        words = [str(word) for pair in settings.items() for word in pair]
        return [str(python), str(BENCH / "peers" / name), *words]

    def fresh(self, name: str) -> Path:
        """Make an empty folder; what the last run of this name wrote goes."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def attempt(self, name: str, job: Callable[[], None]) -> None:
        """Run something that may fail; it is then not run again, and the reason is kept."""
        if name in self.problems:
            return
        try:
            job()
        except Failed as error:
            self.problems[name] = str(error)

    def table(self, n_bytes: int) -> list[Row]:
        rows = []
        ours = self.runs.get(OURS)
        print(
            f"{'method':>18} {'s':>8} {'spread':>15} {'MB/s':>7} {'x ours':>7} {'CPU s':>7}"
            f" {'tree MB':>8} {'out MB':>8} {'rows':>8} {'fill':>8}"
        )
        for name in (OURS, WHOLE, *self.args.peers):
            if name in self.problems or name not in self.runs:
                reason = self.problems.get(name, "not run")
                print(f"{name:>18} {reason}")
                rows.append({"method": name, "problem": reason})
                continue
            row = summary(
                name, self.runs[name], self.facts.get(name, {}), n_bytes, self.args.length
            )
            if ours:
                row["ratio_to_ours"] = row["wall_s"] / statistics.median(r.wall_s for r in ours)
            rows.append(row)
            print_row(row)
        return rows


def together(first: Measured, second: Measured) -> Measured:
    return Measured(
        wall_s=first.wall_s + second.wall_s,
        cpu_s=first.cpu_s + second.cpu_s,
        peak_tree_bytes=max(first.peak_tree_bytes, second.peak_tree_bytes),
    )


def summary(name: str, runs: list[Measured], facts: Row, n_bytes: int, length: int) -> Row:
    times = [run.wall_s for run in runs]
    row: Row = {
        "method": name, "wall_s": statistics.median(times), "wall_s_min": min(times),
        "wall_s_max": max(times), "megabytes_per_s": n_bytes / 1e6 / statistics.median(times),
        "cpu_s": statistics.median(run.cpu_s for run in runs),
        "peak_tree_bytes": max(run.peak_tree_bytes for run in runs),
        **facts,
    }  # fmt: skip
    if facts and name not in UNPACKED:
        row["fill_fraction"] = facts["n_tokens"] / (facts["n_rows"] * length)
    return row


def print_row(row: Row) -> None:
    spread = f"{row['wall_s_min']:.2f}-{row['wall_s_max']:.2f}"
    ratio = f"{row['ratio_to_ours']:.2f}" if "ratio_to_ours" in row else "-"
    out = f"{row['n_output_bytes'] / 1e6:.1f}" if "n_output_bytes" in row else "-"
    packed = "fill_fraction" in row
    fill = f"{row['fill_fraction']:.3%}" if packed else "-"
    print(
        f"{row['method']:>18} {row['wall_s']:8.2f} {spread:>15} {row['megabytes_per_s']:7.1f}"
        f" {ratio:>7} {row['cpu_s']:7.1f} {row['peak_tree_bytes'] / 1e6:8.0f}"
        f" {out:>8}"
        f" {row['n_rows'] if packed else '-':>8} {fill:>8}"
    )


def measure_size(megabytes: int, folder: Path, args: argparse.Namespace) -> Row:
    corpus = folder / "corpus.jsonl"
    made = make_corpus(corpus, n_bytes=megabytes * 1_000_000, seed=args.seed)
    print(f"\n{megabytes} MB: {made['n_records']:,} records, characters p5/50/90/99/max"
          f" {made['characters_p5_p50_p90_p99_max']}", flush=True)  # fmt: skip
    bench = Benchmark(folder, corpus, args)
    built = {}
    for name in args.peers:
        built[name] = environment(PEERS[name][1], args.environments)
        if problem := built[name].problem:
            bench.problems[name] = f"not installed: {problem}"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.processes])
    for _ in range(args.repeats):
        bench.attempt(OURS, bench.ours)
        for name in args.peers:
            bench.attempt(name, lambda name=name: bench.peer(name, built[name]))
    rows = bench.table(made["n_bytes"])
    return {"corpus": made, "methods": rows}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tokenizers" / "qwen")
    parser.add_argument("--environments", type=Path, default=KEPT)
    return parser


def missing(args: argparse.Namespace) -> str | None:
    """Return what is missing of a measurement's inputs."""
    if not (args.tokenizer / "tokenizer.json").is_file():
        return f"{args.tokenizer} holds no tokenizer.json; name one with --tokenizer"
    if not DATA.is_dir():
        return f"the real data is not here; the corpus grows out of {DATA}"
    return None


def measure_all(args: argparse.Namespace) -> Row:
    """Measure every size; give what the last line says."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    sizes_measured = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            sizes_measured.append(measure_size(megabytes, Path(folder), args))
    names = sorted({PEERS[name][1] for name in args.peers})
    built = {name: environment(name, args.environments) for name in names}
    installed = {n: versions(e) for n, e in built.items() if e.problem is None}
    return {
        "length": args.length, "processes": args.processes, "installed": installed,
        "repeats": args.repeats, "sizes": sizes_measured,
    }  # fmt: skip


def main() -> None:
    args = options().parse_args()
    if reason := missing(args):
        sys.exit(f"skipped: {reason}")
    print(json.dumps(measure_all(args)))


if __name__ == "__main__":
    main()
