"""Chat templates are rendered as transformers renders them, and can't do harm."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from beamline.serving.errors import InvalidRequest, ModelError
from beamline.serving.text.chat import ChatTemplate

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CONTROL = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
TALK = [
    {"role": "user", "content": " Grüße & <so> "},
    {"role": "assistant", "content": "Hallo\nzurück"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "control": CONTROL,
    "tools": "{% if tools is none and documents is none %}none{% endif %}{{ tools is defined }}{{ messages[0].role }}",
    "special tokens": "{{ pad_token }}|{{ unk_token }}|{{ unk_token is defined }}|{{ bos_token }}",
    "json": "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages | tojson(indent=2) }}",
    "ascii": "{{ messages[0] | tojson(ensure_ascii=true) }}",
    "generation": (
        "{% for m in messages %}{% generation %}{% set inside = 1 %}{{ m.content }}\n{% endgeneration %}"
        "{{ inside is defined }}{% endfor %}"
    ),
    "trimmed": "{%- for m in messages -%} {%- generation -%} {{ m.role }} {%- endgeneration -%} {%- endfor -%}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("begin", [True, False])
def test_the_same_as_transformers(template: str, begin: bool) -> None:
    expected, _ = render_jinja_template(
        conversations=[TALK], chat_template=template, add_generation_prompt=begin, **SPECIAL
    )
    assert ChatTemplate(template, SPECIAL).render(TALK, begin) == expected[0]


def test_the_templates_own_complaint_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        ChatTemplate(LLAMA, {}).render(TALK[1:], True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[99].content.strip() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_do_nothing_but_text(template: str) -> None:
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        ChatTemplate(template, {}).render(TALK, True)


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template can't be used"):
        ChatTemplate("{% for %}", {})
