"""Show, without a card, what a training step will run on one: graphs, kernels, bytes.

    python bench/without_a_card.py [--cases NAME ...] [--workers 2]

Two layers of each model at its real width, rows of 2,048 tokens in bf16, adapters of rank 16 with
dropout 0.05 on all projections, compiled for an H100 down to the kernels' plan. Needs a C++
compiler and the package triton (``make triton``; a CUDA build of torch includes it), and for QLoRA
``make bitsandbytes``. KB are
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
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / folder)
    for folder in ("workflow/scripts", "bench", "tests")
)

# These do not import torch, which a worker may not import before it poses as a card.
from fake_card.card import checking, pose_as_card
from gpu_kit.fixtures import LLAMA_8B, SIZES, model_config

LENGTH = 2048
DOCUMENTS = (600, 500, 500, 448)
# Rows that must not trigger another compilation.
OTHER_DOCUMENTS = ((2048,), (300, 300, 300, 300, 300, 300, 248))
SUPERVISED = 0.3
# Models of known shapes, and the rows of a micro-batch.
MODELS = {
    "qwen3-0.6b": (SIZES["0.6B"].facts, 8),
    "qwen3-1.7b": (SIZES["1.7B"].facts, 4),
    "qwen3-4b": (SIZES["4B"].facts, 4),
    "qwen3-8b": (SIZES["8B"].facts, 2),
    "llama-8b": (LLAMA_8B.facts, 2),
}
METHODS = ("lora", "dora", "qlora", "full")


class Case(NamedTuple):
    name: str
    model: str
    method: str
    checkpointed: bool


# The models left out would show the same, at other widths.
SHOWN_ON = {
    "full": ("qwen3-0.6b", "qwen3-1.7b"),
    "qlora": ("qwen3-0.6b", "qwen3-8b"),
}
CASES = {
    name: Case(name, model, method, checkpointed)
    for model, method, checkpointed in product(MODELS, METHODS, (False, True))
    if model in SHOWN_ON.get(method, MODELS)
    and (name := f"{model} {method}{' checkpointed' if checkpointed else ''}")
}


def start_worker() -> None:
    warnings.filterwarnings("ignore")
    pose_as_card()

    import torch

    torch.set_num_threads(1)


def count_case(case: Case) -> dict[str, Any]:
    """Compile two layers of a model, run one step, and count."""
    import torch
    from fake_card.count import LayerCompiler, summarize_graphs
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    from expertflow.train.memory_trace import materialize_weights, sample_batch, whole_model
    from expertflow.train.model import attention
    from expertflow.train.model.packed import PackedLoss, causal_lm, decoder_layers

    torch._dynamo.reset()
    counters.clear()
    (facts, n_rows), run = MODELS[case.model], traced_run(case)
    net = build_net(run, case)
    compiler = LayerCompiler()
    kernel = mock.patch.object(attention, "KERNEL", checking(attention.KERNEL))
    with kernel, FakeTensorMode(allow_non_fake_inputs=True):
        materialize_weights(net, device="cuda")
        if case.method == "qlora":
            from fake_card.four_bit import fill_layers

            fill_layers(net)
        for layer in decoder_layers(causal_lm(net)):
            layer.compile(dynamic=False, backend=compiler)
        for documents in (DOCUMENTS, *OTHER_DOCUMENTS):
            batch = sample_batch(documents, n_rows, SUPERVISED)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = PackedLoss(net)(batch)
            loss.backward()
        found = {
            **case._asdict(),
            "graphs": int(counters["stats"].get("unique_graphs", 0)),
            "graph_breaks": sum(counters["graph_break"].values()),
            **summarize_graphs(compiler.graphs, batch.n_tokens),
            **count_rest(net, batch, facts.hidden_size),
        }
    of_layers = facts.n_layers * found.pop("launches_per_layer")
    found["launches_per_step"] = of_layers + found["loss_launches"] + found["optimizer_launches"]
    peak = whole_model(run, n_rows, LENGTH, checkpoint=case.checkpointed)
    return {**found, "peak_bytes": sum(peak)}


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

    from expertflow.train.memory_trace import TracedRun

    return TracedRun(
        config=model_config(MODELS[case.model][0]),
        method="lora" if case.method == "dora" else case.method,
        lora=None if case.method == "full" else replace(LORA, use_dora=case.method == "dora"),
        attention="packed",
        dtype=torch.bfloat16,
        kernel=True,
        supervised_fraction=SUPERVISED,
        card_bytes=torch.cuda.get_device_properties().total_memory,
    )


def count_rest(net: Any, batch: Any, hidden_size: int) -> dict[str, Any]:
    """Count the loss, with its backward pass, and the optimizer; both run outside the layers."""
    import torch
    from fake_card.count import KIB, EagerWork

    from expertflow.train.model.loss import loss_and_gradient_to_compile, sum_loss
    from expertflow.train.model.packed import causal_lm, find_head

    labels = batch.labels_BL.to("cuda")
    size = (*labels.shape, hidden_size)
    hidden = torch.empty(size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    n_targets, head = batch.n_target_tokens, find_head(causal_lm(net))
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
        "loss_kb_per_target": round(of_loss.n_bytes / n_targets / KIB, 1),
        "loss_launches": of_loss.n_launches,
        "optimizer_launches": of_optimizer.n_launches,
    }


COLUMNS = {
    "name": "case", "graphs": "graphs", "graph_breaks": "breaks", "kernels_per_layer": "kernels",
    "kb_per_token_and_layer": "KB/token", "products_per_layer": "products",
    "launches_per_step": "launches", "loss_kb_per_target": "loss KB", "peak_bytes": "peak GiB",
}  # fmt: skip


def show(counted: dict[str, Any]) -> None:
    peak = counted["peak_bytes"]
    shown = {**counted, "peak_bytes": f"{peak / 2**30:.1f}" if isinstance(peak, int) else peak}
    cells = [str(shown[key]) for key in COLUMNS]
    print(f"{cells[0]:32}" + "".join(f"{cell:>10}" for cell in cells[1:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2)")
    args = parser.parse_args()
    if find_spec("triton") is None:
        print("skipped: triton is not installed (make triton)")
        print(json.dumps({"cases": None, "reason": "triton is not installed"}))
        return
    if find_spec("bitsandbytes") is None:
        print("skipped: qlora, as bitsandbytes is not installed (make bitsandbytes)")
        args.cases = [name for name in args.cases if CASES[name].method != "qlora"]
    show(COLUMNS)
    found = []
    with ProcessPoolExecutor(args.workers, get_context("spawn"), initializer=start_worker) as pool:
        for counted in pool.map(count_case, [CASES[name] for name in args.cases]):
            show(counted)
            found.append(counted)
    print(json.dumps({"cases": found}))


if __name__ == "__main__":
    main()
