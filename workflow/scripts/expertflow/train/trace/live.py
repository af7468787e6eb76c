"""Follow the bytes of live tensors through whatever runs, real or without data."""

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each storage once, from the operation that makes it to its end, views included.

    What autograd saves for the backward pass keeps its storage alive and so is counted. What a
    kernel needs within itself is not seen. ``peaks`` are the most bytes alive during each phase.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peaks: dict[str, int] = defaultdict(int)
        self._phase = ""
        self._alive: dict[int, weakref.ref[Any]] = {}

    def enter(self, phase: str) -> None:
        """Begin a phase; a phase can be entered again."""
        self._phase = phase
        self._note()

    def count(self, tensor: torch.Tensor) -> None:
        """Follow a tensor that was there before."""
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now_bytes -= n_bytes

        self._alive[key] = weakref.ref(storage, freed)
        self.now_bytes += n_bytes
        self._note()

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks[self._phase], self.now_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and follow what it gives."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result
