"""All faults of a manifest are reported at once, without those that follow from another."""

from pathlib import Path

import yaml
from manifests import base, list_errors, source


def test_all_faults_of_a_manifest_are_reported_at_once(tmp_path: Path) -> None:
    training = {"bath_size": 1, "lr": 1e-4, "target_tokens": "1e9"}
    value = {**base(), "sources": [{"name": "s", "text": "{a}"}], "training": training}
    del value["description"]
    lines = list_errors(tmp_path, value)
    assert all(line.startswith("e.yaml") for line in lines)
    assert [line.partition(" (")[0].partition(": ")[2] for line in lines] == [
        "key 'description' is missing; add it",
        "key 'sources.0.kind' is missing; add it",
        "unknown key 'training.bath_size'; did you mean 'batch_size'?",
        "unknown key 'training.lr'; it is called 'learning_rate' here",
        "key 'training.target_tokens' is '1e9': it must be of type integer or null;"
        " write it as 1000000000",
    ]


def test_faults_that_follow_from_another_one_are_left_out(tmp_path: Path) -> None:
    misspelt = {"name": "s", "kind": "local", "pth": "x", "prompt": "{q}", "completon": "{a}"}
    value = {"descripton": "d", **base(), "sources": [misspelt, "b"]}
    value["data"] = {"max_documents": 1.5}
    del value["description"]
    assert [line.split(";")[0].split(" (")[0] for line in list_errors(tmp_path, value)] == [
        "e.yaml:3: unknown key 'descripton'",
        "e.yaml:2: key 'data.max_documents' is 1.5: it must be of type integer or null",
        "e.yaml:8: unknown key 'sources.0.completon'",
        "e.yaml:12: unknown key 'sources.0.pth'",
        "e.yaml:13: key 'sources.1' is 'b': it must be of type object",
    ]


def test_faults_of_a_file_and_its_demo_block_have_their_lines_once_each(tmp_path: Path) -> None:
    text = yaml.safe_dump(base()) + "training: {seed: x}\ndemo:\n  training:\n    batch_size: 0\n"
    value = yaml.safe_load(text)
    found = [line.split(" is ")[0] for line in list_errors(tmp_path, value)]
    assert found == ["e.yaml:14: key 'training.seed'", "e.yaml:3: key 'training.batch_size'"]


def test_all_contradictions_are_reported_at_once(tmp_path: Path) -> None:
    value = {**base(), "origins": {"modle": {"from": "own"}, "training.x": {"from": "own"}}}
    value["sources"] = [source(name="s", id="x", roles={"a": "user"}), source(name="s", text="{a")]
    value["training"] = {"torch_compile_mode": "reduce-overhead", "packing": "none"}
    value["training"] |= {"max_steps": 5, "override_min_warmup": False}
    value["data"] = {"max_per_category": 5, "added_tokens": ["x"], "chat_template": "a/b"}
    value["evaluation"] = {"task": "json_schema", "fields": {"shema": "s"}}
    value["evaluation"]["lm_eval"] = {"tasks": ["a", "a.yaml"]}
    value["acceptance"] = [{"path": path, "op": "<", "value": 1} for path in ("a", "b")]
    lines = list_errors(tmp_path, value)
    expected = (
        "origins names 'modle'", "origins names 'training.x', which is not set here",
        "source s: id applies only to hub",
        "source s: roles has no effect", "data.max_per_category has no effect",
        "training.warmup_steps_min", "training.torch_compile_mode", "data.added_tokens",
        "two sources are named 's'", "data.chat_template", "evaluation.fields.shema",
        "lm_eval.tasks names a.yaml, which does not exist; correct the path, or copy the file here",
        "evaluation.task json_schema asks questions", "source s, text: template '{a'",
        "has no path 'a'", "has no path 'b'",
    )  # fmt: skip
    assert len(lines) == len(expected)
    assert not [
        (line, words) for line, words in zip(lines, expected, strict=True) if words not in line
    ]
