"""Drawn, laid-out and damaged files: no crash, no broken file, nothing to do for a second run."""

import ast
import collections
import importlib.util
import io
import pathlib
import random
import tokenize

import generating
import hypothesis
import pytest
from hypothesis import strategies as st

from jax_dist.lint.engine import fixer, linter
from jax_dist.lint.engine.linter import Examiner
from jax_dist.lint.model import new_imports, sources
from jax_dist.lint.model.findings import Finding, Safety
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError
from jax_dist.migrate import migration as codemod

ALL = frozenset(linter.RULES)
SYNTAX_ERROR = "JXD901"
# Only while one file is checked; what stands in other folders must not matter.
_PATH = "/nowhere/at/all/fuzzed.py"
TARGETS = tuple(codemod.MigrationOptions(to=to) for to in ("jax_dist", "vendored"))
_SETTINGS = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
    ],
}


def examiner() -> Examiner:
    return Examiner(ALL, Project(()))


def inspect(data: bytes, path: str = _PATH) -> list[Finding] | None:
    """Checks, fixes, migrates, and all of it again; None where the bytes are no text.

    What must hold of every file there is stands here.
    """
    try:
        source = linter.load(path, data)
    except UnreadableError:
        return None
    assert source.written(source.code) == data
    findings = examiner().of_source(source)
    assert findings == examiner().of_source(source)
    for finding in findings:
        _assert_in_place(source, finding)
    assert any(finding.code == SYNTAX_ERROR for finding in findings) != _parses(source)
    _assert_fixes_settle(source, frozenset({Safety.SAFE}))
    _assert_fixes_settle(source, frozenset({Safety.SAFE, Safety.UNSAFE}))
    for options in TARGETS:
        _assert_migration_settles(source, options)
    return findings


def _assert_in_place(source: Source, finding: Finding) -> None:
    start, end = finding.span
    assert 0 <= start <= end <= len(source.code)
    source.code[start:end].decode()  # no character is cut in two
    assert finding.code in ALL
    if finding.code != SYNTAX_ERROR:
        assert finding.start == source.position(start)
    assert "\n" not in finding.message


def _assert_fixes_settle(source: Source, allowed: frozenset[Safety]) -> None:
    """What is mended parses, no rule proposed what would not, and a second run does nothing."""
    data = source.written(source.code)
    first = fixer.mended(source.path, data, examiner(), allowed)
    assert "could not" not in first.refused, first.refused
    if first.data == data:
        return
    after = linter.load(source.path, first.data)
    assert _parses(after), after.code.decode()
    second = fixer.mended(source.path, first.data, examiner(), allowed)
    assert second.data == first.data, second.data.decode("utf-8", "replace")


def _assert_migration_settles(source: Source, options: codemod.MigrationOptions) -> None:
    """What is migrated parses and keeps its comments, and a second run does nothing."""
    first = codemod.migrate_text(source.path, source.written(source.code), options)
    if first is None or not first.changed:
        assert first is None or "report" not in first.problem, first.problem
        return
    after = linter.load(source.path, first.after)
    assert _parses(after), after.code.decode()
    if not any(each.code == "JXD104" for each in first.places):  # a statement goes as a whole
        lost = _comments(source) - _comments(after)
        assert not lost, f"{lost} of\n{source.code.decode()}"
    second = codemod.migrate_text(source.path, first.after, options)
    assert second is None or second.after == first.after, second.after.decode()


def _comments(source: Source) -> collections.Counter[str]:
    """Not those that mark the cells of a notebook, which may get a new one."""
    code = source.python.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    tokens = tokenize.tokenize(io.BytesIO(code).readline)
    found = (each.string for each in tokens if each.type == tokenize.COMMENT)
    return collections.Counter(each for each in found if not each.startswith("# cell "))


def _parses(source: Source) -> bool:
    try:
        Project(()).module(source)
    except ParseError:
        return False
    return True


def codes(data: bytes, path: str = _PATH) -> list[str]:
    """The codes found, in order of place."""
    found = inspect(data, path)
    assert found is not None
    return [finding.code for finding in found]


