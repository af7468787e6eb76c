"""No text can pose as a control token, in four families; compared with transformers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import pair
from transformers import PreTrainedTokenizerFast

from expertflow.data.chat_template import chat_environment
from expertflow.data.layout import read_layout
from expertflow.data.records import Layout
from expertflow.data.render import Renderer, split_question
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize
from expertflow.tokens.tokenizer import train_tokenizer

# A chat template; none is the tokenizer's own.
TEMPLATES = {
    "qwen": None,
    "gpt2": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}
# Of the families whose tokenizer is made here.
SPECIAL = {
    "llama": ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"],
}


class Family(NamedTuple):
    engine: Engine
    layout: Layout
    reference: Any

    def encode(self, *contents: str) -> list[int]:
        """Encode a question and its answer, or a question up to where generation starts."""
        renderer = Renderer(self.layout)
        segments = renderer.render(pair(*contents))
        if len(contents) == 1:
            segments, _ = split_question(renderer, pair(*contents))
        ids: list[int] = tokenize([segments], self.engine).ids[0].tolist()
        return ids

    def encode_by_reference(self, *contents: str) -> list[int]:
        roles = ("user", "assistant")[: len(contents)]
        ids: list[int] = self.reference.apply_chat_template(
            [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)],
            chat_template=self.layout.chat_template,
            add_generation_prompt=len(contents) == 1,
            return_dict=False,
            sanitize_control_tokens=True,
        )
        return ids


@pytest.fixture(scope="module", params=TEMPLATES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_data: Path
) -> Family:
    folder, choice = shared_data / "tokenizers" / request.param, "auto"
    made = tmp_path_factory.mktemp("family")
    if request.param in SPECIAL:
        folder = made
        tokenizer = train_tokenizer(["a text", "user", "assistant"] * 9, vocab_size=300)
        tokenizer.add_special_tokens(SPECIAL[request.param])
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template := TEMPLATES[request.param]:
        (made / "own.jinja").write_text(template)
        choice = str(made / "own.jinja")
    layout = read_layout(folder, choice=choice, text_special_tokens="plain")
    assert layout.problem is None
    return Family(Engine(folder), layout, PreTrainedTokenizerFast.from_pretrained(folder))


def test_no_text_poses_as_a_control_token(family: Family) -> None:
    engine = family.engine
    special = {engine.special_id(token) for token in family.layout.special_tokens}
    hostile = "".join(f"x{token}\n{token}" for token in family.layout.special_tokens)
    wanted = [i for i in family.encode("a", "b") if i in special]
    for question, answer in ((hostile, "b"), ("a", hostile), (hostile, hostile)):
        ids = family.encode(question, answer)
        assert [i for i in ids if i in special] == wanted
        assert engine.decode(ids).count(hostile) == (question == hostile) + (answer == hostile)


@pytest.mark.parametrize("text", ["a text", "naïve 数据\n two  blanks", "\n\nline"])
def test_ids_are_those_of_transformers_with_sanitized_tokens(family: Family, text: str) -> None:
    for contents in ((text, "b"), ("a", text), (text,)):
        assert family.encode(*contents) == family.encode_by_reference(*contents)
    # Transformers cuts a text at a control token, so its ids around one are others.
    engine, mark = family.engine, str(family.layout.turn_end)
    special = {engine.special_id(token) for token in family.layout.special_tokens}
    ours, theirs = (e(f"x {mark}", text) for e in (family.encode, family.encode_by_reference))
    assert engine.decode(ours) == engine.decode(theirs)
    assert [i for i in ours if i in special] == [i for i in theirs if i in special]


def test_templates_run_as_in_transformers() -> None:
    """Ours is a second environment, as importing theirs takes a data job 2 s more."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ ns.n }}{{ m | tojson }}"
        "{{ m | tojson(indent=2) }}{% generation %}{{ m.content }}{% endgeneration %}\n"
        "   {% if loop.last %}\n{% break %}{% endif %}{% endfor %}"
    )
    messages = [{"role": r, "content": "é <b>&"} for r in ("user", "tool", "assistant")]
    ours, theirs = chat_environment().from_string(template), _compile_jinja_template(template)
    assert ours.render(messages=messages) == theirs.render(messages=messages)
