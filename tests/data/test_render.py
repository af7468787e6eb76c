"""What a model reads: ChatML, a model's own template, and which parts are learned."""

import random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support import pair, turn

from expertflow.data.chat_template import (
    ChatTemplate,
    chat_environment,
    placeholder,
    special_pattern,
)
from expertflow.data.layout import CHATML, chatml_layout
from expertflow.data.records import Body, Layout, Segment, ToolCall
from expertflow.data.reject import Reject
from expertflow.data.render import (
    Blank,
    Renderer,
    iter_training_texts,
    join_question,
    render_answer,
    split_question,
)
from expertflow.data.shapes import frame_of

# Small versions of well-known families' styles, with their tags and trimming.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set answer = m.content.split('</think>')[-1] %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}: {% endif %}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}<s>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<s>{{ c.function.name }}{% endfor %}</s>{% endfor %}"
)
COUNTED = CALLS + (
    "{% if add_generation_prompt %}<s>Think.{% else %}"
    "{{ {'n': messages | length, 'm': 1} | tojson(separators=[',', ':'], sort_keys=true) }}"
    "{% endif %}"
)
SPECIAL = ("<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def layout(template: str, **changes: Any) -> Layout:
    own = replace(
        chatml_layout(), chat_template=template, chat_template_origin="tokenizer",
        special_tokens=SPECIAL, bos="<s>", eos="</s>",
    )  # fmt: skip
    return replace(own, **changes)


def chat(*texts: str, learned: tuple[int, ...] | None = None) -> Body:
    turns = []
    for i, text in enumerate(texts):
        own = None if learned is None else i in learned
        turns.append(turn(("user", "assistant")[i % 2], text, learned=own))
    return Body(turns=tuple(turns))


def whole(segments: tuple[Segment, ...]) -> str:
    return "".join(segment.text for segment in segments)


def learned(segments: tuple[Segment, ...]) -> str:
    assert all(end <= len(s.text) for s in segments for _, end in s.learned)
    return "|".join(s.text[a:b] for s in segments for a, b in s.learned)


TWO = (
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
)


def test_plain_text_learns_its_end() -> None:
    segments = Renderer(chatml_layout()).render(Body(text="a<|im_end|>"))
    assert learned(segments) == "a<|im_end|>|<|endoftext|>"
    assert [s.special for s in segments] == [False, True]
    assert Renderer(chatml_layout()).has_special_text(Body(text="a<|im_end|>"))
    start = Renderer(replace(chatml_layout(), text_start="<s>")).render(Body(text="a"))
    assert (start[0], learned(start)) == (Segment("<s>", special=True), "a|<|endoftext|>")


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("template", "body", "text", "taught"),
    [
        (CHATML, chat("a", "b", "c", "d"), TWO, "b|<|im_end|>|d|<|im_end|>"),
        (CHATML, chat("a", "b", "c", "d", learned=(3,)), TWO, "d|<|im_end|>"),
        (BRACKETS, chat("a", "b", "c", "d"),
         "<s>[INST] a [/INST] b</s>[INST] c [/INST] d</s>", " b|</s>| d|</s>"),
        (BRACKETS, chat("a", "b", learned=ALL),
         "<s>[INST] a [/INST] b</s>", "<s>|[INST] a [/INST] b|</s>"),
        (
            HEADERS, chat(" a ", "b "),
            "<s><|header|>user<|/header|>\n\na<|eot|><|header|>assistant<|/header|>\n\nb<|eot|>",
            "b|<|eot|>",
        ),
        (
            THINKING, chat("a", f"<think>{'x' * 200}</think>b", "c", "d"),
            TWO.replace("\nd", "\n<think>\n\n</think>\n\nd"),
            "b|<|im_end|>|<think>\n\n</think>\n\nd|<|im_end|>",
        ),
        (MARKED, chat("a", "b"), "a: b</s>", "b|</s>"),
        (CALLS, chat("a", "b", "c", "d"),
         "<s>a</s><s>b</s><s>c</s><s>d</s>", "<s>|b|</s>|<s>|d|</s>"),
        (COUNTED, chat("a", "b"), '<s>a</s><s>b</s>{"m":1,"n":2}', "b|</s>"),
    ],
)  # fmt: skip
def test_the_template_decides_the_text_and_the_turns_what_is_learned(
    template: str, body: Body, text: str, taught: str
) -> None:
    segments = Renderer(layout(template)).render(body)
    assert whole(segments) == text
    assert learned(segments) == taught
    assert all(s.special == (s.text in SPECIAL) for s in segments)


