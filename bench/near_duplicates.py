"""Compare ways to sign documents for near-duplicate detection, and time the search for pairs.

    python bench/near_duplicates.py            # beside ours: rensa and datasketch, where installed

Documents of 100 words, runs of 5 words, 128 permutations; medians over the repeats, one thread.
Ours hashes words and runs with numpy on the text's bytes; the libraries take a list of runs, whose
making counts. The error is the root mean square of the estimate's distance from the true Jaccard
similarity over pairs at 0.8; 0.035 is what 128 permutations can do. The search runs on random
signatures of which a tenth is near an earlier one. Prints tables; the last line is JSON.
"""

import importlib
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.data.near import NearIndex, Signer
from expertflow.data.settings import NearSpec

SPEC = NearSpec(threshold=0.8, n_words=5, n_permutations=128)
N_DOCUMENTS, N_PAIRS, REPEATS = 2000, 500, 5
SEARCHED = [100_000, 1_000_000]


def runs(text: str) -> list[str]:
    """List the runs of words of a text, as the libraries want them."""
    words, n = text.casefold().split(), SPEC.n_words
    return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]


def signers() -> dict[str, Callable[[str], Sequence[int]]]:
    """Give the ways to sign that are installed here."""
    signer = Signer(SPEC)
    ways: dict[str, Callable[[str], Any]] = {
        "ours": lambda text: np.frombuffer(signer.signature(text), "<u4")
    }
    if rensa := installed("rensa"):

        def by_rensa(text: str) -> Any:
            sketch = rensa.RMinHash(num_perm=SPEC.n_permutations, seed=1)
            sketch.update(runs(text))
            return sketch.digest()

        ways["rensa"] = by_rensa
    if datasketch := installed("datasketch"):

        def by_datasketch(text: str) -> Any:
            sketch = datasketch.MinHash(num_perm=SPEC.n_permutations, seed=1)
            sketch.update_batch([run.encode() for run in runs(text)])
            return sketch.hashvalues

        ways["datasketch"] = by_datasketch
    return ways


def installed(name: str) -> Any:
    """Import a library, or give nothing."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def documents(n: int) -> list[str]:
    """Make texts of 100 words."""
    rng = random.Random(0)
    return [" ".join(f"word{rng.randrange(5000)}" for _ in range(100)) for _ in range(n)]


def pairs(n: int) -> list[tuple[str, str]]:
    """Make pairs of texts that share 8 of 9 runs each, so 0.8 of all."""
    made = []
    for number in range(n):
        words = [f"{number}w{i}" for i in range(124)]
        made.append((" ".join(words[:112]), " ".join(words[12:])))
    return made


def signatures(n: int) -> np.ndarray:
    """Make random signatures; every tenth shares 0.9 of an earlier one."""
    rng = np.random.default_rng(0)
    made = rng.integers(0, 2**32, (n, SPEC.n_permutations), dtype=np.uint32)
    for row in range(10, n, 10):
        made[row] = np.where(rng.random(SPEC.n_permutations) < 0.9, made[row - 5], made[row])
    return made


def search_s(n: int) -> tuple[float, int]:
    """Time the search among ``n`` documents; count what it finds."""
    made = signatures(n)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with NearIndex(SPEC, n_documents=n, folder=Path(folder)) as index:
            for first in range(0, n, 2000):
                index.add(made[first : first + 2000])
            n_near = int((index.leaders() >= 0).sum())
    return time.perf_counter() - start, n_near


def main() -> None:
    """Time signing and searching."""
    texts, alike = documents(N_DOCUMENTS), pairs(N_PAIRS)
    first, second = (set(runs(text)) for text in alike[0])
    true = len(first & second) / len(first | second)
    rows = []
    print(f"{'signer':>12} {'documents/s':>12} {'error':>7}")
    for name, sign in signers().items():
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            for text in texts:
                sign(text)
            times.append(time.perf_counter() - start)
        estimates = [np.mean(np.equal(sign(a), sign(b))) for a, b in alike]
        error = float(np.sqrt(np.mean((np.array(estimates) - true) ** 2)))
        per_s = N_DOCUMENTS / statistics.median(times)
        print(f"{name:>12} {per_s:12,.0f} {error:7.3f}")
        rows.append({"signer": name, "documents_per_s": per_s, "error": error})
    searches = []
    print(f"{'documents':>12} {'search s':>12} {'near':>7}")
    for n in SEARCHED:
        seconds, n_near = search_s(n)
        print(f"{n:12,} {seconds:12.2f} {n_near:7,}")
        searches.append({"n_documents": n, "search_s": seconds, "n_near": n_near})
    print(json.dumps({"signers": rows, "searches": searches}))


if __name__ == "__main__":
    main()
