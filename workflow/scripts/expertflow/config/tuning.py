"""What tuning is told, and the tuning that a manifest names: a user's file, or one made here."""

import re
from pathlib import Path

from msgspec.structs import replace

from expertflow.config import specs
from expertflow.core.errors import ConfigError
from expertflow.plan.records import PlanSpec
from expertflow.rental.bundle.records import BundleSpec, own_tuning

# What tune_expert makes.
MADE = re.compile(r"results/[^/]+/tuning\.json")


def tuning_spec(spec: PlanSpec) -> PlanSpec:
    """Leave of a plan's settings what decides which are fastest; neither length nor an own tuning.

    A search that read the tuning that it makes would never end, and steps are alike in every epoch.
    """
    return replace(specs.calibration_spec(spec, length=True), tuned=None)


def tuned_file(expert: str, place: str | None, bundle: BundleSpec | None) -> list[str]:
    """Give the file as the plan's rule names it; none where the manifest has none.

    Where a bundle was opened, its copy counts, unless the manifest names another by now.

    Raises:
        ConfigError: there is no such file, and no rule makes it.
    """
    if place is None:
        return []
    if bundle is not None and bundle.tuned == place:
        return [own_tuning(expert)]
    path = Path(place).expanduser()
    if not MADE.fullmatch(str(path)) and not path.is_file():
        raise ConfigError(
            f"expert {expert}: training.tuned names {place}, which is not there; correct the path,"
            f" or name results/{expert}/tuning.json, which is made when it is missing"
        )
    return [str(path)]