def test_a_tokenizer_may_lack_start_and_end_tokens() -> None:
    for template, text in ((MARKED, "a: b"), (BRACKETS, "[INST] a [/INST] b")):
        renderer = Renderer(layout(template, bos=None, eos=None))
        assert whole(renderer.render(pair("a", "b"))) == text


def test_the_policy_on_special_tokens_in_texts() -> None:
    body = chat("x<|im_end|>y", "b")
    plain = Renderer(chatml_layout())
    assert plain.has_special_text(body) and not plain.has_special_text(chat("a", "b"))
    assert sum(s.special for s in plain.render(body)) == 4
    allowing = Renderer(replace(chatml_layout(), text_special_tokens="allow"))
    assert sum(s.special for s in allowing.render(body)) == 5
    assert whole(allowing.render(body)) == whole(plain.render(body))
    assert sum(s.special for s in allowing.render(Body(text="x<|im_end|>y"))) == 2
    with pytest.raises(Reject, match="special_token_text"):
        Renderer(replace(chatml_layout(), text_special_tokens="reject")).render(body)


CALL = ToolCall(name="f", arguments={"x": "é"}, id="1")
AGENT = Body(
    turns=(
        turn("system", "be kind"), turn("user", " a\n"), turn("assistant", tool_calls=(CALL,)),
        turn("tool", "2"), turn("assistant", "b"),
    ),
    tools=({"function": {"name": "f"}},),
)  # fmt: skip


def test_tools_and_calls_are_written_and_calls_are_learned() -> None:
    segments = Renderer(chatml_layout()).render(AGENT)
    assert '{"function": {"name": "f"}}\n' in segments[1].text
    assert segments[1].text.startswith("system\nbe kind\n\n")
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert learned(segments).strip() == f"{call}|<|im_end|>|b|<|im_end|>"
    # OpenAI's own messages, as other programs pass them to the exported template.
    function = {"name": "f", "arguments": '{"x": "é"}'}
    chat = [{"role": turn.role, "content": turn.content or None} for turn in AGENT.turns]
    chat[2] |= {"tool_calls": [{"type": "function", "function": function}]}
    template = chat_environment().from_string(CHATML)
    assert template.render(messages=chat, tools=list(AGENT.tools)) == whole(segments)
    chat[0]["content"] = None
    assert "be kind" not in template.render(messages=chat, tools=list(AGENT.tools))


def test_a_question_names_the_tools_and_the_calls_before_it() -> None:
    call = '{"name": "f", "arguments": {"x": "é"}}'
    assert join_question(AGENT) == f'be kind\na\n{call}\n2\n{{"function": {{"name": "f"}}}}'
    # If the last answer is a call, its reference is the call.
    _, answer = split_question(Renderer(chatml_layout()), replace(AGENT, turns=AGENT.turns[:3]))
    assert answer == f"<tool_call>\n{call}\n</tool_call>"
    asked = Body(turns=(turn("user", "a"), *calling().turns))
    assert split_question(Renderer(layout(CALLS)), asked)[1] == "<s><s>look_up"


def calling(**arguments: str) -> Body:
    call = ToolCall(name="look_up", arguments=arguments)
    return Body(turns=(turn("assistant", tool_calls=(call,)),))


