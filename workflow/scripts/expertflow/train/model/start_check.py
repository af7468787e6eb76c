"""Check before the first step that the fast route trains like the plain one.

The plain route is transformers' eager attention on one document at a time, nothing compiled, and
torch's cross-entropy of the model's own logits. A part of the fast route with another loss or other
gradients falls back to its next choice: attention, then compilation, then the loss.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
from torch.nn import functional

from expertflow.core.errors import single_line
from expertflow.tokens.packing import IGNORE
from expertflow.train.device import is_out_of_memory
from expertflow.train.feed.batches import Batch
from expertflow.train.model.attention import transformers_name
from expertflow.train.model.compiled import FAILURES
from expertflow.train.model.loss import Kernel, loss_and_gradient
from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers
from expertflow.train.model.self_check import keep_state, own_attention
from expertflow.train.records import Fallback, RoutePart

LOSS_TOLERANCE = 0.01
# Cosine and relative norm, of all gradients together and of each tensor's. A tensor counts from
# this share of the largest one's norm on.
ALL, EACH, COUNTED = (0.999, 0.05), (0.99, 0.1), 0.01
# Scale of noise in the adapters' B matrices: it changes a layer little compared with its weights.
NOISE = 0.02
ADAPTER_B = ("lora_B", "lora_embedding_B")

PARTS: tuple[RoutePart, ...] = ("attention", "compilation", "loss")

T = TypeVar("T")
Autocast = Callable[[], AbstractContextManager[None]]
AnyOf = Callable[[bool], list[bool]]
Gradients = dict[str, torch.Tensor]
# What is wrong with a route's loss and gradients, if anything, and how close they are.
Comparison = tuple[str | None, str]


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
        # No compiled loss without compiled layers: the compiler that failed on them made it, too.
        return [name for name in self._choices[part] if name != "compiled" or is_compiled]

    def start_from(self, part: RoutePart, choice: str) -> None:
        """Use a choice, and drop those before it."""
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


def check_route(
    loss: PackedLoss,
    route: Route,
    batch: Batch,
    *,
    autocast: Autocast,
    any_of: AnyOf = lambda flag: [flag],
    after_step: int = 0,
) -> tuple[list[Fallback], str]:
    """Compare loss and gradients with the plain route's; fall back where they differ.

    Returns the fallbacks, and how close the route in use comes. Processes decide together. Weights,
    gradients, modes and random numbers stay as they are. If memory runs out, raises torch's error.
    """
    fallbacks: list[Fallback] = []
    with _comparable(loss):
        expected = _run_in_all(lambda: _plain_pass(loss, batch, autocast), any_of)

        def compare() -> Comparison:
            compared = _run_in_all(lambda: _compare_fast(loss, batch, autocast, *expected), any_of)
            [failed] = any_of(compared[0] is not None)
            return (compared[0] or "it differs in another process" if failed else None), compared[1]

        problem, words = compare()
        if problem is None:
            return [], words
        # From the plainest choices, each part gets the first one that agrees.
        for part in PARTS:
            route.use(part, route.choices(part)[-1])
        for part in PARTS:
            reasons = []
            for choice in (choices := route.choices(part)):
                route.use(part, choice)
                problem, words = compare()
                if problem is None:
                    break
                reasons.append(problem)
            # If none agrees, the last and plainest one stays.
            if choice != choices[0]:
                fallback = Fallback(
                    part=part,
                    planned=choices[0],
                    used=choice,
                    reason=reasons[0],
                    after_step=after_step,
                )
                fallbacks.append(fallback)
    return fallbacks, words


def _run_in_all(run: Callable[[], T], any_of: AnyOf) -> T:
    """Call ``run`` in each process; if memory runs out in one, raise torch's error in all."""
    error: RuntimeError | None = None
    try:
        made = run()
    except RuntimeError as caught:
        if not is_out_of_memory(caught):
            raise
        error = caught
    [is_short] = any_of(error is not None)
    if is_short:
        raise error or torch.OutOfMemoryError("memory ran out in another process")
    return made


