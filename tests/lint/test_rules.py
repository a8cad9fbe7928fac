"""Every rule says what its cases say, its fixes end, and what they leave gives the same numbers."""

import ast
import dataclasses
import pathlib
import re
import subprocess
import sys
import types
import warnings

import chex
import jax
import numpy as np
import pytest
import rule_cases
from rule_cases import Case, Fixed, Negative, Positive

from jax_dist import _codes
from jax_dist.lint.engine import linter
from jax_dist.lint.model import new_imports, sources
from jax_dist.lint.model.findings import Finding, Safety, choose_fixes
from jax_dist.lint.model.project import Project
from jax_dist.lint.rules import Page, Rule

_CASES = rule_cases.by_rule()
_SILENT = ("JXD900", "JXD901", "JXD902")  # made where comments and files are read, not by a check


def _cases_of(code: str) -> tuple[Case, ...]:
    return _CASES.get(_named(linter.PAGES[code]), ())


def _named(page: Page) -> str:
    return page.name.replace("-", "_")


def _cases(kind: type[Case]) -> list:
    return [
        pytest.param(code, case, id=f"{code}: {case.why}")
        for code in linter.PAGES
        for case in _cases_of(code)
        if isinstance(case, kind)
    ]


def _lint(code: str, text: str, path: str = "case.py", target=None) -> list[Finding]:
    source = sources.read(path, text.encode())
    return linter.check(source, Project(), frozenset({code}), target)


def _mended(code: str, text: str) -> str:
    """The text with all fixes but those that are only shown."""
    fixes = [finding.fix for finding in _lint(code, text) if finding.fix is not None]
    fixes = [fix for fix in fixes if fix.safety is not Safety.DISPLAY]
    applied = choose_fixes(fixes)
    assert len(applied) == len(fixes)
    module = Project().module(sources.read("case.py", text.encode()))
    return new_imports.placed(module, applied).decode()


# --- cases


@pytest.mark.parametrize(("code", "case"), _cases(Negative))
def test_says_nothing(code: str, case: Negative):
    ast.parse(case.code)

    assert _lint(code, case.code, case.path) == []


@pytest.mark.parametrize(("code", "case"), _cases(Positive))
def test_finds(code: str, case: Positive):
    found = _lint(code, case.code, case.path)

    assert tuple(finding.start.line for finding in found) == case.lines
    # What a fix would write is a case for Fixed.
    fixes = [finding.fix.safety for finding in found if finding.fix is not None]
    assert set(fixes) <= {Safety.DISPLAY}
    assert linter.wanted(case.code.encode(), frozenset({code}))


@pytest.mark.parametrize(("code", "case"), _cases(Fixed))
def test_mends(code: str, case: Fixed):
    after = _mended(code, case.before)

    assert after == case.after
    ast.parse(after)
    assert linter.wanted(case.before.encode(), frozenset({code}))
    assert _lint(code, after) == []
    assert _mended(code, after) == after


_SINCE = [code for code, rule in linter.RULES.items() if rule.since != (0,)]


@pytest.mark.parametrize("code", _SINCE)
def test_is_silent_below_the_version_that_its_page_names(code: str):
    first = re.match(r"jax (\d+)\.(\d+)\.(\d+):", linter.PAGES[code].since)
    assert first is not None
    since = tuple(map(int, first.groups()))
    case = next(case for case in _cases_of(code) if not isinstance(case, Negative))
    text = case.before if isinstance(case, Fixed) else case.code

    assert _lint(code, text, target=since)
    assert _lint(code, text, target=(since[0], since[1] - 1, 9)) == []


@pytest.mark.parametrize(("code", "case"), [each for each in _cases(Fixed) if each.values[1].runs])
def test_gives_the_same_numbers(code: str, case: Fixed):
    before, after = _result(case.before), _result(case.after)

    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert len(jax.tree.leaves(before)) > 0
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    chex.assert_trees_all_close(before, after, rtol=1e-6)