SYSTEM = Body(turns=(turn("system", "s"), *pair("a", "b").turns))
TOOLS = replace(pair("a", "b"), tools=({"function": {"name": "look_up"}},))
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "body", "reason"),
    [
        (HEADERS, chat(" x<|eot|>", "b"), "special_token_text: the chat template rewrites"),
        (CHATML, calling(x="<|im_end|>"), "special_token_text: a tool"),
        (BRACKETS, SYSTEM, "only user and assistant turns"),
        (HEADERS, calling(), "leaves out the call in turn 1"),
        (NO_SYSTEM, SYSTEM, r"leaves out turn 1 \(system\)"),
        (HEADERS, TOOLS, "leaves out the tools"),
        (HEADERS, chat("a", "b ", learned=(0,)), "rewrites turn 1 without marking it"),
    ],
)
def test_what_a_template_rejects_or_omits(template: str, body: Body, reason: str) -> None:
    with pytest.raises(Reject, match=reason):
        Renderer(layout(template)).render(body)


@pytest.mark.parametrize("template", [CHATML, HEADERS, BRACKETS, THINKING])
@pytest.mark.parametrize("supervised", [None, ALL])
def test_a_question_ends_at_its_answer(template: str, supervised: tuple[int, ...] | None) -> None:
    renderer, body = Renderer(layout(template)), chat(*"abcde", learned=supervised)
    question, answer = split_question(renderer, body)
    assert answer == "d"
    assert whole(renderer.render(body)).startswith(whole(question))
    assert whole(question).rstrip().endswith(("assistant", "[/INST]", "<|/header|>"))
    assert join_question(body) == "a\nb\nc"
    for text in ("d", "other"):
        segments = render_answer(renderer, body, text)
        assert whole(segments).startswith(whole(question))
        learnt = whole(segments).removeprefix(whole(question)).removesuffix("\n")
        assert learned(segments).replace("|", "") == learnt.replace("|", "") and text in learnt
    assert render_answer(renderer, body, "d") == render_answer(renderer, body)


RENDERERS = [Renderer(layout(template)) for template in (CHATML, BRACKETS)]


# No document contains NUL, for which a template would be rejected.
TEXTS = st.text(st.characters(exclude_characters="\0"), min_size=1).filter(str.strip)


@given(st.lists(TEXTS, min_size=2, max_size=6))
def test_no_text_changes_its_surroundings(texts: list[str]) -> None:
    for renderer in RENDERERS:
        segments = renderer.render(chat(*texts, "end"))
        n_marks = sum(s.special for s in renderer.render(chat(*("x" for _ in texts), "end")))
        assert sum(s.special for s in segments) == n_marks
        assert all(text in whole(segments) for text in texts)


def test_results_go_to_the_calls_they_refer_to() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.type }} {{ c.function.name }}={{ c.id }} {% endfor %}"
        "{{ m.name or '' }} {{ m.tool_call_id or '' }}</s>{% endfor %}"
    )
    calls = tuple(ToolCall(name=name, arguments={}, id=name) for name in "xyz")
    turns = (
        turn("assistant", tool_calls=calls),
        turn("tool", "of y ", tool_call_id="y", name="y"),
        turn("tool", "next "),
        turn("tool", "last "),
        turn("tool", "more "),
    )
    text = whole(Renderer(layout(template)).render(Body(turns=turns)))
    assert text == (
        "function x=call00000 function y=call00001 function z=call00002  </s>"
        "of y y call00001</s>next  call00000</s>last  call00002</s>more  call00000</s>"
    )
    posing = (*turns[:3], turn("tool", "x", name="</s>"))
    with pytest.raises(Reject, match="special_token_text"):
        Renderer(layout(template)).render(Body(turns=posing))


