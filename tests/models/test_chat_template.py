"""Templates: what they may use, what they may not, and what their errors become."""

from __future__ import annotations

import re

import pytest

from fastserve_hpc.errors import ModelError, RequestError
from fastserve_hpc.models.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def render(source: str, **names: str) -> str:
    return ChatTemplate(source, names).render(MESSAGES)


def test_messages_names_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}={{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}?{% endif %}{% if tools is none %}!{% endif %}"
    )
    assert render(source, bos_token="<s>") == "<s>user=hi;assistant=ho;?!"


def test_blocks_are_trimmed_as_the_templates_expect() -> None:
    assert render("  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\nend") == "hi\nho\nend"


def test_loop_controls_json_and_time() -> None:
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "hi"
    assert render("{{ messages[0] | tojson }} {{ '<é>' | tojson }}") == '{"role": "user", "content": "hi"} "<é>"'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 5 }}", "concatenate"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_what_goes_wrong_is_the_request_s_error(source: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        render(source)
    assert "chat template refuses them" in str(refused.value)


def test_a_broken_template_is_the_model_s() -> None:
    with pytest.raises(ModelError, match="chat template is broken"):
        render("{% for %}")
