"""Before step 1 the fast route must train like the plain one; planted faults replace it."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import LORA
from test_attention_routes import LENGTHS, SMALL, SPANS, made, newest
from tiny_run import assembled, train
from tiny_run import made as made_run
from transformers import Qwen3Config

from expertflow.core.errors import Interrupted
from expertflow.tokens.arrow import PackedRows
from expertflow.train import job, loop, start
from expertflow.train.feed.batches import Batch, Collator
from expertflow.train.model import attention, loss, start_check
from expertflow.train.model.compiled import compile_layers
from expertflow.train.model.load import load_for_scoring
from expertflow.train.model.loss import loss_and_gradient
from expertflow.train.model.packed import PackedLoss
from expertflow.train.model.start_check import Route
from expertflow.train.records import RunSummary

pytestmark = pytest.mark.usefixtures("kernel")
TINY = Qwen3Config(**{**SMALL, "num_hidden_layers": 2}, head_dim=16, tie_word_embeddings=True)


@pytest.fixture
def batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, 97, (2, 32)).astype(np.int32)
    return Collator(PackedRows.from_lists(ids, LENGTHS, SPANS)).batch(np.arange(1))


def not_causal(*tensors: Any, window_size: Any = None, **options: Any) -> torch.Tensor:
    return newest(*tensors, **options)


def sharper(*tensors: Any, scale: float | None = None, **options: Any) -> torch.Tensor:
    return newest(*tensors, scale=1.5 * (scale or tensors[0].shape[-1] ** -0.5), **options)


def shifted(labels: torch.Tensor, n_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions, targets = TARGETS_OF(labels, n_targets)
    return positions, targets.roll(1)


TARGETS_OF = loss.targets_of


def scaled(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    value, gradient = loss_and_gradient(*inputs)
    return value, 2 * gradient


def lose_gradient(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Compile layers so that nothing reaches the adapters' A matrices."""
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]

    def run(*inputs: Any) -> Any:
        pairs = zip(names, inputs, strict=True)
        return module(*(x.detach() if "lora_a" in name.lower() else x for name, x in pairs))

    return run


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such\ninstruction")


def made_loss(*, backend: Any = "eager", dropout: float = 0.0) -> tuple[PackedLoss, Route]:
    net = made(TINY, "packed", adapter=True, checkpointing=True)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    packed = PackedLoss(net)
    assert compile_layers(net, dtype=torch.float32, backend=backend) is None
    for module in packed.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    return packed, Route(packed, attention="packed", compiled=True)


def check(packed: PackedLoss, route: Route, batch: Batch) -> dict[str, tuple[str, str]]:
    found, _ = start_check.check_route(packed, route, batch, autocast=nullcontext)
    assert {f.part: f.used for f in found}.items() <= route.used.items()
    return {f.part: (f.used, f.reason) for f in found}


def test_a_sound_route_passes_and_nothing_is_changed(batch: Batch) -> None:
    packed, route = made_loss(dropout=0.1)
    packed.model.get_base_model().model.layers[0].eval()
    modes = [module.training for module in packed.modules()]
    weights = {name: p.detach().clone() for name, p in packed.named_parameters()}
    random, used = torch.random.get_rng_state(), dict(route.used)
    assert check(packed, route, batch) == {}
    assert route.used == used == {"attention": "packed", "compilation": "on", "loss": "compiled"}
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [module.training for module in packed.modules()] == modes
    assert packed.model.get_base_model().model.layers[0].self_attn.attention_dropout == 0.1
    for name, parameter in packed.named_parameters():
        assert torch.equal(parameter, weights[name]) and parameter.grad is None


@pytest.mark.parametrize("n_before", [0, 1])
def test_out_of_memory_in_another_process_counts_for_all(batch: Batch, n_before: int) -> None:
    """Otherwise they would wait for its vote. The plain pass votes first, then the fast one."""
    packed, route = made_loss()
    planned, votes = dict(route.used), list[bool]()

    def any_of(flag: bool) -> list[bool]:
        votes.append(flag)
        return [len(votes) > n_before]

    with pytest.raises(torch.OutOfMemoryError, match="in another process"):
        start_check.check_route(packed, route, batch, autocast=nullcontext, any_of=any_of)
    assert votes == [False] * (n_before + 1) and route.used == planned