def test_only_the_stripping_side_loses_spaces() -> None:
    def stripped(text: str, **changes: tuple[str, ...]) -> tuple[str, str]:
        template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
        segments = Renderer(layout(template, **changes)).render(chat("q", text))
        assert all(segment.text for segment in segments)
        return whole(segments).removeprefix("<s>q</s>"), learned(segments)

    assert stripped(" a ", strip_after=("<s>",)) == ("<s>a </s>", "<s>|a |</s>")
    assert stripped(" a ", strip_before=("</s>",)) == ("<s> a</s>", "<s>| a|</s>")
    assert stripped(" a ", strip_after=("</s>",), strip_before=("<s>",)) == (
        "<s> a </s>", "<s>| a |</s>",
    )  # fmt: skip
    assert stripped(" ", strip_after=("<s>",), strip_before=("</s>",)) == ("<s></s>", "<s>|</s>")
    segments = Renderer(layout(BRACKETS, strip_before=("</s>",))).render(chat("q", " "))
    assert learned(segments) == "</s>"


def test_a_tokenizer_trains_between_special_tokens_and_finds_the_longest() -> None:
    renderer = Renderer(replace(chatml_layout(), text_special_tokens="reject"))
    bodies = [chat("a", "b"), chat("x<|im_end|>", "y"), Body(text="c")]
    texts = list(iter_training_texts(renderer, bodies))
    assert texts == ["user\na", "\n", "assistant\nb", "\n", "c"]
    assert special_pattern(("<a", "", "<a>", "b")).findall("x<a>b<a") == ["<a>", "b", "<a"]
    assert special_pattern(("",)).search("x<a>\n") is None


@pytest.mark.parametrize("text_special_tokens", ["plain", "allow"])
@pytest.mark.parametrize(
    "template", [CHATML, "{% for m in messages %}<s>{{ m.content }};</s>{% endfor %}"]
)
def test_a_filled_form_equals_the_template(
    template: str, text_special_tokens: Literal["plain", "allow"]
) -> None:
    renderer = Renderer(layout(template, text_special_tokens=text_special_tokens))
    for body in (chat("a", "b", "c", "d"), chat("", "b", learned=(0, 1)), Body(text="a")):
        frame, texts = frame_of(body)
        form = renderer.build_form(frame)
        assert form is not None and form.conditions == ()
        assert form.fill(texts) == renderer.render(body)
        writers = [item.writer for item in form.items if isinstance(item, Blank)]
        assert writers == [turn.role for turn in body.turns if turn.content] or writers == [None]


def test_a_template_that_depends_on_its_texts_has_no_form() -> None:
    frame, _ = frame_of(chat("a", "b"))
    two = "{% for m in messages %}{{ m.content }} {% endfor %}</s>"
    both, _ = frame_of(chat("a", "b", learned=(0, 1)))
    assert Renderer(layout(two)).build_form(both) is None
    for own in (
        layout(two),
        layout(CHATML, strip_after=("<s>",)),
        layout(CHATML, strip_before=("<s>",)),
        replace(chatml_layout(), chat_template=None),
    ):
        assert Renderer(own).build_form(frame) is None


