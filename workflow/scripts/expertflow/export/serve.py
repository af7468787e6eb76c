"""Talk to an exported expert in the terminal, as it was scored: same prompts, same decoding."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from expertflow.core.errors import ConfigError
from expertflow.data.layout import read_layout
from expertflow.data.records import Body, Layout, Segment, Turn
from expertflow.data.reject import Reject
from expertflow.data.render import Renderer, question_of
from expertflow.evaluate.ask import without_thoughts
from expertflow.export.decoding import end_ids
from expertflow.export.merge_files import read_system_prompt
from expertflow.tokens.engine import Engine
from expertflow.tokens.tokenise import tokenise
from expertflow.train.model.load import load_base

MERGED = "merged"
THINK = "<think>"
ATTENTION = "sdpa"
# Oldest cards that compute in bf16 (Ampere).
BF16_CAPABILITY = (8, 0)
HELP = "/reset forgets the chat, /quit leaves, Ctrl-C ends an answer, \\ at a line's end goes on"
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Expert:
    """A model with what it needs to be talked to. ``completes``: it knows texts, and no chats.

    ``system_prompt`` is the one of its training.
    """

    name: str
    model: PreTrainedModel
    engine: Engine
    tokenizer: Any
    layout: Layout
    settings: GenerationConfig
    completes: bool
    system_prompt: str | None = None

    def prompt_ids(self, turns: list[Turn]) -> list[int]:
        """Tokenise a chat that the expert is to go on with, or the text of its last turn.

        Raises:
            ConfigError: the model's chat template refuses it.
        """
        if self.completes:
            start = self.layout.text_start
            segments = (*([Segment(start, special=True)] if start else []),)
            return self._ids((*segments, Segment(turns[-1].content)))
        # Where an answer begins is found from any answer.
        body = Body(turns=(*turns, Turn(role="assistant", content="x", learned=True)))
        try:
            segments, _answer = question_of(Renderer(self.layout), body)
        except Reject as reject:
            raise ConfigError(f"the model's chat template refuses this chat: {reject}") from reject
        return self._ids(segments)

    def answer(self, turns: list[Turn], show: Show) -> str:
        """Write an answer, shown piece by piece; Ctrl-C ends it where it is.

        Raises:
            ConfigError: the chat leaves the model no position to answer in, or is more than fits.
        """
        ids = self.prompt_ids(turns)
        settings = copy.deepcopy(self.settings)
        n_positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if n_positions is not None:
            room = n_positions - len(ids)
            if room <= 0:
                raise ConfigError(
                    f"the prompt has {len(ids)} tokens and the model {n_positions} positions;"
                    " shorten it, or begin anew with /reset"
                )
            settings.max_new_tokens = min(settings.max_new_tokens, room)
        stream = Stream(self.engine, end_ids(settings), tuple(settings.stop_strings or ()), show)
        prompt = torch.tensor([ids], device=self.model.device)
        try:
            with suppress(KeyboardInterrupt), torch.inference_mode():
                self.model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=settings,
                    tokenizer=self.tokenizer,
                    streamer=stream,
                )
        except torch.OutOfMemoryError as error:
            why = f"the card has no room for a chat of {len(ids)} tokens and more"
            raise ConfigError(f"{why}; shorten it, or begin anew with /reset") from error
        stream.end()
        return stream.shown

    def _ids(self, segments: tuple[Segment, ...]) -> list[int]:
        ids: list[int] = tokenise([segments], self.engine).ids[0].tolist()
        return ids


class Stream(BaseStreamer):  # type: ignore[misc]
    """Show an answer as it is written, but nothing that may turn out to be a stop text or thought.

    Scoring leaves both out.
    """

    def __init__(self, engine: Engine, ends: set[int], stops: tuple[str, ...], show: Show) -> None:
        self.shown = ""
        self._engine, self._ends, self._stops, self._show = engine, ends, stops, show
        self._ids: list[int] | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then each token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += [i for i in value.reshape(-1).tolist() if i not in self._ends]
        self._emit(final=False)

    def end(self) -> None:
        """Show what was held back."""
        self._emit(final=True)

    def _emit(self, *, final: bool) -> None:
        text = visible(self._engine.decode(self._ids or []), self._stops, final=final)
        # A longer text may begin otherwise while a character is incomplete; that is held back.
        if len(text) > len(self.shown):
            piece, self.shown = text[len(self.shown) :], text
            self._show(piece)


def visible(text: str, stops: tuple[str, ...], *, final: bool) -> str:
    """Give what is an answer of a text so far, without a leading block of thoughts.

    It ends before the first stop text, and unless final before what may become one.
    """
    text = _unstopped(text, stops, final=final)
    begun = text.lstrip()
    answer = without_thoughts(text)
    if not final and (THINK.startswith(begun) or (begun.startswith(THINK) and answer == text)):
        return ""
    return answer


def _unstopped(text: str, stops: tuple[str, ...], *, final: bool) -> str:
    ends = [text.index(stop) for stop in stops if stop in text]
    if ends:
        return text[: min(ends)]
    if final:
        return text
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    longest = max(map(len, stops), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return text[:-n]
    return text


def find_model(folder: Path) -> Path:
    """Give the folder of weights: an expert's exported model, or the folder itself.

    Raises:
        ConfigError: neither holds a model.
    """
    for place in (folder / MERGED, folder):
        if (place / "config.json").is_file():
            return place
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder}: an adapter without its base; name the expert's folder")
    raise ConfigError(
        f"{folder}: no exported model here; make one with: snakemake --cores 8"
        f" results/{folder.name}/export.json"
    )


def load_expert(
    folder: Path, *, max_new_tokens: int, temperature: float | None, completes: bool
) -> Expert:
    """Load an exported model for answering: on a card if there is one, without a network.

    ``temperature`` replaces the exported decoding, 0 by greedy.

    Raises:
        ConfigError: there is no model in the folder, or a setting is out of range.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens}: give 1 or more")
    place = find_model(folder)
    layout = read_layout(place, choice="auto", text_special_tokens="plain")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    dtype = torch.bfloat16 if half else torch.float32
    model = load_base(str(place), dtype=dtype, attention_name=ATTENTION)
    settings = copy.deepcopy(model.generation_config)
    settings.max_new_tokens = max_new_tokens
    if temperature is not None:
        set_temperature(settings, temperature)
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    return Expert(
        name=folder.resolve().name,
        model=model.to(device).eval(),
        engine=Engine(place),
        tokenizer=tokenizer,
        layout=layout,
        settings=settings,
        system_prompt=read_system_prompt(place),
        completes=completes or layout.chat_template is None or layout.problem is not None,
    )