def _result(text: str):
    names: dict = {"__name__": "case"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is mended may be deprecated
        exec(compile(text, "case.py", "exec"), names)
        return jax.tree.map(np.asarray, names["result"]())


@pytest.mark.parametrize("code", sorted(set(linter.PAGES) - set(_SILENT)))
def test_each_rule_is_seen_to_speak_and_to_be_silent(code: str):
    kinds = [type(case) for case in _cases_of(code)]

    assert kinds.count(Negative) >= 2
    assert Positive in kinds or Fixed in kinds
    assert kinds == sorted(kinds, key=(Negative, Positive, Fixed).index)


@pytest.mark.parametrize("code", sorted(set(linter.PAGES) - set(_SILENT)))
def test_the_page_says_how_safe_the_fixes_are(code: str):
    texts = [case.before for case in _cases_of(code) if isinstance(case, Fixed)]
    fixes = [finding.fix for text in texts for finding in _lint(code, text)]
    safeties = {fix.safety for fix in fixes if fix is not None}

    least_safe = [each for each in (Safety.UNSAFE, Safety.SAFE) if each in safeties][:1]
    level = linter.PAGES[code].fix_level
    assert [each.value for each in least_safe] == ([] if level == "none" else [level])


# --- targets


def test_a_rule_is_silent_where_its_advice_cannot_be_followed():
    text = "import jax\nn = jax.lax.psum(1, 'i')\n"

    assert [finding.code for finding in _lint("JXD306", text, target=(0, 6, 1))] == ["JXD306"]
    assert _lint("JXD306", text, target=(0, 6, 0)) == []


@pytest.mark.parametrize(
    ("code", "text", "target", "title"),
    [
        ("JXD107", "import jax\njax.lax.pvary(x, 'i')\n", (0, 7, 2), "jax.lax.pcast"),
        ("JXD108", "import jax\njax.tree_map(f, x)\n", (0, 4, 20), "jax.tree.map"),
        ("JXD108", "from jax import tree_map\n", (0, 4, 20), "import jax.tree_util.tree_map"),
    ],
)
def test_a_fix_that_needs_a_newer_jax_is_only_shown(code, text, target, title):
    (old,) = _lint(code, text, target=target)
    (new,) = _lint(code, text)

    assert old.fix is not None
    assert new.fix is not None
    assert (old.fix.safety, new.fix.safety) == (Safety.DISPLAY, Safety.SAFE)
    assert title in old.fix.title
    assert "needs jax 0." in old.fix.title


# --- pages


@pytest.mark.parametrize("page", linter.PAGES.values(), ids=lambda page: page.code)
def test_page_is_whole(page):
    assert re.fullmatch(r"JXD\d{3}", page.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", page.name)
    for name in ("what", "why", "fix", "since"):
        text = getattr(page, name)
        assert text.endswith("."), name
        assert text[0].isupper() or text.startswith(("`", "jax ", "pmap ")), name
        assert "\n" not in text, name
    assert page.source.startswith("https://") or page.source.endswith(".")
    assert page.fix.split(":")[0].split(" ")[0] in ("Safe", "Unsafe", "Display-only", "None", "Off")


@pytest.mark.parametrize("page", linter.PAGES.values(), ids=lambda page: page.code)
def test_examples_are_python_or_a_sentence(page):
    if page.code != "JXD901":  # its example cannot be parsed
        assert page.example.endswith("\n")
        ast.parse(page.example)
    if not page.instead.endswith("."):
        assert page.instead.endswith("\n")
        ast.parse(page.instead)


@pytest.mark.parametrize(
    "page",
    [page for code, page in linter.PAGES.items() if code not in _SILENT],
    ids=lambda page: page.code,
)
def test_its_example_says_no_more_than_it_mends(page):
    """What stands under "use instead" is not found again."""
    if not page.instead.endswith("."):
        assert _lint(page.code, page.instead) == []


def test_codes_and_names_are_used_once():
    files: dict[types.ModuleType, list[str]] = {}
    for code, module in linter.MODULES.items():
        files.setdefault(module, []).append(code)

    made = [each for module in files for each in vars(module).values() if isinstance(each, Rule)]
    assert len(linter.PAGES) == len(made)
    assert len({page.name for page in linter.PAGES.values()}) == len(made)
    for module, codes in files.items():
        assert (module.__doc__ or "").startswith(f"{', '.join(codes)}: ")
        if len(codes) == 1:
            name = module.__name__.rpartition(".")[2]
            assert name == _named(linter.PAGES[codes[0]])
    assert list(linter.PAGES) == sorted(linter.PAGES)


def test_codes_that_others_speak_of_are_those_of_the_rules():
    names = {page.name.upper().replace("-", "_"): code for code, page in linter.PAGES.items()}
    codes = {name: code for name, code in vars(_codes).items() if name.isupper()}

    assert codes.items() <= names.items()
    assert "PMAP_CALL" in codes


def test_no_other_file_writes_a_code_out():
    """But for what runs in the user's project without this package."""
    root = pathlib.Path(_codes.__file__).parent
    apart = {root / "_codes.py", root / "migrate" / "_mapped.py"}
    found = [
        f"{path}:{node.lineno}"
        for path in sorted(set(root.rglob("*.py")) - apart)
        if path.parent.name != "rules"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch(r"JXD\d{3}", str(node.value))
    ]

    assert found == []


def test_each_rule_has_its_cases_and_each_case_its_rule():
    assert sorted(_CASES) == sorted(map(_named, linter.PAGES.values()))


_NEW_RULE = """
from jax_dist.lint.rules import Found, Page, rule

PAGE = Page("JXD999", "no-tan", "What.", "Why.", "x", "y", "None: no.", "S.", "M.")


@rule(PAGE, triggers=(b"tan",))
def check(module):
    for call in module.calls("jax.numpy.tan"):
        yield Found(call, "tan is steep")
"""


def test_a_new_rule_is_one_file(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "no_tan.py").write_text(_NEW_RULE)
    (tmp_path / "case.py").write_text("from jax import numpy as jnp\ny = jnp.tan(x)\n")
    code = (
        "import sys; from jax_dist.lint import rules; rules.__path__.append('more')\n"
        "from jax_dist.cli.main import main; sys.exit(main(['lint', 'case.py']))"
    )

    command = (sys.executable, "-c", code)
    run = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)

    assert run.returncode == 1, run.stderr
    assert "case.py:2:5: JXD999 tan is steep" in run.stdout


def test_a_page_has_its_headings_in_order():
    text = str(linter.PAGES["JXD101"])

    assert text.startswith("JXD101 removed-device-put-replicated\n\nWhat it does\n  Finds `jax.")
    assert re.findall(r"^\w.*$", text, re.MULTILINE)[1:] == [
        "What it does",
        "Why this is bad",
        "Example",
        "Use instead",
        "Fix safety",
        "Since",
        "Source",
    ]
    assert str(dataclasses.replace(linter.PAGES["JXD101"], default=False)).endswith(
        "\n\nOff by default: --extend-select turns it on."
    )


def test_the_catalogue_does_not_load_jax():
    code = "import sys, jax_dist.lint.engine.linter; sys.exit('jax' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
