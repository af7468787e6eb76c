"""Sources are described for the report and the model card, and cut into shards."""

from pathlib import Path

import pytest

from expertflow.core.errors import DataError
from expertflow.data.records import DataFile, DatasetManifest, ExpertLock, SourceLock, SourceRecord
from expertflow.data.shards import find_datasets


def data_file(path: Path, *, n_records: int | None = 2, notes: tuple[str, ...] = ()) -> DataFile:
    path.write_text("{}\n")
    return DataFile(
        path=str(path), format="jsonl", compression=None, n_bytes=3, n_records=n_records,
        sha256=path.name, notes=notes,
    )  # fmt: skip


def found(*files: DataFile, stated: str | None = "MIT") -> DatasetManifest:
    lock = SourceLock(name="s", kind="hub", n_shards=3, revision=None, identity={}, files=())
    record = SourceRecord(
        name="s", preset="demo", kind="hub", revision="c", card_licence="mit", n_shards=3,
        files=files, artefacts={},
    )  # fmt: skip
    locks = ExpertLock(expert="e", sources=(lock,))
    return find_datasets(
        expert="e", preset="demo", licences={"s": stated}, lock=locks, sources=[record]
    )


def test_files_of_a_source_add_up_and_their_notes_are_gathered(tmp_path: Path) -> None:
    a = data_file(tmp_path / "a", notes=("zstd", "odd"))
    b = data_file(tmp_path / "b", notes=("odd",))
    manifest = found(a, b)
    (source,) = manifest.sources
    assert (source.n_files, source.n_bytes, source.n_records) == (2, 6, 4)
    assert source.notes == ("odd", "zstd")
    assert [(s.shard, s.index, s.n_shards) for s in manifest.shards] == [
        ("000", 0, 3), ("001", 1, 3), ("002", 2, 3),
    ]  # fmt: skip
    assert source.sha256 != found(b, a).sources[0].sha256
    unknown = found(a, data_file(tmp_path / "c", n_records=None))
    assert unknown.sources[0].n_records is None


@pytest.mark.parametrize(
    ("stated", "licence", "notes"),
    [
        ("MIT", "MIT", ()),
        (None, "mit", ("licence mit: from the data set card",)),
        ("CC0-1.0", "CC0-1.0", ("the data set card says mit",)),
    ],
)
def test_the_manifests_licence_wins_and_the_card_is_noted(
    tmp_path: Path, stated: str | None, licence: str, notes: tuple[str, ...]
) -> None:
    (source,) = found(data_file(tmp_path / "a"), stated=stated).sources
    assert (source.licence, source.notes) == (licence, notes)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    file = data_file(tmp_path / "a")
    Path(file.path).unlink()
    with pytest.raises(DataError, match="a: source s lost it; fetch it again"):
        found(file)
