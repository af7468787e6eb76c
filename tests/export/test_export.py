"""The exported folder is complete, reproducible, and loads without a network."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import LORA
from tiny_models import export, train_adapter, write_base
from transformers import AutoModelForCausalLM, AutoTokenizer

import export_model
from expertflow.core.errors import ConfigError
from expertflow.core.files import sha256_directory
from expertflow.data.layout import CHATML
from expertflow.evaluate.records import Decoding
from expertflow.export.model_files import copy_texts, read_system_prompt
from expertflow.tokens.records import TokenizerSpec
from expertflow.tokens.tokenizer import prepare_tokenizer

pytestmark = pytest.mark.long

# More tokenizer and license files than the tiny base has.
TEXTS = {
    **dict.fromkeys(("added_tokens.json", "vocab.json"), "{}"),
    "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    "merges.txt": "#version: 0.2\n",
    "LICENSE": "terms",
    "NOTICE.txt": "names",
    "unrelated.txt": "no part of a model",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_base(tmp_path_factory.mktemp("base"))
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def test_the_folder_has_the_bases_files_and_the_decoding(base: Path, tmp_path: Path) -> None:
    what = train_adapter(base, tmp_path / "adapter")
    decoding = Decoding(temperature=0.7, top_p=0.9, top_k=5)
    export(what, tmp_path / "merged", decoding=decoding, system_prompt="é\r\n")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {
        "README.md", ".adapter_card.md", "config.json", "generation_config.json",
        "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "system_prompt.txt",
        *TEXTS.keys() - {"unrelated.txt"},
    }  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "LICENSE"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    assert read_system_prompt(tmp_path / "merged") == "é\r\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged", local_files_only=True)
    assert model.generation_config.top_k == 5
    ends = model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in np.atleast_1d(ends)


def test_templates_that_transformers_saves_are_chosen_by_name(base: Path, tmp_path: Path) -> None:
    model, chosen = tmp_path / "model", CHATML.replace("'\\n'", "'\\n\\n'")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = {"default": CHATML, "spaced": chosen}
    tokenizer.save_pretrained(model)
    spec = TokenizerSpec(
        model=str(model), revision=None, tokenizer=None, vocab_size=0, chat_template="spaced",
        text_special_tokens="plain", content={},
    )  # fmt: skip
    record = prepare_tokenizer(spec, (), tmp_path / "tokenizer")
    assert record.layout.chat_template == chosen != CHATML
    assert (tmp_path / "tokenizer/additional_chat_templates/spaced.jinja").is_file()
    (tmp_path / "merged").mkdir()
    copy_texts(tmp_path / "merged", tokenizer=model, layout=record.layout)
    exported = AutoTokenizer.from_pretrained(tmp_path / "merged")
    chat = [{"role": "user", "content": "Which?"}]
    expected = tokenizer.apply_chat_template(chat, chat_template=chosen, tokenize=False)
    assert exported.apply_chat_template(chat, tokenize=False) == expected
    with pytest.raises(ConfigError, match=r"spacd is neither a file .* has default, spaced"):
        prepare_tokenizer(replace(spec, chat_template="spacd"), (), tmp_path / "other")


def test_a_card_is_hidden_from_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(AttributeError, match="training"):
        export_model.main(SimpleNamespace())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_merged_weights_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    # Large enough for multi-threaded matrix products.
    base = write_base(tmp_path / "base", hidden_size=256, intermediate_size=1024)
    what = train_adapter(base, tmp_path / "adapter", lora=replace(LORA, use_dora=True))
    n = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            export(what, tmp_path / str(threads))
    finally:
        torch.set_num_threads(n)
    assert sha256_directory(tmp_path / "1") == sha256_directory(tmp_path / "2")
