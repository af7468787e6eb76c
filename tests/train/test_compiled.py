"""Compiled layers must train like uncompiled ones, and be compiled once for all batches."""

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import LORA, plan_spec, tiny_qwen3
from test_attention_routes import FAMILIES, made

from expertflow.core.errors import TrainingError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.switches import choose_compile
from expertflow.tokens.arrow import PackedRows
from expertflow.train.feed.batches import Collator
from expertflow.train.model import compiled
from expertflow.train.model.compiled import compile_layers
from expertflow.train.model.load import add_adapter, load_base
from expertflow.train.model.packed import PackedLoss

FP32 = torch.float32
LENGTHS = [[10, 7, 15], [20, 5], [3, 3, 3, 3, 3, 3], [32]]
PAIRS = [[0, 1], [2, 3], [1, 2], [3, 0]]


@pytest.fixture
def rows() -> PackedRows:
    ids = np.random.default_rng(0).integers(0, 97, (4, 32)).astype(np.int32)
    return PackedRows.from_lists(ids, LENGTHS, [[2, sum(lengths)] for lengths in LENGTHS])


@pytest.fixture(autouse=True)
def counted() -> Iterator[Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def train_alike(one: Any, other: Any, rows: PackedRows, *, evens_bounds: bool = False) -> None:
    collator = Collator(rows, evens_bounds=evens_bounds)
    for pair in PAIRS:
        batch = collator.batch(np.array(pair))
        losses = [PackedLoss(net)(batch) for net in (one, other)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for (name, p), q in zip(one.named_parameters(), other.named_parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(p.grad, q[1].grad, atol=2e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("adapter", "checkpointing", "evens_bounds"),
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True)],
    ids=["full", "lora", "checkpointed", "even"],
)
def test_one_graph_serves_all_layers_and_batches(
    rows: PackedRows, kernel: None, counted: Any, adapter: bool, checkpointing: bool,
    evens_bounds: bool,
) -> None:  # fmt: skip
    nets = [
        made(FAMILIES["qwen3"], "packed", adapter=adapter, checkpointing=checkpointing)
        for _ in range(2)
    ]
    names = list(nets[0].state_dict())
    assert compile_layers(nets[0], dtype=FP32, backend="aot_eager") is None
    assert compiled.describe_compilation().startswith("0 graphs")
    assert list(nets[0].state_dict()) == names
    train_alike(*nets, rows, evens_bounds=evens_bounds)
    assert not counted["graph_break"]
    # Without adapters the first layer is separate: nothing before it needs a gradient.
    n_graphs = counted["stats"]["unique_graphs"]
    assert n_graphs <= 2 and compiled.describe_compilation().startswith(f"{n_graphs} graphs of ")


def test_the_loop_over_documents_is_compiled_for_no_length(rows: PackedRows, counted: Any) -> None:
    nets = [made(FAMILIES["llama"], "packed") for _ in range(2)]
    assert compile_layers(nets[0], dtype=FP32, backend="aot_eager") is None
    collator = Collator(rows)
    PackedLoss(nets[0])(collator.batch(np.array([0, 1])))
    first = counted["stats"]["unique_graphs"]
    nets[0].zero_grad()
    train_alike(*nets, rows)
    assert first > 0 and counted["stats"]["unique_graphs"] == first
    assert len(counted["graph_break"]) == 1
    assert "; break: Skip calling `torch.compiler.disable()`d" in compiled.describe_compilation()


def test_checkpointed_layers_that_loop_are_not_compiled(rows: PackedRows) -> None:
    net = made(FAMILIES["llama"], "packed", checkpointing=True)
    assert "layers not compiled" in str(compile_layers(net, dtype=FP32))
    assert all(module._compiled_call_impl is None for module in net.modules())


def test_a_model_without_known_layers_or_a_compiler_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = made(FAMILIES["qwen3"], "packed")
    net.model.layers = torch.nn.ModuleList()
    with pytest.raises(TrainingError, match="qwen3 has no known decoder layers"):
        compile_layers(net, dtype=FP32)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TrainingError, match="needs a C\\+\\+ compiler, no-such-compiler"):
        compile_layers(made(FAMILIES["qwen3"], "packed"), dtype=FP32)


def test_a_card_without_buildable_kernels_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocks what only a card has: the error is triton's, which is not installed here."""

    def without_headers(_: Any) -> Any:
        raise subprocess.CalledProcessError(1, ["/usr/bin/gcc", "cuda_utils.c"])

    monkeypatch.setattr(torch, "compile", without_headers)
    with pytest.raises(
        TrainingError, match=r"cuda_utils\.c.*install triton, gcc and .* or set it to false"
    ):
        compiled._try_a_kernel(torch.device("cuda"))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    compiled._try_a_kernel(torch.device("cpu"))


def test_a_dropout_mask_does_not_depend_on_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks only the code for a card, as if its kernel had one dimension."""
    from torch._inductor.codegen.triton import TritonOverrides

    monkeypatch.setattr(TritonOverrides, compiled.FOUR_AT_ONCE, staticmethod(lambda: True))
    with torch.compiler.config.patch(cache_key_tag="theirs, "):
        for _ in range(2):
            compiled._draw_one_by_one()
        assert torch.compiler.config.cache_key_tag == f"theirs, {compiled.ONE_BY_ONE}"
    assert TritonOverrides.rand("seed", "place") == "tl.rand(seed, (place).to(tl.uint32))"


@pytest.mark.extra("bitsandbytes")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_four_bit_layers_under_lora_compile_completely(
    rows: PackedRows, kernel: None, counted: Any, tmp_path: Path, checkpointing: bool
) -> None:
    tiny_qwen3(vocab_size=97, hidden_size=64).save_pretrained(tmp_path)
    nets = []
    for _ in range(2):
        base = load_base(str(tmp_path), dtype=FP32, attention_name="packed", quantized=True)
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        nets.append(add_adapter(base, replace(LORA, dropout=0.0)).train())
    assert compile_layers(nets[0], dtype=FP32, backend="aot_eager") is None
    train_alike(*nets, rows)
    assert counted["stats"]["unique_graphs"] and not counted["graph_break"]


def test_a_plan_compiles_four_bit_layers_unless_under_dora() -> None:
    gpu = GpuFacts(name="H100 SXM", source="test")
    for use_dora in (False, True):
        spec = plan_spec(method="qlora", lora=replace(LORA, use_dora=use_dora))
        wanted, reason = choose_compile(spec, gpu, attention="packed", packing="bfd")
        assert wanted is not use_dora and ("DoRA" in reason) is use_dora


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="no C++ compiler or no Python headers",
)
def test_compiled_code_trains_like_the_model(
    rows: PackedRows, kernel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    nets = [made(FAMILIES["qwen3"], "packed") for _ in range(2)]
    compile_layers(nets[0], dtype=FP32)
    # No more processes that import torch, neither to compile nor to detect CPU features.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        train_alike(*nets, rows)
