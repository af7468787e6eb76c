"""Engines produce the same ids, and in four families no text poses as a control token."""

import json
import random
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import pair, tiny_tokenizer
from test_added_tokens import cut_vocabulary
from transformers import PreTrainedTokenizerFast

from expertflow.data.chat_template import chat_environment
from expertflow.data.layout import read_layout
from expertflow.data.records import Layout
from expertflow.data.render import Renderer, split_question
from expertflow.tokens import engine as engine_module
from expertflow.tokens.engine import Engine, FastEngine, choose_engine
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.tokenize import tokenize
from expertflow.tokens.tokenizer import train_tokenizer

# Ids of the real Qwen tokenizer, taken from tokenizers 0.23.3.
GOLDEN = {
    "SELECT name FROM users WHERE age > 21;": [
        4858, 829, 4295, 3847, 5288, 4231, 861, 220, 17, 16, 26,
    ],
    "\n\nassistant\nNaïve café — 東京 2026, I'm 👩‍💻": [
        271, 77091, 198, 16193, 37572, 586, 51950, 1959, 60596, 109, 46553, 220, 17, 15, 17, 21,
        11, 358, 2776, 61804, 102, 378, 235, 145851,
    ],
    "e\u0301 \u00a0x  y\t\tz\r\n": [963, 220, 4102, 87, 220, 379, 197, 20832, 319],
    "<|im_end|>1234567890": [
        27, 91, 318, 6213, 91, 29, 16, 17, 18, 19, 20, 21, 22, 23, 24, 15,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> Path:
    return shared_data / "tokenizers" / "qwen"


@pytest.fixture(scope="module")
def engines(qwen: Path) -> list[Engine]:
    return [choose_engine(qwen, wanted=w, sample=["a text"]) for w in ("auto", "tokenizers")]


def test_both_engines_produce_the_golden_ids(engines: list[Engine]) -> None:
    assert [engine.name for engine in engines] == ["fastokens", "tokenizers"]
    for engine in engines:
        assert engine.encode_flat(list(GOLDEN)).tolist() == list(GOLDEN.values())
        assert [engine.decode(ids) for ids in GOLDEN.values()] == [
            unicodedata.normalize("NFC", text) for text in GOLDEN
        ]
        assert len(engine.encode_flat([])) == 0
        assert engine.encode_flat(["", "a", ""]).lengths.tolist() == [0, 1, 0]


def random_texts() -> list[str]:
    rng = random.Random(0)
    points = [c for c in range(1, 0x30000) if not 0xD800 <= c < 0xE000]
    blanks, marks = " \t\n\r\u00a0\u2009\u3000", "\u0301\u0327\u093c\u200d\ufe0f"
    texts = ["".join(map(chr, rng.choices(points, k=rng.randint(1, 12)))) for _ in range(3000)]
    return texts + ["".join(rng.choices(blanks + "a1.'" + marks, k=15)) for _ in range(3000)]


def test_random_unicode_has_the_same_ids(engines: list[Engine], shared_data: Path) -> None:
    gpt2 = shared_data / "tokenizers" / "gpt2"
    other = choose_engine(gpt2, wanted="auto", sample=[])
    assert other.name == "fastokens", other.reason
    texts = random_texts()
    for one, reference in (engines, (other, Engine(gpt2))):
        assert one.encode_flat(texts).tolist() == reference.encode_flat(texts).tolist()


class Wrong(FastEngine):
    def encode_flat(self, texts: list[str]) -> Ragged:
        found = super().encode_flat(texts).tolist()
        pairs = zip(texts, found, strict=True)
        return Ragged.from_lists([[7] if text == "odd" else ids for text, ids in pairs])


def test_one_different_id_rules_fastokens_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> tuple[str, str]:
        engine = choose_engine(tmp_path, wanted="auto", sample=["fine", "odd"])
        return engine.name, engine.reason

    tiny_tokenizer(tmp_path)
    assert chosen()[0] == "fastokens"
    monkeypatch.setattr(engine_module, "FastEngine", Wrong)
    assert chosen() == ("tokenizers", "fastokens gives other ids for 'odd'")


@pytest.mark.parametrize("wanted", ["auto", "tokenizers"])
def test_saved_truncation_padding_and_dropout_are_ignored(
    tmp_path: Path, wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, text = train_tokenizer(["a longer text"] * 3, vocab_size=300), "a longer text " * 9
    ids = tokenizer.encode(text).ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=20)
    model: Any = tokenizer.model
    model.dropout = 0.9
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = choose_engine(tmp_path, wanted=wanted, sample=[])
    assert engine.encode_flat([*[text] * 9, "", "a"]).tolist() == [*[ids] * 9, [], ids[:1]]
    assert Engine(tmp_path).encode_with_special_tokens(text) == ids
    assert "tokenizer.json: its dropout of 0.9 is not used here" in caplog.text


def test_a_tokenizer_that_fastokens_cannot_load_is_left_to_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    pieces = [("[unk]", 0.0), ("a", -1.0), ("b", -2.0)]
    Tokenizer(models.Unigram(pieces, unk_id=0)).save(str(tmp_path / "tokenizer.json"))
    engine = choose_engine(tmp_path, wanted="auto", sample=["ab"])
    assert engine.name == "tokenizers"
    assert engine.reason.startswith("fastokens cannot load this tokenizer (")
    assert engine.encode_flat(["ab", ""]).tolist() == [[1, 2], []]


# A chat template; null uses the tokenizer's own.
TEMPLATES = {
    "qwen": None,
    "gpt2": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "llama": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}
# Only for families whose tokenizer is made here.
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
    made, choice = tmp_path_factory.mktemp("family"), "auto"
    folder = made / "small"
    if request.param not in SPECIAL:
        cut_vocabulary(shared_data / "tokenizers" / request.param, folder)
    else:
        folder.mkdir()
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
    # Transformers cuts a text at a control token, so ids around one differ.
    engine, mark = family.engine, str(family.layout.turn_end)
    special = {engine.special_id(token) for token in family.layout.special_tokens}
    ours, theirs = (e(f"x {mark}", text) for e in (family.encode, family.encode_by_reference))
    assert engine.decode(ours) == engine.decode(theirs)
    assert [i for i in ours if i in special] == [i for i in theirs if i in special]


def test_templates_run_as_in_transformers() -> None:
    """Ours is a second environment, as importing theirs costs a data job 2 s."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ ns.n }}{{ m | tojson }}"
        "{{ m | tojson(indent=2) }}{{ m | tojson(true, 2) }}"
        "{% generation %}{{ m.content }}{% endgeneration %}\n"
        "   {% if loop.last %}\n{% break %}{% endif %}{% endfor %}"
    )
    messages = [{"role": r, "content": "é <b>&"} for r in ("user", "tool", "assistant")]
    ours, theirs = chat_environment().from_string(template), _compile_jinja_template(template)
    assert ours.render(messages=messages) == theirs.render(messages=messages)
