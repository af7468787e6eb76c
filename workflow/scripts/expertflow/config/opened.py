"""Settings of an expert whose bundle was opened here: those it was made with, unless told anew.

The configuration of this machine counts for what belongs to the machine. For what was decided where
the bundle was made, the bundle's counts, and over it the command line.
"""

from pathlib import Path
from typing import Any

from msgspec import field

from expertflow.config.guard import note
from expertflow.config.hardware_tables import HardwareTables
from expertflow.config.load import Schemas, find_manifest, load_config, merge
from expertflow.core.errors import ConfigError
from expertflow.core.files import sha256_file
from expertflow.core.records import Record, read_record
from expertflow.rental.bundle.records import CARRIED, OPENED, BundleSpec, Opened

Settings = dict[str, Any]
# Keys of the configuration that decide what a bundle holds. The others belong to a machine.
DECIDED = (
    "preset", "training", "hardware", "price_usd_per_hour", "price_as_of", "billing_minutes",
    "compare", "calibrate", "ablate", "ablation",
)  # fmt: skip


class Case(Record, frozen=True, kw_only=True):
    """The places that an expert's settings are read from; ``bundle`` is null where none is open.

    ``told`` is what the command line says of the configuration, here or where the bundle was made.
    """

    config: Settings
    directories: list[Path]
    hardware: HardwareTables
    bundle: Opened | None = None
    told: Settings = field(default_factory=dict)

    @property
    def spec(self) -> BundleSpec | None:
        """The settings that the bundle was made with."""
        return None if self.bundle is None else self.bundle.index.spec

    @property
    def content(self) -> dict[str, dict[str, str]]:
        """The hashes of the user's files that the bundle knows, by the manifest's path."""
        return {} if self.spec is None else self.spec.content


def decided(config: Settings, expert: str) -> Settings:
    """Cut out of the configuration what decides an expert's bundle."""
    own = config["experts"].get(expert) or {}
    return {**{key: config[key] for key in DECIDED}, "experts": {expert: own}}


def told_training(told: Settings, expert: str) -> Settings:
    """Cut out of what the command line says what is about the training of an expert."""
    own = ((told.get("experts") or {}).get(expert) or {}).get("training") or {}
    return {"training": told.get("training") or {}, "experts": {expert: {"training": own}}}


def opened_case(
    name: str, *, own: Case, raw: Settings, told: Settings, schemas: Schemas, workflow_dir: Path
) -> Case:
    """Return the case of an expert: that of its bundle if one is open, else this machine's ``own``.

    ``raw`` is the configuration before it was checked, ``told`` the part from the command line.

    Raises:
        ConfigError: the command line asks for another preset than the bundle's.
    """
    marker = Path("results", name, OPENED)
    if not marker.is_file():
        return own
    bundle = read_record(Opened, marker)
    if bundle.index.spec is None:
        raise ConfigError(f"{marker}: holds no settings; open the bundle again with --replace")
    made = bundle.index.spec.config
    if told.get("preset", made["preset"]) != made["preset"]:
        raise ConfigError(
            f"results/{name} is an opened bundle of the {made['preset']} preset and the command"
            f" line says preset={told['preset']}; leave it out, or make a bundle with that preset"
        )
    experts = {**raw["experts"], **made["experts"]}
    config = load_config(merge({**raw, **made, "experts": experts}, told), schemas)
    directories = [Path("results", name, CARRIED), *own.directories]
    hardware = HardwareTables(config, directories, workflow_dir)
    if manifest_here(name, own.directories) != bundle.settings_here:
        directories = own.directories
    return Case(
        config=config,
        directories=directories,
        hardware=hardware,
        bundle=bundle,
        told=merge(bundle.index.spec.told, told),
    )


def manifest_here(name: str, directories: list[Path]) -> str | None:
    """Hash the manifest that this machine has of an expert, if it has one."""
    try:
        return sha256_file(find_manifest(name, [d / "experts" for d in directories]))
    except ConfigError:
        return None


def note_case(name: str, case: Case, own: list[Path]) -> None:
    """Log where an opened expert's settings are read from, if that could surprise."""
    if case.bundle is None or case.spec is None:
        return
    place = f"results/{name}/{CARRIED}/experts"
    files = case.spec.files.items()
    made_with = next((file.sha256 for key, file in files if key.startswith("experts/")), None)
    if case.directories == own:
        note(
            f"{name}: its manifest in config/experts changed since its bundle was opened, and"
            f" counts; the bundle's is in {place}"
        )
    elif case.bundle.settings_here not in (None, made_with):
        note(f"{name}: goes by the manifest of its bundle, in {place}; config/experts has another")
