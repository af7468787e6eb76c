"""Our own stages as commands, from a JSONL corpus to packed rows."""

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from measured import Processes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow" / "scripts"))

from expertflow.core.files import canonical_json
from expertflow.core.hashes import HashCache
from expertflow.core.records import read_record, to_json
from expertflow.data.lock import lock_sources, write_lock
from expertflow.data.records import DatasetManifest
from expertflow.data.settings import DeduplicateSpec, FetchSpec, PrepareSpec, SourceSpec
from expertflow.data.shards import shard_names, token_shards
from expertflow.tokens.records import PackingSpec, TokenizerSpec, TokenSpec

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
EXPERT = "bench"


class Chain:
    """The stages of one run, in a folder of its own."""

    def __init__(self, folder: Path, corpus: Path, tokenizer: Path, *, processes: int) -> None:
        self.folder, self.tokenizer, self.processes = folder, tokenizer, processes
        self.rows = folder / "rows"
        self.source = SourceSpec(
            name="s", kind="local", path=str(corpus), prompt="{prompt}", completion="{completion}"
        )

    def prepare(self, processes: Processes) -> None:
        """Lock, fetch, prepare and deduplicate.

        The lock is taken in this process, as the workflow takes it in its main process: the time
        counts, CPU time and memory do not.
        """
        at = self.folder
        lock = lock_sources(
            EXPERT, (self.source,), hashes=HashCache(at / "hashes.json"), generator_digest=str
        )
        write_lock(at / "lock.json", lock)
        locked = ("--lock", at / "lock.json")
        fetch = FetchSpec(source=self.source, preset="full")
        fetched = ("--directory", at / "s", "--output", at / "s.json")
        processes.run(command("fetch_source", to_json(fetch), *locked, *fetched))
        named = {"expert": EXPERT, "preset": "full", "licenses": {"s": None}}
        found = ("--sources", at / "s.json", "--output", at / "datasets.json")
        processes.run(command("find_datasets", named, *found))
        spec = PrepareSpec(
            source=self.source, system_prompt=None, supervise="completion", evaluation_fields=(),
            on_reject="skip", near=None, benchmarks=(),
        )  # fmt: skip
        jobs = []
        for shard in self.shards():
            place = str(at / shard)
            output = ("--documents", f"{place}.arrow", "--rejected", f"{place}.rejected.jsonl")
            inputs = ("--source", at / "s.json", "--shard", shard)
            jobs.append(
                command(
                    "prepare_shard", to_json(spec), *inputs, *output, "--output", f"{place}.json"
                )
            )
        processes.run(*jobs, at_once=self.processes)
        deduplicate = DeduplicateSpec(
            eval_fraction=0.02, max_documents=None, seed=0, max_rejected_fraction=0.01, near=None,
            weights={}, max_per_source={}, max_per_category=None, category_caps={},
        )  # fmt: skip
        shards = [at / f"{shard}.json" for shard in self.shards()]
        output = ("--keep", at / "keep.arrow", "--output", at / "documents.json")
        arguments = ("--expert", EXPERT, "--shards", *shards, *output)
        processes.run(command("deduplicate_documents", to_json(deduplicate), *arguments))

    def tokenize_and_pack(self, processes: Processes, *, length: int) -> None:
        """Tokenize every shard, one at a time, and pack all."""
        at = self.folder
        engines = ("fastokens", "tokenizers")
        tokens = TokenSpec(
            engine="auto", versions={name: metadata.version(name) for name in engines}
        )
        jobs, records = [], []
        for name, shards in token_shards(len(self.shards())).items():
            records.append(at / f"{name}.tokens.json")
            inputs = ("--name", name, "--shards", *(at / f"{shard}.json" for shard in shards))
            made = ("--tokenizer", self.tokenizer, "--store", at / "store")
            outputs = ("--ids", at / f"{name}.ids", "--index", at / f"{name}.index.arrow")
            outputs += ("--output", records[-1])
            job = command("pretokenize_shard", to_json(tokens), *inputs, *made, *outputs)
            # As the rule starts it.
            jobs.append(["env", "MALLOC_ARENA_MAX=1", *job])
        processes.run(*jobs)
        packing = PackingSpec(
            sequence_length_tokens=length, packing="bfd", overflow="split", seed=0,
            max_rejected_fraction=0.01,
        )  # fmt: skip
        inputs = ("--expert", EXPERT, "--shards", *records, "--keep", at / "keep.arrow")
        outputs = ("--directory", self.rows, "--output", at / "packing.json")
        processes.run(command("pack_sequences", to_json(packing), *inputs, *outputs))

    def shards(self) -> list[str]:
        manifest = read_record(DatasetManifest, self.folder / "datasets.json")
        return shard_names(manifest.sources[0].n_shards)

    def count_tokens(self) -> dict[str, int]:
        packing = json.loads((self.folder / "packing.json").read_text())
        splits = (packing["train"], packing["held_out"])
        return {
            "n_rows": sum(split["n_sequences"] for split in splits),
            "n_tokens": sum(split["n_tokens"] for split in splits),
        }


def command(script: str, spec: Any, *arguments: object) -> list[str]:
    settings = ("--spec", canonical_json(spec), "--code", EXPERT)
    return [sys.executable, str(SCRIPTS / f"{script}.py"), *settings, *map(str, arguments)]


def prepare_tokenizer(folder: Path, tokenizer: Path) -> Path:
    """Make the record of a given tokenizer with ChatML; it is not measured."""
    spec = TokenizerSpec(
        model="builtin:tiny-qwen3", revision=None, tokenizer=str(tokenizer), vocab_size=300,
        chat_template="chatml", text_special_tokens="plain", content={},
    )  # fmt: skip
    output = ("--directory", folder / "tokenizer", "--output", folder / "tokenizer.json")
    Processes(folder / "tokenizer.log").run(command("prepare_tokenizer", to_json(spec), *output))
    return folder / "tokenizer.json"


def sizes(folder: Path) -> Iterator[int]:
    """Return the bytes of each file below a folder."""
    return (path.stat().st_size for path in folder.rglob("*") if path.is_file())
