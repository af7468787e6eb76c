"""Data sets made by programs: the modules of ``generated``.

They are imported by name, and the lock holds the digest of the one used: editing one generator does
not affect the data of others.
"""

import importlib
import re
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.read import describe
from expertflow.data.records import Artifact, SourceLock
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.git_store import head
from expertflow.data.sources.kind import Fetched, Found, Pinned, Pins

PACKAGE = "expertflow.data.sources.generated"
# Identifies a generator module without importing it.
GENERATOR = re.compile(r"^(def generate\(|generate = )", re.MULTILINE)


def look_up(source: SourceSpec) -> Found:
    return Found("generated", n_records=source.n_documents)


def pin(source: SourceSpec, pins: Pins) -> Pinned:
    files = Path(__file__).with_name("generated").glob("*.py")
    known = sorted(path.stem for path in files if GENERATOR.search(path.read_text("utf-8")))
    if source.generator not in known:
        raise ConfigError(f"no generator {source.generator!r}; use one of {', '.join(known)}")
    identity = {
        "generator": source.generator,
        "n_documents": source.n_documents,
        "seed": source.seed,
        "code": pins.digest_generator(source.generator),
    }
    return Pinned(identity=identity)


def fetch(source: SourceSpec, lock: SourceLock, directory: Path) -> Fetched:
    with replacing(directory) as partial:
        partial.mkdir(parents=True)
        made: dict[str, Path] = importlib.import_module(f"{PACKAGE}.{source.generator}").generate(
            n_documents=int(source.n_documents or 0), seed=int(source.seed or 0), directory=partial
        )
        paths = {name: directory / path.relative_to(partial) for name, path in made.items()}
    artifacts = {
        # A repository is pinned by its head: packing is up to git.
        name: Artifact(path=str(path), sha256=sha256_file(path) if path.is_file() else head(path))
        for name, path in paths.items()
    }
    return Fetched((describe(directory / "records.jsonl"),), artifacts=artifacts)
