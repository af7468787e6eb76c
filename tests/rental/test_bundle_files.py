"""A bundle lets nothing else in; it can be opened next to runs, after kills, with any weights."""

import fcntl
import gzip
import io
import json
import os
import re
import shutil
import tarfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from httpx2 import ReadTimeout, Request, Response
from huggingface_hub.errors import GatedRepoError, XetDownloadError
from msgspec.structs import replace
from support import tokenizer_record

from expertflow.core import errors
from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import sha256_text
from expertflow.core.records import to_json
from expertflow.plan.records import ModelFacts
from expertflow.rental.bundle import tar
from expertflow.rental.bundle.pack import pack_outcome
from expertflow.rental.bundle.records import FORMAT, INDEX, BundleIndex, OpenedBundle
from expertflow.rental.bundle.unpack import land_outcome, link_weights, open_bundle
from expertflow.train.model.base import hash_weights
from expertflow.train.records import ModelRecord

CARDS, WEIGHTS = "results/e/.bundle/gpus.yaml", "results/e/base_model/model.safetensors"
ITEMS: tar.Items = {CARDS: b"{}", WEIGHTS: b"weights", "results/e/plan.json": b"{}" * 300}
# The longest part of a name, and the longest name, that every file system allows.
LONG_PART = "results/e/" + "n" * 255
LONG_NAME = "results/e/" + "é" * 127 + ("/" + "d" * 252) * 3 + "d"


def index_of(items: tar.Items, **changes: Any) -> BundleIndex:
    settings = {"format": FORMAT, "kind": "bundle", "expert": "e", "code": {}, **changes}
    return BundleIndex(members=tar.describe_items(items), **settings)


def make(path: Path, items: tar.Items = ITEMS, **changes: Any) -> Path:
    tar.write_bundle(path, index_of(items, **changes), items)
    return path


def start(folder: Path, path: Path, **changes: Any) -> bool:
    opened = OpenedBundle(index=tar.read_index(path), settings_here=None)
    return open_bundle(path, opened, folder, **changes)


def test_members_come_out_as_they_went_in(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"rows" * 300)
    items = {**ITEMS, "results/e/rows.arrow": tmp_path / "rows"}
    items |= {"results/e/empty": b"", LONG_PART: b"", LONG_NAME: b"{}"}
    assert len(LONG_NAME.encode()) == 1024
    assert start(tmp_path / "box", make(tmp_path / "b.tar", items))
    for name, content in items.items():
        found = (tmp_path / "box" / name).read_bytes()
        assert found == (content if isinstance(content, bytes) else content.read_bytes())


def test_snakemakes_old_metadata_of_results_is_dropped(tmp_path: Path) -> None:
    metadata = tmp_path / "box" / ".snakemake" / "metadata"
    encoded = [
        b64encode(name.encode()).decode()
        for name in ("results/e/base_model", WEIGHTS, "results/e/packing.json")
    ]
    # Snakemake splits names that are too long for a file.
    encoded[1] = f"@{encoded[1][:9]}/{encoded[1][9:]}"
    for name in (*encoded, "no name"):
        path = metadata / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert start(tmp_path / "box", make(tmp_path / "b.tar"))
    left = {path.name for path in metadata.rglob("*") if path.is_file()}
    assert left == {encoded[2], "no name"}


Forge = Callable[[Path], object]
# Half a UTF-16 pair can be written this way, but not in canonical JSON.
UTF8 = ("utf-8", "surrogatepass")


def text(value: Any) -> bytes:
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return plain.encode(*UTF8)


def sealed(**changes: Any) -> bytes:
    """Return the text of an index as written by somebody who knows the format."""
    value = {**to_json(index_of(ITEMS)), **changes}
    return text({"index": value, "sha256": sha256_text(text(value).decode(*UTF8))})


Part = tuple[tarfile.TarInfo, bytes]


def part(name: str, content: bytes = b"", **changes: Any) -> Part:
    info = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def archive(*parts: Part) -> Forge:
    def forge(path: Path) -> None:
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as stream:
            for info, content in parts:
                info.size = info.size or len(content)
                stream.addfile(info, io.BytesIO(content.ljust(info.size, b"\0")))

    return forge


GOOD = part(INDEX, sealed())
FIRST, SECOND, THIRD = (part(name, bytes(ITEMS[name])) for name in sorted(ITEMS))  # type: ignore[arg-type]


def index(content: bytes) -> Forge:
    return archive(part(INDEX, content), FIRST, SECOND, THIRD)


