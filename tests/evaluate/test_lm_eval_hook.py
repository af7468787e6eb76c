"""Tasks of lm-evaluation-harness: with a mock, and with the real one if installed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from made_up_model import tiny_qwen3

from expertflow.core.errors import EvaluationError
from expertflow.evaluate import lm_eval_hook, lm_eval_tasks
from expertflow.evaluate.lm_eval_hook import pair_scores, read_figures
from expertflow.evaluate.records import LmEvalScore, LmEvalSpec
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

SPEC = LmEvalSpec(tasks=("one",), n_shots=2, limit=5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["what is two and two"] * 3, vocab_size=300), folder)
    return folder


def tiny() -> Any:
    model = tiny_qwen3(vocab_size=300)
    model.generation_config.repetition_penalty = 3.0
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace lm_eval and return the calls of its evaluator."""
    calls: list[dict[str, Any]] = []

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        import datasets.config
        import huggingface_hub.constants

        held = options["model"].pretrained
        assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.HF_HUB_OFFLINE
        assert held.config._attn_implementation == "sdpa"
        assert held.generation_config.repetition_penalty is None
        calls.append(options)
        if "lost" in options["tasks"]:
            raise ConnectionError("Couldn't reach\nthe Hub")
        value = 0.25 * len(calls)
        return {"results": {"one": {"alias": "one", "acc,none": value, "acc_stderr,none": 0.1}}}

    content: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.evaluator": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": lambda **k: SimpleNamespace(**k)},
        "lm_eval.tasks": {
            "TaskManager": lambda **k: SimpleNamespace(**k, all_tasks=["one", "lost"])
        },
    }
    for name, names in content.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def run(spec: LmEvalSpec, tokenizer: Path) -> list[LmEvalScore]:
    sides = [lm_eval_hook.run_tasks(tiny(), spec, tokenizer=tokenizer, batch_size=4) for _ in "ab"]
    return pair_scores(*sides)


def test_both_models_are_measured_the_same_way(
    calls: list[dict[str, Any]], tokenizer: Path
) -> None:
    import datasets.config

    stderr = {"before_stderr": 0.1, "after_stderr": 0.1}
    score = LmEvalScore(task="one", metric="acc", before=0.25, after=0.5, **stderr)
    offline_before = datasets.config.HF_HUB_OFFLINE
    assert run(SPEC, tokenizer) == [score]
    for call in calls:
        assert (call["tasks"], call["num_fewshot"], call["limit"]) == (["one"], 2, 5)
        assert call["task_manager"].include_defaults
        assert call["model"].softmax_dtype == "float32"
    assert offline_before == datasets.config.HF_HUB_OFFLINE


def test_a_task_may_be_a_file(calls: list[dict[str, Any]], tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("# a task\ntask: 'one'\nprocess: !function mine.f\n")
    run(LmEvalSpec(tasks=(str(path),), n_shots=0, limit=None), tokenizer)
    manager = calls[0]["task_manager"]
    assert manager.include_path == [str(tmp_path)] and not manager.include_defaults
    assert calls[0]["tasks"] == ["one"]
    (tmp_path / "two.yaml").write_text("task: two_of_them\n")
    for task, match in (
        (str(tmp_path / "two.yaml"), "has no line 'task: two'; rename"),
        ("nine", "lm_eval.tasks: nine: no such task; `lm_eval ls tasks`"),
        ("lost", r"lm_eval\.tasks lost: Couldn't reach the Hub; use"),
    ):
        with pytest.raises(EvaluationError, match=match):
            run(LmEvalSpec(tasks=(task,), n_shots=0, limit=None), tokenizer)


def test_results_are_read_by_task_and_metric() -> None:
    results = {
        "group": {"alias": "group", "acc,none": 0.5, "acc_stderr,none": "N/A"},
        "part": {"acc,none": 0.1, "acc_stderr,none": 0.2},
        "sums": {"exact_match,strict": 0.3, "exact_match_stderr,strict": float("nan")},
    }
    assert read_figures(results, ["group", "sums"]) == {
        ("group", "acc"): (0.5, None),
        ("sums", "exact_match (strict)"): (0.3, None),
    }
    # A group without its own figures is shown by its members.
    results["group"] = {" ": " ", "alias": "group"}
    assert ("part", "acc") in read_figures(results, ["group", "sums"])
    # A tag names tasks but is not one.
    assert ("part", "acc") in read_figures(results, ["tag"])


def test_a_missing_package_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lm_eval_tasks.unavailable_reason() == (
        "lm_eval is not installed; see envs/requirements-lm-eval.lock"
    )


QUESTIONS = [{"q": f"What is {i} and {i}?", "o": [str(2 * i), "no"], "a": 0} for i in range(12)]
CHOICE = """task: made_up_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}\\nAnswer:"
doc_to_choice: "{{{{o}}}}"
doc_to_target: a
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.mark.extra("lm-eval")
def test_a_real_task(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data, task = tmp_path / "questions.jsonl", tmp_path / "made_up_choice.yaml"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task.write_text(CHOICE.format(data=data))
    scores = run(LmEvalSpec(tasks=(str(task),), n_shots=0, limit=10), tokenizer)
    assert [(s.task, s.metric) for s in scores] == [("made_up_choice", "acc")]
    score = scores[0]
    assert score.before == score.after is not None and score.before_stderr is not None
    # One right answer is a tenth.
    assert score.before * 10 == pytest.approx(round(score.before * 10))
