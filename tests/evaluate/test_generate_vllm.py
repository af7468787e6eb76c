"""The vLLM backend against a stand-in that notes how it is called."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_model import END, PAD, Pairs
from support import LORA

from expertflow.core.errors import EvaluationError
from expertflow.evaluate import generate_vllm
from expertflow.evaluate.generate import Answer
from expertflow.evaluate.generate_vllm import choose_backend
from expertflow.evaluate.records import Decoding


@dataclass
class Calls:
    """What was asked of the stand-in. ``write`` gives the ids that follow a prompt."""

    write: Callable[[list[int]], list[int]] = lambda prompt: [prompt[-1], END]
    engines: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    lora: Any = None
    closed: list[str] = field(default_factory=list)
    clock_s: float = 0.0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
            calls.engines.append(options)
            calls.clock_s += 90
            core = SimpleNamespace(shutdown=lambda: calls.closed.append("engine"))
            self.llm_engine = SimpleNamespace(engine_core=core)

        def generate(
            self, prompts: Any, sampling_params: Any, *, use_tqdm: bool, lora_request: Any
        ) -> list[Any]:
            calls.prompts += prompts
            calls.params += sampling_params
            calls.lora = lora_request
            calls.clock_s += 2
            written = [calls.write(prompt["prompt_token_ids"]) for prompt in prompts]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in written]

    modules = {
        "vllm": {"LLM": LLM, "SamplingParams": lambda **k: SimpleNamespace(**k)},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lambda *a: a},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "cleanup_dist_env_and_memory": lambda: calls.closed.append("memory")
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in generate_vllm.QUIET:
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 12}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, END]}))
    return folder


def ask(base: Path, adapter: Path | None, prompts: list[list[int]], **changes: Any) -> list[Answer]:
    settings: dict[str, Any] = {"decoding": Decoding(), "max_new_tokens": 4, "seed": 5, **changes}
    return generate_vllm.answers(
        base, adapter, prompts, engine=Pairs(), end_id=END, pad_id=PAD, batch_size=16, **settings
    )[0]


def test_prompts_are_answered_in_their_order(calls: Calls, base: Path) -> None:
    found = ask(base, None, [[2, 3], [9] * 10, [4]])
    assert found == [Answer("Da", 2, True), Answer("Ja", 2, True), Answer("Ea", 2, True)]
    assert [p["prompt_token_ids"] for p in calls.prompts] == [[2, 3], [9] * 10, [4]]
    assert [p.max_tokens for p in calls.params] == [4, 2, 4]
    engine = calls.engines[0]
    assert engine["model"] == str(base) and engine["dtype"] == "bfloat16"
    assert engine["max_model_len"] == 12 and engine["max_num_seqs"] == 16
    assert engine["generation_config"] == "vllm" and not engine["trust_remote_code"]
    assert "enable_lora" not in engine and calls.lora is None
    assert calls.params[0].stop_token_ids == [PAD, END, 7]
    assert calls.params[0].temperature == 0
    assert calls.closed == ["engine", "memory"]


def test_an_adapter_is_asked_for(calls: Calls, base: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 20}')
    ask(base, adapter, [[2]], precision="fp16")
    assert calls.lora == ("expert", 1, str(adapter))
    engine = calls.engines[0]
    assert (engine["enable_lora"], engine["max_lora_rank"], engine["dtype"]) == (
        True,
        32,
        "float16",
    )


def test_decoding_settings_are_passed_on(calls: Calls, base: Path) -> None:
    decoding = Decoding(temperature=0.7, top_p=0.9, top_k=5, stop=("x",))
    ask(base, None, [[2], [3], [2]], decoding=decoding)
    first, second, third = calls.params
    assert (first.temperature, first.top_p, first.top_k) == (0.7, 0.9, 5)
    assert first.seed == third.seed != second.seed
    ask(base, None, [[2]], decoding=replace(decoding, top_k=0), seed=6)
    assert calls.params[-1].top_k == -1 and calls.params[-1].seed != first.seed


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_stop_texts_end_answers_with_and_without_a_tokenizer(
    calls: Calls, base: Path, has_tokenizer: bool
) -> None:
    if has_tokenizer:
        (base / "tokenizer.json").write_text("{}")
    calls.write = lambda prompt: [2, 3, 4, 5]
    found = ask(base, None, [[2]], decoding=Decoding(stop=("aE",)))
    assert found == [Answer("CaD", 4, ended=True)]
    assert calls.engines[0]["skip_tokenizer_init"] is not has_tokenizer
    assert calls.params[0].detokenize is has_tokenizer
    assert calls.params[0].stop == (["aE"] if has_tokenizer else None)
    # Without one, nothing needs the tokenizer.
    ask(base, None, [[2]])
    assert calls.engines[1]["skip_tokenizer_init"]


def test_what_has_no_end_was_cut_off(calls: Calls, base: Path) -> None:
    calls.write = lambda prompt: [2, 3, 4, 5]
    assert ask(base, None, [[2]]) == [Answer("CaDaEaFa", 4, ended=False)]


def test_a_prompt_that_leaves_no_position_is_not_asked(calls: Calls, base: Path) -> None:
    found = ask(base, None, [[2] * 12, [3]])
    assert found[0].hindrance is not None and found[1].text == "Da"
    assert len(calls.prompts) == 1
    assert ask(base, None, [[2] * 12])[0].hindrance is not None
    assert len(calls.engines) == 1


def test_starting_the_engine_is_no_part_of_the_time(
    calls: Calls, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: calls.clock_s)
    monkeypatch.setattr(generate_vllm, "time", clock)
    how: dict[str, Any] = {"decoding": Decoding(), "max_new_tokens": 4, "seed": 0}
    for prompts, duration_s in (([[2], [3]], 2.0), ([[2] * 12], 0.0)):
        assert duration_s == generate_vllm.answers(
            base, None, prompts, engine=Pairs(), end_id=END, pad_id=PAD, batch_size=16, **how
        )[1]  # fmt: skip


def test_the_engine_is_unloaded_after_a_failure(calls: Calls, base: Path) -> None:
    def fail(prompt: list[int]) -> list[int]:
        raise RuntimeError("no")

    calls.write = fail
    with pytest.raises(RuntimeError, match="no"):
        ask(base, None, [[2]])
    assert calls.closed == ["engine", "memory"]


def card(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)


def test_vllm_is_chosen_where_it_can_be_used(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, True)
    assert choose_backend("auto", method="lora", lora=LORA) == ("vllm", None)
    assert choose_backend("vllm", method="full", lora=None) == ("vllm", None)
    assert choose_backend("transformers", method="lora", lora=LORA) == ("transformers", None)


@pytest.mark.parametrize(
    ("method", "changes", "there", "reason"),
    [
        ("qlora", {}, True, "4 bits"),
        ("lora", {"use_dora": True}, True, "DoRA"),
        ("lora", {"r": 1024}, True, "rank 512"),
        ("lora", {"precision": "fp32"}, True, "in bf16 and fp16"),
        ("lora", {}, False, "needs a card"),
    ],
)
def test_what_vllm_cannot_do_is_said(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    changes: dict[str, Any],
    there: bool,
    reason: str,
) -> None:
    card(monkeypatch, there)
    precision = {"precision": changes.get("precision", "bf16")}
    lora = replace(LORA, **{k: v for k, v in changes.items() if k not in precision})
    how: dict[str, Any] = {"method": method, "lora": lora, **precision}
    caplog.set_level("INFO")
    name, why = choose_backend("auto", **how)
    assert name == "transformers" and why is not None and reason in why
    assert why in caplog.text
    with pytest.raises(EvaluationError, match=f"backend vllm: .*{reason}.*; set it to"):
        choose_backend("vllm", **how)


def test_without_the_package_transformers_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert generate_vllm.hindrance() == "vllm is not installed"
    assert choose_backend("auto", method="full", lora=None)[0] == "transformers"
