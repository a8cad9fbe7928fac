"""Every rule says what its cases say, its fixes end, and what they leave gives the same numbers."""

import ast
import pathlib
import re
import subprocess
import sys
import warnings

import chex
import jax
import numpy as np
import pytest
import rule_cases
import rules_page
from rule_cases import Case, Fixed, Negative, Positive

from jax_dist import _codes
from jax_dist.lint import new_imports
from jax_dist.lint.engine import linter
from jax_dist.lint.engine.linter import RULES
from jax_dist.lint.findings import Finding, Safety, choose_fixes
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project

_CASES = rule_cases.by_code()
_CHECKED = [rule for code, rule in RULES.items() if code != _codes.SYNTAX_ERROR]


def _cases(kind: type[Case]) -> list:
    return [
        pytest.param(code, case, id=f"{code}: {case.why}")
        for code, cases in _CASES.items()
        for case in cases
        if isinstance(case, kind)
    ]


def _lint(code: str, text: str, path: str = "case.py", target=None) -> list[Finding]:
    module = Project().module(sources.read(path, text.encode()))
    return linter.check_module(module, frozenset({code}), target)


def _fixed(code: str, text: str) -> str:
    """Return the text with all fixes but those that are only shown."""
    fixes = [finding.fix for finding in _lint(code, text) if finding.fix is not None]
    fixes = [fix for fix in fixes if fix.safety is not Safety.DISPLAY]
    chosen = choose_fixes(fixes)
    assert len(chosen) == len(fixes)
    module = Project().module(sources.read("case.py", text.encode()))
    return new_imports.place_imports(module, chosen).decode()


@pytest.mark.parametrize(("code", "case"), _cases(Negative))
def test_silent(code: str, case: Negative):
    ast.parse(case.code)

    assert _lint(code, case.code, case.path) == []


@pytest.mark.parametrize(("code", "case"), _cases(Positive))
def test_finds(code: str, case: Positive):
    findings = _lint(code, case.code, case.path)

    assert tuple(finding.start.line for finding in findings) == case.lines
    # What a fix would write is a case for Fixed.
    assert {finding.safety for finding in findings} <= {None, Safety.DISPLAY}


@pytest.mark.parametrize(("code", "case"), _cases(Fixed))
def test_fixes(code: str, case: Fixed):
    after = _fixed(code, case.before)

    assert after == case.after
    ast.parse(after)
    assert _lint(code, after) == []


@pytest.mark.parametrize(("code", "case"), [each for each in _cases(Fixed) if each.values[1].runs])
def test_fixes_keep_the_numbers(code: str, case: Fixed):
    before, after = _result(case.before), _result(case.after)

    assert len(jax.tree.leaves(before)) > 0
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    chex.assert_trees_all_close(before, after, rtol=1e-6)


def _result(text: str):
    names: dict = {"__name__": "case"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is fixed may be deprecated
        exec(compile(text, "case.py", "exec"), names)
        return jax.tree.map(np.asarray, names["result"]())


@pytest.mark.parametrize("rule", _CHECKED, ids=lambda rule: rule.code)
def test_each_rule_has_cases_in_order(rule):
    file = f"tests/lint/rule_cases/{rule.name.replace('-', '_')}.py"
    assert rule.code in _CASES, f"{file} is missing"
    kinds = [type(case) for case in _CASES[rule.code]]

    assert kinds.count(Negative) >= 2
    assert Positive in kinds or Fixed in kinds
    assert kinds == sorted(kinds, key=(Negative, Positive, Fixed).index)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
def test_each_rule_stands_in_a_file_of_its_name_and_explains_itself_briefly(rule):
    module = sys.modules[rule.check.__module__]

    assert module.__name__.rpartition(".")[2] == rule.name.replace("-", "_") == rule.check.__name__
    assert module.__doc__.startswith(f"{rule.code}: ")
    assert re.fullmatch(r"JXD\d{3}", rule.code)
    prose = " ".join((rule.what, rule.why, rule.instead))
    assert len(prose) < 12 * 86


def test_codes_that_other_parts_name_are_those_of_the_rules():
    names = {rule.name.upper().replace("-", "_"): code for code, rule in RULES.items()}
    codes = {name: code for name, code in vars(_codes).items() if name.isupper()}

    assert codes.items() <= names.items()


def test_a_rule_is_silent_where_its_advice_cannot_be_followed():
    text = "import jax\nn = jax.lax.psum(1, 'i')\n"

    assert [finding.code for finding in _lint("JXD306", text, target=(0, 6, 1))] == ["JXD306"]
    assert _lint("JXD306", text, target=(0, 6, 0)) == []


@pytest.mark.parametrize("text", ["import jax\njax.tree_map(f, x)\n", "from jax import tree_map\n"])
def test_a_fix_that_needs_a_newer_jax_is_only_shown(text):
    (old,) = _lint("JXD108", text, target=(0, 4, 20))
    (new,) = _lint("JXD108", text)

    assert (old.safety, new.safety) == (Safety.DISPLAY, Safety.SAFE)
    assert old.fix.title.endswith("(needs jax 0.4.25)")


def test_the_page_of_rules_is_that_of_the_code():
    page = pathlib.Path(__file__).parents[2] / "docs" / "rules.md"

    assert page.read_text() == rules_page.text(), "run: python tests/lint/rules_page.py"


_NEW_RULE = """
from jax_dist.lint.rules import Found, Rule


@Rule("JXD999", what="W.", why="W.", instead="x", triggers=(b"tan",))
def no_tan(module):
    for call in module.calls("jax.numpy.tan"):
        yield Found(call, "tan is steep")
"""


def test_a_new_rule_is_one_file(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "no_tan.py").write_text(_NEW_RULE)
    (tmp_path / "case.py").write_text("from jax import numpy as jnp\ny = jnp.tan(x)\n")
    code = (
        "import sys; from jax_dist.lint import rules; rules.__path__.append('more')\n"
        "from jax_dist.cli.main import main; code = main(['lint', 'case.py'])\n"
        "sys.exit(3 if 'jax' in sys.modules else code)"
    )

    command = (sys.executable, "-c", code)
    run = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)

    assert run.returncode == 1, run.stderr
    assert "case.py:2:5: JXD999 tan is steep" in run.stdout
