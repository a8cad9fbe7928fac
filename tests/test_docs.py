"""Every example in the documentation runs, and gives what stands there."""

import doctest
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = [_ROOT / "README.md", *sorted(_ROOT.glob("docs/**/*.md"))]
_BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLANK_IN_OUTPUT = re.compile(r"^$(?=\n(?!>>>))", re.MULTILINE)


def _run(page: pathlib.Path) -> int:
    """Runs the blocks of a page in order, in one namespace; gives their number."""
    text, names = page.read_text(), {"__name__": page.stem}
    blocks = list(_BLOCK.finditer(text))
    for block in blocks:
        language, code = block.groups()
        above = text.count("\n", 0, block.start(2))  # a traceback names the line of the page
        if language == "python":
            exec(compile("\n" * above + code, page, "exec"), names)
        else:
            code = _BLANK_IN_OUTPUT.sub("<BLANKLINE>", code)  # a report has blank lines
            example = doctest.DocTestParser().get_doctest(code, names, page.stem, str(page), above)
            doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
            names.update(example.globs)
    return len(blocks)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_page_runs(page: pathlib.Path):
    assert _run(page) > 0, f"{page} has no code to run"


def test_the_architecture_page_names_every_module():
    page = (_ROOT / "docs" / "architecture.md").read_text()
    package = _ROOT / "jax_dist"
    names = ("mapping", "passes", "rewriting", "checker", "checker/rules", "checker/render")
    floors = [package / name for name in ("", *names, "migrating")]
    modules = sorted(module for floor in floors for module in floor.glob("*.py"))

    assert [module.name for module in modules if module.name not in page] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert 1 == 2\n```\n", AssertionError),
        ("```python\nn = 1\n```\nThen\n```pycon\n>>> n + 1\n3\n```\n", doctest.DocTestFailure),
        ("```pycon\n>>> missing\n```\n", doctest.UnexpectedException),
    ],
    ids=["python", "pycon", "pycon that raises"],
)
def test_a_wrong_example_is_found(tmp_path, text, error):
    page = tmp_path / "page.md"
    page.write_text(text)

    with pytest.raises(error):
        _run(page)


def test_the_output_of_an_example_may_have_blank_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```pycon\n>>> print('a\\n\\nb')\na\n\nb\n\n>>> 1 + 1\n2\n```\n")

    assert _run(page) == 1


def test_a_traceback_names_the_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\nraise ValueError(x)\n```\n")

    with pytest.raises(ValueError, match="1") as caught:
        _run(page)

    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 5)


@pytest.mark.parametrize("page", [*_PAGES, _ROOT / "BUILD.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: pathlib.Path):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)

    assert [link for link in links if not (page.parent / link).exists()] == []
