"""Arrange the real data of ``learned.py`` as the manifests in docs/examples expect it."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from learned_variants import variants
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from expertflow.core.files import read_json_lines
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


# By name: the folder of its data.
FOLDERS = {
    "wikisql": "expert-sql/wikisql",
    "gsm8k": "phase1c-cot/gsm8k",
    "json": "expert-json/schemastore",
    "typescript": "expert-typescript",
    "cypher": "expert-neo4j",
}


def lay_out(name: str, source: Path, target: Path, eval_fraction: float) -> None:
    """Write or link the files that the manifest of this name reads into ``target``."""
    folder = source / FOLDERS[name]
    if not folder.is_dir():
        raise SystemExit(f"{folder}: no such folder; set the folder of the data with --data")
    target.mkdir(parents=True, exist_ok=True)
    if name == "json":
        _write(target / "json", _short_documents(_with_schemas(folder, "schema_name")))
        return
    if name == "cypher":
        _write(target / "cypher", _with_schemas(folder, "database"))
        return
    (target / name).unlink(missing_ok=True)
    (target / name).symlink_to(folder.resolve())
    if name == "wikisql":
        _add_wikisql(target, eval_fraction)


def _add_wikisql(target: Path, eval_fraction: float) -> None:
    """Write variants of the training questions, and a tokenizer of their words."""
    edge = math.ceil(eval_fraction * N_PLACES)
    records = read_json_lines(target / "wikisql" / "records.jsonl")
    # Held-out questions affect no token or variant, and a variant stays on its table's side.
    trained = [record for record in records if group_hash(record["table_id"]) >= edge]
    texts = (f"{record['schema']}\n{record['question']}\n{record['sql']}" for record in trained)
    database = target / "wikisql" / "tables.sqlite"
    _write(target / "wikisql-varied", variants(trained, database, n_each=WIKISQL_VARIANTS, seed=1))
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


def _with_schemas(folder: Path, key: str) -> Iterator[Record]:
    """Yield a folder's records, each with the schema that it names."""
    schemas = {one[key]: one["schema"] for one in read_json_lines(folder / "schemas.jsonl")}
    for record in read_json_lines(folder / "records.jsonl"):
        yield {**record, "schema": schemas[record[key]]}


def _short_documents(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the valid records that are short, with schema and document as JSON texts."""
    for record in records:
        schema, document = (
            json.dumps(record[key], ensure_ascii=False) for key in ("schema", "document")
        )
        is_short = len(schema) <= MAX_SCHEMA_CHARACTERS and len(document) <= MAX_DOCUMENT_CHARACTERS
        if record["valid"] and is_short:
            yield {**record, "schema": schema, "document": document}


def _write(folder: Path, records: Iterable[Record]) -> None:
    folder.mkdir(exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / "records.jsonl").write_text("".join(lines), encoding="utf-8")
