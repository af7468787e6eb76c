"""The manifest of a bundle, and the record that an opened one leaves behind."""

from pathlib import PurePath
from typing import Any, Literal

from msgspec import field

from expertflow.chain import CHAIN, stages_before
from expertflow.core.records import Record
from expertflow.data.records import ExpertLock
from expertflow.evaluate.records import OWN_TASK
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import TokenSpec

INDEX = "MANIFEST.json"
FORMAT = 2
# In results/{expert}/ of an opened bundle: what it contained besides the results.
CARRIED = ".bundle"
OPENED = f"{CARRIED}/opened.json"
# In an outcome: the folders made after the plan.
FOLDERS = {
    path.rstrip("/")
    for stage in CHAIN
    if stage not in stages_before("make_bundle")
    for path in stage.files.values()
    if path.endswith("/")
}


class SettingsFile(Record, frozen=True, kw_only=True):
    """A settings file as it was when the bundle was requested; in a bundle, below results/."""

    path: str
    sha256: str


class BundleSpec(Record, frozen=True, kw_only=True):
    """Settings of ``make_bundle``.

    ``config`` has the configuration keys that decide results, ``told`` the training settings from
    the command line. ``files`` are manifest, cards and prices by their name in the bundle.
    ``content`` has hashes of the user's own files by their path in the manifest. ``artifacts`` are
    what scoring reads. ``tuned`` is the tuning's path in the manifest; ``staging`` belongs to this
    machine; ``code`` has the digests of all rules and generators.
    """

    expert: str
    config: dict[str, Any]
    files: dict[str, SettingsFile]
    content: dict[str, dict[str, str]]
    artifacts: dict[str, str]
    own_artifacts: dict[str, str]
    tokens: TokenSpec
    code: dict[str, str]
    with_weights: bool
    tuned: str | None = None
    staging: StageSpec = field(default_factory=StageSpec)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> list[str]:
        """Return the configuration keys that request optional stages."""
        return [key for key, value in self.config.items() if value is True]

    @property
    def own_code(self) -> str | None:
        """The user's own scoring task, if any: its path in the manifest and its hash."""
        if (place := self.own_artifacts.get(OWN_TASK)) is None:
            return None
        # A task is one file; an older bundle may lack its hash.
        digest, *_ = [*self.content.get(place, {}).values(), "unknown"]
        return f"{place} (sha256 {digest})"


class Member(Record, frozen=True, kw_only=True):
    name: str
    n_bytes: int
    sha256: str


class BundleIndex(Record, frozen=True, kw_only=True):
    """The first member: all others in order, settings, lock; ``brought`` came in the bundle."""

    format: int = FORMAT
    kind: Literal["bundle", "outcome"]
    expert: str
    code: dict[str, str]
    members: tuple[Member, ...]
    spec: BundleSpec | None = None
    lock: ExpertLock | None = None
    brought: tuple[str, ...] = ()


class OpenedBundle(Record, frozen=True, kw_only=True):
    """The record of an opened bundle; the bundle counts as open while it exists.

    ``settings_here`` hashes this machine's manifest, which takes precedence once edited.
    """

    index: BundleIndex
    settings_here: str | None
    allow_own_code: bool = False
    allow_judge: bool = False


def artifact_path(expert: str, key: str, place: str) -> str:
    return f"results/{expert}/{CARRIED}/artifacts/{key}/{PurePath(place).name}"


def tuning_path(expert: str) -> str:
    return f"results/{expert}/{CARRIED}/tuning.json"
