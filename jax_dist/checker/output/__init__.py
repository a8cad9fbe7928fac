"""The forms in which findings are shown, by name.

Each is a function `render(findings, context) -> str`; its module is loaded when it is used.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jax_dist.checker.model.findings import Finding
from jax_dist.checker.output.context import RenderContext

Render: TypeAlias = Callable[[Sequence[Finding], RenderContext], str]


def _render(name: str, findings: Sequence[Finding], context: RenderContext) -> str:
    module = importlib.import_module(f"jax_dist.checker.output.{name}")
    return module.render(findings, context)


FORMATS: dict[str, Render] = {
    name: functools.partial(_render, name) for name in ("text", "json", "sarif", "github")
}
