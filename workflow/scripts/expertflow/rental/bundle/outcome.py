"""What a GPU box hands back: results, records and logs, laid out where a run would put them."""

import logging
from pathlib import Path

from expertflow.core.errors import ConfigError, DataError
from expertflow.core.files import remove, sha256_file, sync_directory
from expertflow.core.records import read_part, read_record
from expertflow.rental.bundle.contents import TIMESTAMP
from expertflow.rental.bundle.lock import only_one
from expertflow.rental.bundle.open import below, holds, same_time, sweep, unpacked
from expertflow.rental.bundle.provenance import (
    provenance_text,
    read_provenance,
    write_provenance,
)
from expertflow.rental.bundle.records import (
    CARRIED,
    FORMAT,
    OPENED,
    PROVENANCE,
    BundleIndex,
    Opened,
)
from expertflow.rental.bundle.tar import Item, describe

log = logging.getLogger(__name__)
RECORDS = ("*.json", "*.jsonl", "*.html", ".*.fingerprint")
REPORT = "report.json"
ABLATION = "ablation"
# Records that say what was trained on: an outcome of other ones is not of these results.
SAME = ("packing.json", "plan.json")


def pack_outcome(expert: str, *, git: str | None) -> tuple[BundleIndex, dict[str, Item]]:
    """Collect what was made from an opened bundle in the working directory.

    Checkpoints of a full fine-tuning stay behind: they hold the weights that ``merged`` holds.

    Raises:
        DataError: no bundle was opened here, or there is no report yet.
    """
    results = Path("results", expert)
    opened = read_record(Opened, results / OPENED)
    if not (results / REPORT).is_file():
        raise DataError(f"{results / REPORT}: is missing; run snakemake {results / REPORT} first")
    brought = {member.name: member.sha256 for member in opened.index.members}
    items = {
        path.as_posix(): Item(
            content=path, brought=brought.get(path.as_posix()) == sha256_file(path)
        )
        for path in _files(results)
    }
    made = {name for name, item in items.items() if not item.brought}
    folders = {str(parent) for name in made for parent in Path(name).parents}
    records = read_provenance(expert, lambda key: key in made or key in folders)
    items[f"{results}/{PROVENANCE}"] = Item(content=provenance_text(records))
    index = BundleIndex(
        format=FORMAT,
        kind="outcome",
        expert=expert,
        git=git,
        code=opened.index.code,
        members=describe(items),
        bundle_sha256=opened.sha256,
    )
    return index, items


def land_outcome(outcome: Path, index: BundleIndex, directory: Path, *, replace: bool) -> None:
    """Lay an outcome, of which the index was read, out in a working directory; checked.

    What came to the GPU box with its bundle is only laid out where it is missing. The report comes
    last; stopped half-way, the same command finishes it.

    Raises:
        ConfigError: there are other results, and no word that they may be dropped; or a run makes
            the expert.
        DataError: this is no outcome, or it was changed.
    """
    if index.kind != "outcome":
        raise DataError(f"{outcome}: is a {index.kind}; open it without --outcome")
    results = directory / "results" / index.expert
    with only_one(directory, index.expert):
        sweep(results)
        if not replace:
            _refuse_others(index, results)
        with unpacked(outcome, index, results) as (partial, _):
            provenance = (partial / PROVENANCE).read_text(encoding="utf-8")
            remove(partial / CARRIED)
            time_s = same_time(partial)
            write_provenance(directory, provenance, expert=index.expert, time_s=time_s)
            _move_in(index, partial, results)
    if any(below(index, member) == f"{ABLATION}.json" for member in index.members):
        log.info(
            "%s: its report shows an ablation; keep ablate=true in the configuration here, with the"
            " same ablation settings, or the report is built again without it",
            index.expert,
        )


def _files(results: Path) -> list[Path]:
    found = [path for pattern in RECORDS for path in results.glob(pattern)]
    folders = ["merged", "logs", "profile", ABLATION]
    if read_part(str, results / "training.json", "method") != "full":
        folders.append("checkpoint")
    for folder in folders:
        found += results.joinpath(folder).rglob("*")
    return sorted(path for path in found if path.is_file())


def _refuse_others(index: BundleIndex, results: Path) -> None:
    for member in index.members:
        name = below(index, member)
        path = results / name
        if not path.exists() or name.startswith((CARRIED, "logs/")) or name.endswith(TIMESTAMP):
            continue
        if (not member.brought or name in SAME) and not holds(path, member):
            raise ConfigError(
                f"{path}: is not of this outcome; move it away, use --directory, or drop it with"
                " --replace"
            )


def _move_in(index: BundleIndex, partial: Path, results: Path) -> None:
    results.mkdir(parents=True, exist_ok=True)
    brought = {below(index, member) for member in index.members if member.brought}
    for folder in ("merged", "checkpoint", "profile"):
        if (partial / folder).is_dir():
            remove(results / folder)
            (partial / folder).rename(results / folder)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda file: file.name == REPORT):
        name = path.relative_to(partial).as_posix()
        target = results / name
        if not (name in brought and target.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    sync_directory(results)
