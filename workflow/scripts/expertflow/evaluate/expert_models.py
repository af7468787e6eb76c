"""Hold one model at a time: loading takes minutes of a paid card, and two may not fit."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)
# Below the checkpoint's folder; null is the base model.
Place = str | None


class Models:
    """The base model and the candidates, each loaded when it is asked for and another was before.

    ``load`` takes the folder of trained weights, or null for the base model. Who gets a model keeps
    no hold of it.
    """

    def __init__(self, load: Callable[[Path | None], Any], checkpoint: Path) -> None:
        self._load = load
        self._checkpoint = checkpoint
        self._held: tuple[Place, Any] | None = None
        self.n_loaded = 0

    def get(self, place: Place) -> Any:
        """Give the model of a place; whatever else was loaded is let go first."""
        if self._held is None or self._held[0] != place:
            self.release()
            log.info("loading %s", self.name(place))
            self._held = place, self._load(self.folder(place))
            self.n_loaded += 1
        return self._held[1]

    def folder(self, place: Place) -> Path | None:
        """Give the folder of trained weights; null for the base model."""
        return None if place is None else self._checkpoint / place

    def name(self, place: Place) -> str:
        """Name a model in a log."""
        return "the base model" if place is None else str(self.folder(place))

    def release(self) -> None:
        """Free the memory for the next model."""
        if self._held is None:
            return
        self._held = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
