"""A layout that is found once fits every text that meets its conditions."""

import random

import pytest
from msgspec.structs import replace

from expertflow.data.chat_template import ChatTemplate, place
from expertflow.data.layout import chatml_layout
from expertflow.data.records import Body, ToolCall, Turn

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
    "cut": "{{ c[:2] }};",
    "counted": "{{ c | length }}{{ c }};",
    "upper": "{{ c | upper }};",
    "json": "{{ c | tojson }};",
    "json of all": "{{ messages | tojson }};",
    "letters": "{% for letter in c %}{{ letter }}{% endfor %};",
    "joined": "{{ (c ~ '!') | trim }};",
    "escaped": "{{ c | e }};",
    "number": "{{ c | int }};",
    "inside": "{% if c in 'a b c' %}I{% endif %}{{ c }};",
    "block": "{% set d %}{{ c }}{% endset %}{{ d | trim }};",
    "macro": "{% macro f(t) %}{{ t }}{% endmacro %}{{ f(c) | trim }};",
    "derived": "{{ (c + ' ') | trim }};",
    "words": "{{ c.split() | first }};",
    "counted words": "{{ c.count('a') }}{{ c }};",
    "order": "{% if c < 'm' %}<{% endif %}{{ c }};",
    "at": "{{ c.find('a') }}{{ c }};",
    "formatted": "{{ '%s' | format(c) }};",
    "of two": "{% if messages[0].content in c %}O{% endif %}{{ c }};",
    "prefixes": "{% if c.startswith(('a', 'x')) %}P{% endif %}{{ c }};",
    "starts inside": "{% if c.startswith('b', 1) %}S{% endif %}{{ c }};",
    "title": "{{ c | title }};",
    "in a text": "{% set known = 'x y a' %}{% if c in known %}I{% endif %}{{ c }};",
    "in two texts": "{% if c in 'x ' + 'y a' %}I{% endif %}{{ c }};",
    "is in": "{% if c is in 'x y a' %}I{% endif %}{{ c }};",
    "same": "{% if c is sameas messages[0].content %}S{% endif %}{{ c }};",
    "selected": "{{ messages | selectattr('content', 'in', 'x y a') | list | length }}{{ c }};",
    "joined by a text": "{{ ''.join([c]) | trim }};",
    "asked of a text": "{% if 'x y a'.startswith(c) %}S{% endif %}{{ c }};",
    "found in a text": "{% if 'x y a'.find(c) >= 0 %}F{% endif %}{{ c }};",
    "put into a text": "{{ ('@' | replace('@', c)) | trim }};",
    "format method": "{{ c.format() | trim }};",
    "escaped by mode": "{% autoescape true %}{{ c }}{% endautoescape %};",
}
WORDS = ["x", "y", "a", "ab ", " b", "\n", "<tool>", "</think>", "</think>\nx", "é", "5", "<", "!"]


def chat_template(source: str) -> ChatTemplate:
    layout = replace(chatml_layout(), chat_template=LOOP.replace("[%s]", source))
    return ChatTemplate(layout)


def body(*texts: str) -> Body:
    roles = ("user", "assistant")
    return Body(
        turns=tuple(
            Turn(role=roles[i % 2], content=text, learned=True) for i, text in enumerate(texts)
        )
    )


def random_texts(n: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    words = ["".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(2 * n)]
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("name", [*PLAIN, *OPAQUE])
def test_where_the_conditions_hold_the_layout_is_the_templates(name: str) -> None:
    template = chat_template({**PLAIN, **OPAQUE}[name])
    found = template.form(body(place(0), place(1)))
    assert (found is None) == (name in OPAQUE)
    if found is None:
        return
    atoms, conditions = found
    n_met = 0
    for texts in random_texts(400):
        if all(c.holds(texts[c.text]) for c in conditions):
            n_met += 1
            filled = "".join(a.text if a.turn is None else texts[a.turn] for a in atoms)
            assert filled == template._apply(body(*texts).turns, ())
    # The conditions do not keep everything out; where nothing is asked they keep nothing out.
    assert n_met == 400 if not conditions else 20 < n_met < 400 or name == "equal"


def test_a_chat_with_tools_has_a_form_unless_one_of_them_poses() -> None:
    template = ChatTemplate(chatml_layout())
    call = ToolCall(name="find", arguments={"a": 1})
    turns = body(place(0), place(1)).turns
    called = Body(turns=(turns[0], replace(turns[1], tool_calls=(call,))))

    def form_with(**function: str) -> object:
        return template.form(replace(called, tools=({"type": "function", "function": function},)))

    assert form_with(name="find") is not None
    assert form_with(name="<|im_end|>") is None
    assert form_with(name="f", description=place(0)) is None
    assert chat_template("{{ raise_exception('no') }}").form(body(place(0))) is None
