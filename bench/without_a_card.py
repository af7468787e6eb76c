"""Show, without a card, what a training step will run on one: graphs, kernels, bytes.

    python bench/without_a_card.py [--cases NAME ...] [--ptx] [--workers 2]

Two layers of each model at its real width, rows of 2,048 tokens in bf16, adapters of rank 16 with
dropout 0.05 on all projections, compiled for sm_90 down to the kernels' plan; with ``--ptx`` down
to machine code for sm_80, sm_89, sm_90 and sm_100. Needs a C++ compiler and the package triton
(``make triton``; a CUDA build of torch includes it), and for QLoRA ``make bitsandbytes``. KB are
Inductor's own count of generated kernels, without matrix products, attention and the unpacking of
4-bit weights; "launches" count a step of one micro-batch. Peak memory is the eager step's, traced.
No value is computed and nothing is timed. Prints a table; the last line is JSON.
"""

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("workflow/scripts", "bench", "tests")]

LENGTH = 2048
DOCUMENTS = (600, 500, 500, 448)
# Rows that must not trigger another compilation.
OTHER_DOCUMENTS = ((2048,), (300, 300, 300, 300, 300, 300, 248))
SUPERVISED = 0.3
CAPABILITIES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0)}
HOPPER = "sm_90"


class Shape(NamedTuple):
    """A model's dimensions, as in its config, and the rows of a micro-batch."""

    family: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    n_rows: int


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 16, 8, 3072, 151_936, True, 8),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 16, 8, 6144, 151_936, True, 4),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 9728, 151_936, True, 4),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 12_288, 151_936, False, 2),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 14_336, 128_256, False, 2),
}
METHODS = ("lora", "dora", "qlora", "full")


class Case(NamedTuple):
    model: str
    method: str
    checkpointed: bool

    @property
    def name(self) -> str:
        return f"{self.model} {self.method}{' checkpointed' if self.checkpointed else ''}"


# The models left out would show the same, at other widths.
SHOWN_ON = {
    "full": ("qwen3-0.6b", "qwen3-1.7b"),
    "qlora": ("qwen3-0.6b", "qwen3-8b"),
}
CASES = {
    case.name: case
    for model in SHAPES
    for method in METHODS
    for checkpointed in (False, True)
    if (case := Case(model, method, checkpointed)) and model in SHOWN_ON.get(method, SHAPES)
}


def start_worker(architecture: str) -> None:
    from fake_card.card import pose_as_card

    warnings.filterwarnings("ignore")
    pose_as_card(CAPABILITIES[architecture])

    import torch

    torch.set_num_threads(1)


def count_case(case: Case, *, to_cubin: bool) -> dict[str, Any]:
    """Compile two layers of a model, run one step, and count."""
    import torch
    from fake_card.card import checking
    from fake_card.count import LayerCompiler, read_counters, summarize_graphs
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    from expertflow.train.memory_trace import materialize_weights, sample_batch
    from expertflow.train.model import attention
    from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers

    torch._dynamo.reset()
    counters.clear()
    shape, run = SHAPES[case.model], traced_run(case)
    net = build_net(run, case)
    compiler = LayerCompiler(to_cubin=to_cubin)
    kernel = mock.patch.object(attention, "KERNEL", checking(attention.KERNEL))
    with kernel, FakeTensorMode(allow_non_fake_inputs=True):
        materialize_weights(net, device="cuda")
        if case.method == "qlora":
            from fake_card.four_bit import fill_layers

            fill_layers(net)
        for layer in decoder_layers(causal_lm(net)):
            layer.compile(dynamic=False, backend=compiler)
        for documents in (DOCUMENTS, *OTHER_DOCUMENTS):
            batch = sample_batch(documents, shape.n_rows, SUPERVISED)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = PackedLoss(net)(batch)
            loss.backward()
        found = read_counters() | summarize_graphs(compiler.graphs, batch.n_tokens)
        found |= count_rest(net, case, batch)
    found["launches_per_step"] = shape.n_layers * found.pop("launches_per_layer") + found.pop(
        "other_launches"
    )
    found["peak_bytes"] = None if to_cubin else peak_bytes(case)
    names = {"name": case.name, "model": case.model, "method": case.method}
    counted = {**names, "checkpointed": case.checkpointed, **found}
    return counted | ({"cubins": compiler.n_cubins} if to_cubin else {})


def build_net(run: Any, case: Case) -> Any:
    """Build two layers without weights; 4-bit ones are bitsandbytes' own, whose kernels count."""
    import torch

    from expertflow.train.memory_trace import build_model
    from expertflow.train.model.load import add_adapter
    from expertflow.train.model.packed import decoder_layers

    if case.method != "qlora":
        return build_model(run, n_layers=2, checkpoint=case.checkpointed)
    from fake_card.four_bit import pack_layers

    net = build_model(
        replace(run, method="lora", lora=None), n_layers=2, checkpoint=case.checkpointed
    )
    pack_layers(net, decoder_layers(net))
    with torch.device("meta"):
        net = add_adapter(net, run.lora)
    for module in net.modules():
        # Adapters on 4-bit layers leave their input dtype to autocast; the name is peft's.
        module.cast_input_dtype_enabled = False
    return net.train()


