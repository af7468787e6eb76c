"""Where content is read from: in place, from memory, or from a copy on the fastest disk."""

from pathlib import Path
from typing import Any

import pytest
from made_content import make_model, make_rows, store_at
from msgspec.structs import replace

from expertflow.core.errors import HardwareError
from expertflow.hardware import disk, probe
from expertflow.hardware.records import ScratchFacts
from expertflow.staging import ensure
from expertflow.staging.content import Content
from expertflow.staging.ensure import choose
from expertflow.staging.records import StageSpec


class Machine:
    """A machine whose file systems, memory and disks are made up; counts what is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file_systems: dict[Path, str] = {}
        self.free_memory_bytes = 0
        self.source_speed: float | None = 0.2e9
        self.disks: dict[Path, float | None] = {}
        self.n_measured = 0
        monkeypatch.setattr(disk, "file_system", self._file_system)
        monkeypatch.setattr(disk, "file_read_speed", self._source)
        monkeypatch.setattr(disk, "scratch_facts", self._facts)
        monkeypatch.setattr(disk, "candidates", lambda *_: [(p, "TMPDIR") for p in self.disks])
        monkeypatch.setattr(probe, "free_memory_bytes", lambda: self.free_memory_bytes)
        # All of a test's folders are on one device.
        monkeypatch.setattr(ensure, "_may_hold", lambda path, _: path.is_dir())

    def _file_system(self, path: Path) -> str | None:
        known = [p for p in (path, *path.parents) if p in self.file_systems]
        return self.file_systems[known[0]] if known else "ext4"

    def _source(self, _: Path) -> tuple[float | None, str]:
        self.n_measured += 1
        return self.source_speed, "256 MiB"

    def _facts(self, places: Any, *, measure: bool) -> tuple[ScratchFacts, ...]:
        assert measure
        return tuple(
            ScratchFacts(
                path=str(path), asked_by=why, file_system="xfs", is_memory=False,
                is_rotational=None, free_bytes=1 << 40, total_bytes=1 << 40,
                read_bytes_per_s=self.disks[path], read_method="256 MiB",
            )
            for path, why in places
        )  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Content:
    return make_rows((tmp_path / "net" / "packed").resolve())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, rows: Content) -> Machine:
    found = Machine(monkeypatch)
    found.file_systems[rows.source] = "nfs4"
    return found


def disk_at(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_settings_may_leave_content(tmp_path: Path, rows: Content, machine: Machine) -> None:
    model = make_model(tmp_path / "model")
    for content, spec, reason in (
        (rows, StageSpec(scratch=None), "scratch is null"),
        (model, StageSpec(scratch=str(tmp_path), weights=False), "stage_weights is false"),
    ):
        scratch, note = choose(content, spec)
        assert (scratch, note.reason) == (None, reason)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs"])
def test_a_local_source_is_read_in_place_unmeasured(
    rows: Content, machine: Machine, kind: str
) -> None:
    machine.file_systems[rows.source] = kind
    scratch, note = choose(rows, StageSpec())
    assert scratch is None
    assert kind in note.reason
    assert machine.n_measured == 0


def test_what_lies_in_memory_stays_there(rows: Content, machine: Machine) -> None:
    machine.file_systems[rows.source] = "tmpfs"
    assert "lies in memory" in choose(rows, StageSpec(scratch="/"))[1].reason


def test_what_fits_in_half_of_memory_is_read_ahead(rows: Content, machine: Machine) -> None:
    machine.free_memory_bytes = 2 * rows.n_bytes + 1
    scratch, note = choose(rows, StageSpec())
    assert (scratch, note.action) == (None, "pre_read")
    assert "fits into memory" in note.reason
    assert machine.n_measured == 0
    machine.free_memory_bytes = 2 * rows.n_bytes
    assert choose(rows, StageSpec())[1].action == "read_in_place"


def test_memory_is_promised_once(rows: Content, machine: Machine) -> None:
    machine.free_memory_bytes = 2 * rows.n_bytes + 2
    assert choose(rows, StageSpec(), promised_bytes=0)[1].action == "pre_read"
    assert choose(rows, StageSpec(), promised_bytes=1)[1].action == "read_in_place"


def test_the_fastest_disk_is_taken(tmp_path: Path, rows: Content, machine: Machine) -> None:
    slow, fast = disk_at(tmp_path / "slow"), disk_at(tmp_path / "fast")
    machine.disks = {slow: 0.5e9, fast: 3e9}
    scratch, note = choose(rows, StageSpec())
    assert scratch == fast
    assert note.source_read_bytes_per_s == 0.2e9
    assert note.target_read_bytes_per_s == 3e9
    assert "nfs4" in note.reason
    assert "0.20 GB/s" in note.reason


# A source too small to measure is copied to any disk that was measured.
@pytest.mark.parametrize(
    ("source", "target", "is_copied"),
    [(0.2e9, 0.28e9, False), (0.2e9, 0.32e9, True), (None, 1e9, True)],
)
def test_a_copy_has_to_be_read_faster_than_its_source(
    tmp_path: Path, rows: Content, machine: Machine,
    source: float | None, target: float, is_copied: bool,
) -> None:  # fmt: skip
    machine.source_speed = source
    machine.disks = {disk_at(tmp_path / "disk"): target}
    scratch, note = choose(rows, StageSpec())
    assert (scratch is not None) is is_copied
    assert note.target_read_bytes_per_s is not None, "measured, whatever was decided"


@pytest.mark.parametrize("disks", [{}, {"disk": None}])
def test_without_a_disk_that_can_be_measured_nothing_is_copied(
    tmp_path: Path, rows: Content, machine: Machine, disks: dict[str, None]
) -> None:
    machine.disks = {disk_at(tmp_path / name): speed for name, speed in disks.items()}
    scratch, note = choose(rows, StageSpec())
    assert scratch is None
    assert "no disk of this machine could be measured" in note.reason


def test_an_earlier_choice_is_taken_again(tmp_path: Path, rows: Content, machine: Machine) -> None:
    scratch = disk_at(tmp_path / "job-1")
    machine.disks = {scratch: 3e9}
    _, first = choose(rows, StageSpec())
    recorded = replace(first, target=str(store_at(scratch) / rows.key / "files"))
    n_measured = machine.n_measured
    assert choose(rows, StageSpec(), recorded=recorded) == (scratch, first)
    assert machine.n_measured == n_measured


def test_another_machine_chooses_anew(tmp_path: Path, rows: Content, machine: Machine) -> None:
    _, first = choose(rows, StageSpec())
    recorded = replace(first, target=str(store_at(tmp_path / "job-1") / rows.key / "files"))
    here = disk_at(tmp_path / "job-2")
    machine.disks = {here: 3e9}
    assert choose(rows, StageSpec(), recorded=recorded)[0] == here


def test_a_directory_that_is_set_is_taken(
    tmp_path: Path, rows: Content, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.free_memory_bytes = 1 << 40
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    scratch, note = choose(rows, StageSpec(scratch="$NODE_DISK"))
    assert (scratch, note.reason) == (tmp_path, "scratch is set")
    assert machine.n_measured == 0


def test_a_directory_that_is_not_there_is_named(rows: Content, machine: Machine) -> None:
    with pytest.raises(HardwareError, match=r"scratch \$NO_SUCH/x: no such directory"):
        choose(rows, StageSpec(scratch="$NO_SUCH/x"))


def test_memory_is_no_place_for_a_copy(tmp_path: Path, rows: Content, machine: Machine) -> None:
    machine.file_systems[tmp_path.resolve()] = "tmpfs"
    with pytest.raises(HardwareError, match="is memory"):
        choose(rows, StageSpec(scratch=str(tmp_path)))


def test_memory_and_the_same_disk_are_no_places(tmp_path: Path, rows: Content) -> None:
    assert not ensure._may_hold(tmp_path, rows), "the same disk"
    assert not ensure._may_hold(tmp_path / "none", rows)
    if disk.file_system(Path("/dev/shm")) == "tmpfs":
        assert not ensure._may_hold(Path("/dev/shm"), rows)
