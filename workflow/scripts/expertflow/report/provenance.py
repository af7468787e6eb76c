"""Say what a report was made from: code, inputs, machine. Nothing here decides a result."""

import getpass
import hashlib
import json
import os
import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import read_record
from expertflow.data.records import DatasetManifest

# From a source's number of document shards to the names of its token shards.
TokenShards = Callable[[int], Iterable[str]]
# The command line that Snakemake was started with, as the Snakefile hands it on.
COMMAND = "EXPERTFLOW_COMMAND"
ROOT = Path(__file__).resolve().parents[4]
LOCKFILE = ROOT / "envs" / "requirements.lock"
# Where each stage leaves its records, in the order of the chain.
CHAIN = (
    "sources/fetched/*.json",
    "sources/generated/*.json",
    "datasets.json",
    "documents/*/*.json",
    "documents.json",
    "model.json",
    "tokens/*/*.json",
    "packing.json",
    "calibration.json",
    "plan.json",
    "staging.json",
    "training.json",
    "evaluation.json",
    "export.json",
)
RECORDS = ("sources.lock.json", *(name for name in CHAIN if "*" not in name))


def collect_provenance(
    results: Path, token_shards: TokenShards, *, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Hash the records in ``results`` and describe code and host; null where something is unknown.

    ``also`` names records of studies that were asked for; others may lie there unasked.

    The host's name is hashed: it tells two machines apart and names neither.
    """
    host = f"{getpass.getuser()}@{platform.node()}"
    found = [name for name in (*RECORDS, *also) if (results / name).is_file()]
    return {
        "git": git_commit(),
        "lockfile_sha256": sha256_file(LOCKFILE) if LOCKFILE.is_file() else None,
        "input_sha256": {name: sha256_file(results / name) for name in found},
        "chain": stages(results, token_shards),
        "command": os.environ.get(COMMAND),
        "host_hash": hashlib.sha256(host.encode()).hexdigest()[:12],
    }


def stages(results: Path, token_shards: TokenShards) -> list[dict[str, str]]:
    """List the stages behind a result from the notes beside their records, in their order.

    Shards that one code made are one entry: the pattern of their records, and the hash of their
    hashes. A record without a note was not made by the workflow and is left out, and so is one of a
    source or shard that ``datasets.json`` does not name: an earlier manifest had it.
    """
    named = _named(results, token_shards)
    return [
        {"stage": stage, "record": record, "sha256": sha256, "code": code}
        for pattern in CHAIN
        for (stage, code), records in sorted(_notes(results, pattern, named).items())
        for record, sha256 in (
            records.items()
            if len(records) == 1
            else [(f"{pattern} ({len(records)})", sha256_json(records))]
        )
    ]


def _named(results: Path, token_shards: TokenShards) -> set[str]:
    path = results / "datasets.json"
    if not path.is_file():
        return set()
    shards = read_record(DatasetManifest, path).shards
    n_shards = {shard.source: shard.n_shards for shard in shards}
    names = {f"documents/{shard.source}/{shard.shard}.json" for shard in shards}
    for source, n in n_shards.items():
        names |= {f"sources/{kind}/{source}.json" for kind in ("fetched", "generated")}
        names |= {f"tokens/{source}/{shard}.json" for shard in token_shards(n)}
    return names


def _notes(results: Path, pattern: str, named: set[str]) -> dict[tuple[str, str], dict[str, str]]:
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for record in sorted(results.glob(pattern)):
        sidecar = record.with_name(f".{record.name}.fingerprint")
        place = record.relative_to(results).as_posix()
        if sidecar.is_file() and ("*" not in pattern or place in named):
            note = json.loads(sidecar.read_text(encoding="utf-8"))
            found[note["rule"], note["code"]][place] = note["sha256"]
    return found


def git_commit() -> str | None:
    """Return the commit of the code, marked when it has local changes; null outside a clone."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
