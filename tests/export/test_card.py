"""The model card states the most important facts first, and shows data as plain text."""

import ast
import json
import re
import shlex
import sys
import unicodedata
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from msgspec.structs import replace
from support import ROOT

from expertflow.evaluate.records import Decoding
from expertflow.export.card import CardInputs, model_card
from expertflow.export.records import ExportSpec, MergeComparison

# Cards use the made-up run of the report's tests.
sys.path.insert(0, str(ROOT / "tests" / "report"))
from made_up_runs import CPU, GPU
from report_reading import compare_with_golden

COMPARISON = MergeComparison(
    loss_before_merge=1.25, loss_after_merge=1.2507, n_rows_compared=32, n_targets=1838,
    allowed_loss_difference=0.0033, max_logit_difference=0.12, allowed_logit_difference=2.0,
)  # fmt: skip
HOSTILE = "a|b\n# c <script>x</script> [l](http://e) `d` **e** \\\n---\n| f | g |"
HIDDEN = "\x1b]0;x\x07\x9b\u202e\u2066y"


def card_inputs(run: Any) -> CardInputs:
    spec = ExportSpec(
        expert="expert-sql", description="Writes SQL.", decoding=Decoding(), dtype="auto",
        hub_datasets={},
    )  # fmt: skip
    names = ("datasets", "model", "plan", "training", "monitor", "evaluation")
    records = {name: getattr(run, name) for name in names}
    return CardInputs(spec=spec, code="c0de", **records)


def write_card(inputs: CardInputs, *files: str, is_adapter: bool = False, **changes: Any) -> str:
    """Write a card of an export with these changes and license files."""
    return model_card(inputs, replace(GPU.inputs.export, **changes), COMPARISON, files, is_adapter)


