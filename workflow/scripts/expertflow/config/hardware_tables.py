"""The cards and prices of config/hardware, and the plan's spec, which takes what it needs."""

import functools
from pathlib import Path
from typing import Any

from expertflow.config import specs
from expertflow.config.load import read_yaml
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
        names = ", ".join(row["name"] for row in self.gpus)
        raise ConfigError(
            f"hardware is {hardware!r}: no such row in config/hardware/gpus.yaml; use auto, cpu, or"
            f" one of {names}"
        )

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
        """Give the user's prices by card."""
        return read_yaml(self._file("prices.yaml"))["prices"] or {}

    def plan_spec(self, expert: dict[str, Any]) -> PlanSpec:
        """Give the settings of ``plan_training``."""
        return specs.plan_spec(
            expert,
            hardware=self.hardware,
            gpu_table=self.gpus,
            prices=self.prices,
            price=(self._config["price_usd_per_hour"], self._config["price_as_of"]),
            compare=self._config["compare"],
        )

    def _file(self, name: str) -> Path:
        found = [directory / "hardware" / name for directory in self._directories]
        return next((path for path in found if path.is_file()), found[-1])
