"""Read a model's chat and text layout from its tokenizer files."""

import json
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateSyntaxError
from msgspec.structs import replace

from expertflow.core.errors import ConfigError, DataError
from expertflow.data.chat_template import ChatTemplate
from expertflow.data.records import Body, Layout, Turn
from expertflow.data.reject import Reject

# tokenizer_config.json, or another JSON file next to it.
TokenizerConfig = dict[str, Any]
TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML_TOKENS = (TURN_START, TURN_END)
CHATML = r"""{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}
{{- (messages[0].content or '') + '\n\n' }}
{%- endif %}
{{- 'These tools may be called:\n' }}
{%- for tool in tools %}
{{- tool | tojson + '\n' }}
{%- endfor %}
{{- 'A call is JSON with name and arguments between <tool_call> and </tool_call>.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n' if message.content or not loop.first }}
{%- set given = call.function.arguments %}
{{- '<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- (given if given is string else given | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""
Choice = Literal["auto", "chatml"] | str
DEFAULT, NAMED_TEMPLATES = "default", "additional_chat_templates/*.jinja"


def read_layout(
    directory: Path, *, choice: Choice, text_special_tokens: Literal["plain", "reject", "allow"]
) -> Layout:
    """Read a tokenizer's special tokens and choose its chat template.

    ``choice`` is ``auto`` (the tokenizer's template, else ChatML if it has the tokens, else none),
    ``chatml``, a Jinja file, or the name of one of the tokenizer's templates (ConfigError if there
    is none). An unusable template becomes ``problem``, since plain texts need none. DataError if no
    token ends a text.
    """
    tokenizer = _read_json(directory / "tokenizer.json")
    settings = _read_json(directory / "tokenizer_config.json")
    added = tokenizer.get("added_tokens", [])
    special = _names(added, "special")
    template, origin = _choose(directory, settings, choice=choice, special=special)
    bos, eos = _token(settings, "bos_token"), _token(settings, "eos_token")
    text_end = TEXT_END if TEXT_END in special else eos
    if text_end is None:
        raise DataError(f"{directory}: the tokenizer has no eos_token; documents need an end")
    layout = Layout(
        chat_template=template,
        chat_template_origin=origin,
        special_tokens=tuple(sorted({*special, text_end, *filter(None, (bos, eos))})),
        added_tokens=tuple(t for t in _names(added) if t not in special and not t.isspace()),
        strip_after=_names(added, "special", "rstrip"),
        strip_before=_names(added, "special", "lstrip"),
        bos=bos,
        eos=eos,
        text_start=bos if bos and _adds_bos(settings, tokenizer, bos) else None,
        text_end=text_end,
        text_special_tokens=text_special_tokens,
    )
    return layout if template is None else _with_turn_end(layout)


def _names(added: list[TokenizerConfig], *flags: str) -> tuple[str, ...]:
    return tuple(sorted(t["content"] for t in added if all(t.get(flag) for flag in flags)))


def chatml_layout() -> Layout:
    return Layout(
        chat_template=CHATML,
        chat_template_origin="chatml",
        special_tokens=(TEXT_END, TURN_END, TURN_START),
        eos=TURN_END,
        text_end=TEXT_END,
        turn_end=TURN_END,
    )


def _choose(
    directory: Path, settings: TokenizerConfig, *, choice: Choice, special: tuple[str, ...]
) -> tuple[str | None, Literal["tokenizer", "manifest", "chatml", "none"]]:
    named = _named_templates(directory, settings)
    if choice == "auto":
        if DEFAULT in named:
            return named[DEFAULT], "tokenizer"
        knows_chatml = all(token in special for token in CHATML_TOKENS)
        return (CHATML, "chatml") if knows_chatml else (None, "none")
    if choice == "chatml":
        if missing := [token for token in CHATML_TOKENS if token not in special]:
            raise DataError(
                f"{directory}: the tokenizer has no token {missing[0]!r}, which ChatML needs; set"
                " data.chat_template to auto, or to a template file for this tokenizer"
            )
        return CHATML, "chatml"
    path = Path(choice).expanduser()
    if path.is_file():
        return _read_template(path), "manifest"
    if choice in named:
        return named[choice], "tokenizer"
    raise ConfigError(
        f"data.chat_template: {choice} is neither a file nor a template of the tokenizer, which has"
        f" {', '.join(sorted(named)) or 'none'}; use auto, chatml, a path or such a name"
    )


def _named_templates(directory: Path, settings: TokenizerConfig) -> dict[str, str]:
    """Return a tokenizer's templates by name, an unnamed one as the default."""
    own = settings.get("chat_template")
    found = {DEFAULT: own} if isinstance(own, str) else {}
    if isinstance(own, list):
        found = {item["name"]: item["template"] for item in own}
    files = {path.stem: path for path in directory.glob(NAMED_TEMPLATES)}
    # A file wins over the key, as in transformers.
    if (file := directory / "chat_template.jinja").is_file():
        files[DEFAULT] = file
    return found | {name: _read_template(path) for name, path in files.items()}


def _read_template(path: Path) -> str:
    try:
        # A byte order mark, as Windows writes it, would precede every chat.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error


def _with_turn_end(layout: Layout) -> Layout:
    # Mid-chat: the last turn of a chat may end differently.
    turns = tuple(
        Turn(role=role, content=role, learned=role == "assistant")
        for role in ("user", "assistant", "user")
    )
    try:
        atoms = ChatTemplate(layout).lay_out(Body(turns=turns))
    except TemplateSyntaxError as error:
        fault = f"line {error.lineno}: {error.message}"
        return replace(layout, problem=f"its chat template does not parse ({fault})")
    except Reject as reject:
        return replace(layout, problem=f"its chat template rejects a plain chat ({reject.detail})")
    # Text 1 is the assistant's.
    text = next((i for i, atom in enumerate(atoms) if atom.number == 1), 0)
    ends = [atom.text for atom in atoms[text:] if atom.special and atom.learned]
    if not ends:
        return replace(
            layout,
            problem="its chat template ends an answer without a special token, so the model"
            " would not learn to stop; write {{ eos_token }} after the assistant's text",
        )
    return replace(layout, turn_end=ends[0])


def _adds_bos(settings: TokenizerConfig, tokenizer: dict[str, object], bos: str) -> bool:
    if settings.get("add_bos_token") is not None:
        return bool(settings["add_bos_token"])
    # Without the key, the post-processor in tokenizer.json decides.
    return f'"{bos}"' in json.dumps(tokenizer.get("post_processor"), ensure_ascii=False)


def _token(settings: TokenizerConfig, name: str) -> str | None:
    value = settings.get(name)
    # A token is a text, or an object with its flags.
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> TokenizerConfig:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}); save the tokenizer again") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: is not a JSON object; save the tokenizer again")
    return value
