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
from expertflow.data.render import Renderer
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenize import tokenize
from expertflow.tokens.tokenizer import train_tokenizer

LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GPT2 = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
LLAMA_TOKENS = ("<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")


class Family(NamedTuple):
    engine: Engine
    layout: Layout
    reference: Any


@pytest.fixture(scope="module", params=["qwen", "gpt2", "llama", "mistral"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_data: Path
) -> Family:
    made = tmp_path_factory.mktemp("family")
    if request.param in ("qwen", "gpt2"):
        folder = shared_data / "tokenizers" / request.param
    else:
        folder = made
        tokenizer = train_tokenizer(["a text", "user", "assistant"] * 9, vocab_size=300)
        tokens = LLAMA_TOKENS if request.param == "llama" else MISTRAL_TOKENS
        tokenizer.add_special_tokens(list(tokens))
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": LLAMA if request.param == "llama" else MISTRAL,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    choice = "auto"
    if request.param == "gpt2":
        (made / "gpt2.jinja").write_text(GPT2)
        choice = str(made / "gpt2.jinja")
    layout = read_layout(folder, choice=choice, text_special_tokens="plain")
    assert layout.problem is None
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    return Family(Engine(folder), layout, reference)


def encode(family: Family, question: str, answer: str) -> list[int]:
    segments = Renderer(family.layout).render(pair(question, answer))
    ids: list[int] = tokenize([segments], family.engine).ids[0].tolist()
    return ids


def encode_by_reference(family: Family, question: str, answer: str) -> list[int]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    ids: list[int] = family.reference.apply_chat_template(
        messages,
        chat_template=family.layout.chat_template,
        tokenize=True,
        return_dict=False,
        sanitize_control_tokens=True,
    )
    return list(ids)


def test_no_text_poses_as_a_control_token(family: Family) -> None:
    engine = family.engine
    special = {engine.special_id(token) for token in family.layout.special_tokens}
    hostile = "".join(f"x{token}\n{token}" for token in family.layout.special_tokens)
    wanted = [i for i in encode(family, "a", "b") if i in special]
    for question, answer in ((hostile, "b"), ("a", hostile), (hostile, hostile)):
        ids = encode(family, question, answer)
        assert [i for i in ids if i in special] == wanted
        assert engine.decode(ids).count(hostile) == (question == hostile) + (answer == hostile)


@pytest.mark.parametrize("text", ["a text", "naïve 数据\n two  blanks", "\n\nline"])
def test_ids_are_those_of_transformers_with_control_tokens_sanitized(
    family: Family, text: str
) -> None:
    for question, answer in ((text, "b"), ("a", text)):
        assert encode(family, question, answer) == encode_by_reference(family, question, answer)
    # Transformers cuts a text at a control token, so its ids around one are others.
    engine, mark = family.engine, str(family.layout.turn_end)
    special = {engine.special_id(token) for token in family.layout.special_tokens}
    ours, theirs = (e(family, f"x {mark}", text) for e in (encode, encode_by_reference))
    assert engine.decode(ours) == engine.decode(theirs)
    assert [i for i in ours if i in special] == [i for i in theirs if i in special]


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ ns.n }}{{ m | tojson }}"
        "{{ m | tojson(indent=2) }}{% generation %}{{ m.content }}{% endgeneration %}\n"
        "   {% if loop.last %}\n{% break %}{% endif %}{% endfor %}",
        "{{ raise_exception('no such turn') }}",
    ],
)
def test_templates_run_as_in_transformers(template: str) -> None:
    """Ours is a second environment, as importing theirs takes a data job 2 s more."""
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    values = {
        "messages": [{"role": r, "content": "é <b>&"} for r in ("user", "tool", "assistant")],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }

    def render(compiled: Any) -> str:
        try:
            return str(compiled.render(**values))
        except jinja2.TemplateError as error:
            return f"refused: {error}"

    assert render(chat_environment().from_string(template)) == render(
        _compile_jinja_template(template)
    )
