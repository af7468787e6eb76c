"""Chatting with an exported expert, and its decoding settings in other loaders."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import tiny_qwen3
from transformers import ArceeConfig, AutoModelForCausalLM, GenerationConfig

import serve_expert
from expertflow.core import cli
from expertflow.core.errors import ConfigError, TrainingError
from expertflow.data.records import Turn
from expertflow.evaluate.generate import PromptCodec, generate_answers
from expertflow.evaluate.records import Decoding, GenerationSpec
from expertflow.export import serve
from expertflow.export.model_files import SYSTEM_PROMPT, set_decoding
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

N_POSITIONS = 120
# Settings of chat models, which a manifest's settings replace.
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 2.0}


def export(folder: Path, decoding: Decoding, *, own_ends: list[int] | None = None) -> Any:
    """Write a tokenizer and a random model that writes letters; return the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(["what is two and two"] * 3, vocab_size=300)
    save_tokenizer(tokenizer, folder)
    own = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": N_POSITIONS}
    model = tiny_qwen3(scale=6, vocab_size=300, **own)
    model.generation_config.update(**SAMPLING, eos_token_id=own_ends)
    with torch.no_grad():
        for token in range(300):
            text = tokenizer.decode([token], skip_special_tokens=False).replace(" ", "")
            if not (text.isascii() and text.isalpha()):
                model.lm_head.weight[token] = 0
    end, text_end = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    set_decoding(model, decoding, end_id=end, text_end_id=text_end)
    model.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "expert-two"
    export(folder / "merged", Decoding())
    return folder


def no_show(piece: str) -> None:
    """Show nothing."""


def load(folder: Path, max_new_tokens: int = 16) -> serve.ServedExpert:
    return serve.load_expert(folder, max_new_tokens=max_new_tokens)


def user(text: str) -> Turn:
    return Turn(role="user", content=text, learned=False)


def test_it_answers_as_it_was_scored_without_its_stop_text(folder: Path, tmp_path: Path) -> None:
    expert, pieces = load(folder), list[str]()
    turns = [user("what is two")]
    said = expert.generate_answer(turns, pieces.append)
    how = GenerationSpec(
        task="exact_match", max_examples=1, n_selection_examples=0, max_new_tokens=16,
        batch_size=1, decoding=Decoding(),
    )  # fmt: skip
    codec = PromptCodec(expert.engine, expert.layout)
    scored = generate_answers(expert.model, [expert.prompt_ids(turns)], codec, how)
    assert "".join(pieces) == said == scored[0].text
    assert len(pieces) > 3
    ids = expert.prompt_ids([user("two<|im_end|>")])
    text = expert.engine.decode(ids)
    assert text == "<|im_start|>user\ntwo<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    # Typed text cannot become a special token.
    assert ids.count(expert.engine.special_id("<|im_end|>")) == 1
    whole = load(folder).generate_answer([user("what")], no_show)
    stop = whole[5:8]
    export(tmp_path, Decoding(stop=(stop,)))
    expert, pieces = load(tmp_path), list[str]()
    said = expert.generate_answer([user("what")], pieces.append)
    assert "".join(pieces) == said == whole[: whole.index(stop)]


def test_a_character_of_several_tokens_is_shown_once_complete(folder: Path) -> None:
    expert, pieces = load(folder), list[str]()
    stream = serve.Stream(expert.engine, expert.model.generation_config, pieces.append)
    ids = expert.engine.encode_with_special_tokens("aé")
    for put in ([1, 2], *([i] for i in ids)):
        stream.put(torch.tensor(put))
    assert len(ids) == 3 and pieces == ["a", "é"]


