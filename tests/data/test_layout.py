"""A model's chat layout, derived from its tokenizer's files."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import pair

from expertflow.core.errors import ConfigError, DataError
from expertflow.data.layout import CHATML, chatml_layout, read_layout
from expertflow.data.records import Body, Layout
from expertflow.data.render import Renderer

OWN = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('a role it does not know') }}{% endif %}<|u|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|e|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|u|>{% endif %}"
)
MARKS = ("<|e|>", "<|u|>")
CHAT = pair("a", "b")


def layout(
    folder: Path, *special: str, choice: str = "auto", post: Any = None, **settings: Any
) -> Layout:
    """Write the files of a tokenizer, and derive its layout."""
    tokens = [{"content": name, "special": True} for name in special]
    tokens.append({"content": "<think>", "special": False})
    value = {"added_tokens": tokens, "post_processor": post}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return read_layout(folder, choice=choice, text_special_tokens="plain")


def test_the_tokenizers_own_template_takes_precedence(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": OWN}]
    for template in (OWN, named):
        found = layout(tmp_path, *MARKS, chat_template=template, eos_token="<|e|>")
        assert (found.chat_template, found.chat_template_origin) == (OWN, "tokenizer")
        assert (found.turn_end, found.text_end) == ("<|e|>", "<|e|>")
        assert found.special_tokens == MARKS
        # Other added tokens are not special.
        assert found.added_tokens == ("<think>",)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert layout(tmp_path, *MARKS, chat_template=OWN, eos_token="<|e|>").chat_template == CHATML


def test_a_template_is_chosen_by_its_name_or_path(tmp_path: Path) -> None:
    """In the settings, or as transformers saves several: one file each."""
    named = [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": OWN}]
    marks = {"chat_template": named, "eos_token": "<|e|>"}
    found = layout(tmp_path, *MARKS, choice="rag", **marks)
    assert (found.chat_template, found.chat_template_origin) == (OWN, "tokenizer")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text(OWN + " ")
    assert layout(tmp_path, *MARKS, choice="short", eos_token="<|e|>").chat_template == OWN + " "
    with pytest.raises(ConfigError, match=r"tools is neither a file .* has rag, short, tool_use"):
        layout(tmp_path, *MARKS, choice="tools", **marks)
    (tmp_path / "mine.jinja").write_text(OWN + "  ", encoding="utf-8-sig")
    found = layout(tmp_path, *MARKS, choice=str(tmp_path / "mine.jinja"), **marks)
    assert (found.chat_template, found.chat_template_origin) == (OWN + "  ", "manifest")
    with pytest.raises(ConfigError, match=r"nowhere\.jinja is neither a file nor a template of"):
        layout(tmp_path, *MARKS, choice="nowhere.jinja", eos_token="<|e|>")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xe9")
    with pytest.raises(DataError, match=r"chat_template\.jinja: byte 0 is not UTF-8"):
        layout(tmp_path, *MARKS, eos_token="<|e|>")


def test_without_a_template_chatml_is_used_if_its_tokens_exist(tmp_path: Path) -> None:
    for choice in ("auto", "chatml"):
        known = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        found = layout(tmp_path, *known, choice=choice)
        assert found == replace(chatml_layout(), eos=None, added_tokens=("<think>",))
        assert (found.turn_end, found.text_end) == ("<|im_end|>", "<|endoftext|>")
    for others in (["</s>"], ["</s>", "<|im_start|>"]):
        other = layout(tmp_path, *others, eos_token={"content": "</s>"})
        assert (other.chat_template, other.chat_template_origin) == (None, "none")
    with pytest.raises(DataError, match=r"no token '<\|im_start\|>'"):
        layout(tmp_path, "</s>", choice="chatml", eos_token="</s>")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("a\n{% if %}", "does not parse (line 2"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "would not learn to stop"),
        ("{{ '\\0' }}" + OWN, "the chat template writes U+0000"),
        ("{{ 1 / 0 }}" + OWN, "rejects the chat: division by zero"),
        (
            "{{ strftime_now('%Y') }}" + OWN,
            "rejects a plain chat (the chat template rejects the chat: 'strftime",
        ),
    ],
)
def test_a_template_that_is_rejected_for_chats(tmp_path: Path, template: str, problem: str) -> None:
    found = layout(tmp_path, *MARKS, chat_template=template, eos_token="<|e|>")
    assert found.problem is not None and found.turn_end is None
    assert problem in found.problem
    with pytest.raises(DataError, match="cannot render chats: its chat template "):
        Renderer(found).render(CHAT)
    assert Renderer(found).render(Body(text="a"))


def test_tokens_after_a_chat_or_added_end_no_turn(tmp_path: Path) -> None:
    template = OWN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    found = layout(tmp_path, *MARKS, "</s>", chat_template=template, eos_token="</s>")
    assert (found.turn_end, found.text_end) == ("<|e|>", "</s>")
    segments = Renderer(found).render(CHAT)
    assert "".join(s.text[a:b] for s in segments for a, b in s.learned) == "b<|e|>"
    renderer = Renderer(layout(tmp_path, "</s>", eos_token="</s>"))
    assert renderer.has_special_text(pair("<think>", "b"))
    assert not renderer.has_special_text(pair("a", "<think>"))


POST = {"type": "TemplateProcessing", "special_tokens": {"<｜s｜>": {"id": "<｜s｜>"}}}


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({}, None), ({"post": POST}, "<｜s｜>"), ({"post": POST, "add_bos_token": False}, None),
        ({"add_bos_token": True}, "<｜s｜>"), ({"add_bos_token": True, "bos_token": None}, None),
    ],
)  # fmt: skip
def test_a_start_token_precedes_texts_if_the_tokenizer_adds_it(
    tmp_path: Path, settings: dict[str, Any], start: str | None
) -> None:
    names = {"bos_token": "<｜s｜>", "eos_token": "</s>", **settings}
    assert layout(tmp_path, "<｜s｜>", "</s>", **names).text_start == start


def test_tokens_that_strip_spaces_and_unlisted_ends_are_recognized(tmp_path: Path) -> None:
    tokens = [
        {"content": "<b>", "special": True, "lstrip": True},
        {"content": "<a>", "special": True, "rstrip": True, "lstrip": True},
        {"content": "<call>", "special": False, "rstrip": True},
        {"content": "  ", "special": False},
    ]
    layout(tmp_path, eos_token={"content": "</s>"}, bos_token="<s>")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    found = read_layout(tmp_path, choice="auto", text_special_tokens="plain")
    assert found.special_tokens == ("</s>", "<a>", "<b>", "<s>")
    assert found.added_tokens == ("<call>",)
    assert (found.strip_after, found.strip_before) == (("<a>",), ("<a>", "<b>"))
    assert (found.bos, found.eos, found.turn_end) == ("<s>", "</s>", None)


def test_a_tokenizer_that_is_damaged_or_has_no_end_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no eos_token"):
        read_layout(tmp_path, choice="auto", text_special_tokens="plain")
    for text, fault in (("{", "damaged"), ("[]", "is not a JSON object")):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=rf"tokenizer\.json: {fault}.*save the tokenizer again"):
            read_layout(tmp_path, choice="auto", text_special_tokens="plain")
