"""Bundles as an attacker or a bad disk would make them, each by one change to a good one."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import tokenizer_record

from expertflow.core.files import sha256_text
from expertflow.core.records import to_json
from expertflow.rental.bundle.records import FORMAT, INDEX, BundleIndex
from expertflow.rental.bundle.tar import Items, describe_items, read_index, write_bundle
from expertflow.rental.bundle.unpack import open_bundle

PROVENANCE = "results/e/.bundle/provenance.json"
ITEMS: Items = {
    PROVENANCE: b"{}",
    "results/e/base_model/model.safetensors": b"weights",
    "results/e/plan.json": b"{}" * 300,
}
RECORD: dict[str, Any] = {
    "rule": "plan_training", "input": ["results/e/packing.json"], "log": [], "params": ["'x'"],
    "code": None, "record_format_version": 6, "input_checksums": {},
}  # fmt: skip

# Half a pair of UTF-16 can be written so, and by canonical JSON not at all.
UTF8 = ("utf-8", "surrogatepass")
Forge = Callable[[Path], None]


def index_of(items: Items, **changes: Any) -> BundleIndex:
    settings = {"format": FORMAT, "kind": "bundle", "expert": "e", "code": {}, **changes}
    return BundleIndex(members=describe_items(items), **settings)


def make(path: Path, items: Items = ITEMS, **changes: Any) -> Path:
    write_bundle(path, index_of(items, **changes), items)
    return path


def start(folder: Path, path: Path, **changes: Any) -> bool:
    return open_bundle(path, read_index(path), folder, **changes)


def model_record(**changes: Any) -> bytes:
    facts = {
        "n_layers": 1, "hidden_size": 8, "n_heads": 1, "n_kv_heads": 1, "head_dim": 8,
        "intermediate_size": 8, "vocab_size": 8, "tie_word_embeddings": True,
        "model_type": "qwen3", "n_mlp_matrices": 3,
    }  # fmt: skip
    value = {
        "name": "m", "kind": "local", "revision": None, "path": "m", "license": None,
        "facts": facts, "n_parameters": 1, "n_weight_bytes": 7, "weights_sha256": "",
        "tokenizer": to_json(tokenizer_record()), **changes,
    }  # fmt: skip
    return json.dumps(value).encode()


def sealed(value: Any) -> bytes:
    """Return the text of an index as one would write it who knows the format."""
    return _text({"index": value, "sha256": sha256_text(_text(value).decode(*UTF8))})


def _text(value: Any) -> bytes:
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return plain.encode(*UTF8)


def raw(path: Path, text: bytes, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in [(tarfile.TarInfo(INDEX), text), *members]:
            info.size = info.size or len(content)
            archive.addfile(info, io.BytesIO(content.ljust(info.size, b"\0")))


def member(name: str, content: bytes = b"", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def members() -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member(name, bytes(ITEMS[name])) for name in sorted(ITEMS)]  # type: ignore[arg-type]


def index_value(**changes: Any) -> dict[str, Any]:
    return {**to_json(index_of(ITEMS)), **changes}


def names(*found: str, **changes: Any) -> Forge:
    """Forge a bundle whose index, correctly sealed, has members of these names."""
    listed = [{"name": name, "n_bytes": 0, "sha256": "", **changes} for name in found]
    return index(members=listed)


def index(**changes: Any) -> Forge:
    return text(sealed(index_value(**changes)))


def text(content: bytes) -> Forge:
    return lambda path: raw(path, content, members())


def second(name: str, content: bytes = b"weights", **changes: Any) -> Forge:
    """Forge a bundle whose second member has another header than the index says."""
    parts = members()
    return listed([parts[0], member(name, content, **changes), *parts[2:]])


def listed(parts: list[tuple[tarfile.TarInfo, bytes]]) -> Forge:
    return lambda path: raw(path, sealed(index_value()), parts)


def item(name: str, content: bytes) -> Forge:
    return lambda path: void(make(path, {**ITEMS, name: content}))


def void(_: object) -> None:
    return None


def whole(change: Callable[[bytes], bytes]) -> Forge:
    return lambda path: void(path.write_bytes(change(make(path).read_bytes())))


def records(key: str, record: Any = RECORD) -> Forge:
    return item(PROVENANCE, json.dumps({key: record}).encode())


def odd_names() -> Iterator[tuple[str, Forge]]:
    for title, name in {
        "absolute": "/etc/passwd", "two slashes": "//results/e/x", "above": "../results/e/x",
        "up and down": "results/e/../../x", "ends above": "results/e/x/..", "dot": "results/e/./x",
        "empty part": "results/e//x", "empty": "", "newline": "results/e/x\n",
        "escape": "results/e/\x1b[1m", "nul": "results/e/\0x", "bidi": "results/e/\u202ex",
        "surrogate": "results/e/\ud800", "backslash": "results/e/a\\..\\b", "home": "~/x",
        "another expert": "results/other/x", "expert in capitals": "results/E/x",
        "the folder": "results/e", "a slash after": "results/e/", "outside": "state/e/x",
        "300 characters": "results/e/" + "n" * 300, "400 bytes": "results/e/" + "é" * 200,
        "2000 folders": "results/e/" + "d/" * 2000 + "x",
        "1100 bytes": "results/e" + "/dddddd" * 155,
    }.items():  # fmt: skip
        yield title, names(name)
    yield "twice", names("results/e/x", "results/e/x")
    yield "out of order", names("results/e/y", "results/e/x")
    yield "a file as a folder", names("results/e/x", "results/e/x/y")
    yield "case", names("results/e/A", "results/e/a")
    yield "case of a folder", names("results/e/X", "results/e/x/y")
    yield "unicode", names("results/e/e\u0301", "results/e/\u00e9")
    yield "ligature", names("results/e/fi", "results/e/\ufb01")
    for expert in ("", ".", "..", "a/b", "e\n", "x" * 300, "\ud800"):
        yield f"expert {expert[:9]!r}", index(expert=expert, members=[])


def odd_indices() -> Iterator[tuple[str, Forge]]:
    yield "another format", index(format=FORMAT + 1)
    yield "another kind", index(kind="parcel")
    yield "a key too many", index(extra=1)
    yield "a negative size", names("results/e/x", n_bytes=-1)
    yield "more than a disk holds", names("results/e/x", n_bytes=10**30)
    yield "a size that is text", names("results/e/x", n_bytes="1")
    yield "not a number", text(sealed(index_value(code={"a": float("nan")})))
    yield "a seal of another index", text(sealed(index_value()).replace(b'"e"', b'"f"'))
    yield "blanks", text(sealed(index_value()).replace(b",", b", "))
    yield "one key twice", text(sealed(index_value()).replace(b'"code"', b'"code":{},"code"'))
    yield "no JSON", text(b"{")
    yield "a list", text(b"[]")
    yield "no UTF-8", text(b'{"index":"\xff"}')
    yield "a long number", text(b'{"index":' + b"1" * 5000 + b"}")
    yield "100,000 levels", text(b"[" * 100_000 + b"]" * 100_000)
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    yield "400 levels", text(sealed(index_value(code=deep)))


def odd_archives() -> Iterator[tuple[str, Forge]]:
    name = sorted(ITEMS)[1]
    for title, kind in {
        "symlink": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "character device": b"3",
        "block device": b"4", "directory": tarfile.DIRTYPE, "fifo": tarfile.FIFOTYPE,
        "contiguous": tarfile.CONTTYPE, "sparse": tarfile.GNUTYPE_SPARSE,
    }.items():  # fmt: skip
        yield title, second(name, type=kind, linkname="/etc/passwd")
    pax = {"path": "/etc/passwd", "size": "1", "GNU.sparse.size": "9", "comment": "x"}
    for key, value in pax.items():
        yield f"pax {key}", second(name, pax_headers={key: value})
    yield "setuid", second(name, mode=0o4755)
    yield "a time", second(name, mtime=1)
    yield "another name", second("results/e/other")
    yield "another size", second(name, size=600)
    yield "another content", second(name, b"WEIGHTS")
    parts = members()
    yield "a member too many", listed([*parts, member("results/e/z")])
    yield "a member too few", listed(parts[:-1])
    yield "members swapped", listed([parts[1], parts[0], parts[2]])
    yield "a member before", lambda path: raw(path, b"", members())
    yield "cut in the index", whole(lambda data: data[:700])
    yield "cut in a member", whole(lambda data: data[:-1800])
    yield "cut in the end", whole(lambda data: data[:-1])
    yield "a byte after", whole(lambda data: data + b"\0")
    yield "compressed", whole(gzip.compress)
    yield "an empty file", whole(lambda _: b"")
    yield "a text", whole(lambda _: b"{}")
    yield "zeros", whole(lambda _: bytes(10240))
    yield "noise", whole(lambda _: b"\xff\xfe" * 5000)


def odd_contents() -> Iterator[tuple[str, Forge]]:
    yield (
        "no provenance",
        lambda path: void(make(path, {"results/e/base_model/a.safetensors": b""})),
    )
    yield "cut provenance", item(PROVENANCE, b'{"results/e/plan.json": {"ru')
    yield "provenance of no JSON", item(PROVENANCE, b"\xff\0")
    yield "a list of provenance", item(PROVENANCE, b"[]")
    yield "deep provenance", item(PROVENANCE, b"[" * 5000 + b"]" * 5000)
    for key in ("results/other/plan.json", "/etc/hosts", "results/e/../o/plan.json", "results/e",
                "results/e/" + "n" * 300, "results/e/" + "d/" * 2000 + "x"):  # fmt: skip
        yield f"record of {key[:24]}", records(key)
    for i, record in enumerate(
        ([1], {}, {**RECORD, "input": "a"}, {**RECORD, "params": [1]}, {**RECORD, "shellcmd": "rm"})
    ):
        yield f"record of another form {i}", records("results/e/plan.json", record)
    without = {PROVENANCE: b"{}", "results/e/model.json": b'{"name": '}
    yield "no weights, a cut model", lambda path: void(make(path, without))  # type: ignore[arg-type]


def all_forgeries() -> dict[str, Forge]:
    found = [*odd_names(), *odd_indices(), *odd_archives(), *odd_contents()]
    assert len(found) == len(dict(found)) > 100
    return dict(found)
