"""What a bundle says of itself, and what an opened one leaves behind."""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from expertflow.data.records import ExpertLock
from expertflow.tokens.records import TokenSpec

INDEX = "MANIFEST.json"
FORMAT = 1
# Below results/{expert}/ of an opened bundle: what its makers' box had beside the results.
CARRIED = ".bundle"
OPENED = f"{CARRIED}/opened.json"
PROVENANCE = f"{CARRIED}/provenance.json"
# Not below it: model.json names this folder, also where the bundle no longer counts.
MODEL = "base_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsFile:
    """A file of settings, as it was when the bundle was asked for; in a bundle, below results/."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleSpec:
    """Settings of ``make_bundle``.

    ``config`` are the keys of the configuration that decide what was made. ``files`` are manifest,
    cards and prices by the name they get in the bundle. ``content`` hashes what the manifest names
    of the user's own files, as its rules see them, by the path in the manifest. ``artefacts`` are
    what scoring reads; ``own_artefacts`` those of them that are the user's. ``tokens`` names the
    engines that tokenised, ``tuned`` the tuning that the plan goes by, as the manifest does.
    ``code`` is the digest of every rule, and of the generators.
    """

    expert: str
    config: dict[str, Any]
    files: dict[str, SettingsFile]
    content: dict[str, dict[str, str]]
    artefacts: dict[str, str]
    own_artefacts: dict[str, str]
    tokens: TokenSpec
    code: dict[str, str]
    with_weights: bool
    tuned: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A file of a bundle. ``brought`` ones came to the box that packed it with another bundle."""

    name: str
    n_bytes: int
    sha256: str
    brought: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelToFetch:
    """A base model whose weights the box that opens the bundle has to find."""

    name: str
    kind: Literal["local", "hub"]
    revision: str | None
    weights_sha256: str
    n_weight_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleIndex:
    """The first member of a bundle: all others in their order, and what they were made by.

    An outcome has neither settings nor lock; ``bundle_sha256`` names the bundle it was made from.
    ``git`` is null outside a clone. ``unrecorded`` are outputs of which Snakemake kept no record,
    so that later changes of their settings go unnoticed.
    """

    format: int
    kind: Literal["bundle", "outcome"]
    expert: str
    git: str | None
    code: dict[str, str]
    members: tuple[Member, ...]
    spec: BundleSpec | None = None
    lock: ExpertLock | None = None
    model: ModelToFetch | None = None
    bundle_sha256: str | None = None
    unrecorded: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What stays of a bundle's index where it was opened; as long as it is there, it counts.

    ``settings_here`` hashes the manifest of this box when the bundle was opened, null where it had
    none: edited since, it counts again. ``other_code`` are rules of which this box has other code.
    """

    sha256: str
    n_bytes: int
    index: BundleIndex
    settings_here: str | None
    other_code: tuple[str, ...] = field(default=())


def own_artefact(expert: str, key: str, place: str) -> str:
    """Say where a file of the user's that scoring reads lies in an opened bundle."""
    return f"results/{expert}/{CARRIED}/artefacts/{key}/{PurePath(place).name}"


def own_tuning(expert: str) -> str:
    """Say where the tuning that the plan goes by lies in an opened bundle."""
    return f"results/{expert}/{CARRIED}/tuning.json"