def _plain_pass(loss: PackedLoss, batch: Batch, autocast: Autocast) -> tuple[float, Gradients]:
    lm, total = causal_lm(loss.model), 0.0
    device = next(lm.parameters()).device
    ids_N = batch.input_ids_BL.flatten().to(device)
    labels_N = batch.labels_BL.flatten().long()
    with own_attention(lm), torch.compiler.set_stance("force_eager"):
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            # The first token of a document is not a target: nothing before it predicts it.
            targets = labels_N[start + 1 : end]
            if not (targets != IGNORE).any():
                continue
            with autocast():
                out = lm(input_ids=ids_N[None, start:end], use_cache=False)
            part = functional.cross_entropy(
                out.logits[0, :-1].float(),
                targets.to(device),
                ignore_index=IGNORE,
                reduction="sum",
                label_smoothing=loss.label_smoothing,
            )
            torch.autograd.backward(part)
            total += float(part.detach())
    # On the host, since a card may have memory for one set of gradients only.
    return total, {name: g.to("cpu", copy=True) for name, g in _take_gradients(loss)}


def _take_gradients(loss: PackedLoss) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in loss.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad
            parameter.grad = None


def _compare_fast(
    loss: PackedLoss, batch: Batch, autocast: Autocast, expected: float, gradients: Gradients
) -> Comparison:
    try:
        with autocast():
            value = loss(batch)
        value.backward()
    except FAILURES as error:
        loss.zero_grad()
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return f"it fails: {single_line(error, 300)}", ""
    found = dict(_take_gradients(loss))
    difference = abs(value.item() - expected)
    if not difference <= LOSS_TOLERANCE * abs(expected):
        return f"its loss is {value.item():.6g}, but {expected:.6g} on the plain route", ""
    problem, words = _compare_gradients(found, gradients)
    return problem, f"loss off by {difference / abs(expected):.1e}, {words}"


def _compare_gradients(found: Gradients, expected: Gradients) -> Comparison:
    # A parameter may have a gradient on one route only, which counts as zero on the other.
    names = sorted(found.keys() | expected.keys())
    products = torch.stack([_products(found.get(n), expected.get(n)) for n in names])
    counted = products[:, 2] >= COUNTED**2 * products[:, 2].max()
    for name, products_3, counts in zip(names, products, counted, strict=True):
        if counts and (problem := _disagreement(products_3, *EACH)) is not None:
            return f"the gradient of {name} {problem}", ""
    problem = _disagreement(products.sum(0), *ALL)
    # Nothing counts if the largest norm is NaN.
    least = min(map(_cosine, products[counted]), default=math.nan)
    words = f"cosine of gradients {_cosine(products.sum(0)):.6f}, each at least {least:.4f}"
    return problem and f"the gradient of all weights {problem}", words


def _cosine(products: torch.Tensor) -> float:
    product, found, expected = products.tolist()
    return float(product / (found * expected) ** 0.5) if found * expected else math.nan


def _products(found: torch.Tensor | None, expected: torch.Tensor | None) -> torch.Tensor:
    """Return the product of two gradients and that of each with itself, 0 if one is missing."""
    one, other = (None if g is None else g.flatten().float() for g in (found, expected))
    if one is not None and other is not None:
        other = other.to(one.device)
    pairs = (one, other), (one, one), (other, other)
    values = [0.0 if a is None or b is None else float(torch.dot(a, b)) for a, b in pairs]
    return torch.tensor(values, dtype=torch.float64)


def _disagreement(products: torch.Tensor, least_cosine: float, tolerance: float) -> str | None:
    product, found, expected = products.tolist()
    norm, expected_norm = found**0.5, expected**0.5
    # Written so that NaN disagrees.
    if not product >= least_cosine * norm * expected_norm:
        return (
            f"has a cosine of {_cosine(products):.4f} with the plain route's, below {least_cosine}"
        )
    if not abs(norm - expected_norm) <= tolerance * expected_norm:
        return f"has {norm / expected_norm:.3f} times the norm of the plain route's"
    return None


@contextmanager
def _comparable(loss: PackedLoss) -> Iterator[None]:
    """Train without dropout and with noise in the adapters' B; undo it all at the end.

    At zero, where training starts, B would hide the gradients of A.
    """
    dropouts = [
        (module, name, value)
        for module in loss.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and ("dropout" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]
    own = [p for n, p in loss.named_parameters() if any(key in n for key in ADAPTER_B)]
    before = [parameter.detach().clone() for parameter in own]
    generator = torch.Generator().manual_seed(0)
    try:
        with keep_state(loss):
            loss.train()
            for module, name, _ in dropouts:
                setattr(module, name, 0.0)
            _write(own, [NOISE * torch.randn(b.shape, generator=generator) for b in before])
            yield
    finally:
        _write(own, before)
        for module, name, value in dropouts:
            setattr(module, name, value)
        loss.zero_grad()


@torch.no_grad()
def _write(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
