"""Before the first step: checks of the machine, flags of the trainer, starting of processes."""

import os
import re
import signal
from collections import namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from support import LORA, tiny_qwen3

from expertflow.core.errors import ConfigError, HardwareError, TrainingError
from expertflow.hardware.nvml import Gpus
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import TrainPlan
from expertflow.train import preflight as module
from expertflow.train import processes
from expertflow.train.device import ALLOCATOR, configure_allocator
from expertflow.train.flags import changes_of, trainer_parser
from expertflow.train.model.packed import PackedLoss
from expertflow.train.preflight import run_preflight
from expertflow.train.processes import launch_command
from expertflow.train.run import stop_on_signals

Usage = namedtuple("Usage", "total used free")
H100 = GpuFacts(name="H100 SXM", source="test")


def card(monkeypatch: pytest.MonkeyPatch, name: str = "H100 SXM", *, bf16: bool = True) -> None:
    cuda = module.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda: name)
    # By default, torch counts emulated bf16.
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda including_emulation=True: (
        bf16 or including_emulation
    ))  # fmt: skip


def test_a_card_without_bf16_is_rejected(plan: TrainPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "Tesla T4", bf16=False)
    with pytest.raises(HardwareError, match=r"Tesla T4 lacks it; .* hardware=auto"):
        module._check_gpu(replace(plan, precision="bf16"), H100)
    assert module._check_gpu(replace(plan, precision="fp16"), H100) == "Tesla T4"


