import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import yaml
from support import ROOT, run_script

from expertflow.hardware import disk, probe
from expertflow.hardware.gpu_table import FIGURES, gpu_by_name, gpu_from_row
from expertflow.hardware.probe import cpu_quota, memory_limits

TABLE: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "config" / "hardware" / "gpus.yaml").read_text()
)["gpus"]
BY_NAME = {row["name"]: row for row in TABLE}


def write(root: Path, group: str | None, files: dict[str, str]) -> Path:
    own = {} if group is None else {"proc/self/cgroup": group}
    for name, text in (own | {f"sys/fs/cgroup/{name}": files[name] for name in files}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_a_group_bounds_processors_and_memory(tmp_path: Path) -> None:
    """A process's view of its cgroup, and the resulting limits of the machine."""
    for i, (group, files, cpus, memory, left) in enumerate((
        (None, {}, None, None, None),
        # The tightest group above a process counts.
        (
            "0::/job/step",
            {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000",
             "job/memory.max": "8000000000", "job/step/memory.max": "9000000000"},
            1.5, 8 * 10**9, None,
        ),
        # Idle cached files are free.
        (
            "0::/job",
            {"job/memory.max": "8000000", "job/memory.current": "7000000",
             "job/memory.stat": "anon 6500000\ninactive_file 500000"},
            None, 8_000_000, 1_500_000,
        ),
        # Version 1, and its number for no limit.
        (
            "4:cpu,cpuacct:/slurm\n3:memory:/slurm\n2:cpuset:/",
            {"cpu,cpuacct/slurm/cpu.cfs_quota_us": "400000",
             "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
             "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000",
             "memory/slurm/memory.limit_in_bytes": "9223372036854771712",
             "memory/memory.limit_in_bytes": "8000000",
             "memory/memory.usage_in_bytes": "9000000"},
            4.0, 8_000_000, 0,
        ),
        # In a container the path is one of the host.
        ("0::/docker/abc", {"cpu.max": "200000 100000"}, 2.0, None, None),
    )):  # fmt: skip
        root = write(tmp_path / str(i), group, files)
        assert (cpu_quota(root), *memory_limits(root)) == (cpus, memory, left)
        free = probe.free_memory_bytes(root)
        assert free == left or (left is None and free)


def test_affinity_and_quota_bound_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for quota, n in (("50000", 1), ("250000", 2), ("max", 6)):
        root = write(tmp_path, "0::/", {"cpu.max": f"{quota} 100000"})
        assert probe.usable_cpus(root) == n


def test_a_disk_or_file_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "file_system", lambda path: "ext4")
    # A busy disk may take longer for the entire file.
    monkeypatch.setattr(disk, "LONGEST_S", 600.0)
    speed, method = disk.measure_disk(tmp_path, 8 << 20)
    assert speed is not None and speed > 0 and method.startswith("8 MiB in order, ")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "rows.arrow"
    # Not a multiple of the block size.
    file.write_bytes(bytes((17 << 20) + 5))
    speed, method = disk.measure_file(file)
    assert speed is not None and speed > 0 and method.startswith("17 MiB in order, ")
    file.write_bytes(b"x")
    message = "not measured: 0.0 MB are too few, 16 MiB needed"
    assert disk.measure_file(file) == (None, message)
    speed, method = disk.measure_file(tmp_path / "none")
    assert speed is None and "No such file" in method


def test_places_are_described_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(return_value=(5e8, "how"))
    monkeypatch.setattr(disk, "file_system", lambda path: "ext4")
    monkeypatch.setattr(disk, "measure_disk", measure)
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    # The system denies access there, as below an unreadable folder.
    (tmp_path / "refused").symlink_to("x" * 300)
    places = [(tmp_path / name, "test") for name in ("b", "absent", "refused", "link", ".")]
    found = disk.describe_places(places, measure=True, file_bytes=1)
    assert [Path(place["path"]).name for place in found] == ["b", tmp_path.name]
    assert {place["read_bytes_per_s"] for place in found} == {5e8}
    # One device, one measurement.
    measure.assert_called_once()


def test_memory_and_full_disks_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "tmpfs"
    monkeypatch.setattr(disk, "file_system", lambda path: kind)
    (place,) = disk.describe_places([(tmp_path, "test")], measure=True)
    assert place["read_bytes_per_s"] is None and "memory" in place["read_method"]
    kind = "ext4"
    free = psutil.disk_usage(str(tmp_path)).free
    (place,) = disk.describe_places([(tmp_path, "test")], measure=True, file_bytes=free // 3)
    assert place["read_bytes_per_s"] is None and "GB free" in place["read_method"]
    (place,) = disk.describe_places([(tmp_path, "test")], measure=False)
    assert place["read_method"] == disk.NOT_ASKED
    (tmp_path / "mnt" / "nvme1").mkdir(parents=True)
    found = list(disk.list_candidates({"SLURM_TMPDIR": "/s", "TMPDIR": ""}, tmp_path))
    assert found[0] == (Path("/s"), "SLURM_TMPDIR")
    assert tmp_path / "mnt" / "nvme1" in [path for path, _ in found]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_every_figure_of_a_card_has_its_source(row: dict[str, Any]) -> None:
    assert {key for key in FIGURES if row[key] is not None} == row["sources"].keys()
    card = gpu_from_row(row)
    fields = [field for field, _ in FIGURES.values()]
    assert {name for name in fields if getattr(card, name) is not None} == card.sources.keys()
    assert card.compute_capability is not None


def test_names_are_exact_and_identify_one_card() -> None:
    # A row without sources has one source for all figures.
    card = gpu_from_row({**BY_NAME["L4"], "sources": {}, "source": "ours"})
    assert set(card.sources.values()) == {"ours"}
    names = [name for row in TABLE for name in (row["name"], *row["driver_names"])]
    assert len(names) == len(set(names))
    assert gpu_by_name("NVIDIA L40", TABLE) is None
    h200 = gpu_by_name("NVIDIA H200", TABLE)
    assert h200 is not None and h200.sources["power_limit_w"].endswith("second-hand")


def test_the_probe_works_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "m.json"
    hidden = {**os.environ, "LD_LIBRARY_PATH": ""}
    done = run_script("probe_machine", "--output", output, env=hidden)
    assert done.returncode == 0, done.stderr
    machine = json.loads(output.read_text())
    assert machine["n_cpus_usable"] <= machine["n_cpus_logical"]
    assert machine["ram_usable_bytes"] <= machine["ram_total_bytes"]
    assert all(place["read_bytes_per_s"] is None for place in machine["scratch"])
    if not machine["gpus"]:
        assert machine["unavailable"]["gpus"]
    assert yaml.safe_load(done.stdout) == machine


def test_the_speed_of_a_cpu_is_that_of_its_least_disturbed_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all products only the fortieth is not slowed down tenfold by other load."""
    ticks = [second for i in range(3000) for second in (0.0, 0.01 if i == 39 else 0.1)]
    monkeypatch.setattr(probe, "usable_cores", lambda: 4)
    monkeypatch.setattr(probe.time, "perf_counter", iter(ticks).__next__)
    probe.cpu_flops_per_s.cache_clear()
    assert probe.cpu_flops_per_s() == pytest.approx(4 * 2 * 64**3 / 0.01)
    # Measured once: another would find no more ticks.
    assert probe.cpu_flops_per_s() == pytest.approx(4 * 2 * 64**3 / 0.01)
    probe.cpu_flops_per_s.cache_clear()
