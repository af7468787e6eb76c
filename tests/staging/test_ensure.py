"""The place content is read from, chosen by the workflow and again where training runs."""

import errno
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_content import is_copy, make_model, make_rows, model_content, store_at
from msgspec import Struct, field
from msgspec.structs import replace
from support import wait_for

from expertflow.core.errors import DataError, HardwareError, TrainingError, TransientError
from expertflow.hardware import disk, probe
from expertflow.staging import ensure, store
from expertflow.staging.content import Content, read_content, weights_key
from expertflow.staging.ensure import choose_place, open_staged, plan_staging
from expertflow.staging.records import StageSpec, StagingRecord
from expertflow.staging.store import prune_copies


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Treat a test's folders as a disk even if they are in memory, which is never staged."""
    if disk.file_system(tmp_path) in disk.IN_MEMORY:
        monkeypatch.setattr(disk, "file_system", lambda _: "ext4")


@pytest.fixture
def rows(tmp_path: Path) -> Content:
    return make_rows((tmp_path / "packed").resolve())


@pytest.fixture
def model(tmp_path: Path) -> Content:
    return make_model(tmp_path / "model")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return disk_at(tmp_path / "scratch")


def disk_at(folder: Path) -> Path:
    folder.mkdir()
    return folder


def plan(rows: Content, model: Content, scratch: object = "auto", **more: bool) -> StagingRecord:
    spec = StageSpec(scratch=str(scratch), **more)
    return plan_staging(expert="e", spec=spec, rows=rows, weights=model)


def test_training_finds_and_locks_copied_rows_and_weights(
    tmp_path: Path, rows: Content, model: Content, scratch: Path
) -> None:
    record = plan(rows, model, scratch)
    assert [record.rows.action, record.weights.action] == ["copied", "copied"]
    assert record.rows.n_bytes_copied == rows.n_bytes
    assert record.rows.copy_bytes_per_s is not None
    (tmp_path / "results" / "e").mkdir(parents=True)
    nothing = {"rows": {"target": str(store_at(scratch) / "k" / "files")}, "weights": {}}
    (tmp_path / "results" / "e" / "staging.json").write_text(json.dumps(nothing))
    with open_staged(record) as places:
        assert [note.action for note in places.staged] == ["reused", "reused"]
        assert is_copy(rows, places.rows) and is_copy(model, places.weights)
        assert prune_copies(tmp_path / "results") == []
    assert plan(rows, model, scratch, weights=False).weights.reason == "stage_weights is false"
    kept = {store_at(scratch) / content.key for content in (rows, model)}
    assert set(prune_copies(tmp_path / "results")) == kept


def test_content_that_fits_into_memory_is_read_beforehand_by_training(
    rows: Content, model: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "file_system", lambda _: "nfs")
    read: list[list[Path]] = []
    monkeypatch.setattr(ensure, "_will_need", read.append)
    record = plan(rows, model)
    assert {record.rows.action, record.weights.action} == {"pre_read"}
    assert not read
    with open_staged(record) as places:
        assert places.rows == rows.source
    # It is read in the background.
    wait_for(lambda: len(read) == 2)
    assert sorted(map(len, read)) == [len(model.sizes), len(rows.sizes)]


