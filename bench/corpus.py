"""Grow a corpus of prompt and completion records of any size out of the real data.

    python bench/corpus.py --megabytes 200 --output corpus.jsonl [--seed 0] [--processes 2]

Repeating a small corpus would flatter tokenizers that keep a cache of words. So the first pass
over the real records writes them as they are, and every later pass changes them by the seed:
numbers become other numbers, and a share of the words becomes others, drawn by rank from a list
that begins with the real words by frequency and never ends, since a word of any higher rank is
made of two halves of real ones. The ranks follow Zipf-Mandelbrot, so that distinct words go on
growing with the size as they do in real text (Heaps' law). Some records are joined to one document,
so that lengths vary. A document of a later pass ends its prompt with a number: all differ.

The text depends on seed and size alone. Prints what was made; the last line is JSON.
"""

import argparse
import itertools
import json
import multiprocessing
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WORD = re.compile(r"[^\W\d_]+")
SLOT = re.compile(r"[A-Za-z]{4,}|[0-9]+")
# Of the words of four letters or more, so many become others; and their ranks' distribution,
# P(rank) ~ (1 + rank / FLAT) ** -FALL. Fitted to the growth of distinct words in the real data.
CHANGED_FRACTION = 0.15
FLAT, FALL = 6000.0, 1.83
# Records in a document: 1 + a Lomax variable of this scale and shape, rounded down; one document in
# so many gets that many more.
JOINED_SCALE, JOINED_SHAPE = 3.0, 3.0
ONE_LONG_IN, N_LONG = 4000, 150
N_BLOCK = 8000  # records that one job takes, whoever runs it

Pair = tuple[str, str]
Record = dict[str, Any]
# file, and how its records give a prompt and a completion; empty ones are left out
SOURCES: dict[str, Callable[[Record], Pair]] = {
    "expert-sql/wikisql/records.jsonl": lambda r: (f"{r['schema']}\n{r['question']}", r["sql"]),
    "expert-sql/defog/records.jsonl": lambda r: (f"{r['question']}\n{r['instructions']}", r["sql"]),
    "expert-neo4j/records.jsonl": lambda r: (r["question"], r["cypher"]),
    "expert-neo4j/schemas.jsonl": lambda r: (r["schema"], r["structured_schema"]),
    "expert-typescript/mbtsp.jsonl": lambda r: (r["prompt"], r["canonical_solution"] or ""),
    "expert-json/schemastore/records.jsonl": lambda r: (r["description"], pretty(r["document"])),
    "expert-json/schemastore/schemas.jsonl": lambda r: (r["schema_name"], pretty(r["schema"])),
    "expert-json/test-suite/draft2020-12.jsonl": lambda r: (
        f"{r['group']}: {r['description']}\n{pretty(r['schema'])}",
        pretty(r["data"]),
    ),
    "phase1a/dolly/records.jsonl": lambda r: (f"{r['instruction']}\n{r['context']}", r["response"]),
    "phase1a/natural-instructions/records.jsonl": lambda r: (
        f"{r['definition']}\n{r['input']}",
        r["output"][0],
    ),
    "phase1a/tldr/records.jsonl": lambda r: (
        f"{r['command']}: {r['description']}",
        "\n".join(f"{e['description']}\n    {e['command']}" for e in r["examples"]),
    ),
    "phase1c-cot/gsm8k/train.jsonl": lambda r: (r["question"], r["answer"]),
    "phase1c-cot/aqua/records.jsonl": lambda r: (
        "\n".join((r["question"], *r["options"])),
        r["rationale"],
    ),
    "chat-tools/sgd/records.jsonl": lambda r: (
        r["turns"][0]["utterance"],
        "\n".join(f"{t['speaker']}: {t['utterance']}" for t in r["turns"][1:]),
    ),
}


