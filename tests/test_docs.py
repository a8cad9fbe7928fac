"""Every example in the documentation runs, and gives what stands there.

A page that cannot run everywhere says so under its title, in a comment that readers do not see:
`<!-- needs jax>=0.10 flax -->`. Above a block, it holds for that block alone.
"""

import doctest
import importlib.metadata
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = [_ROOT / "README.md", *sorted(_ROOT.glob("docs/**/*.md"))]
# `python` runs, `pycon` is compared, `console` is a shell; `file=train.py` is only written down.
_BLOCK = re.compile(
    r"(?:^<!-- needs ([^\n]+) -->\n\n?)?"
    r"^```(python|pycon|toml|console)(?: file=(\S+))?\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_PAGE_NEEDS = re.compile(r"\A# .*\n\n<!-- needs (.+) -->\n\n(?!```)")
_BLANK_IN_OUTPUT = re.compile(r"^$(?=\n(?!>>>))", re.MULTILINE)
_COMMAND = re.compile(r"^\$ (.*(?:\n> .*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_PATIENCE = 300  # seconds for one command; the longest takes some ten


def _lacking(needs: str | None) -> list[str]:
    """Those of `jax>=0.10 flax` that are not there."""
    return [each for each in (needs or "").split() if not _is_there(Requirement(each))]


def _is_there(package: Requirement) -> bool:
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return package.specifier.contains(version, prereleases=True)


def _run(page: pathlib.Path, folder: pathlib.Path) -> int:
    """Run the blocks of a page in order, in one namespace; gives their number."""
    text, names = page.read_text(), {"__name__": page.stem}
    whole = _PAGE_NEEDS.match(text)
    if whole and (lacking := _lacking(whole[1])):
        pytest.skip(f"needs {' '.join(lacking)}")
    blocks = list(_BLOCK.finditer(text))
    for block in blocks:
        needs, language, file, code = block.groups()
        above = text.count("\n", 0, block.start(4))  # a traceback names the line of the page
        if _lacking(needs):
            continue
        if file is not None:
            (folder / file).write_text(code)
        elif language == "python":
            exec(compile("\n" * above + code, page, "exec"), names)
        elif language == "console":
            _run_console(code, folder)
        elif language == "pycon":
            code = _BLANK_IN_OUTPUT.sub("<BLANKLINE>", code)  # a report has blank lines
            example = doctest.DocTestParser().get_doctest(code, names, page.stem, str(page), above)
            doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
            names.update(example.globs)
    return len(blocks)


def _pattern(expected: str) -> re.Pattern[str]:
    """`...` as a line of its own stands for any lines, or none; within a line, for any text."""
    lines = [
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in expected.splitlines()
    ]
    return re.compile("".join(lines))


def test_a_line_of_dots_stands_for_any_number_of_lines():
    pattern = _pattern("a\n...\nb: ... s\n")
    assert all(pattern.fullmatch(text) for text in ("a\nb: 1 s\n", "a\nc\nd\nb: 1 s\n"))
    assert not any(pattern.fullmatch(text) for text in ("a\nb: 1 s", "a\nb: 1\n s\n", "b: 1 s\n"))


def _run_console(code: str, folder: pathlib.Path) -> None:
    """Each line with `$` in a shell in `folder`; what follows is what it prints."""
    environment = {
        **os.environ,
        "NO_COLOR": "1",
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
    }
    for command, expected in _COMMAND.findall(code):
        command = re.sub(r"^jax-dist\b", f"{sys.executable} -m jax_dist", command)
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=_PATIENCE,
        )
        same = _pattern(expected).fullmatch(ran.stdout)
        assert same, f"$ {command}\nprints\n{ran.stdout}\nand the page says\n{expected}"


def _page_case(page: pathlib.Path) -> Any:
    marks = [] if page.stem in ("README", "pmap") else [pytest.mark.thorough]
    return pytest.param(page, id="/".join(page.parts[-2:]), marks=marks)


@pytest.mark.parametrize("page", [*map(_page_case, _PAGES)])
def test_page_runs(page: pathlib.Path, tmp_path: pathlib.Path):
    assert (_run(page, tmp_path) > 0) == bool(_BLOCK.search(page.read_text()))


def test_the_reference_names_what_is_there():
    for name in re.findall(r"(?m)^::: (\S+)$", (_ROOT / "docs" / "reference.md").read_text()):
        assert pkgutil.resolve_name(name)


def test_the_architecture_page_names_files_that_are_there():
    page = (_ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`((?:jax_dist|tests)/[\w/.]*)`", page)

    assert len(paths) > 20
    assert [path for path in paths if not (_ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert 1 == 2\n```\n", AssertionError),
        ("```python\nn = 1\n```\nThen\n```pycon\n>>> n + 1\n3\n```\n", doctest.DocTestFailure),
        ("```pycon\n>>> missing\n```\n", doctest.UnexpectedException),
        ("```console\n$ echo one\ntwo\n```\n", AssertionError),
        ("```python file=a.py\nn = 1\n```\n```console\n$ cat a.py\nn = 2\n```\n", AssertionError),
    ],
    ids=["python", "pycon", "pycon that raises", "console", "console with a file"],
)
def test_a_wrong_example_is_found(tmp_path, text, error):
    page = tmp_path / "page.md"
    page.write_text(text)

    with pytest.raises(error):
        _run(page, tmp_path)


_RAISES = "```python\nraise ValueError('it ran')\n```\n"


@pytest.mark.parametrize("needs", ["jax>=99", "pytest no-such-package"])
def test_a_page_or_a_block_runs_only_where_what_it_needs_is_there(tmp_path, needs):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n<!-- needs {needs} -->\n\nText.\n\n{_RAISES}")
    with pytest.raises(pytest.skip.Exception, match=f"needs {needs.split()[-1]}"):
        _run(page, tmp_path)

    page.write_text(f"# A page\n\n<!-- needs {needs} -->\n\n{_RAISES}\n```python\nn = 1\n```\n")
    assert _run(page, tmp_path) == 2


@pytest.mark.parametrize("between", ["Text.\n\n", ""], ids=["a page", "a block"])
def test_it_does_run_there(tmp_path, between):
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n<!-- needs jax>=0.7 pytest -->\n\n{between}{_RAISES}")
    assert _lacking("jax>=0.7 pytest") == []  # else the next line skips this test

    with pytest.raises(ValueError, match="it ran"):
        _run(page, tmp_path)


def test_what_pages_need_stands_where_it_is_read():
    for page in _PAGES:
        text = page.read_text()
        read = len(_PAGE_NEEDS.findall(text)) + sum(
            bool(found[0]) for found in _BLOCK.findall(text)
        )
        assert text.count("<!-- needs") == read, page


def test_the_output_of_an_example_may_have_blank_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```pycon\n>>> print('a\\n\\nb')\na\n\nb\n\n>>> 1 + 1\n2\n```\n")

    assert _run(page, tmp_path) == 1


def test_a_traceback_names_the_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\nraise ValueError(x)\n```\n")

    with pytest.raises(ValueError, match="1") as caught:
        _run(page, tmp_path)

    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 5)


@pytest.mark.parametrize("page", [*_PAGES, _ROOT / "BUILD.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: pathlib.Path):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)

    assert [link for link in links if not (page.parent / link).exists()] == []
