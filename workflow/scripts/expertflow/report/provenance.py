"""Record what a report was made from: code, inputs, machine. Nothing here affects a result."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from expertflow.chain import Stage, expand_path, stages_before
from expertflow.core.attempts import hash_host
from expertflow.core.files import sha256_file, sha256_json, sidecar_of
from expertflow.core.records import read_record
from expertflow.core.sidecars import Sidecar
from expertflow.data.records import DatasetManifest, DatasetSource
from expertflow.report.records import ChainLink

# The Snakemake command line, passed on by the Snakefile.
COMMAND = "EXPERTFLOW_COMMAND"
ROOT = Path(__file__).resolve().parents[4]
LOCKFILE = ROOT / "envs" / "requirements.lock"


def collect_provenance(results: Path, *, asked: Collection[str] = ()) -> dict[str, object]:
    """Hash the records in ``results`` and describe code and host; unknown values are null.

    ``asked`` names the optional stages that were requested; records of others are ignored. The
    host's name is hashed: the hash distinguishes machines without naming them.
    """
    records = (stage.record for stage in stages_before("build_report", asked=asked))
    # Records of shards have wildcards in their names; ``chain`` has those.
    names = ("sources.lock.json", *(name for name in records if "{" not in name))
    found = [name for name in names if (results / name).is_file()]
    return {
        "git": git_commit(),
        "lockfile_sha256": sha256_file(LOCKFILE) if LOCKFILE.is_file() else None,
        "input_sha256": {name: sha256_file(results / name) for name in found},
        "chain": list_stages(results, asked=asked),
        "command": os.environ.get(COMMAND),
        "host_hash": hash_host(),
    }


def list_stages(results: Path, *, asked: Collection[str] = ()) -> tuple[ChainLink, ...]:
    """List the stages behind a result, in order, from the notes next to their records.

    Shards made by one version of the code are one entry: the pattern of their records, and the hash
    of their hashes. Records without a note, which the workflow did not make, are skipped, and so
    are those of sources or shards not in ``datasets.json``, left over from an earlier manifest.
    """
    path, found = results / "datasets.json", []
    sources = read_record(DatasetManifest, path).sources if path.is_file() else ()
    for stage in stages_before("build_report", asked=asked):
        for code, records in sorted(_notes(results, stage, sources).items()):
            entries = records
            if len(records) > 1:
                entries = {f"{stage.pattern} ({len(records)})": sha256_json(records)}
            for record, sha256 in entries.items():
                found.append(ChainLink(stage=stage.name, record=record, sha256=sha256, code=code))
    return tuple(found)


def _notes(
    results: Path, stage: Stage, sources: Iterable[DatasetSource]
) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for place in sorted(expand_path(stage, stage.record, sources)):
        record = results / place
        sidecar = sidecar_of(record)
        if record.is_file() and sidecar.is_file():
            note = read_record(Sidecar, sidecar)
            # By code, so that an old shard among new ones is a separate entry.
            found[note.code][place] = note.sha256
    return found


def git_commit() -> str | None:
    """Return the commit of the code, marked if there are local changes; null outside a clone."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str | None:
    try:
        # Not the working directory: that may be the user's own repository.
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