def test_the_faulty_part_is_replaced(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    for place, fault, part, used, reason in (
        ("attention.KERNEL", not_causal, "attention", "sdpa", "the plain route"),
        ("attention.KERNEL", sharper, "attention", "sdpa", "the plain route"),
        ("attention.KERNEL", fail, "attention", "sdpa", "it fails: no such instruction"),
        ("loss.targets_of", shifted, "loss", "plain", "its loss is"),
        (None, lose_gradient, "compilation", "off", "lora_A.default.weight has 0.000 times"),
        (None, fail, "compilation", "off", "no such instruction"),
        ("loss.kernel", scaled, "loss", "chunked", "has 2.000 times the norm"),
    ):
        packed, route = made_loss(backend="eager" if place else fault)
        with monkeypatch.context() as faulty:
            if place == "loss.kernel":
                packed.kernel = fault
                route = Route(packed, attention="packed", compiled=True)
            elif place is not None:
                faulty.setattr(f"expertflow.train.model.{place}", fault)
            found = check(packed, route, batch)
            assert list(found) == [part] and found[part][0] == used and reason in found[part][1]
            assert check(packed, route, batch) == {}


def test_two_faults_are_distinguished(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    monkeypatch.setattr(attention, "KERNEL", not_causal)
    packed, route = made_loss(backend=lose_gradient)
    assert set(check(packed, route, batch)) == {"attention", "compilation"}
    assert route.used == {"attention": "sdpa", "compilation": "off", "loss": "chunked"}


def run_tiny(folder: Path, **settings: Any) -> RunSummary:
    lora = replace(LORA, dropout=0.1)
    return train(made_run(folder, n_steps=3, lora=lora, **settings))


def test_a_checked_or_compiled_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_tiny(tmp_path / "plain", torch_compile=False)
    with monkeypatch.context() as checked:
        checked.setattr(start, "CHECKED_DEVICES", ("cpu",))
        found = run_tiny(tmp_path / "checked", torch_compile=False)
    [words] = [line for line in found.activated if line.startswith("route checked: ")]
    assert re.fullmatch(
        r"route checked: a row's loss and gradients match the plain route's: loss off by \d.*e-\d+,"
        r" cosine of gradients 1\.0+, each at least (1\.0000|0\.9999)",
        words,
    )
    assert found.fallbacks == () and found.weights_sha256 == plain.weights_sha256
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for name, backend in (("sound", "eager"), ("failing", fail)):
        monkeypatch.setattr(start, "compile_layers", partial(compile_layers, backend=backend))
        found = run_tiny(tmp_path / name, torch_compile=True)
        assert found.weights_sha256 == plain.weights_sha256
        [counted] = [line for line in found.activated if "graphs of" in line]
        assert counted.endswith("by the end of step 1")
        if name == "sound":
            assert found.fallbacks == () and not counted.startswith("0 graphs")
    [fallback] = found.fallbacks
    assert (fallback.part, fallback.used, fallback.after_step) == ("compilation", "off", 0)
    assert "no such instruction" in fallback.reason


def test_a_run_records_fallbacks_and_resumes_on_the_same_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "CHECKED_DEVICES", ("cpu",))
    inputs = made_run(tmp_path, n_steps=10)
    begun: list[Any] = []
    train_step = loop.train_step

    def begin_step(*step: Any) -> Any:
        begun.append(step)
        return train_step(*step)

    with monkeypatch.context() as faulty:
        faulty.setattr(loss, "targets_of", shifted)
        faulty.setattr(attention, "KERNEL", not_causal)
        faulty.setattr(loop, "train_step", begin_step)
        faulty.setattr(job, "stop_on_signals", lambda: nullcontext(lambda: bool(begun)))
        with pytest.raises(Interrupted):
            train(inputs)
    found = train(inputs)
    assert [(f.part, f.used, f.after_step) for f in found.fallbacks] == [
        ("attention", "sdpa", 0), ("loss", "plain", 0)
    ]  # fmt: skip
    assert found.resumed_at_steps and "loss plain" in " ".join(found.activated)
    told = {"model": inputs.model, "plan": inputs.plan, "fallbacks": found.fallbacks}
    assert load_for_scoring(None, **told).config._attn_implementation == "sdpa"


def test_the_longest_rows_run_uncompiled_where_they_do_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "compile_layers", partial(compile_layers, backend=fail))
    with assembled(made_run(tmp_path, n_steps=1, torch_compile=True)) as run:
        run.feed.collator.cuts = True
        run.loss.train()
        start.try_batches(run)
    assert run.route.used["compilation"] == "off" and len(run.progress.fallbacks) == 1
