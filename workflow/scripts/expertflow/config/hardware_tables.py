"""The cards and prices of config/hardware, and the specs that contain rows of them."""

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from expertflow.config.read_yaml import Settings
from expertflow.config.validate import read_checked
from expertflow.core.errors import ConfigError
from expertflow.core.records import fill_record, from_json
from expertflow.core.settings import name_of, neutralize, without_auto
from expertflow.plan.records import (
    CALIBRATION_STEPS,
    Claim,
    HardwareChoice,
    Origin,
    PlanSpec,
    TrainPlan,
)
from expertflow.plan.settings import Training, TrainingSection

# The keys of a row of prices that a plan reads.
PRICE_KEYS = ("usd_per_hour", "as_of", "billing_minutes", "storage_usd_per_hour")


class HardwareTables:
    """Cards and prices; the user's own files in the first folder win over ours in the last."""

    def __init__(self, config: Settings, folders: Sequence[Path]) -> None:
        self._config, self._folders = config, folders

    @property
    def files(self) -> dict[str, Path]:
        """The files of both tables, by name."""
        return {f"hardware/{name}": self._file(name) for name in ("gpus.yaml", "prices.yaml")}

    @functools.cached_property
    def gpus(self) -> list[Settings]:
        return list(read_checked(self._file("gpus.yaml"), "hardware")["gpus"])

    @functools.cached_property
    def prices(self) -> dict[str, Settings]:
        """The user's prices by GPU, under the user's name for it; ConfigError if it is unknown."""
        path = self._file("prices.yaml")
        prices: dict[str, Settings] = read_checked(path, "prices")["prices"] or {}
        for card in prices:
            self._check_known(card, f"{path}: prices names {card!r}")
        return prices

    def plan_spec(self, expert: Settings) -> PlanSpec:
        """Return the settings of ``plan_training``.

        It takes only the rows of the chosen card and of those to compare it with, or all while the
        card is not known yet. The demo is always planned for the CPU, and nothing is compared with
        a CPU.

        Raises:
            ConfigError: a card's name is unknown.
        """
        chosen = from_json(TrainingSection, without_auto(expert["training"]), where="training")
        # A LoRA block left in the manifest then has no effect.
        if chosen.method == "full":
            chosen = replace(chosen, lora=None)
        config, is_demo = self._config, expert["preset"] == "demo"
        # The demo trains a small model anywhere; a card would change its plan, and what it shows.
        hardware = "cpu" if is_demo else config["hardware"]
        if hardware not in ("auto", "cpu"):
            known = ", ".join(("auto", "cpu", *(row["name"] for row in self.gpus)))
            self._check_known(hardware, f"hardware is {hardware!r} (known: {known})")
        compare: list[Settings] = [] if hardware == "cpu" else config["compare"]
        for choice in compare:
            self._check_known(choice["name"], f"compare names {choice['name']!r}")
        # With rows of other cards, a new price for one would rerun every plan.
        wanted = {hardware, *(choice["name"] for choice in compare)}
        cards = [row for row in self.gpus if hardware == "auto" or wanted & _names(row).keys()]
        prices = {row["name"]: price for row in cards if (price := self._price(row)) is not None}
        origins: dict[str, Origin] = expert["setting_origins"]
        kept = {name: origins[name] for name in Training.__struct_fields__ if name in origins}
        # The plan has another name for the length of rows.
        if chosen.max_seq_length is not None:
            length = origins.get(name_of(TrainingSection.max_seq_length), "default")
            kept[name_of(TrainPlan.sequence_length_tokens)] = length
        return fill_record(
            PlanSpec,
            chosen,
            origins=kept,
            hardware=hardware,
            gpu_table=tuple(cards),
            prices=prices,
            price_usd_per_hour=config["price_usd_per_hour"],
            price_as_of=config["price_as_of"],
            billing_minutes=config["billing_minutes"],
            system=expert["system"],
            claims=from_json(tuple[Claim, ...], expert["claims"], where="claims"),
            compare=from_json(tuple[HardwareChoice, ...], compare, where="compare"),
            may_drop_budgets=is_demo,
        )

    def _check_known(self, card: str, setting: str) -> None:
        names = [name for row in self.gpus for name in _names(row)]
        if card not in names:
            near = difflib.get_close_matches(card, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?"
            fix = hint if near else "correct the name, or add the row"
            raise ConfigError(f"{setting}: no such row in config/hardware/gpus.yaml; {fix}")

    def _price(self, row: Settings) -> Settings | None:
        # Users write a card's price under the name that their driver or provider shows.
        listed = next((self.prices[name] for name in _names(row) if name in self.prices), None)
        # Notes and links next to a price are for people.
        return listed and {key: listed[key] for key in PRICE_KEYS if key in listed}

    def _file(self, name: str) -> Path:
        found = [folder / "hardware" / name for folder in self._folders]
        return next((path for path in found if path.is_file()), found[-1])


def calibration_spec(spec: PlanSpec) -> PlanSpec:
    """Reduce a plan's settings to those that determine the time and memory of a step.

    This drops prices, budgets and claims, what the short run sets for itself, the size of an
    optimizer step and the length of the run, so that a sweep pays for one calibration.
    """
    is_any = spec.hardware == "auto"
    cards = [row for row in spec.gpu_table if is_any or spec.hardware in _names(row)]
    n_steps = min(CALIBRATION_STEPS, spec.max_steps or CALIBRATION_STEPS)
    settings = replace(neutralize(fill_record(Training, spec)), max_steps=n_steps)
    return fill_record(PlanSpec, settings, hardware=spec.hardware, gpu_table=tuple(cards))


def _names(row: Settings) -> dict[str, None]:
    """Return a card's short name and those that drivers give it, in this order."""
    return dict.fromkeys((row["name"], *row.get("driver_names", [])))
