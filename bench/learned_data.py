"""Arrange the real data of ``learned.py`` as the manifests in docs/examples expect it."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from learned_variants import variants
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from expertflow.data.documents import group_hash
from expertflow.tokens.tokenizer import learn_merges, save_tokenizer

Record = dict[str, Any]
N_PLACES = 2**64  # of groups; the first in order are held out
WIKISQL_TOKENS = 4000
WIKISQL_VARIANTS = 6
# Letters, digits, and everything between them: a word has the same tokens after a space, in a
# question, as after a quote, in a query. That and lower case let a small model copy words.
PIECES = r"\p{L}+|\p{N}+|[^\p{L}\p{N}]+"
# Longer JSON schemas and documents are left out, so that rows stay short.
MAX_SCHEMA_CHARACTERS, MAX_DOCUMENT_CHARACTERS = 3000, 500


def lay_out(name: str, source: Path, target: Path, eval_fraction: float) -> None:
    """Write or link the files that the manifest of this name reads into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    LAYOUTS[name](source, target, eval_fraction)


def _wikisql(source: Path, target: Path, eval_fraction: float) -> None:
    _link(target / "wikisql", source / "expert-sql" / "wikisql")
    edge = math.ceil(eval_fraction * N_PLACES)
    records = _read(target / "wikisql" / "records.jsonl")
    # Held-out questions affect no token or variant, and a variant stays on its table's side.
    trained = [record for record in records if group_hash(record["table_id"]) >= edge]
    texts = (f"{record['schema']}\n{record['question']}\n{record['sql']}" for record in trained)
    database = target / "wikisql" / "tables.sqlite"
    varied = variants(trained, database, n_each=WIKISQL_VARIANTS, seed=1)
    _write(target / "wikisql-varied" / "records.jsonl", varied)
    (target / "tokenizer").mkdir(exist_ok=True)
    save_tokenizer(word_tokenizer(texts, WIKISQL_TOKENS), target / "tokenizer")


def word_tokenizer(texts: Iterable[str], n_tokens: int) -> Tokenizer:
    """Train a byte-level BPE on lower-case words that are split the same everywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return learn_merges(tokenizer, texts, vocab_size=n_tokens)


def _gsm8k(source: Path, target: Path, _: float) -> None:
    _link(target / "gsm8k", source / "phase1c-cot" / "gsm8k")


def _typescript(source: Path, target: Path, _: float) -> None:
    _link(target / "typescript", source / "expert-typescript")


def _json(source: Path, target: Path, _: float) -> None:
    folder = source / "expert-json" / "schemastore"
    schemas = {
        record["schema_name"]: record["schema"] for record in _read(folder / "schemas.jsonl")
    }

    def join_records() -> Iterator[Record]:
        for record in _read(folder / "records.jsonl"):
            schema = json.dumps(schemas[record["schema_name"]], ensure_ascii=False)
            document = json.dumps(record["document"], ensure_ascii=False)
            short = len(schema) <= MAX_SCHEMA_CHARACTERS
            if record["valid"] and short and len(document) <= MAX_DOCUMENT_CHARACTERS:
                yield {**record, "schema": schema, "document": document}

    _write(target / "json" / "records.jsonl", join_records())


def _cypher(source: Path, target: Path, _: float) -> None:
    folder = source / "expert-neo4j"
    schemas = {record["database"]: record["schema"] for record in _read(folder / "schemas.jsonl")}
    records = _read(folder / "records.jsonl")
    joined = ({**record, "schema": schemas[record["database"]]} for record in records)
    _write(target / "cypher" / "records.jsonl", joined)


LAYOUTS: dict[str, Callable[[Path, Path, float], None]] = {
    "wikisql": _wikisql,
    "gsm8k": _gsm8k,
    "json": _json,
    "typescript": _typescript,
    "cypher": _cypher,
}


def _link(path: Path, source: Path) -> None:
    if not source.is_dir():
        raise SystemExit(f"{source}: no such folder; set the folder of the data with --data")
    path.unlink(missing_ok=True)
    path.symlink_to(source.resolve())


def _read(path: Path) -> Iterator[Record]:
    if not path.is_file():
        raise SystemExit(f"{path}: no such file; set the folder of the data with --data")
    return (json.loads(line) for line in path.read_bytes().split(b"\n") if line)


def _write(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