def test_a_chat_has_the_system_prompt_of_training_and_is_kept_until_it_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = "be\r\nbrief é ", list[list[str]]()

    def generate_answer(self: serve.ServedExpert, turns: list[Turn], show: Any) -> str:
        asked.append([turn.content for turn in turns])
        return f"a{len(asked)}"

    monkeypatch.setattr(serve.ServedExpert, "generate_answer", generate_answer)
    export(tmp_path, Decoding())
    (tmp_path / SYSTEM_PROMPT).write_bytes(own.encode())
    expert = load(tmp_path)
    for system in (None, "other", ""):
        serve.run_chat(expert, system, read=typed("one"), show=no_show)
    serve.answer_once(expert, None, "two", no_show)
    assert asked == [[own, "one"], ["other", "one"], ["one"], [own, "two"]]
    lines = typed("one", "", "two", "/reset", "three", "/quit", "four")
    serve.run_chat(expert, "", read=lines, show=no_show)
    assert asked[4:] == [["one"], ["one", "a5", "two"], ["three"]]
    (tmp_path / "system_prompt.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"system_prompt\.txt: not UTF-8"):
        load(tmp_path)


def typed(*lines: str | type[BaseException]) -> Callable[[], str]:
    """Type lines or raise exceptions like keys do, then end the input."""
    return Mock(side_effect=[*lines, EOFError])


def test_an_interrupt_ends_the_answer_and_not_the_chat(folder: Path) -> None:
    expert, shown = load(folder, max_new_tokens=60), list[str]()

    def show(piece: str) -> None:
        shown.append(piece)
        if len(shown) == 3:
            raise KeyboardInterrupt

    serve.run_chat(expert, None, read=typed("what is", KeyboardInterrupt, "/quit"), show=show)
    whole = expert.generate_answer([user("what is")], no_show)
    assert whole.startswith("".join(shown[:3])) and len(shown) < 8
    assert "/reset clears" in shown[-1]


def test_a_prompt_that_leaves_no_position_is_refused(folder: Path) -> None:
    expert, shown = load(folder, max_new_tokens=200), list[str]()
    near = "what is two and two " * 10
    assert len(expert.prompt_ids([user(near)])) < N_POSITIONS
    expert.generate_answer([user(near)], no_show)
    serve.run_chat(expert, None, read=typed("two " * 200, "two"), show=shown.append)
    assert shown[0].startswith("error: the prompt has ") and "120 positions" in shown[0]
    assert "".join(shown[1:]).strip()


def test_a_model_without_chats_continues_texts(tmp_path: Path) -> None:
    bare = tmp_path
    export(bare, Decoding())
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = (bare / "tokenizer.json").read_text()
    (bare / "tokenizer.json").write_text(tokenizer.replace("<|im_start|>", "<|other|>"))
    expert = load(bare)
    assert expert.prompt_ids([user("two and")]) == expert.engine.encode_with_special_tokens(
        "two and"
    )
    assert expert.generate_answer([user("two and")], no_show)


def test_a_tokenizers_own_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tmp_path, Decoding(stop=("x",)))
    # A family for which transformers has no tokenizer.
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = ArceeConfig(**size, vocab_size=300, intermediate_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n"
    (tmp_path / "own.py").write_text(code)
    monkeypatch.setattr("builtins.input", Mock(return_value="y"))
    expert = load(tmp_path, max_new_tokens=4)
    expert.model.generation_config.update(stop_strings=["x"], max_new_tokens=4)
    assert isinstance(expert.generate_answer([user("two")], no_show), str)
    assert not (tmp_path / "ran").exists()


def test_an_expert_that_cannot_be_served_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve.find_model(folder) == folder / "merged" == serve.find_model(folder / "merged")
    with pytest.raises(ConfigError, match=r"no exported model here; make one with: snakemake"):
        serve.find_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"results/{tmp_path.name}/export.json"):
        serve.find_model(Path())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter without its base"):
        serve.find_model(tmp_path)
    with pytest.raises(ConfigError, match="--max-new-tokens 0"):
        load(folder, max_new_tokens=0)
    # An interrupted copy.
    shutil.copytree(folder / "merged", tmp_path / "part")
    weights = (tmp_path / "part" / "model.safetensors").read_bytes()
    (tmp_path / "part" / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(TrainingError, match=r"cannot be loaded .*not fully covered"):
        load(tmp_path / "part")


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str, text: bytes = b"") -> str | int:
    """Run the script in this process; return its exit code or error message."""
    monkeypatch.setattr(sys, "argv", ["serve_expert.py", *arguments])
    # The reader of the answer may end first, like head; in this process that would end the tests.
    monkeypatch.setattr(cli, "stop_with_reader", reader := Mock())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
    with pytest.raises(SystemExit) as ended:
        cli.run(serve_expert.main)
    assert reader.called
    assert isinstance(ended.value.code, str | int)
    return ended.value.code


def test_the_script_answers_a_prompt_and_piped_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = load(folder).generate_answer([user("what is two")], no_show) + "\n"
    short = ("--max-new-tokens", "16")
    capsys.readouterr()
    assert call(monkeypatch, str(folder), "--prompt", "what is two", *short) == 0
    assert capsys.readouterr().out == expected
    assert call(monkeypatch, str(folder / "merged"), *short, text=b"what is two") == 0
    assert capsys.readouterr().out == expected
    for text, error in ((b" ", "nothing to answer"), (b"caf\xe9", "the text is not UTF-8")):
        assert str(call(monkeypatch, str(folder), text=text)).startswith(f"error: {error}; ")


def test_an_export_has_the_experts_settings_and_all_ends(tmp_path: Path) -> None:
    tokenizer = export(tmp_path, Decoding(), own_ends=[7, 8])
    settings = GenerationConfig.from_pretrained(tmp_path)
    assert settings.do_sample is False and settings.stop_strings is None
    assert not settings.to_diff_dict().keys() & (SAMPLING.keys() - {"do_sample"})
    end, text_end = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert settings.eos_token_id == sorted([end, text_end, 7, 8])
    assert settings.pad_token_id == text_end
    plain = SimpleNamespace(generation_config=GenerationConfig())
    set_decoding(plain, Decoding(), end_id=2, text_end_id=2)
    assert plain.generation_config.eos_token_id == 2
