"""Examples in docstrings become code blocks: they stand there as a Python session, unmarked."""

import re
from typing import Any

import griffe

_SESSION = re.compile(r"^( *)>>> (?:.*\n?)+?(?=\n\s*\n|\Z)", re.MULTILINE)


class Doctests(griffe.Extension):
    """Marks each session, from its first `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SESSION.sub(_fenced, obj.docstring.value)


def _fenced(session: re.Match[str]) -> str:
    indent = session[1]
    return f"{indent}```pycon\n{session[0].rstrip()}\n{indent}```"
