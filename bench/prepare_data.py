"""Measure the data stages on JSON Lines: speed in MB/s, and peak memory by size of the corpus.

    python bench/prepare_data.py [--megabytes 20 200 2000] [--records FILE] [--processes 2]

Makes a corpus of each size by repeating the records of FILE (default: the WikiSQL questions beside
the project), every record made different by a number in its question, plus one record in a hundred
repeated as it is. Then the scripts run as the workflow runs them: lock, fetch_source,
find_datasets, prepare_shard for every shard (two at a time), deduplicate_documents;
prompt and completion templates, validation on, exact duplicates dropped. Sizes are medians over
--repeats. Peak memory is the largest of any process, as the kernel counts it. Prints a table; the
last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.core.files import canonical_json
from expertflow.core.records import read_record, to_json
from expertflow.data.lock import HashCache, lock_sources, write_lock
from expertflow.data.records import DatasetManifest
from expertflow.data.settings import DeduplicateSpec, FetchSpec, PrepareSpec, SourceSpec

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "workflow" / "scripts"
RECORDS = ROOT.parent / "shared" / "data" / "expert-sql" / "wikisql" / "records.jsonl"
REPEATED = 100


class Timed:
    """Runs a stage's script in a process of its own; keeps its time and the largest memory."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}

    def run(self, script: str, *arguments: str) -> None:
        """Run one script to its end."""
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--code", "bench", *arguments]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{script} failed with {process.returncode}")
        peak = usage.ru_maxrss * 1024
        self.peak_bytes[script] = max(self.peak_bytes.get(script, 0), peak)

    def stage(self, name: str, jobs: list[tuple[str, ...]], *, processes: int) -> None:
        """Run the jobs of one stage, some at a time."""
        start = time.perf_counter()
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(lambda job: self.run(name, *job), jobs))
        self.seconds[name] = time.perf_counter() - start


def make_corpus(path: Path, records: Path, n_bytes: int) -> None:
    """Write records until the size is reached."""
    lines = [json.loads(line) for line in records.read_bytes().split(b"\n") if line]
    size = number = 0
    with path.open("w", encoding="utf-8") as stream:
        while size < n_bytes:
            record = dict(lines[number % len(lines)])
            if number % REPEATED:
                record["question"] = f"{record['question']} ({number})"
            text = json.dumps(record, ensure_ascii=False) + "\n"
            stream.write(text)
            size += len(text)
            number += 1


def measure(folder: Path, corpus: Path, *, processes: int) -> tuple[Timed, dict[str, Any]]:
    """Run all data stages once."""
    source = SourceSpec(
        name="s", kind="local", path=str(corpus), prompt="{schema}\n{question}", completion="{sql}"
    )
    prepare = PrepareSpec(
        source=source, system_prompt=None, supervise="completion", evaluation_fields=(),
        on_reject="skip", near=None, benchmarks=(),
    )  # fmt: skip
    deduplicate = DeduplicateSpec(
        eval_fraction=0.02, max_documents=None, seed=0, max_rejected_fraction=0.01, near=None,
        weights={}, max_per_source={}, max_per_category=None, category_caps={},
    )  # fmt: skip
    timed = Timed()
    start = time.perf_counter()
    lock = lock_sources(
        "bench", (source,), hashes=HashCache(folder / "hashes.json"), generator_digest=str
    )
    write_lock(folder / "lock.json", lock)
    timed.seconds["lock"] = time.perf_counter() - start

    def spec(value: Any) -> tuple[str, ...]:
        return "--spec", canonical_json(to_json(value))

    at = {name: str(folder / name) for name in ("lock.json", "s.json", "datasets.json", "keep")}
    fetch = (
        *spec(FetchSpec(source=source, preset="full")),
        "--lock",
        at["lock.json"],
        "--directory",
        str(folder / "s"),
    )
    timed.stage("fetch_source", [(*fetch, "--output", at["s.json"])], processes=1)
    named = {"expert": "bench", "preset": "full", "licences": {"s": None}}
    find = (*spec(named), "--lock", at["lock.json"], "--sources", at["s.json"])
    timed.stage("find_datasets", [(*find, "--output", at["datasets.json"])], processes=1)
    shards = read_record(DatasetManifest, folder / "datasets.json").shards
    jobs = []
    for shard in shards:
        place = str(folder / shard.shard)
        inputs = (*spec(prepare), "--source", at["s.json"])
        outputs = ("--documents", f"{place}.arrow", "--rejected", f"{place}.rejected.jsonl")
        jobs.append((*inputs, "--shard", shard.shard, *outputs, "--output", f"{place}.json"))
    timed.stage("prepare_shard", jobs, processes=processes)
    records = [str(folder / f"{shard.shard}.json") for shard in shards]
    drop = (*spec(deduplicate), "--expert", "bench", "--keep", at["keep"], "--shards", *records)
    output = str(folder / "documents.json")
    timed.stage("deduplicate_documents", [(*drop, "--output", output)], processes=1)
    return timed, json.loads(Path(output).read_text())


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not args.records.is_file():
        sys.exit(f"skipped: {args.records} is not here; name a file of records with --records")
    rows = []
    print(
        f"{'MB':>6} {'documents':>10} {'whole s':>8} {'MB/s':>6} {'peak MB':>8}  seconds by stage"
    )
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            corpus = Path(directory) / "corpus.jsonl"
            make_corpus(corpus, args.records, megabytes * 1_000_000)
            runs = []
            for repeat in range(args.repeats):
                folder = Path(directory) / str(repeat)
                folder.mkdir()
                runs.append(measure(folder, corpus, processes=args.processes))
        totals = [sum(timed.seconds.values()) for timed, _ in runs]
        seconds = statistics.median(totals)
        timed, documents = runs[totals.index(sorted(totals)[len(totals) // 2])]
        row = {
            "megabytes": megabytes, "n_documents": documents["n_documents"],
            "n_dropped_by_reason": documents["n_dropped_by_reason"], "wall_s": seconds,
            "wall_s_min": min(totals), "wall_s_max": max(totals),
            "megabytes_per_s": megabytes / seconds, "peak_bytes": timed.peak_bytes,
            "seconds": timed.seconds,
        }  # fmt: skip
        rows.append(row)
        stages = ", ".join(f"{name} {s:.1f}" for name, s in timed.seconds.items())
        peak = max(timed.peak_bytes.values()) / 1e6
        print(f"{megabytes:6} {row['n_documents']:10,} {seconds:8.1f} {row['megabytes_per_s']:6.1f}"
              f" {peak:8.0f}  {stages}")  # fmt: skip
    print(json.dumps({"processes": args.processes, "repeats": args.repeats, "rows": rows}))


if __name__ == "__main__":
    main()