def members(*names: str, n_bytes: Any = 0, **changes: Any) -> Forge:
    listed: list[dict[str, Any]] = [{"name": name, "n_bytes": 0, "sha256": ""} for name in names]
    listed[0]["n_bytes"] = n_bytes
    return index(sealed(members=listed, **changes))


def second(name: str = WEIGHTS, content: bytes = b"weights", **changes: Any) -> Forge:
    """Forge a bundle whose second member has a different header from the index."""
    return archive(GOOD, FIRST, part(name, content, **changes), THIRD)


def whole(change: Callable[[bytes], bytes]) -> Forge:
    return lambda path: path.write_bytes(change(make(path).read_bytes()))


def items(content: tar.Items) -> Forge:
    return lambda path: make(path, content)


def nested(n_levels: int) -> Any:
    value: Any = 0
    for _ in range(n_levels):
        value = {"a": value}
    return value


# By error message, so that each forgery is rejected for its own reason.
FORGERIES: dict[str, dict[str, Forge]] = {
    "is not in results/e, or has a name": {title: members(name) for title, name in {
        "absolute": "/etc/passwd", "two slashes": "//results/e/x", "above": "../results/e/x",
        "up and down": "results/e/../../x", "ends above": "results/e/x/..", "dot": "results/e/./x",
        "empty part": "results/e//x", "empty": "", "newline": "results/e/x\n",
        "escape": "results/e/\x1b[1m", "nul": "results/e/\0x", "bidi": "results/e/\u202ex",
        "backslash": "results/e/a\\..\\b", "home": "~/x", "another expert": "results/other/x",
        "expert in capitals": "results/E/x", "the folder": "results/e", "a slash after":
        "results/e/", "outside": "state/e/x", "256 characters": LONG_PART + "n",
        "256 bytes": "results/e/" + "é" * 128, "1025 bytes": LONG_NAME + "d",
    }.items()},
    "is not the name of an expert": {
        f"expert {expert[:9]!r}": index(sealed(expert=expert, members=[]))
        for expert in ("", ".", "..", "a/b", "e\n", "x" * 300)
    },
    "out of order or repeated": {
        "twice": members("results/e/x", "results/e/x"),
        "out of order": members("results/e/y", "results/e/x"),
        "a negative size": members("results/e/x", "results/e/y", n_bytes=-1),
    },
    "two of its members have the same path": {
        "a file as a folder": members("results/e/x", "results/e/x/y"),
        "case": members("results/e/A", "results/e/a"),
        "case of a folder": members("results/e/X", "results/e/x/y"),
        "unicode": members("results/e/e\u0301", "results/e/\u00e9"),
        "ligature": members("results/e/fi", "results/e/\ufb01"),
    },
    "is a bundle of format 3, but this code reads 2": {"format": index(sealed(format=FORMAT + 1))},
    f"{INDEX}.kind: ": {"another kind": index(sealed(kind="parcel"))},
    f"{INDEX}: object contains unknown field extra": {"a key too many": index(sealed(extra=1))},
    f"{INDEX}.members[0].n_bytes": {"a size that is text": members("results/e/x", n_bytes="1")},
    " TB needed for ": {"more than a disk holds": members("results/e/x", n_bytes=10**30)},
    f"{INDEX}: was changed": {
        "a seal of another index": index(sealed().replace(b'"e"', b'"f"')),
        "blanks": index(sealed().replace(b",", b", ")),
        "one key twice": index(sealed().replace(b'"code"', b'"code":{},"code"')),
    },
    f"{INDEX}: is damaged": {
        "not a number": index(sealed(code={"a": float("nan")})),
        "a surrogate": members("results/e/\ud800"),
        "a list": index(b"[]"), "40 levels": index(text(nested(39))),
        "no JSON": index(b"{"), "no UTF-8": index(b'{"index":"\xff"}'),
        "a long number": index(b'{"index":' + b"1" * 5000 + b"}"),
        "100,000 levels": index(b"[" * 100_000 + b"]" * 100_000),
    },
    "is damaged (nested deeper than 40 levels)": {"41 levels": index(text(nested(40)))},
    "model.safetensors does not match the index": {
        # Links, devices, a directory, a pipe, a contiguous and a sparse file.
        **{f"type {kind}": second(type=kind.encode(), linkname="/x") for kind in "1234567S"},
        **{f"pax {key}": second(pax_headers={key: value}) for key, value in {
            "path": "/etc/passwd", "size": "1", "GNU.sparse.size": "9", "comment": "x",
        }.items()},
        "setuid": second(mode=0o4755), "a time": second(mtime=1),
        "another name": second("results/e/other"), "another size": second(size=600),
    },
    "model.safetensors was changed": {"another content": second(content=b"WEIGHTS")},
    "ends within results/e/plan.json": {"cut in a member": whole(lambda data: data[:-1800])},
    "its end does not match the index": {
        "a member too many": archive(GOOD, FIRST, SECOND, THIRD, SECOND),
        "cut in the end": whole(lambda data: data[:-1]),
    },
    "plan.json does not match the index": {"a member too few": archive(GOOD, FIRST, SECOND)},
    "gpus.yaml does not match the index": {"swapped": archive(GOOD, SECOND, FIRST, THIRD)},
    f"{INDEX} does not match the index": {"cut in the index": whole(lambda data: data[:700])},
    "continues after its end": {"a byte after": whole(lambda data: data + b"\0")},
    f"is not a bundle: {INDEX} does not come first": {"a member before": archive(FIRST)},
    "is not a bundle; copy or make the bundle again": {
        "compressed": whole(gzip.compress), "an empty file": whole(lambda _: b""),
        "a text": whole(lambda _: b"{}"), "zeros": whole(lambda _: bytes(10240)),
        "noise": whole(lambda _: b"\xff\xfe" * 5000),
    },
    "model.json: not a JSON record": {
        "a cut model": items({CARDS: b"{}", "results/e/model.json": b'{"name": '}),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "forge"),
    [
        pytest.param(said, forge, id=title)
        for said, forgeries in FORGERIES.items()
        for title, forge in forgeries.items()
    ],
)
def test_a_forged_bundle_is_rejected_completely(tmp_path: Path, said: str, forge: Forge) -> None:
    forge(tmp_path / "b.tar")
    with pytest.raises(errors.ExpertflowError, match=re.escape(said)) as refusal:
        start(tmp_path / "box", tmp_path / "b.tar")
    message = str(refusal.value)
    assert message.isprintable() and len(message) < 600 + len(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]


