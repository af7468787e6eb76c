"""Records and sidecars that a power cut has corrupted are told of, and removed by a run."""

import fcntl
from pathlib import Path

import pytest

from expertflow.config.attach import only_looks
from expertflow.config.recovery import remove_corrupt_records
from expertflow.core.locks import EXPERT_LOCKS

# What a spoilt sidecar belongs to has to be made again with it.
SPOILT = ("e/plan.json", "e/.model.json.fingerprint", "e/documents/s/000.json", "e/model.json")
WHOLE = ("e/.plan.json.fingerprint", "e/documents/s/.000.json.fingerprint")


def test_records_that_are_no_json_are_removed_unless_a_run_looks_or_another_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*SPOILT, *WHOLE):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"n": 1}\n')
    Path(SPOILT[0]).write_bytes(bytes(9))
    Path(SPOILT[1]).write_text("")
    Path(SPOILT[2]).write_text('{"n": ')
    Path("e/notes.json").write_text("of the user's own {")
    EXPERT_LOCKS.mkdir(parents=True)
    with (EXPERT_LOCKS / "e.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        remove_corrupt_records(tmp_path, looks=False)
    assert capsys.readouterr().err == ""
    remove_corrupt_records(tmp_path, looks=True)
    assert all(Path(name).exists() for name in SPOILT)
    assert capsys.readouterr().err.count("a run removes it") == len(SPOILT)
    remove_corrupt_records(tmp_path, looks=False)
    assert not any(Path(name).exists() for name in SPOILT)
    assert all(Path(name).exists() for name in (*WHOLE, "e/notes.json"))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(SPOILT)
    assert all(any(name in line for line in told) for name in SPOILT)


def test_what_only_looks_is_known_by_its_options() -> None:
    for words in ("--summary", "-S", "--dag", "--report=r.html"):
        assert only_looks([words], dryrun=False)
    for words in ("--cores 2 results/e/report.json", "--report r.html --report-after-run"):
        assert not only_looks(words.split(), dryrun=False)
        assert only_looks(words.split(), dryrun=True)
