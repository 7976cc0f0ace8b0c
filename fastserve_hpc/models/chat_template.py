"""Chat messages to a prompt, by the model's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastserve_hpc.errors import ModelError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[Mapping[str, str]]


class ChatTemplate:
    """`names` are what the template may use besides the messages: bos_token, eos_token, ..."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)

    def render(self, messages: Messages) -> str:
        """The prompt that asks for the assistant's next turn. Raises `RequestError` where the template refuses."""
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._names,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from None

    @cached_property
    def _template(self) -> Template:
        # Imported late: a server that only ever sees prompts does not need it.
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            return environment.from_string(self._source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is broken: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON; Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