def test_a_changed_byte_is_rejected_anywhere(tmp_path: Path) -> None:
    bundle = make(tmp_path / "b.tar", {"results/e/x": b"content"})
    index = tar.read_index(bundle)
    whole = bytearray(bundle.read_bytes())
    # Of the many zeros in a tar archive, every 16th.
    for place in (i for i, byte in enumerate(bytes(whole)) if byte or i % 16 == 0):
        flip = (0x01, 0x80)[place % 2]
        whole[place] ^= flip
        bundle.write_bytes(whole)
        with pytest.raises(DataError):
            tar.read_bundle(bundle, index, lambda _: (tmp_path / "out").open("wb"))
        whole[place] ^= flip


def test_replaced_or_unreadable_files_are_rejected(tmp_path: Path) -> None:
    index = tar.read_index(make(tmp_path / "b.tar"))
    make(tmp_path / "b.tar", code={"a rule": "of other code"})
    with pytest.raises(DataError, match="was replaced while being opened"):
        tar.read_bundle(tmp_path / "b.tar", index, lambda _: (tmp_path / "out").open("wb"))
    for place in ("none.tar", "."):
        with pytest.raises(DataError, match="no such file; correct the path"):
            tar.read_index(tmp_path / place)
    with pytest.raises(DataError, match="two of its members have the same path"):
        make(tmp_path / "c.tar", {"results/e/A": b"", "results/e/a": b""})
    with pytest.raises(DataError, match="changed while being packed"):
        tar.write_bundle(tmp_path / "c.tar", index, {**ITEMS, WEIGHTS: b"WEIGHTS"})
    assert not list(tmp_path.glob("*c.tar*"))


LOCK = Path(".snakemake", "expertflow", "e.lock")


