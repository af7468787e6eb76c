"""How a model is trained: its attention, its compilation, its loss, and what may replace each."""

from expertflow.train.model.attention import transformers_name
from expertflow.train.model.loss import Kernel, loss_and_gradient
from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers
from expertflow.train.records import RoutePart

PARTS: tuple[RoutePart, ...] = ("attention", "compilation", "loss")


class Route:
    """What each part of a loss uses now, and its choices: the planned one, then plainer ones."""

    def __init__(self, loss: PackedLoss, *, attention: str, compiled: bool) -> None:
        self._loss, self._lm = loss, causal_lm(loss.model)
        self._calls = [(layer, layer._compiled_call_impl) for layer in decoder_layers(self._lm)]
        plainer = "sdpa" if self._lm._supports_sdpa else "eager"
        ladder = [attention] if attention in ("sdpa", "eager") else [attention, plainer]
        own: dict[str, Kernel | None] = {"compiled": loss.kernel} if compiled else {}
        self._kernels = own | {"chunked": loss_and_gradient, "plain": None}
        self._choices: dict[RoutePart, list[str]] = {
            "attention": ladder,
            "compilation": ["on", "off"] if compiled else ["off"],
            "loss": list(self._kernels),
        }
        self.used = {part: choices[0] for part, choices in self._choices.items()}

    def choices(self, part: RoutePart) -> list[str]:
        is_compiled = self.used["compilation"] == "on"
        # No compiled loss without compiled layers: the compiler that failed there made it, too.
        return [name for name in self._choices[part] if name != "compiled" or is_compiled]

    def start_from(self, part: RoutePart, choice: str) -> None:
        """Use a choice, and never again one before it."""
        names = self._choices[part]
        if choice in names:
            self._choices[part] = names[names.index(choice) :]
            self.use(part, choice)

    def use(self, part: RoutePart, choice: str) -> None:
        self.used[part] = choice
        if part == "attention":
            self._lm.set_attn_implementation(transformers_name(choice))
        elif part == "loss":
            self._loss.kernel = self._kernels[choice]
        else:
            for layer, call in self._calls:
                layer._compiled_call_impl = call if choice == "on" else None
            if choice == "off" and self.used["loss"] == "compiled":
                self.use("loss", "chunked")
