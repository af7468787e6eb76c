"""The cards and prices of config/hardware, and the plan's spec, which takes what it needs."""

import difflib
import functools
from pathlib import Path
from typing import Any

from expertflow.config import specs
from expertflow.config.read_yaml import read_yaml
from expertflow.config.validate import check
from expertflow.core.errors import ConfigError
from expertflow.plan.records import PlanSpec


class HardwareTables:
    """Cards and prices; the user's own files in the first directory win over ours in the last."""

    def __init__(self, config: dict[str, Any], directories: list[Path], workflow_dir: Path) -> None:
        self._config, self._directories, self._workflow = config, directories, workflow_dir

    @property
    def hardware(self) -> str:
        """Give what the plan is for: ``auto``, ``cpu`` or a card; the demo is always on the CPU.

        Raises:
            ConfigError: no card has this name.
        """
        hardware: str = "cpu" if self._config["preset"] == "demo" else self._config["hardware"]
        if hardware in ("auto", "cpu") or any(specs.is_card(row, hardware) for row in self.gpus):
            return hardware
        known = ", ".join(("auto", "cpu", *(row["name"] for row in self.gpus)))
        nearest = self._nearest(hardware)
        raise ConfigError(f"hardware is {hardware!r}, and known are {known}: {nearest}")

    @property
    def files(self) -> dict[str, Path]:
        """Give the files of both tables, by the names that are looked for."""
        return {f"hardware/{name}": self._file(name) for name in ("gpus.yaml", "prices.yaml")}

    @functools.cached_property
    def gpus(self) -> list[dict[str, Any]]:
        """Give the rows of the table of cards."""
        path = self._file("gpus.yaml")
        table = read_yaml(path)
        schema = read_yaml(self._workflow / "schemas" / "hardware.schema.yaml")
        check(table, schema, where=str(path))
        return list(table["gpus"])

    @functools.cached_property
    def prices(self) -> dict[str, dict[str, Any]]:
        """Give the user's prices by card, under the name that the user gives it.

        Raises:
            ConfigError: no card has this name.
        """
        path = self._file("prices.yaml")
        table = read_yaml(path)
        check(table, read_yaml(self._workflow / "schemas" / "prices.schema.yaml"), where=str(path))
        prices: dict[str, dict[str, Any]] = table["prices"] or {}
        for card in prices:
            if not any(specs.is_card(row, card) for row in self.gpus):
                raise ConfigError(f"{path}: prices names {card!r}: {self._nearest(card)}")
        return prices

    @property
    def compare(self) -> list[dict[str, Any]]:
        """Give the hardware to compare with; none where the plan is for the CPU.

        Raises:
            ConfigError: no card has this name.
        """
        if self.hardware == "cpu":
            return []
        choices: list[dict[str, Any]] = self._config["compare"]
        for choice in choices:
            if not any(specs.is_card(row, choice["name"]) for row in self.gpus):
                raise ConfigError(
                    f"compare names {choice['name']!r}: no such row in config/hardware/gpus.yaml;"
                    " correct the name, or add the row"
                )
        return choices

    def plan_spec(self, expert: dict[str, Any]) -> PlanSpec:
        """Give the settings of ``plan_training``."""
        return specs.plan_spec(
            expert,
            hardware=self.hardware,
            gpu_table=self.gpus,
            prices=self.prices,
            price=(self._config["price_usd_per_hour"], self._config["price_as_of"]),
            billing_minutes=self._config["billing_minutes"],
            compare=self.compare,
            may_drop_budgets=self._config["preset"] == "demo",
        )

    def calibration_spec(self, expert: dict[str, Any]) -> PlanSpec:
        """Give the settings of ``calibrate_expert``."""
        return specs.calibration_spec(self.plan_spec(expert))

    def _nearest(self, card: str) -> str:
        names = [name for row in self.gpus for name in (row["name"], *row.get("driver_names", []))]
        near = difflib.get_close_matches(card, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "correct the name"
        return f"no such row in config/hardware/gpus.yaml; {hint}"

    def _file(self, name: str) -> Path:
        found = [directory / "hardware" / name for directory in self._directories]
        return next((path for path in found if path.is_file()), found[-1])