class Grower:
    """Makes any block of the corpus from the real records, the seed and the block's number."""

    def __init__(self, pairs: list[Pair], seed: int) -> None:
        self.pairs, self.seed = pairs, seed
        counts = Counter(itertools.chain.from_iterable(map(WORD.findall, map("\n".join, pairs))))
        words = [(-n, word) for word, n in counts.items() if SLOT.fullmatch(word)]
        self.words = [word for _, word in sorted(words)]

    def block(self, number: int) -> list[bytes]:
        rng = np.random.default_rng((self.seed, 2, number))
        indices = iter(range(number * N_BLOCK, (number + 1) * N_BLOCK))
        draws = self.draws(rng)
        pairs = []
        n_joined = 1 + (rng.pareto(JOINED_SHAPE, N_BLOCK) * JOINED_SCALE).astype(int)
        n_joined[rng.integers(0, ONE_LONG_IN, N_BLOCK) == 0] += N_LONG
        for n in n_joined.tolist():
            taken = list(itertools.islice(indices, n))
            if not taken:
                break
            pairs.append(self.document(taken, draws))
        return [orjson.dumps({"prompt": p, "completion": c}) + b"\n" for p, c in pairs]

    def document(self, indices: list[int], draws: Iterator[int]) -> Pair:
        """Join records to one document; ``indices`` count through all passes."""
        n = len(self.pairs)
        pairs = [self.pairs[self.order(i // n)[i % n]] for i in indices]
        prompt, completion = pairs[0]
        completion = "\n\n".join((completion, *map("\n".join, pairs[1:])))
        if indices[-1] >= n:
            change = self.changer(draws)
            prompt, completion = SLOT.sub(change, prompt), SLOT.sub(change, completion)
            prompt = f"{prompt} ({indices[0]})"
        return prompt, completion

    def order(self, number: int) -> np.ndarray:
        """Return the order of the records in one pass."""
        if getattr(self, "_pass", None) != number:
            self._pass = number
            self._order = np.random.default_rng((self.seed, 1, number)).permutation(len(self.pairs))
        return self._order

    def draws(self, rng: np.random.Generator) -> Iterator[int]:
        """Return a rank for every word and number in turn; below 0 says that a word stays."""
        while True:
            ranks = np.minimum(rng.pareto(FALL - 1, 1 << 16) * FLAT, 2.0**53).astype(np.int64)
            ranks[rng.random(len(ranks)) >= CHANGED_FRACTION] -= 1 << 54
            yield from ranks.tolist()

    def changer(self, draws: Iterator[int]) -> Callable[[re.Match[str]], str]:
        """Make the function that changes a word or a number."""

        def change(match: re.Match[str]) -> str:
            old, rank = match[0], next(draws)
            if old[0] <= "9":
                # A number of as many digits; its first is no 0 where the old one's was none.
                shift = old[0] != "0"
                digits = f"{(rank + (1 << 54)) * 2654435761 % 10 ** len(old):0{len(old)}}"
                return f"{int(digits[0]) % 9 + 1}{digits[1:]}" if shift else digits
            if rank < 0:
                return old
            new = self.word(rank)
            return new.capitalize() if old[0].isupper() else new

        return change

    def word(self, rank: int) -> str:
        """Return the word of a rank: a real one, or the halves of two."""
        n = len(self.words)
        if rank < n:
            return self.words[rank]
        # A full cycle over all pairs of real words: each rank has a pair of its own.
        first, second = divmod((rank * 6364136223846793005 + 1442695040888963407) % (n * n), n)
        a, b = self.words[first], self.words[second]
        return a[: (len(a) + 1) // 2] + b[len(b) // 2 :].lower()


def pretty(value: Any) -> str:
    """Write a JSON value as a person would."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def real_pairs(data: Path) -> list[Pair]:
    pairs: dict[Pair, None] = {}
    for name, make in SOURCES.items():
        for line in (data / name).read_bytes().splitlines():
            prompt, completion = make(orjson.loads(line))
            if prompt.strip() and completion.strip():
                pairs[prompt.strip(), completion.strip()] = None
    return list(pairs)


_grower: Grower  # of the process; workers inherit it


def make_block(number: int) -> list[bytes]:
    return _grower.block(number)


def blocks(processes: int) -> Iterator[list[bytes]]:
    """Make blocks without end, in order, a few ahead of what is taken."""
    # Forked, so that the workers have the real records without reading them again.
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        ahead = deque(pool.apply_async(make_block, (i,)) for i in range(2 * processes))
        for number in itertools.count(2 * processes):
            block = ahead.popleft().get()
            ahead.append(pool.apply_async(make_block, (number,)))
            yield block


def make_corpus(
    path: Path, *, n_bytes: int, data: Path = DATA, seed: int = 0, processes: int = 2
) -> Record:
    """Write a corpus of ``n_bytes`` or a little more; say what is in it."""
    global _grower
    _grower = Grower(real_pairs(data), seed)
    size, n_characters = 0, []
    with path.open("wb") as stream:
        for block in blocks(processes):
            for line in block:
                stream.write(line)
                size += len(line)
                n_characters.append(len(line.decode()))
                if size >= n_bytes:
                    percentiles = np.percentile(n_characters, [5, 50, 90, 99, 100])
                    return {
                        "n_bytes": size, "n_records": len(n_characters), "seed": seed,
                        "characters_p5_p50_p90_p99_max": percentiles.astype(int).tolist(),
                    }  # fmt: skip
    raise AssertionError("blocks never end")


def main() -> None:
    """Make a corpus, or describe the real data."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"skipped: {DATA} is not here; the corpus grows out of the real data")
    n_bytes = args.megabytes * 1_000_000
    made = make_corpus(args.output, n_bytes=n_bytes, seed=args.seed, processes=args.processes)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