def parts(card: str) -> tuple[dict[str, Any], str]:
    _, front, body = re.split(r"^---\n", card, maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(front), body


@pytest.fixture
def inputs() -> CardInputs:
    return card_inputs(GPU.inputs)


def change(inputs: CardInputs, **records: dict[str, Any]) -> CardInputs:
    """Change fields of some of the records."""
    changed = {name: replace(getattr(inputs, name), **fields) for name, fields in records.items()}
    return replace(inputs, **changed)


def licensed(inputs: CardInputs, license: str, base: str = "apache-2.0") -> CardInputs:
    sources = tuple(replace(source, license=license) for source in inputs.datasets.sources)
    return change(inputs, model={"license": base}, datasets={"sources": sources})


def test_the_front_matter_is_what_the_hub_reads(inputs: CardInputs) -> None:
    from huggingface_hub import ModelCard

    data_sets = {"hub_datasets": {"a": "org/data", "b": "org/data"}}
    model = {"kind": "hub", "name": "org/base"}
    inputs = change(licensed(inputs, "mit"), model=model, spec=data_sets)
    data = ModelCard(write_card(inputs)).data
    assert (data.base_model, data.license) == ("org/base", "apache-2.0")
    assert data.datasets == ["org/data"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    quantities = {result.metric_type for result in data.eval_results}
    assert quantities == {"execution_accuracy", "perplexity"}
    local = {"kind": "local", "name": "/models/mine", "license": None}
    unknown = change(inputs, model=local, spec={"hub_datasets": {}})
    front, body = parts(write_card(unknown))
    assert not front.keys() & {"base_model", "license", "datasets", "language"}
    assert "Base model: mine, a local folder" in body and "license **not stated**" in body
    assert "/models" not in body


def test_license_conflicts_come_first_and_an_odd_one_is_linked(inputs: CardInputs) -> None:
    front, body = parts(write_card(licensed(inputs, "cc-by-nc-sa-4.0")))
    top = body.split("# expert-sql")[0]
    assert "**Licenses: read this before use.**" in top and "not legal advice" in top
    assert "> - non-commercial: " in top and "> - share-alike: " in top
    assert (front["license"], front["license_name"]) == ("other", "several-see-model-card")
    clean = write_card(licensed(inputs, "mit"))
    assert "Licenses: read this" not in clean
    for base, source, file, name, link in (
        ("Qwen Research", "mit", "LICENSE", "qwen-research", "LICENSE"),
        ("qwen-research", "mit", "NOTICE", "qwen-research", None),
        ("other", "mit", "LICENSE.md", "see-model-card", "LICENSE.md"),
        ("qwen-research", "cc-by-nc-4.0", "LICENSE", "several-see-model-card", None),
    ):
        front, _ = parts(write_card(licensed(inputs, source, base), file))
        assert (front["license"], front["license_name"]) == ("other", name)
        assert front.get("license_link") == link


def test_cards_equal_their_golden_texts(inputs: CardInputs) -> None:
    compare_with_golden("card-gpu.md", write_card(inputs))
    compare_with_golden("card-cpu.md", write_card(card_inputs(CPU.inputs)))


def test_a_card_describes_its_weights_and_why_parts_are_missing(inputs: CardInputs) -> None:
    told = {"unavailable": {"judge": "none was asked for"}}
    assert "- judge: none was asked for" in write_card(change(inputs, evaluation=told))
    for merged_into, words in (
        (None, "all trained; bfloat16"),
        ("base", "adapter merged into the base model; bfloat16"),
        ("dequantized base", "base model, dequantized from 4 bits; bfloat16"),
    ):
        card = write_card(inputs, merged_into=merged_into, dtype="bfloat16")
        assert words in card and ("adapter itself" in card) == (merged_into is not None)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_has_its_own_card(inputs: CardInputs, method: str) -> None:
    model = {"kind": "hub", "name": "org/base", "revision": "abc"}
    inputs = change(
        inputs, model=model, training={"method": method}, spec={"added_tokens": ("<x>",)}
    )
    card = write_card(inputs, is_adapter=True)
    front, body = parts(card)
    assert (front["base_model_relation"], front["library_name"]) == ("adapter", "peft")
    assert "merge" not in body.lower() and "llama" not in body
    [code] = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    ast.parse(code)
    assert '"org/base"' in code and 'revision="abc"' in code
    assert f"resize_token_embeddings({inputs.model.facts.vocab_size})" in code
    assert ("BitsAndBytesConfig(" in code) == (method == "qlora")
    assert inputs.evaluation.published.weights_sha256 in body


def test_data_stay_text_everywhere(inputs: CardInputs) -> None:
    text = dict.fromkeys(("name", "license", "revision"), HOSTILE)
    sample = replace(inputs.evaluation.samples[0], prompt=HIDDEN + "q")
    source = replace(inputs.datasets.sources[0], **text, notes=(HOSTILE,))
    hostile = change(
        inputs,
        spec={"description": f"- {HOSTILE}{HIDDEN}", "expert": HIDDEN, "system_prompt": HIDDEN},
        datasets={"sources": (source,)},
        model={"kind": "hub", **text},
        evaluation={"unavailable": {HOSTILE: HOSTILE + HIDDEN}, "samples": (sample,)},
    )
    card = write_card(hostile)
    assert not [c for c in card if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")]
    front, body = parts(card)
    assert front["base_model"] == HOSTILE
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(body)
    flat = [child for token in tokens for child in (token.children or [token])]
    assert not [token for token in flat if token.type in ("html_block", "html_inline", "link_open")]
    assert sum(token.type == "heading_open" and token.tag == "h1" for token in tokens) == 1
    rows = [row for row in body.splitlines() if row.startswith("| a\\|b")]
    assert len(rows) == 1
    shown = MarkdownIt("gfm-like", {"linkify": False}).render(body)
    assert shown.count("&lt;script&gt;x&lt;/script&gt; [l](http://e)") >= 6


def test_other_servers_get_the_decoding_of_the_scores(inputs: CardInputs) -> None:
    vllm: dict[str, Any]
    for decoding, vllm, llama in (
        (Decoding(), {"temperature": 0}, "--temp 0"),
        (
            Decoding(temperature=0.7, top_p=0.9, top_k=5),
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
            "--temp 0.7 --top-p 0.9 --top-k 5 --min-p 0",
        ),
        (
            Decoding(temperature=1.0),
            {"temperature": 1.0, "top_p": 1.0},
            "--temp 1 --top-p 1 --top-k 0 --min-p 0",
        ),
    ):
        lines = write_card(change(inputs, spec={"decoding": decoding})).splitlines()
        [served] = [shlex.split(line) for line in lines if line.startswith("vllm")]
        assert served[:-1] == ["vllm", "serve", ".", "--override-generation-config"]
        assert json.loads(served[-1]) == vllm
        [chat] = [line for line in lines if line.startswith("llama-cli")]
        assert chat == f"llama-cli -m model.gguf {llama}"
    plain_card = write_card(inputs)
    assert "also ends before these stop texts" not in plain_card and "<think>" not in plain_card
    thinks = replace(inputs.model.tokenizer.layout, chat_template="{{ '<think>' }}")
    tokenizer = replace(inputs.model.tokenizer, layout=thinks)
    spec = {"decoding": Decoding(stop=(";\n\n", "`"))}
    card = write_card(change(inputs, spec=spec, model={"tokenizer": tokenizer}))
    assert 'also ends before these stop texts (as JSON): `";\\n\\n"`, `` "`" ``.' in card
    assert "A `<think>…</think>` block at the start of an answer was removed" in card


def test_the_system_prompt_of_training_is_in_the_snippet(inputs: CardInputs) -> None:
    system = 'Say "SQL".\n```\n# é \u2028 \N{GRINNING FACE}'
    told = change(inputs, spec={"system_prompt": system})
    snippet = write_card(told).split("```python\n")[1].split("\n```\n")[0]
    [chat] = [node for node in ast.parse(snippet).body if isinstance(node, ast.Assign)
              and ast.unparse(node.targets[0]) == "chat"]  # fmt: skip
    assert ast.literal_eval(chat.value) == [
        {"role": "system", "content": system}, {"role": "user", "content": "..."}
    ]  # fmt: skip
    assert '"role": "system"' not in write_card(inputs)


def test_a_held_out_question_shows_the_prompts_format(inputs: CardInputs) -> None:
    [sample, *_] = inputs.evaluation.samples
    long = replace(sample, prompt=f"Be brief.\n{HOSTILE}\n```\n" + "x" * 2000)
    told = change(inputs, spec={"system_prompt": "Be brief."}, evaluation={"samples": (long,)})
    _, body = parts(write_card(told))
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(body)
    [shown] = [token.content for token in tokens if token.type == "code_block"]
    assert shown.startswith(HOSTILE.splitlines()[0]) and "```" in shown
    assert len(shown) < 700 and "one (its first 600 characters):" in body
    assert not [token for token in tokens if token.type == "html_block"]
    none = change(inputs, evaluation={"samples": ()})
    assert "Questions look like" not in write_card(none)
