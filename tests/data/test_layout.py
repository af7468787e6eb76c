"""How a model writes chats, found out from its tokenizer's files."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import pair

from expertflow.core.errors import ConfigError, DataError
from expertflow.data.layout import CHATML, read_layout
from expertflow.data.records import Body, Turn
from expertflow.data.render import Renderer

OWN = (
    "{% for m in messages %}<|u|>{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|u|>{% endif %}"
)

CHAT = pair("a", "b")


def tokenizer(
    folder: Path, *special: str, template: Any = None, post: Any = None, **settings: Any
) -> Path:
    tokens = [{"content": name, "special": True} for name in special]
    tokens.append({"content": "<think>", "special": False})
    value = {"added_tokens": tokens, "post_processor": post}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    settings |= {"chat_template": template} if template is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def layout(folder: Path, choice: str = "auto") -> Any:
    return read_layout(folder, choice=choice, text_special_tokens="plain")


def test_the_tokenizers_own_template_wins(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": OWN}]
    for template in (OWN, named):
        found = layout(tokenizer(tmp_path, "<|e|>", "<|u|>", template=template, eos_token="<|e|>"))
        assert (found.chat_template, found.chat_template_origin) == (OWN, "tokenizer")
        assert (found.turn_end, found.text_end) == ("<|e|>", "<|e|>")
        assert found.special_tokens == ("<|e|>", "<|u|>")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert layout(tmp_path).chat_template == CHATML


def test_without_a_template_chatml_is_used_where_its_marks_are_known(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, "<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert layout(folder).chat_template_origin == "chatml"
    assert (layout(folder).turn_end, layout(folder).text_end) == ("<|im_end|>", "<|endoftext|>")
    other = layout(tokenizer(tmp_path, "</s>", eos_token={"content": "</s>"}))
    assert (other.chat_template, other.chat_template_origin) == (None, "none")
    with pytest.raises(DataError, match=r"no token '<\|im_start\|>'"):
        layout(tmp_path, "chatml")


def test_a_manifests_template_wins_over_all(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, "<|e|>", "<|u|>", template="x", eos_token="<|e|>")
    (tmp_path / "mine.jinja").write_text(OWN)
    found = layout(folder, str(tmp_path / "mine.jinja"))
    assert (found.chat_template, found.chat_template_origin) == (OWN, "manifest")
    with pytest.raises(ConfigError, match=r"no file at nowhere\.jinja"):
        layout(folder, "nowhere.jinja")


def test_a_template_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, "</s>", template="a\n{% if %}", eos_token="</s>")
    assert "does not parse (line 2" in layout(folder).problem
    with pytest.raises(DataError, match=r"cannot write chats: its chat template does not parse"):
        Renderer(layout(folder)).render(CHAT)
    assert Renderer(layout(folder)).render(Body(text="a"))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "would not learn to stop"),
        (
            "{{ strftime_now('%Y') }}" + OWN,
            "refuses a plain chat (the chat template refuses the chat: 'strftime",
        ),
    ],
)
def test_a_template_that_is_refused_for_chats(tmp_path: Path, template: str, problem: str) -> None:
    found = layout(tokenizer(tmp_path, "<|e|>", "<|u|>", template=template, eos_token="<|e|>"))
    assert problem in found.problem and found.turn_end is None


def test_a_token_after_the_whole_chat_does_not_end_a_turn(tmp_path: Path) -> None:
    template = OWN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    found = layout(
        tokenizer(tmp_path, "<|e|>", "<|u|>", "</s>", template=template, eos_token="</s>")
    )
    assert (found.turn_end, found.text_end) == ("<|e|>", "</s>")
    segments = Renderer(found).render(CHAT)
    assert "".join(s.text[a:b] for s in segments for a, b in s.learned) == "b<|e|>"


def test_added_tokens_that_are_not_special_are_listed_apart(tmp_path: Path) -> None:
    found = layout(tokenizer(tmp_path, "</s>", eos_token="</s>"))
    assert found.added_tokens == ("<think>",)
    posing = Body(turns=(Turn(role="user", content="<think>", learned=False), *CHAT.turns[1:]))
    thinking = Body(turns=(CHAT.turns[0], Turn(role="assistant", content="<think>", learned=True)))
    assert Renderer(found).has_special_text(posing)
    assert not Renderer(found).has_special_text(thinking)


def test_a_start_token_stands_before_texts_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    names = {"bos_token": "<｜s｜>", "eos_token": "</s>"}
    assert layout(tokenizer(tmp_path, "<｜s｜>", "</s>", **names)).text_start is None
    post = {"type": "TemplateProcessing", "special_tokens": {"<｜s｜>": {"id": "<｜s｜>"}}}
    assert (
        layout(tokenizer(tmp_path, "<｜s｜>", "</s>", post=post, **names)).text_start == "<｜s｜>"
    )
    folder = tokenizer(tmp_path, "<｜s｜>", "</s>", post=post, add_bos_token=False, **names)
    assert layout(folder).text_start is None

    folder = tokenizer(tmp_path, "<｜s｜>", "</s>", add_bos_token=True, **names)
    assert layout(folder).text_start == "<｜s｜>"
    assert (
        layout(tokenizer(tmp_path, "</s>", add_bos_token=True, eos_token="</s>")).text_start is None
    )


def test_tokens_that_swallow_blanks_and_ends_that_are_not_listed_are_known(tmp_path: Path) -> None:
    tokens = [
        {"content": "<b>", "special": True, "lstrip": True},
        {"content": "<a>", "special": True, "rstrip": True, "lstrip": True},
        {"content": "<call>", "special": False, "rstrip": True},
        {"content": "  ", "special": False},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = layout(tmp_path)
    assert found.special_tokens == ("</s>", "<a>", "<b>", "<s>")
    assert found.added_tokens == ("<call>",)
    assert (found.strip_after, found.strip_before) == (("<a>",), ("<a>", "<b>"))
    assert (found.bos, found.eos, found.turn_end) == ("<s>", "</s>", None)


@pytest.mark.parametrize(("text", "fault"), [("{", "damaged"), ("[]", "holds no JSON object")])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tokenizer(tmp_path, eos_token="</s>") / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=rf"tokenizer\.json: {fault}.*save the tokenizer again"):
        layout(tmp_path)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names no eos_token"):
        layout(tokenizer(tmp_path))
