"""The ceiling: fastokens ``encode_batch_flat`` over all texts, already in memory, on all cores.

Reading and joining the texts does not count, nor does loading the tokenizer. The texts go in by
blocks, so that any corpus fits; the word cache is cold at the first. Prints JSON.
"""

import itertools
import json
import time

import fastokens
import orjson
import program

N_BLOCK = 20_000


def main() -> None:
    """Encode a corpus."""
    args = program.arguments(__doc__)
    engine = fastokens.Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    encode_s, n_bytes, n_tokens = 0.0, 0, 0
    with args.input.open("rb") as stream:
        while lines := list(itertools.islice(stream, N_BLOCK)):
            records = [orjson.loads(line) for line in lines]
            texts = [f"user\n{r['prompt']}" for r in records]
            texts += [f"assistant\n{r['completion']}" for r in records]
            n_bytes += sum(map(len, lines))
            start = time.perf_counter()
            ids, _ = engine.encode_batch_flat(texts, split_special_tokens=True)
            encode_s += time.perf_counter() - start
            n_tokens += len(ids) // 4
    print(json.dumps({"encode_s": encode_s, "n_bytes": n_bytes, "n_tokens": n_tokens}))


if __name__ == "__main__":
    main()
