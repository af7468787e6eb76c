"""Data sets made by programs: the modules of ``generated``.

They are imported by name, and the lock records the digest of the one used: editing one generator
does not affect the data of others.
"""

import importlib
import re
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.read import describe_file
from expertflow.data.records import Artifact, SourceLock
from expertflow.data.sources.base import DataSource, Fetched, Found, Pinned, Pins
from expertflow.data.sources.git_store import resolve_commit

PACKAGE = "expertflow.data.sources.generated"
# Identifies a generator module without importing it.
GENERATOR = re.compile(r"^(def generate\(|generate = )", re.MULTILINE)


class GeneratedRecords(DataSource):
    kind = "generated"
    required = ("generator", "n_documents")
    optional = ("seed",)

    def look_up(self) -> Found:
        return Found("generated", n_records=self.spec.n_documents)

    def pin(self, pins: Pins) -> Pinned:
        spec = self.spec
        files = Path(__file__).with_name("generated").glob("*.py")
        known = sorted(path.stem for path in files if GENERATOR.search(path.read_text("utf-8")))
        if spec.generator not in known:
            raise ConfigError(f"no generator {spec.generator!r}; use one of {', '.join(known)}")
        code = pins.digest_generator(spec.generator)
        keys = ("generator", "n_documents", "seed")
        return Pinned(identity={key: getattr(spec, key) for key in keys} | {"code": code})

    def fetch(self, lock: SourceLock, directory: Path) -> Fetched:
        n_documents, seed = int(self.spec.n_documents or 0), int(self.spec.seed or 0)
        generator = importlib.import_module(f"{PACKAGE}.{self.spec.generator}")
        with replacing(directory) as partial:
            partial.mkdir(parents=True)
            made = generator.generate(n_documents=n_documents, seed=seed, directory=partial)
        artifacts = {}
        for name, file in made.items():
            path = directory / file.relative_to(partial)
            # A repository is pinned by its head: packing is up to git.
            sha256 = sha256_file(path) if path.is_file() else resolve_commit(path)
            artifacts[name] = Artifact(path=str(path), sha256=sha256)
        return Fetched((describe_file(directory / "records.jsonl"),), artifacts=artifacts)
