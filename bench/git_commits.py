"""Measure how fast commits are read, and scanned for secrets, in one process.

    python bench/git_commits.py [BUNDLE]

BUNDLE is a bundle or repository; by default, the shared history next to the project. Each case
runs three times in a separate process; commits/s are medians. The message and the diff of each
commit are scanned for secrets. Memory is the peak of all runs, without git's processes.
Prints a table; the last line is JSON.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.core.process import peak_resident_bytes
from expertflow.data.secrets import find_secrets, load_detectors
from expertflow.data.sources.git import extract_commits
from expertflow.data.sources.git_options import GitOptions

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT.parent / "shared" / "data" / "git-history" / "json-schema-test-suite.bundle"
CASES = ("extract", "extract+secrets")
REPEATS = 3


def measure(bundle: Path, case: str) -> dict[str, float]:
    """Read a history once, with the detectors already loaded."""
    scan = case == "extract+secrets"
    if scan:
        load_detectors()
    n_commits = n_chars = n_with_secrets = 0
    start = time.perf_counter()
    for record in extract_commits(bundle, GitOptions(), Counter()):
        n_commits += 1
        n_chars += len(record["message"]) + len(record["diff"])
        if scan and find_secrets(f"{record['message']}\n{record['diff']}"):
            n_with_secrets += 1
    wall_s = time.perf_counter() - start
    return {
        "n_commits": n_commits,
        "n_chars": n_chars,
        "n_with_secrets": n_with_secrets,
        "commits_per_s": n_commits / wall_s,
        "peak_rss_mib": peak_resident_bytes() / 2**20,
    }


def repeat_case(bundle: Path, case: str) -> dict[str, float | str]:
    """Return the median speed and the highest memory of the repeats."""
    runs = []
    for _ in range(REPEATS):
        command = [sys.executable, __file__, str(bundle), case]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
    result = {key: max(run[key] for run in runs) for key in runs[0]}
    speed = statistics.median(run["commits_per_s"] for run in runs)
    return {"case": case, **result, "commits_per_s": speed}


def main() -> None:
    bundle = Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLE
    if len(sys.argv) > 2:
        print(json.dumps(measure(bundle, sys.argv[2])))
        return
    if not bundle.exists():
        print(f"skipped: {bundle} does not exist; pass a bundle or repository")
        print(json.dumps({"skipped": f"{bundle.name} does not exist"}))
        return
    rows = []
    print(f"{'case':>16} {'commits':>8} {'commits/s':>10} {'RSS MiB':>8} {'hits':>5}")
    for case in CASES:
        row = repeat_case(bundle, case)
        rows.append(row)
        print(
            f"{case:>16} {row['n_commits']:8} {row['commits_per_s']:10.0f} "
            f"{row['peak_rss_mib']:8.0f} {row['n_with_secrets']:5}"
        )
    print(json.dumps({"bundle": bundle.name, "n_repeats": REPEATS, "rows": rows}))


if __name__ == "__main__":
    main()
