"""What is packed has to be what the records say: a box would find out only after it was rented."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.records import read_record
from expertflow.data.records import DocumentsRecord, ExpertLock, ShardRecord
from expertflow.data.shards import shard_names
from expertflow.rental.bundle.records import MODEL, Member
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import ModelRecord

Fact = tuple[Path, Path, str]


def check_made(
    results: Path, members: Iterable[Member], *, lock: ExpertLock, model: ModelRecord
) -> None:
    """Compare what was hashed to be packed with what its records say.

    Raises:
        DataError: a file is another one by now.
    """
    found = {member.name: member.sha256 for member in members}
    for file, record, sha256 in _facts(results, lock, model):
        if found.get(file.as_posix()) != sha256:
            raise _another(file, record)
    folder = f"{results.as_posix()}/{MODEL}/"
    names = sorted(n for n in found if n.startswith(folder) and n.endswith(".safetensors"))
    # A hub's or local model's weights are not packed unless asked for; who opens it checks them.
    if names and sha256_json([found[name] for name in names]) != model.weights_sha256:
        raise _another(results / MODEL, results / "model.json")


def _facts(results: Path, lock: ExpertLock, model: ModelRecord) -> Iterator[Fact]:
    """Give files, the records that speak of them, and the hashes that these give."""
    packing = read_record(PackingRecord, results / "packing.json")
    for split, packed in (("train", packing.train), ("held_out", packing.held_out)):
        yield results / "packed" / split / ROWS_FILE, results / "packing.json", packed.sha256
    documents = read_record(DocumentsRecord, results / "documents.json")
    yield results / "keep.arrow", results / "documents.json", documents.sha256
    for source in lock.sources:
        for shard in shard_names(source.n_shards):
            record = results / "documents" / source.name / f"{shard}.json"
            yield record.with_suffix(".arrow"), record, read_record(ShardRecord, record).sha256
    yield results / MODEL / "tokenizer.json", results / "model.json", model.tokenizer_sha256


def _another(file: Path, record: Path) -> DataError:
    return DataError(f"{file}: is not what {record} says; delete {record} and run again")
