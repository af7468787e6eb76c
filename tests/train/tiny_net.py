"""A net that trains in milliseconds and has a language model's parts: dropout, norms, adapters."""

import json
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import fields
from safetensors.torch import load_file

from expertflow.plan.records import TrainPlan
from expertflow.train.optimizers import learning_rate, make_optimizer
from expertflow.train.saved.checkpoint import restore_checkpoint, take_snapshot
from expertflow.train.saved.checkpoint_files import OPTIMIZER, PROGRESS, WEIGHTS

WIDTH = 64  # 64 x 64 is the smallest matrix whose moments 8-bit AdamW keeps in 8 bits


class TinyNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.up = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.embed(tokens))
        logits: torch.Tensor = self.head(self.dropout(self.norm(hidden)))
        return logits


def train_plan(**changes: Any) -> TrainPlan:
    settings = {
        "optim": "adamw_torch_fused", "learning_rate": 1e-2, "weight_decay": 0.1,
        "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-8, "n_steps": 10,
        "n_warmup_steps": 2, "n_decay_steps": 3, "lr_scheduler_type": "cosine",
    }  # fmt: skip
    return TrainPlan(**{**dict.fromkeys(f.name for f in fields(TrainPlan)), **settings, **changes})


def tiny_net(method: str = "full", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Make a net; the seed is the adapter's if there is one, with always the same frozen base."""
    torch.manual_seed(seed if method == "full" else 0)
    net: Any = TinyNet().to(dtype)
    torch.manual_seed(seed)
    if method in ("lora", "dora"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=WIDTH, target_modules=["up"], lora_dropout=0.2, use_dora=method == "dora"
        )
        net = get_peft_model(net, config).to(dtype)
    return net


def steps(net: Any, optimizer: torch.optim.Optimizer, plan: TrainPlan, *, of: range) -> None:
    for step in of:
        tokens = torch.arange(step, step + 24).reshape(4, 6) % 11
        loss = torch.nn.functional.cross_entropy(
            net(tokens).flatten(0, 1).float(), tokens.flatten()
        )
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan)
        optimizer.step()
        optimizer.zero_grad()


def trained(plan: TrainPlan, method: str = "full", n_steps: int = 3, **how: Any) -> tuple[Any, Any]:
    net = tiny_net(method, **how)
    optimizer = make_optimizer(net, plan)
    steps(net, optimizer, plan, of=range(n_steps))
    return net, optimizer


def snapshot(net: Any, optimizer: Any, *, step: int, scaler: Any = None, **more: Any) -> Any:
    progress = {"step": step, "seed": 1, "held_out_loss": None, "clock": {"wall": 1.5}, **more}
    return take_snapshot(model=net, optimizer=optimizer, scaler=scaler, progress=progress)


def restored(directory: Path, net: Any, optimizer: Any, **how: Any) -> dict[str, Any]:
    how = {"rank": 0, "world_size": 1, "scaler": None, **how}
    return restore_checkpoint(directory, model=net, optimizer=optimizer, **how)


def content(directory: Path) -> dict[str, Any]:
    tensors = {f"weights/{k}": v for k, v in load_file(directory / WEIGHTS).items()}
    tensors |= {f"optimizer/{k}": v for k, v in load_file(directory / OPTIMIZER).items()}
    record = json.loads((directory / PROGRESS).read_text())
    values = {f"values/{k}": v for k, v in record["checkpoint"]["optimizer"].items()}
    bits = {
        name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
        if not name.startswith("optimizer/random/")
    }
    return {**bits, **values}