def set_temperature(settings: GenerationConfig, temperature: float) -> None:
    """Replace the temperature of some decoding settings; 0 is greedy.

    Raises:
        ConfigError: it is negative.
    """
    if temperature < 0:
        raise ConfigError(f"--temperature {temperature:g}: give 0 (greedy) or more")
    settings.do_sample = temperature > 0
    settings.temperature = temperature or None
    # What is left open, transformers fills with its own: top_k 50.
    settings.top_p = (settings.top_p or 1.0) if temperature else None
    settings.top_k = (settings.top_k or 0) if temperature else None


def talk(expert: Expert, system: str | None, *, read: Callable[[], str], show: Show) -> None:
    """Answer what is typed until /quit or the end of the input; what was said is kept in mind."""
    opening = opening_of(expert, system)
    turns = list(opening)
    for text in questions(read, show):
        if text == "/reset":
            turns = list(opening)
            continue
        asked = [*turns, Turn(role="user", content=text, learned=False)]
        try:
            said = expert.answer(asked, show)
        except ConfigError as error:
            show(f"error: {error}\n")
            continue
        show("\n")
        turns = [*asked, Turn(role="assistant", content=said, learned=False)]


def opening_of(expert: Expert, system: str | None) -> list[Turn]:
    """Begin a chat with a system prompt, null: the expert's own; an empty one is none."""
    said = expert.system_prompt if system is None else system
    return [Turn(role="system", content=said, learned=False)] if said else []


def questions(read: Callable[[], str], show: Show) -> Iterator[str]:
    """Give what is typed, /reset included, without empty lines, until /quit or the end."""
    lines: list[str] = []
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            lines = []
            show(f"\n{HELP}\n")
            continue
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        text = "\n".join([*lines, line]).strip()
        lines = []
        if text == "/quit":
            return
        if text in ("/help", "/?"):
            show(f"{HELP}\n")
        elif text:
            yield text


def answer_once(expert: Expert, system: str | None, text: str, show: Show) -> None:
    """Answer one question.

    Raises:
        ConfigError: it is empty, or leaves the model no position.
    """
    if not text.strip():
        raise ConfigError("nothing to answer: give --prompt, or text on standard input")
    opening = opening_of(expert, system)
    expert.answer([*opening, Turn(role="user", content=text, learned=False)], show)
    show("\n")


def to_terminal(piece: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