def test_a_retry_on_another_machine_stages_again_or_reads_the_source(
    tmp_path: Path, rows: Content, model: Content,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("JOB_DISK", str(disk_at(tmp_path / "job-1")))
    record = plan(rows, model, "$JOB_DISK")
    shutil.rmtree(tmp_path / "job-1")
    monkeypatch.setenv("JOB_DISK", str(disk_at(tmp_path / "job-2")))
    with open_staged(record) as places:
        assert places.rows.is_relative_to(tmp_path / "job-2")
        assert [note.action for note in places.staged] == ["copied", "copied"]
    shutil.rmtree(tmp_path / "job-2")
    with open_staged(record) as places:
        assert (places.rows, places.weights) == (rows.source, model.source)
        assert all(note.is_fallback for note in places.staged)
    assert "no such directory" in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EDQUOT, "no more"), "scratch: disk quota exceeded, more than "),
        (OSError(errno.EIO, "it fails"), "it fails"),
        (HardwareError("make prune removes"), "make prune removes"),
    ],
)
def test_a_disk_that_fails_midway_is_not_used(
    rows: Content, model: Content, scratch: Path, error: Exception, message: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    copy = store._copy_file

    def fail(source: Path, *arguments: Any) -> tuple[str, str]:
        if source.is_relative_to(rows.source):
            raise error
        return copy(source, *arguments)

    monkeypatch.setattr(store, "_copy_file", fail)
    record = plan(rows, model, scratch)
    assert (record.rows.target, record.rows.is_fallback) == (None, True)
    assert message in record.rows.reason
    assert record.weights.action == "copied"
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    left = [path.name for path in store_at(scratch).iterdir() if path.is_dir()]
    assert left == [model.key]


def test_lost_copies_are_reported(rows: Content, model: Content, scratch: Path) -> None:
    record = plan(rows, model, scratch)
    for error in (FileNotFoundError("gone"), TrainingError("cannot be loaded")):
        with pytest.raises(TransientError, match="vanished while being read; run again"):
            with open_staged(record) as places:
                shutil.rmtree(places.weights)
                raise error
        with open_staged(record) as places:
            assert [note.action for note in places.staged] == ["reused", "copied"]
        with pytest.raises(type(error), match=str(error)), open_staged(record):
            raise error


def test_links_are_followed(tmp_path: Path, rows: Content, model: Content, scratch: Path) -> None:
    for name in model.sizes:
        blob = (model.source / name).rename(tmp_path / f"blob-{name}")
        (model.source / name).symlink_to(blob)
    linked = model_content(model.source)
    assert linked.key == model.key, "the content decides, and not where it lies"
    record = plan(rows, linked, scratch)
    target = Path(record.weights.target or "")
    assert is_copy(linked, target)
    assert not any(path.is_symlink() for path in target.iterdir())
    (tmp_path / "blob-tokenizer.json").write_text('{"b": 2}')
    assert model_content(model.source).key != model.key, "a tokenizer is part of it"


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_dangling_link_is_named(tmp_path: Path, model: Content, name: str) -> None:
    with pytest.raises(DataError, match="no weights found"):
        read_content("weights", tmp_path / "none", "k")
    (model.source / name).unlink()
    (model.source / name).symlink_to(tmp_path / "blob")
    for read in (lambda: read_content("weights", model.source, "k"),
                 lambda: weights_key(model.source, "sha")):  # fmt: skip
        with pytest.raises(DataError, match=rf"{name}: a link to .*blob, which is missing"):
            read()


class Machine(Struct):
    """A machine with made-up file systems, memory and disks; counts what is measured."""

    file_systems: dict[Path, str]
    free_memory_bytes: int = 0
    source_speed: float | None = 0.2e9
    disks: dict[Path, float | None] = field(default_factory=dict)
    n_measured: int = 0

    def file_system(self, path: Path) -> str | None:
        known = [p for p in (path, *path.parents) if p in self.file_systems]
        return self.file_systems[known[0]] if known else "ext4"

    def measure_source(self, _: Path) -> tuple[float | None, str]:
        self.n_measured += 1
        return self.source_speed, "256 MiB"

    def describe(self, places: Any, *, measure: bool) -> list[dict[str, Any]]:
        assert measure
        return [
            {
                "path": str(path), "asked_by": why, "file_system": "xfs", "free_bytes": 1 << 40,
                "read_bytes_per_s": self.disks[path], "read_method": "256 MiB",
            }
            for path, why in places
        ]  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, rows: Content) -> Machine:
    made = Machine({rows.source: "nfs4"})
    monkeypatch.setattr(disk, "file_system", made.file_system)
    monkeypatch.setattr(disk, "measure_file", made.measure_source)
    monkeypatch.setattr(disk, "describe_places", made.describe)
    monkeypatch.setattr(disk, "list_candidates", lambda *_: [(p, "TMPDIR") for p in made.disks])
    monkeypatch.setattr(probe, "free_memory_bytes", lambda: made.free_memory_bytes)
    # All of a test's folders are on one device.
    monkeypatch.setattr(ensure, "_may_hold", lambda path, _: path.is_dir())
    return made