@pytest.mark.thorough
@hypothesis.given(generating.programs())
@hypothesis.settings(max_examples=30, derandomize=True, **_SETTINGS)
def test_drawn_programs_are_checked_and_fixed(code: str):
    assert "JXD001" in codes(code.encode())


@pytest.mark.thorough
@pytest.mark.parametrize("layout", generating.LAYOUTS)
@hypothesis.given(code=generating.programs(), seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=6, derandomize=True, **_SETTINGS)
def test_the_layout_of_a_file_changes_no_finding(layout: str, code: str, seed: int):
    laid_out = generating.LAYOUTS[layout](code, random.Random(seed))

    assert codes(laid_out) == codes(code.encode())


@pytest.mark.thorough
@hypothesis.given(code=generating.programs(), seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=8, derandomize=True, **_SETTINGS)
def test_a_notebook_is_a_file_in_pieces(code: str, seed: int):
    data = generating.notebook(code, random.Random(seed))

    assert codes(data, _PATH.replace(".py", ".ipynb")) == codes(code.encode())


@pytest.mark.thorough
@hypothesis.given(code=generating.programs(), seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=30, derandomize=True, **_SETTINGS)
def test_damaged_programs_do_no_harm(code: str, seed: int):
    choice = random.Random(seed)
    shuffled = generating.statements_shuffled(code, choice).encode()

    inspect(shuffled)
    inspect(generating.damaged(shuffled, choice))


def real_files(count: int) -> list[pathlib.Path]:
    """Files of the installed jax that speak of what the rules know."""
    found = importlib.util.find_spec("jax")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = pathlib.Path(found.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"))
    wanted = [path for path in files if path.stat().st_size < 60_000 and _is_wanted(path)]
    return wanted[:: max(1, len(wanted) // count)][:count]


def _is_wanted(path: pathlib.Path) -> bool:
    return linter.wanted(path.read_bytes(), ALL)


def test_real_files_and_their_damage():
    files = real_files(6)
    assert len(files) == 6
    for number, path in enumerate(files):
        data = path.read_bytes()
        assert inspect(data) is not None
        inspect(generating.damaged(data, random.Random(number)))


@pytest.mark.slow
@hypothesis.given(code=generating.programs(), seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=500, **_SETTINGS)
def test_many_damaged_programs_do_no_harm(code: str, seed: int):
    choice = random.Random(seed)
    shuffled = generating.statements_shuffled(code, choice)
    for layout in generating.LAYOUTS.values():
        inspect(layout(shuffled, choice))
    inspect(generating.damaged(shuffled.encode(), choice))


@pytest.mark.slow
def test_all_real_files_and_their_damage():
    for number, path in enumerate(real_files(10_000)):
        data = path.read_bytes()
        choice = random.Random(number)
        inspect(data)
        for _ in range(5):
            inspect(generating.damaged(data, choice))


def test_any_syntax_is_resolved():
    """Also files that the prefilter would pass over: those of the standard library."""
    root = pathlib.Path(ast.__file__).parent
    files = sorted(root.glob("*.py")) + sorted(root.glob("test/test_p*.py"))
    assert len(files) > 150
    for path in files[::5]:
        source = sources.read(_PATH, path.read_bytes())
        if _parses(source):
            assert Project(()).module(source).used_names is not None


def test_the_inspection_sees_a_fix_that_breaks_the_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(new_imports, "placed", lambda module, fixes: b"def (:\n")

    with pytest.raises(AssertionError, match="could not parse"):
        inspect(b"import jax\nn = jax.lax.psum(1, 'i')\n")


def test_the_inspection_sees_a_fix_that_never_settles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(new_imports, "placed", lambda module, fixes: b"#\n" + module.source.code)

    with pytest.raises(AssertionError):
        inspect(b"import jax\nn = jax.lax.psum(1, 'i')\n")


def test_the_layouts_mean_the_same():
    code = "import jax\n\n\ndef f(x):\n    return jax.pmap(g, 'i')(x, [1, {'a': 2}], \"ö\")\n"
    tree = ast.dump(ast.parse(code))

    for name, layout in generating.LAYOUTS.items():
        for seed in range(20):
            source = sources.read(_PATH, layout(code, random.Random(seed)))
            assert ast.dump(ast.parse(source.code.decode())) == tree, name