LOOP = "{% for m in messages %}{% set c = m.content %}[%s]{% endfor %}"
PLAIN = {
    "added": "{{ '<|im_start|>' + m.role + c + '<|im_end|>' }}",
    "trimmed": "{{ c | trim }};",
    "stripped": "{{ c.strip() }}{{ c.lstrip('\\n') }}{{ c.rstrip() }};",
    "thoughts": "{% if '</think>' in c %}{{ c.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ c }}{% endif %};",
    "begins": "{% if c.startswith('<tool') and not c.endswith('>') %}T{% endif %}{{ c }};",
    "equal": "{% if c == 'x' or c != 'y' %}E{% endif %}{{ c }};",
    "listed": "{% if c in ['x', 'y'] %}L{% endif %}{{ c }};",
    "replaced": "{{ c | replace('a', 'b') }}{{ c.replace('x', 'y') }};",
    "truth": "{% if c and c is string %}{{ c }}{% endif %};",
    "default": "{{ c | default('none', true) }};",
    "folded": "{% if loop.first %}{{ messages[1:][0].content.strip() if messages | length > 1 }}"
    "{% endif %}{{ c }};",
    "backwards": "{% for m in messages[::-1] %}{{ m.content.rstrip() }}{% endfor %};",
    "before": "{% if loop.previtem is defined and loop.previtem.content.endswith('!') %}B"
    "{% endif %}{{ c }};",
    "kept": "{% set ns = namespace(last='') %}{% set ns.last = c %}{{ ns.last }};",
}
OPAQUE = {
    "upper": "{{ c | upper }};",
    "json of all": "{{ messages | tojson }};",
    "joined": "{{ (c ~ '!') | trim }};",
    "escaped": "{{ c | e }};",
    "inside": "{% if c in 'a b c' %}I{% endif %}{{ c }};",
    "block": "{% set d %}{{ c }}{% endset %}{{ d | trim }};",
    "macro": "{% macro f(t) %}{{ t }}{% endmacro %}{{ f(c) | trim }};",
    "derived": "{{ (c + ' ') | trim }};",
    "words": "{{ c.split() | first }};",
    "of two": "{% if messages[0].content in c %}O{% endif %}{{ c }};",
    "prefixes": "{% if c.startswith(('a', 'x')) %}P{% endif %}{{ c }};",
    "starts inside": "{% if c.startswith('b', 1) %}S{% endif %}{{ c }};",
    "is in": "{% if c is in 'x y a' %}I{% endif %}{{ c }};",
    "same": "{% if c is sameas messages[0].content %}S{% endif %}{{ c }};",
    "selected": "{{ messages | selectattr('content', 'in', 'x y a') | list | length }}{{ c }};",
    "joined by a text": "{{ ''.join([c]) | trim }};",
    "put into a text": "{{ ('@' | replace('@', c)) | trim }};",
    "format method": "{{ c.format() | trim }};",
    "escaped by mode": "{% autoescape true %}{{ c }}{% endautoescape %};",
}
WORDS = ["x", "y", "a", "ab ", " b", "\n", "<tool>", "</think>", "</think>\nx", "é", "5", "<", "!"]


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(layout(LOOP.replace("[%s]", source)))


def learned_chat(*texts: str) -> Body:
    return chat(*texts, learned=tuple(range(len(texts))))


def random_texts(n: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    words = ["".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(2 * n)]
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("name", [*PLAIN, *OPAQUE])
def test_under_the_conditions_the_layout_equals_the_template(name: str) -> None:
    template = chat_template({**PLAIN, **OPAQUE}[name])
    found = template.build_form(learned_chat(placeholder(0), placeholder(1)))
    assert (found is None) == (name in OPAQUE)
    if found is None:
        return
    atoms, conditions = found
    n_met = 0
    for texts in random_texts(400):
        if all(c.holds(texts[c.text]) for c in conditions):
            n_met += 1
            filled = [a.text if a.number is None else texts[a.number] for a in atoms]
            applied = template.lay_out(learned_chat(*texts))
            assert "".join(filled) == "".join(atom.text for atom in applied)
    # The conditions do not exclude everything; without conditions nothing is excluded.
    assert n_met == 400 if not conditions else 20 < n_met < 400 or name == "equal"


def test_a_chat_with_tools_has_a_form_unless_one_of_them_poses() -> None:
    template = ChatTemplate(chatml_layout())
    asked = turn("user", placeholder(0))
    turns = (asked, turn("assistant", placeholder(1), tool_calls=(CALL,)))
    for function, has_form in (
        ({"name": "f"}, True),
        ({"name": "<|im_end|>"}, False),
        ({"name": "f", "description": placeholder(0)}, False),
    ):
        tools = ({"type": "function", "function": function},)
        assert (template.build_form(Body(turns=turns, tools=tools)) is not None) == has_form
    assert chat_template("{{ raise_exception('no') }}").build_form(Body(turns=(asked,))) is None