def test_content_that_needs_no_copy_is_read_in_place(
    tmp_path: Path, rows: Content, machine: Machine
) -> None:
    machine.disks = {disk_at(tmp_path / "unreadable"): None}
    for kind, spec, reason in (
        ("nfs4", StageSpec(scratch=None), "scratch is null"),
        ("tmpfs", StageSpec(scratch="/"), "it is in memory (tmpfs)"),
        ("zfs", StageSpec(), "a local disk already (zfs)"),
        ("nfs4", StageSpec(), "nfs4, and no disk on this machine could be measured"),
    ):
        machine.file_systems[rows.source] = kind
        scratch, note = choose_place(rows, spec)
        assert scratch is None and note.reason.endswith(reason)
        assert machine.n_measured == ("measured" in reason)


def test_content_below_half_of_memory_is_read_ahead(rows: Content, machine: Machine) -> None:
    for more, promised, is_ahead in ((1, 0, True), (0, 0, False), (2, 0, True), (2, 1, False)):
        machine.free_memory_bytes = 2 * rows.n_bytes + more
        action = choose_place(rows, StageSpec(), promised_bytes=promised)[1].action
        assert action == ("pre_read" if is_ahead else "read_in_place")


def test_a_copy_must_be_faster_than_its_source(
    tmp_path: Path, rows: Content, machine: Machine
) -> None:
    slow, fast = disk_at(tmp_path / "slow"), disk_at(tmp_path / "fast")
    for source, target, is_copied in (
        (0.2e9, 0.28e9, False),
        (0.2e9, 0.32e9, True),
        (None, 1e9, True),  # too small to measure: copied to any measured disk
    ):
        machine.source_speed, machine.disks = source, {slow: target / 2, fast: target}
        scratch, note = choose_place(rows, StageSpec())
        assert scratch == (fast if is_copied else None)
        # Measured, whatever the decision.
        assert (note.source_read_bytes_per_s, note.target_read_bytes_per_s) == (source, target)
        assert "nfs4" in note.reason and f"{target / 1e9:.2f} GB/s" in note.reason


def test_an_earlier_choice_is_kept(tmp_path: Path, rows: Content, machine: Machine) -> None:
    scratch = disk_at(tmp_path / "job-1")
    machine.disks = {scratch: 3e9}
    _, first = choose_place(rows, StageSpec())
    recorded = replace(first, target=str(store_at(scratch) / rows.key / "files"))
    n_measured = machine.n_measured
    assert choose_place(rows, StageSpec(), recorded=recorded) == (scratch, first)
    assert machine.n_measured == n_measured
    scratch.rename(tmp_path / "job-2")
    machine.disks = {tmp_path / "job-2": 3e9}
    assert choose_place(rows, StageSpec(), recorded=recorded)[0] == tmp_path / "job-2"


def test_an_explicit_directory_is_used(
    tmp_path: Path, rows: Content, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.free_memory_bytes = 1 << 40
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    scratch, note = choose_place(rows, StageSpec(scratch="$NODE_DISK"))
    assert (scratch, note.reason) == (tmp_path, "scratch is set")
    assert machine.n_measured == 0
    with pytest.raises(HardwareError, match=r"scratch \$NO_SUCH/x: no such directory"):
        choose_place(rows, StageSpec(scratch="$NO_SUCH/x"))
    machine.file_systems[tmp_path.resolve()] = "tmpfs"
    with pytest.raises(HardwareError, match="is in memory"):
        choose_place(rows, StageSpec(scratch=str(tmp_path)))


def test_memory_and_the_same_disk_are_not_candidates(tmp_path: Path, rows: Content) -> None:
    assert not ensure._may_hold(tmp_path, rows), "the same disk"
    assert not ensure._may_hold(tmp_path / "none", rows)
    (tmp_path / "refused").symlink_to("x" * 300)
    assert not ensure._may_hold(tmp_path / "refused", rows)
    if disk.file_system(Path("/dev/shm")) == "tmpfs":
        assert not ensure._may_hold(Path("/dev/shm"), rows)