def traced_run(case: Case) -> Any:
    import torch
    from gpu_kit.training import LORA
    from transformers import AutoConfig

    from expertflow.train.memory_trace import TracedRun

    shape = SHAPES[case.model]
    config = AutoConfig.for_model(
        shape.family,
        num_hidden_layers=shape.n_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=128,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=40_960,
    )
    return TracedRun(
        config=config,
        method="lora" if case.method == "dora" else case.method,
        lora=None if case.method == "full" else replace(LORA, use_dora=case.method == "dora"),
        attention="packed",
        dtype=torch.bfloat16,
        kernel=True,
        supervised_fraction=SUPERVISED,
        card_bytes=torch.cuda.get_device_properties().total_memory,
    )


def count_rest(net: Any, case: Case, batch: Any) -> dict[str, Any]:
    """Count the loss, with its backward pass, and the optimizer; both run outside the layers."""
    import torch
    from fake_card.count import KIB, EagerWork

    from expertflow.train.model.loss import loss_and_gradient_to_compile, sum_loss
    from expertflow.train.model.packed import causal_lm, find_head

    lm, shape = causal_lm(net), SHAPES[case.model]
    size = (shape.n_rows, LENGTH, shape.hidden_size)
    hidden = torch.empty(size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = batch.labels_BL.to("cuda")
    n_targets, head = batch.n_target_tokens, find_head(lm)
    with EagerWork() as of_loss, torch.autocast("cuda", dtype=torch.bfloat16):
        kernel = of_loss.compiled(loss_and_gradient_to_compile)
        sum_loss(hidden, head, labels, n_targets=n_targets, kernel=kernel).backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    with EagerWork() as of_optimizer:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return {
        "loss_kb_per_target": round(of_loss.n_bytes / batch.n_target_tokens / KIB, 1),
        "loss_launches": of_loss.n_launches,
        "optimizer_launches": of_optimizer.n_launches,
        "other_launches": of_loss.n_launches + of_optimizer.n_launches,
    }


def peak_bytes(case: Case) -> int:
    from expertflow.train.memory_trace import whole_model

    run, n_rows = traced_run(case), SHAPES[case.model].n_rows
    return sum(whole_model(run, n_rows, LENGTH, checkpoint=case.checkpointed))


def run_cases(cases: list[Case], *, architecture: str, to_cubin: bool, workers: int) -> Any:
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=start_worker, initargs=(architecture,)
    )
    with pool:
        waiting = [pool.submit(count_case, case, to_cubin=to_cubin) for case in cases]
        for one in waiting:
            yield one.result()


COLUMNS = {
    "name": "case", "graphs": "graphs", "graph_breaks": "breaks", "kernels_per_layer": "kernels",
    "kb_per_token_and_layer": "KB/token", "products_per_layer": "products",
    "launches_per_step": "launches", "loss_kb_per_target": "loss KB", "peak_bytes": "peak GiB",
}  # fmt: skip


def show(counted: dict[str, Any]) -> str:
    shown = dict(counted)
    if shown["peak_bytes"] is not None:
        shown["peak_bytes"] = f"{shown['peak_bytes'] / 2**30:.1f}"
    cells = [str(shown[key]) if shown[key] is not None else "-" for key in COLUMNS]
    return f"{cells[0]:32}" + "".join(f"{cell:>10}" for cell in cells[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--ptx", action="store_true", help="compile every kernel to machine code")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2)")
    args = parser.parse_args()
    if find_spec("triton") is None:
        print("skipped: triton is not installed (make triton)")
        print(json.dumps({"cases": None, "reason": "triton is not installed"}))
        return
    if find_spec("bitsandbytes") is None:
        print("skipped: qlora, as bitsandbytes is not installed (make bitsandbytes)")
        args.cases = [name for name in args.cases if CASES[name].method != "qlora"]
    titles = list(COLUMNS.values())
    print(f"{titles[0]:32}" + "".join(f"{title:>10}" for title in titles[1:]))
    cases, found = [CASES[name] for name in args.cases], []
    for architecture in CAPABILITIES if args.ptx else [HOPPER]:
        if args.ptx:
            print(architecture)
        run = run_cases(cases, architecture=architecture, to_cubin=args.ptx, workers=args.workers)
        for counted in run:
            print(show(counted), flush=True)
            found.append({**counted, "architecture": architecture})
    print(json.dumps({"cases": found}))


if __name__ == "__main__":
    main()
