"""Comments that switch findings off, those that do nothing, and those that are added."""

import textwrap

import pytest
import word_rules

from jax_dist.lint.engine import suppressions
from jax_dist.lint.model.findings import Safety, apply_edits
from jax_dist.lint.model.sources import Source, read

_CODES = word_rules.CODES


def _source(text: str) -> Source:
    return read("a.py", textwrap.dedent(text).encode())


def _findings(text: str, codes=_CODES):
    source = _source(text)
    found = word_rules.check(source, None, codes)
    return suppressions.applied(source, found, codes, word_rules.PAGES)


def _said(text: str, codes=_CODES) -> list[str]:
    return [f"{each.code}:{each.start.line}" for each in _findings(text, codes)]


@pytest.mark.parametrize(
    "text",
    [
        "old  # noqa",
        "old  # NOQA",
        "old  # noqa: JXD101",
        "old  #noqa:JXD101",
        "old  # noqa : jxd101 because it is",
        "old  # noqa: E501, JXD101",
        "old  # noqa: E501 JXD101",
        "old  # noqa: JXD1",
        "old  # noqa: JXD",
        "old  # type: ignore  # noqa: JXD101",
        "old  # jax-dist: ignore",
        "old  # jax-dist: ignore[JXD101]",
        "old  # jax-dist:ignore[olden]",
        "old  # jax-dist: ignore[JXD2, JXD1]",
        "x = 1\n# jax-dist: ignore[JXD101]\nold",
        "# jax-dist: ignore[JXD101]\n# and why\nx = [\n    old,\n]",
        "old\n# jax-dist: ignore-file",
        "# jax-dist: ignore-file[JXD101]\nold",
    ],
)
def test_switched_off(text):
    codes = _CODES - {"JXD900"}  # a prefix that is too wide is another matter

    assert _said(text, codes) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("old  # noqa: E501", ["JXD101:1"]),
        ("old  # noqual", ["JXD101:1"]),
        ("old  # Noqas: JXD101", ["JXD101:1"]),
        ("# noqa: JXD101\nold", ["JXD900:1", "JXD101:2"]),  # its own line only
        ("x = ['# noqa', old]", ["JXD101:1"]),
        ('x = """\n# jax-dist: ignore-file\n"""\nold', ["JXD101:4"]),
        ("old  # jax-dist: ignore-this", ["JXD101:1", "JXD902:1"]),
        ("x  # jax-dist: ignore\nold", ["JXD900:1", "JXD101:2"]),
        ("x  # noqa\nold", ["JXD101:2"]),
    ],
)
def test_not_switched_off(text, said):
    assert _said(text) == said


@pytest.mark.parametrize("marked", [0, 2, 4])
def test_a_comment_on_the_first_last_or_own_line_of_a_statement(marked):
    lines = ["f(", "    1,", "    old,", "    2,", ")", "x = 1"]
    lines[marked] += "  # noqa: JXD101"

    assert _said("\n".join(lines)) == []


@pytest.mark.parametrize("marked", [1, 3, 5])
def test_a_comment_on_another_line_does_not_count(marked):
    lines = ["f(", "    1,", "    old,", "    2,", ")", "x = 1"]
    lines[marked] += "  # noqa: JXD101"

    assert _said("\n".join(lines)) == sorted(
        [f"JXD900:{marked + 1}", "JXD101:3"], key=lambda each: each[-1]
    )


def test_the_head_of_a_block_does_not_speak_for_its_body():
    assert _said("def f():  # noqa: JXD101\n    return old\n") == ["JXD900:1", "JXD101:2"]


def test_wide_characters_and_other_line_ends_move_nothing():
    text = "é = '日本'; old  # noqa: JXD101\r\rold  # é noqa\r"

    assert [each.start.line for each in _findings(text)] == [3]


def test_a_file_that_cannot_be_parsed_has_no_unused_comments():
    assert _said("x  # noqa: JXD101\ndef f(:\n") == ["JXD901:2"]


def test_only_its_code_hides_that_a_file_cannot_be_parsed():
    assert _said("def f(:  # noqa\n") == ["JXD901:1"]
    assert _said("# jax-dist: ignore-file\ndef f(:\n") == ["JXD901:2"]
    assert _said("# jax-dist: ignore-file[JXD901]\ndef f(:\n") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x  # noqa: JXD101", "nothing to switch off here: JXD101"),
        ("x  # noqa: E501, JXD101, JXD102", "nothing to switch off here: JXD101, JXD102"),
        ("x  # jax-dist: ignore[olden]", "nothing to switch off here: olden"),
        ("x  # jax-dist: ignore", "nothing to switch off here: every rule"),
        ("# jax-dist: ignore-file[JXD1]", "nothing to switch off here: JXD1"),
        ("old  # noqa: JXD109", "no rule is called JXD109. Did you mean JXD101?"),
        (
            "x  # jax-dist: ignore[oldn, nonsense]",
            "no rule is called oldn. Did you mean olden?",
        ),
        (
            "x  # jax-dist: ingore[JXD101]",
            "'jax-dist: ingore' switches nothing off. Did you mean ignore?",
        ),
        ("x  # jax-dist: off", "'jax-dist: off' switches nothing off. Say ignore[CODE]."),
    ],
)
def test_what_is_said_of_comments(text, message):
    said = [each.message for each in _findings(text) if each.code in ("JXD900", "JXD902")]

    assert said[0] == message


def test_a_rule_that_is_off_is_not_called_unused():
    text = "x  # noqa: JXD101"

    assert _said(text, _CODES - {"JXD101"}) == []
    assert _said("x  # noqa: JXD201") == []  # off by default
    assert _said("x  # noqa: JXD9, JXD900") == []  # about comments


def test_a_comment_can_keep_a_comment():
    assert _said("x  # noqa: JXD101, JXD900") == []
    assert _said("# jax-dist: ignore-file[JXD900]\nx  # noqa: JXD101") == []
    assert _said("# jax-dist: ignore-file[JXD902]\nx  # noqa: JXD666") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = 1  # noqa: JXD101\ny", "x = 1\ny"),
        ("x = 1  # noqa: JXD101 pmap stays\n", "x = 1  # pmap stays\n"),
        ("x = 1  # noqa: JXD101 # pmap stays\n", "x = 1  # pmap stays\n"),
        ("x = 1  # type: ignore  # noqa: JXD101\n", "x = 1  # type: ignore\n"),
        ("x = 1  # noqa: E501, JXD101,W1\n", "x = 1  # noqa: E501, W1\n"),
        ("old  # noqa: JXD101, JXD102\n", "old  # noqa: JXD101\n"),
        ("old  # jax-dist: ignore[JXD102, JXD101]\n", "old  # jax-dist: ignore[JXD101]\n"),
        ("x = 1\n  # jax-dist: ignore-file[JXD101]\ny\n", "x = 1\ny\n"),
        ("x = 1  # jax-dist: ignore", "x = 1"),
        ("é = '日本'  # noqa: JXD101\r\ny\r\n", "é = '日本'\r\ny\r\n"),
    ],
)
def test_what_is_unused_is_taken_out(before, after):
    [finding] = _findings(before)
    assert finding.code == "JXD900"
    assert finding.fix is not None
    assert finding.fix.safety is Safety.SAFE

    assert apply_edits(_source(before).code, finding.fix.edits).decode() == after
    assert _findings(after) == []
