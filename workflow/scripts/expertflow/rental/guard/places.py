"""Whether what is copied is what the command writes, and whether the copy outlives the machine."""

from collections.abc import Sequence
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.rental.sync.destination import is_local

# Below the folder that the guard is started in.
RESULTS, STATE = Path("results"), Path("state")


def check_disk(results: Path, option: str, destination: str | None) -> None:
    """Refuse a folder on the disk that ends with the machine.

    Raises:
        ConfigError: it is on the same disk as the results.
    """
    if destination is None or not is_local(destination):
        return
    if _device(Path(destination)) == _device(results):
        raise ConfigError(
            f"{option} {destination}: a folder on the disk of {results}, which --on-finish may end;"
            " give a folder of another disk, host:path or s3://…, or --disk-stays where it stays"
        )


def _device(path: Path) -> int:
    """Give the disk that a path is on, or will be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place.stat().st_dev


def check_directory(command: Sequence[str]) -> None:
    """Refuse a Snakemake that works in another folder than the guard.

    Raises:
        ConfigError: it is told to.
    """
    names = [Path(word).name for word in command]
    if "snakemake" not in names:
        return
    for word in command[names.index("snakemake") + 1 :]:
        if word.startswith("--directory") or (word.startswith("-d") and not word.startswith("--")):
            raise ConfigError(
                f"{word}: Snakemake would write where the guard does not look; start the guard in"
                " that folder, or give it --results and --state"
            )
