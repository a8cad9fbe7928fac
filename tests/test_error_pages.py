"""docs/errors.md lists the messages of JAX as JAX raises them, and every fix runs."""

import pathlib
import re
import subprocess
import sys
import warnings

import error_cases
import jax
import pytest
from error_cases import CASES, Case

from jax_dist.testing import run_processes

_PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "errors.md").read_text()
_VERSIONS = ("0.10.2", "0.12.0.1")  # those that the page speaks of
_HERE = [case for case in CASES if case.processes == 1]


def _matches(case: Case, text: str) -> bool:
    flat = re.sub(r"\s+", " ", text.replace("`", ""))
    return case.message in flat or bool(case.also) and case.also in flat


def _message(case: Case) -> str:
    """Return the error and the warnings of `before`."""
    if case.is_once:  # in a process that has not shown it yet
        code = f"import error_cases; error_cases.CASES[{CASES.index(case)}].before()"
        command = [sys.executable, "-W", "always", "-c", code]
        folder = pathlib.Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case.before()
            error = ""
        except Exception as raised:  # noqa: BLE001 - which error it is, is compared
            error = str(raised)
    return error + " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("case", _HERE, ids=lambda case: case.message)
def test_before_raises_the_message_and_after_runs(case: Case):
    message = _message(case)

    if jax.__version__ in _VERSIONS:
        assert _matches(case, message) == (jax.__version__ in case.versions), message or "it ran"
    case.after()


def test_the_messages_of_several_processes():
    outcomes = run_processes(error_cases.run_in_processes, processes=2, cpu_devices=4)
    cases = [case for case in CASES if case.processes > 1]

    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        for case, (before, after) in zip(cases, outcome.value, strict=True):
            if jax.__version__ in _VERSIONS:
                assert _matches(case, before) == bool(case.versions), case.message
            assert after == "", case.message


def test_the_page_lists_each_case_once():
    rows = re.findall(r"^\| `{1,2}(.+?)`{1,2} \|", _PAGE, re.MULTILINE)
    headings = re.findall(r"^### (.+)$", _PAGE, re.MULTILINE)
    listed = [*rows, *(heading.replace("`", "") for heading in headings)]

    assert sorted(set(listed)) == sorted(listed)
    assert {case.message for case in CASES} <= {*listed}