def test_a_card_in_use_or_without_kernels_is_rejected(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(monkeypatch)
    held = "GPU 0 has 5.0 GB free; used by python (pid 7, 70.0 GB)"
    monkeypatch.setattr(module, "least_free_gpu_memory", lambda n_gpus: (5 * 10**9, held))
    monkeypatch.setattr(module, "DYING_S", 0.01)
    wanted = replace(plan, gpu=H100, predicted_peak_bytes=40 * 10**9)
    with pytest.raises(HardwareError, match=rf"needs 40\.0 GB .*{re.escape(held)}"):
        run_preflight(wanted, tmp_path / "state")
    # No micro-batch is below one row.
    with pytest.raises(HardwareError, match=r"or set training\.gradient_checkpointing to true$"):
        run_preflight(replace(wanted, batch_size=1), tmp_path / "state")

    def compute(*_: Any, device: str) -> None:
        raise torch.AcceleratorError(f"{device.upper()} error: no kernel image is available")

    monkeypatch.setattr(module, "least_free_gpu_memory", lambda n_gpus: (10**12, "free"))
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(module.torch, "ones", compute)
    with pytest.raises(HardwareError, match=r"SXM \(CUDA error: no kernel .* capability 7\.0,"):
        run_preflight(wanted, tmp_path / "state")


def test_a_run_waits_for_memory_of_dying_processes(
    plan: TrainPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    wanted = replace(plan, gpu=H100, predicted_peak_bytes=40 * 10**9, may_halve_micro_batch=False)
    for total, fits in ((None, True), (80 * 10**9, True), (30 * 10**9, False)):
        readings = iter([(5 * 10**9, "held"), (6 * 10**9, "held"), (60 * 10**9, "free")])
        monkeypatch.setattr(module, "least_free_gpu_memory", lambda _, r=readings: next(r))
        gpu = replace(H100, memory_total_bytes=total)
        if fits:
            assert module._check_gpu_memory(wanted, gpu) == 60 * 10**9
        else:
            # It never fits: nothing is waited for.
            with pytest.raises(HardwareError, match=r"needs 40\.0 GB .* held"):
                module._check_gpu_memory(wanted, gpu)


def test_an_unsuitable_machine_is_rejected(
    plan: TrainPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, value, gpu, match in (
        ("shutil.disk_usage", lambda _: Usage(10, 10, 0), None,
         r"file system /.* has 0 B free, .* needed for 4 checkpoints"),
        ("torch.cuda.is_available", lambda: False, H100,
         "the plan is for H100 SXM but torch sees no CUDA"),
        ("FLOORS", {**module.FLOORS, "torch": "99.0"}, None, r"torch .* is older than 99\.0"),
        # The last without activation_checkpointing_enable, which training calls.
        ("package_version", lambda *_: "5.22.2", None, r"transformers 5\.22\.2 is older than 5"),
    ):  # fmt: skip
        with monkeypatch.context() as patched, pytest.raises(HardwareError, match=match):
            patched.setattr(f"{module.__name__}.{place}", value)
            run_preflight(replace(plan, gpu=gpu), tmp_path / "state")


def test_a_cpu_is_measured_with_the_threads_of_the_run(plan: TrainPlan, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    readings = run_preflight(replace(plan, n_threads=1), tmp_path / "state")
    assert cast(float, readings["measured_peak_flops_per_s"]) > 1e8
    assert torch.get_num_threads() == before


def test_a_card_that_torch_cannot_use_is_reported_with_versions(
    plan: TrainPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Gpus(devices=cast(Any, ("a card",)), driver="470.82")
    monkeypatch.setattr(module, "open_gpus", lambda: nullcontext(found))
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module.torch.version, "cuda", "13.0")
    with pytest.raises(
        HardwareError, match=r"driver 470\.82\), but torch .* for CUDA 13\.0, cannot"
    ):
        module._check_gpu(plan, H100)


@pytest.mark.parametrize("name", [None, *ALLOCATOR])
def test_the_allocator_grows_unless_the_user_set_it(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    for each in ALLOCATOR:
        monkeypatch.setenv(each, "theirs")
        if each != name:
            monkeypatch.delenv(each)
    configure_allocator()
    found = [os.environ[each] for each in ALLOCATOR if each in os.environ]
    assert found == ["theirs" if name else "expandable_segments:True"]


def test_shards_are_gathered_in_the_dtype_of_products(
    plan: TrainPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies, dora = list[Any](), replace(LORA, use_dora=True)
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda _, mp_policy: policies.append(mp_policy)
    )
    for precision, lora, dtype in (
        ("fp32", None, None), ("bf16", None, torch.bfloat16), ("bf16", LORA, torch.bfloat16),
        ("bf16", dora, None),
    ):  # fmt: skip
        policies.clear()
        sharded = replace(plan, world_size=2, parallel="fsdp", precision=precision, lora=lora)
        processes.wrap_model(PackedLoss(tiny_qwen3(vocab_size=97)), sharded)
        assert len(policies) == 3 and {policy.param_dtype for policy in policies} == {dtype}
        assert {policy.reduce_dtype for policy in policies} == {dtype and torch.float32}


def test_products_repeat_from_the_first(plan: TrainPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch decides once, at a process's first product, which may be the measured one."""
    name, seen = "CUBLAS_WORKSPACE_CONFIG", list[str | None]()
    monkeypatch.setenv(name, "")  # so that changes are undone
    monkeypatch.delenv(name)

    def measured(dtype: object, *, cuda: bool) -> float:
        seen.append(os.environ.get(name))
        return 1e12

    monkeypatch.setattr(module, "measure_flops_per_s", measured)
    on_card = replace(plan, gpu=H100, precision="bf16")
    for deterministic in (False, True):
        module._measured_peak(replace(on_card, deterministic=deterministic))
    assert seen == [None, ":4096:8"]
    known = replace(H100, peak_bf16_flops_per_s=1.0)
    assert module._measured_peak(replace(on_card, gpu=known)) is None


COMMAND = ["train_expert.py", "--output", "a b.json"]


def launched_in_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> list[str]:
    (folder / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return launch_command(4, COMMAND)


def test_two_nodes_get_half_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '[ "$*" = "--noheader --jobs=7 --format=%D" ] && echo 2'
    command = launched_in_a_job(tmp_path, monkeypatch, answer)
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    script = next(part for part in command if part.startswith("exec "))
    assert "--nnodes=2 --nproc-per-node=2" in script
    assert '--master-addr="$SLURM_LAUNCH_NODE_IPADDR" --node-rank="$SLURM_NODEID" "$@"' in script
    assert command[-len(COMMAND) :] == COMMAND
    for answer, match in (
        ("echo 3", "4 processes cannot be spread evenly over the 3 nodes"),
        ("exit 1", "cannot count the nodes of job 7"),
        ("echo many", "cannot count the nodes of job 7"),
    ):
        with pytest.raises(TrainingError, match=match):
            launched_in_a_job(tmp_path, monkeypatch, answer)


@pytest.fixture
def inherited(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Set a signal's handler like the process's parent would; return both."""
    number, handler = request.param
    before = signal.signal(number, handler)
    yield request.param
    signal.signal(number, before)


TERMINAL, NOHUP = (signal.SIGHUP, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_IGN)
# A shell starts a script's background jobs with interrupts ignored.
BACKGROUND = [(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("inherited", [TERMINAL, NOHUP, *BACKGROUND], indirect=True)
def test_a_trainer_saves_and_ends_unless_nohup_started_it(inherited: Any) -> None:
    number, handler = inherited
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop() == (inherited != NOHUP)
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize("inherited", [TERMINAL, NOHUP], indirect=True)
def test_a_launcher_of_two(inherited: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, it stops its trainers at a hang-up, whatever it inherited."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    for variable in (name, processes.RANK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(variable, "")  # so that changes are undone
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os, "execvp", lambda *_: None)
    processes.launch_processes(2)
    heard = os.environ.get(name, "SIGHUP").split(",")
    assert ("SIGHUP" in heard) == (inherited == TERMINAL)
    assert inherited == TERMINAL or {"SIGTERM", "SIGINT"} <= set(heard)


def changes(*arguments: str) -> dict[str, Any]:
    return changes_of(trainer_parser("a test").parse_args(["--code", "c", *arguments]))


def test_a_value_that_no_manifest_may_have_is_rejected() -> None:
    for arguments, message in (
        (["--learning-rate=-0.001"], "--learning-rate -0.001: must be above 0"),
        (["--learning-rate=nan"], "--learning-rate nan: must be a finite number"),
        (["--label-smoothing-factor", "3"], "--label-smoothing-factor 3: must be below 1"),
        (["--seed=-1", "--batch-size", "4"], "--seed -1: must be at least 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            changes(*arguments)
        assert str(caught.value) == message


def test_values_that_a_manifest_may_have_are_passed_on() -> None:
    wanted = {
        "batch_size": 4, "learning_rate": 3e-6, "lora_targets": ("q_proj", "v_proj"),
        "max_loss": 9.0, "patience": 2, "bf16": True, "torch_compile": False,
        "warmup_ratio": 0.0, "attention": "sdpa", "dataloader_num_workers": 0,
    }  # fmt: skip
    given = changes(
        *("--batch-size", "4", "--learning-rate", "3e-6", "--lora-targets", "q_proj", "v_proj"),
        *("--max-loss", "9", "--patience", "2", "--bf16", "--no-torch-compile"),
        *("--warmup-ratio", "0", "--attention", "sdpa", "--dataloader-num-workers", "0"),
    )
    assert given == wanted
