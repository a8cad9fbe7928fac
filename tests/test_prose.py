"""The prose is plain English: words that make readers stumble do not come back."""

import ast
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")]
_FRONT = (
    "README.md",
    "docs/index.md",
    "docs/migration-guide.md",
    "docs/errors.md",
)
_MODULES = sorted((_ROOT / "jax_dist").rglob("*.py"))
_WORST = {  # what not to write, and what to write in its place
    "anew(?!:)": "again",  # a parameter has that name
    "whoever": "anyone who; or name the user, the process, the reader",
    "at once": "immediately, or together",
    "by now": "now, or nothing",
    "tells? of": "reports",
    "put(?:s|ting)? right": "fix",
    "(?:a|and|its|the|their) cures?": "fix",
    "act as one": "work together",
    "for want of": "because ... is missing",
    "in secret": "silently",
    "(?:who|what) (?:[^ .,;:]+ ){1,3}is, is": "the sentence the other way round",
}
_WORDS = re.compile("|".join(rf"\b{words}\b" for words in _WORST), re.IGNORECASE)
_CODE = re.compile(r"^ *```.*?^ *```$|``.+?``|`[^`]*`", re.MULTILINE | re.DOTALL)
_INSTALL = re.compile(r"pip install [^\n`|;]*?(?<![\w./-])jax[-_]dist(?![\w./-])")


def _found(text: str) -> list[str]:
    """Each of the worst words with its neighbours; code is no prose."""
    prose = re.sub(r"\s+", " ", _CODE.sub("", text))
    return [prose[max(0, m.start() - 40) : m.end() + 20] for m in _WORDS.finditer(prose)]


def _docstrings(source: str) -> str:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds))
    return "\n\n".join(text for text in found if text)


@pytest.mark.parametrize("page", _FRONT)
def test_a_front_page_has_none_of_the_worst_words(page):
    assert _found((_ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_a_page_has_none_of_the_worst_words(page):
    assert _found(page.read_text(encoding="utf-8")) == []


def test_docstrings_have_none_of_the_worst_words():
    found = {path: _found(_docstrings(path.read_text(encoding="utf-8"))) for path in _MODULES}

    assert {path.name: words for path, words in found.items() if words} == {}


def test_nobody_is_told_to_install_what_is_not_published():
    texts = {path: path.read_text(encoding="utf-8") for path in (*_PAGES, *_MODULES)}

    assert [path.name for path, text in texts.items() if _INSTALL.search(text)] == []


@pytest.mark.parametrize(
    "text",
    ["It is compiled\nanew.", "Whoever reads it", "Who this process is, is taken from", "a cure"],
)
def test_a_bad_sentence_is_found(text):
    assert len(_found(text)) == 1
    assert _found(f"```text\n{text}\n```\n") == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install jax-dist", True),
        ('pip install "jax-dist[tpu]"', True),
        ("pip install -U jax_dist jax", True),
        ("pip install path/to/jax_dist", False),
        ("pip install '.[dev]'; jax-dist doctor", False),
    ],
)
def test_an_install_by_name_is_found(text, wrong):
    assert bool(_INSTALL.search(text)) == wrong