def test_a_run_that_makes_the_expert_is_left_alone(tmp_path: Path) -> None:
    path, outcome = make(tmp_path / "b.tar"), make(tmp_path / "o.tar", kind="outcome")
    (tmp_path / LOCK).parent.mkdir(parents=True)
    (tmp_path / LOCK).write_text('{"host": "h", "pid": 1, "slurm_runs": ["a"]}\n')
    assert start(tmp_path, path)
    # Files that a run left for the next one stay.
    signed = json.loads((tmp_path / LOCK).read_text())
    assert (signed["pid"], signed["slurm_runs"]) == (os.getpid(), ["a"])
    said = "made by another run, process 123 on a-host; wait for it"
    with (tmp_path / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write('{"host": "a-host", "pid": 123}')
        stream.flush()
        with pytest.raises(ConfigError, match=said):
            start(tmp_path, path, may_replace=True)
        with pytest.raises(ConfigError, match=said):
            land_outcome(outcome, tar.read_index(outcome), tmp_path, may_replace=True)


def test_leftovers_of_killed_openings_are_removed(tmp_path: Path) -> None:
    path, results = make(tmp_path / "b.tar"), tmp_path / "results"
    for name in (".e.123.partial", ".e.other.123.partial", "e"):
        (results / name).mkdir(parents=True)
    (results / ".e.123.partial" / ".lock").touch()
    with pytest.raises(ConfigError, match="contains results; move it"):
        start(tmp_path, path)
    assert start(tmp_path, path, may_replace=True)
    assert sorted(p.name for p in results.iterdir()) == [".e.other.123.partial", "e"]


def test_a_finished_run_is_not_dropped_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(tmp_path, make(tmp_path / "b.tar"))
    (tmp_path / "results" / "e" / "report.json").touch()
    other = make(tmp_path / "other.tar", {**ITEMS, CARDS: b"[]"})
    with pytest.raises(ConfigError, match=r"a finished run, which make_outcome\.py e "):
        start(tmp_path, other)
    assert not caplog.messages and start(tmp_path, other, may_replace=True)
    assert (
        "dropping a finished run, which make_outcome.py e --output FILE takes home" in caplog.text
    )


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "b.tar", {**ITEMS, "results/e/" + "d/" * 400 + "x": b""})
    deep = tmp_path.joinpath(*["a" * 200] * 17)
    with pytest.raises(errors.HardwareError, match=r"cannot be written \(File name too long\)"):
        start(deep, path)
    assert [p.name for p in tmp_path.iterdir()] == ["b.tar"]


def test_an_outcome_needs_an_opened_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="results/e: no bundle was opened here"):
        pack_outcome("e")


def model(name: str, folder: Path, **changes: Any) -> ModelRecord:
    """Return the record of a model with the weights of a folder."""
    facts = ModelFacts(
        n_layers=1, hidden_size=8, n_heads=1, n_kv_heads=1, head_dim=8, intermediate_size=8,
        vocab_size=8, tie_word_embeddings=True, model_type="qwen3",
    )  # fmt: skip
    record = ModelRecord(
        name=name, kind="local", revision=None, path="m", license=None, facts=facts,
        n_parameters=1, n_weight_bytes=7, weights_sha256=hash_weights(folder),
        tokenizer=tokenizer_record(),
    )  # fmt: skip
    return replace(record, **changes)


def test_missing_weights_are_linked_again(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "model.safetensors").write_text("weights")
    without = {name: content for name, content in ITEMS.items() if name != WEIGHTS}
    without["results/e/model.json"] = json.dumps(to_json(model(str(here), here))).encode()
    path = make(tmp_path / "b.tar", {**without, "results/e/base_model/tokenizer.json": b"{}"})
    assert start(tmp_path, path)
    there = shutil.move(here, tmp_path / "there")
    assert not start(tmp_path, path, model=there)
    assert (tmp_path / WEIGHTS).resolve() == there / "model.safetensors"


def test_a_hub_model_has_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, laid_out, asked = tmp_path / "snapshot", tmp_path / "laid out", []
    failures: list[Exception] = []
    for name in ("snapshot/model-1.safetensors", "snapshot/model-2.safetensors",
                 "snapshot/consolidated.safetensors", "laid out/tokenizer.json"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def download(
        name: str, *, revision: str, allow_patterns: list[str], dry_run: bool = False
    ) -> str | list[object]:
        if dry_run:
            return []
        asked.append((name, revision))
        if failures:
            raise failures.pop()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    record = model("maker/model", folder, kind="hub", revision="abc")
    for _ in range(2):
        link_weights(record, None, laid_out)
    assert asked == [("maker/model", "abc")], "what is there already is not asked for"
    assert hash_weights(laid_out) == hash_weights(folder)
    assert not (laid_out / "consolidated.safetensors").exists()
    access = "get access at https://huggingface.co/maker/model and 'hf auth login'; else pass a"
    refused = Response(403, request=Request("GET", "https://huggingface.co"))
    for failure, said in (
        (OSError("no network"), r"nor available from the hub \(OSError\); pass a folder"),
        (GatedRepoError("not yours", response=refused), access),
        (XetDownloadError("broke off"), r"\(XetDownloadError\); pass a folder"),
        (ReadTimeout("too slow"), r"\(ReadTimeout\); pass a folder"),
    ):
        failures.append(failure)
        with pytest.raises(DataError, match=said):
            link_weights(record, None, tmp_path)
    with pytest.raises(errors.TrainingError, match="no such folder on this machine"):
        link_weights(model("/nowhere", folder), None, tmp_path)
