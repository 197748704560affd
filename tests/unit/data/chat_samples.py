"""Templates shaped like those of common model families, a tokenizer, and conversations."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>",
]  # fmt: skip

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CHATML_MARKED = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endif %}
{% endfor %}
"""

HEADERS = """\
{%- set date = strftime_now("%d %b %Y") %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday: " + date + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message['content'] | trim + '<|eot|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
"""

MERGED_SYSTEM = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}{% set rest = messages %}\
{% set system = '' %}{% endif %}{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('user and assistant must take turns') }}{% endif %}{% if loop.index0 == 0 %}\
{% set content = system + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}{% else %}\
{% generation %}{{ ' ' + content.strip() + eos_token }}{% endgeneration %}{% endif %}{% endfor %}
"""

TOOLS = """\
{%- macro show(tool) -%}
    {{ tool.function.name }}: {{ tool.function.parameters | tojson(indent=2) }}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- show(tool) ~ "\\n" ~ (tool | tojson) ~ "\\n" }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(calls=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if message.reasoning_content is defined %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
            {%- if message.content %}{{- message.content }}{%- endif %}
            {%- for call in message.tool_calls or [] %}
                {%- set ns.calls = ns.calls + 1 %}
                {{- '\\n<call ' ~ ns.calls ~ '>' ~ {"name": call.function.name, "arguments": call.function.arguments}|tojson ~ '</call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501

FORGETFUL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and not loop.last %}
        {{- message.content.split('</think>')[-1] }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Leaves out what was thought in all turns but the last: a turn changes when another follows."""

MARKED = {"chatml": CHATML_MARKED, "headers": HEADERS, "merged": MERGED_SYSTEM, "tools": TOOLS}


def turns(*contents: str, system: str = "") -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
}
CALLING: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it raining in Ré?"},
    {
        "role": "assistant",
        "content": None,
        "thinking": "A tool knows.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Ré <&>"}}}],
    },
    {"role": "tool", "content": '{"rain": false}'},
    {"role": "assistant", "content": "No, it is dry."},
]


def write_tokenizer(folder: Path, template: str | None = None) -> Path:
    """Writes a byte-level tokenizer of 300 words, as of a model; returns its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(["the weather is fine and the sun is out, hello and good day to you"] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True, "__type": "AddedToken"},
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "tokenizer.json"
