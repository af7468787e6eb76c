"""What a model card says of use: how to load the folder, and how it was asked when scored."""

import json
import shlex

from expertflow.evaluate.records import Decoding
from expertflow.export.card_inputs import CardInputs, Exported
from expertflow.export.card_text import code

# Of a held-out question, so much is shown.
MAX_QUESTION_CHARACTERS = 600


def use_lines(inputs: CardInputs, exported: Exported) -> list[str]:
    """Show how to load the folder and to decode as the scores were reached.

    Of the data, what a reader copies holds the system prompt alone, as a literal.
    """
    override = json.dumps(vllm_settings(inputs.spec.decoding))
    lines = [
        "## Use",
        "",
        *_form_lines(inputs),
        "In this folder, with transformers:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        *_ask_lines(inputs),
        "```",
        "",
        "With vLLM, which does not read from the folder that it is to be greedy:",
        "",
        "```sh",
        f"vllm serve . --override-generation-config {shlex.quote(override)}",
        "```",
        "",
    ]
    options = llama_options(inputs.spec.decoding)
    lines += [
        "With llama.cpp, whose own converter reads this folder:",
        "",
        "```sh",
        "python convert_hf_to_gguf.py . --outfile model.gguf --outtype q8_0",
        f"llama-cli -m model.gguf {options}",
        "```",
        "",
    ]
    lines += _scored_lines(inputs)
    if exported.record.merged_into is not None:
        lines += _adapter_lines(inputs, exported)
    return lines


def vllm_settings(decoding: Decoding) -> dict[str, float | int]:
    """Give vLLM's sampling settings for some decoding; a temperature of 0 is greedy."""
    if decoding.temperature == 0:
        return {"temperature": 0}
    settings = {"temperature": decoding.temperature, "top_p": decoding.top_p}
    return settings | ({"top_k": decoding.top_k} if decoding.top_k else {})


def llama_options(decoding: Decoding) -> str:
    """Give llama.cpp's options for some decoding; left out, it takes its own."""
    if decoding.temperature == 0:
        return "--temp 0"
    return (
        f"--temp {decoding.temperature:g} --top-p {decoding.top_p:g} --top-k {decoding.top_k}"
        " --min-p 0"
    )


def _form_lines(inputs: CardInputs) -> list[str]:
    """Show a held-out question, since an expert answers best what looks like its data."""
    samples, system = inputs.evaluation.samples, inputs.spec.system_prompt
    if not samples:
        return []
    question = samples[0].prompt
    if system is not None:
        question = question.removeprefix(system.strip()).strip()
    part = ""
    if len(question) > MAX_QUESTION_CHARACTERS:
        question = question[:MAX_QUESTION_CHARACTERS]
        part = f" (its first {MAX_QUESTION_CHARACTERS} characters)"
    said = f"Questions look like this one, which was held out{part}:"
    # Indented by four, no line can end the block or be markup.
    lines = question.replace("\t", "    ").splitlines()
    return [said, "", *(f"    {line}".rstrip() for line in lines), ""]


def _ask_lines(inputs: CardInputs) -> list[str]:
    if inputs.model.layout.chat_template is None:
        return [
            'inputs = tokenizer("...", return_tensors="pt")',
            "ids = model.generate(**inputs, max_new_tokens=256, tokenizer=tokenizer)",
        ]
    system = inputs.spec.system_prompt
    turn = '{"role": "user", "content": "..."}'
    # A literal of JSON is one of Python, too, and has no line of its own.
    chat = (
        [f"chat = [{turn}]"]
        if system is None
        else [
            "chat = [",
            f'    {{"role": "system", "content": {json.dumps(system)}}},',
            f"    {turn},",
            "]",
        ]
    )
    return [
        *chat,
        "inputs = tokenizer.apply_chat_template(",
        '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
        "ids = model.generate(**inputs, max_new_tokens=256, tokenizer=tokenizer)",
        'print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _scored_lines(inputs: CardInputs) -> list[str]:
    """Say what else the scores were reached with."""
    decoding, layout = inputs.spec.decoding, inputs.model.layout
    said = []
    if inputs.spec.system_prompt is not None and layout.chat_template is not None:
        said.append(
            "It was trained and scored with the system prompt above, which also lies in"
            " `system_prompt.txt`; vLLM and llama.cpp have to be given it with each chat."
        )
    if decoding.stop:
        stops = ", ".join(code(json.dumps(stop)) for stop in decoding.stop)
        said.append(
            f"An answer ends before these texts, too (as JSON): {stops}. transformers leaves the"
            " text at the end; vLLM and llama.cpp have to be given them with each request."
        )
    if "<think>" in (layout.chat_template or ""):
        said.append(
            "A block `<think>…</think>` that begins an answer was left out before scoring; leave it"
            " out, too."
        )
    return [line for text in said for line in (text, "")]


def _adapter_lines(inputs: CardInputs, exported: Exported) -> list[str]:
    path = inputs.evaluation.published.path
    where = "the run's folder `checkpoint`" if path == "." else f"`checkpoint`, {code(path)}"
    lines = [f"The adapter by itself lies in {where}; peft loads it onto the base model."]
    if exported.record.merged_into == "dequantised base":
        lines.append("It was trained on the base in 4 bits and fits no other form of it.")
    return [*lines, ""]
