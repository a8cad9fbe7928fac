"""What the report says, for people and for machines."""

import json
import os
from typing import Any

import pytest

from jax_dist.migrate import report
from jax_dist.migrate.report import MigrationReport
from jax_dist.migrate.results import FileMigration, Helpers, PlaceResult
from jax_dist.migrate.verify.ledger import Ledger, LedgerEntry, Rung

_NEVER = LedgerEntry("d.py", 4, "g", Rung.NEVER_RAN)
_DONE = PlaceResult("a.py", 12, None, "JXD001", "done", "a | jax.pmap", "a | b")
_LOCAL = "pmap takes what each process holds"
_FILES = (
    FileMigration(
        "a.py",
        b"1",
        b"2",
        (
            PlaceResult("a.py", 30, None, "JXD001", "left", "jax.pmap", _LOCAL, "Use X.", "line 3"),
            _DONE,
        ),
        helpers=Helpers(os.path.abspath("pkg/_mapped.py"), frozenset({"mapped", "axes"})),
    ),
    FileMigration("b.py", b"(", b"(", problem="Python cannot parse it: line 1: no"),
    FileMigration(
        "c.ipynb",
        b"1",
        b"1",
        (
            PlaceResult("c.ipynb", 2, 4, "JXD001", "left", "jax.pmap", _LOCAL, "Use X."),
            PlaceResult(
                *("c.ipynb", 1, 3, "JXD108", "left", "xmap(\n  f)", "gone | away"),
                "Write it anew:\nf = jax.jit(\n    f)",
            ),
        ),
    ),
    FileMigration("pkg/_mapped.py", b"", b"3", is_new=True),
)
_CAUTION = "The program may run in several processes (a.py:3)."

_MARKDOWN = """\
# Migration to jax

2 files changed, 1 place done, 3 left.

The program may run in several processes (a.py:3).

| rule | done | left |
|---|---:|---:|
| JXD001 pmap-call | 1 | 2 |
| JXD108 removed-name | 0 | 1 |

## Helper modules

* `pkg/_mapped.py` (new): `mapped`

## Files left whole

* `b.py`: Python cannot parse it: line 1: no

## Left, and why

| places | reason |
|---:|---|
| 2 | pmap takes what each process holds |
| 1 | gone \\| away |

### Pmap takes what each process holds

What to do: Use X.

* `a.py:30` `jax.pmap` (line 3)
* `c.ipynb:cell 4:2` `jax.pmap`

### Gone | away

What to do: Write it anew:

```python
f = jax.jit(
    f)
```

* `c.ipynb:cell 3:1` `xmap( ...`

## Done

| place | rule | what | |
|---|---|---|---|
| `a.py:12` | JXD001 | `a \\| jax.pmap` | a \\| b |

## Verification

```text
The same.
```
"""


def test_markdown():
    found = MigrationReport("jax", _FILES, proof="The same.", cautions=(_CAUTION,))

    assert report.FORMS[".md"](found) == _MARKDOWN


def test_json():
    made = MigrationReport("jax", _FILES, {"verdict": "same"}, cautions=(_CAUTION,))
    found = json.loads(report.FORMS[".json"](made))

    assert list(found) == [
        *("schema", "to", "summary", "rules", "reasons", "files", "places"),
        *("helpers", "cautions", "verification"),
    ]
    assert found["schema"] == 3
    assert found["to"] == "jax"
    assert found["summary"] == {"files": 4, "changed": 2, "done": 1, "left": 3, "problems": 1}
    assert found["rules"] == [
        {"code": "JXD001", "name": "pmap-call", "done": 1, "left": 2},
        {"code": "JXD108", "name": "removed-name", "done": 0, "left": 1},
    ]
    assert found["reasons"] == [
        {"reason": _LOCAL, "by_hand": "Use X.", "sketch": "", "places": 2},
        {
            "reason": "gone | away",
            "by_hand": "Write it anew:",
            "sketch": "f = jax.jit(\n    f)",
            "places": 1,
        },
    ]
    assert found["files"][1] == {
        "path": "b.py",
        "changed": False,
        "problem": "Python cannot parse it: line 1: no",
    }
    assert found["helpers"] == [{"path": "pkg/_mapped.py", "functions": ["mapped"], "is_new": True}]
    assert found["cautions"] == [_CAUTION]
    assert found["verification"] == {"verdict": "same"}


def test_places_are_in_order_and_have_all_fields():
    places = json.loads(report.FORMS[".json"](MigrationReport("jax", _FILES)))["places"]

    assert [(place["path"], place["cell"], place["line"]) for place in places] == [
        ("a.py", None, 12),
        ("a.py", None, 30),
        ("c.ipynb", 3, 1),
        ("c.ipynb", 4, 2),
    ]
    assert places[1] == {
        "path": "a.py",
        "line": 30,
        "cell": None,
        "code": "JXD001",
        "name": "pmap-call",
        "status": "left",
        "what": "jax.pmap",
        "reason": _LOCAL,
        "detail": "line 3",
        "by_hand": "Use X.",
        "sketch": "",
    }


def test_without_a_proof_there_is_none():
    assert json.loads(report.FORMS[".json"](MigrationReport("jax", _FILES)))["verification"] is None
    assert "Verification" not in report.FORMS[".md"](MigrationReport("jax", _FILES))


def test_nothing_at_all():
    assert report.FORMS[".md"](MigrationReport("jax_dist", ())) == (
        "# Migration to jax_dist\n\n0 files changed, 0 places done, 0 left.\n"
    )


# --- with a proof


_ENTRIES = (
    LedgerEntry("a.py", 12, "a | jax.pmap", Rung.EQUAL_BY_RULES, 2, 2, rules=("R1",)),
    LedgerEntry("d.py", 3, "f(\n  x)", Rung.REPLAYED, 7, 7),
    LedgerEntry("d.py", 4, "g", Rung.NEVER_RAN, put_back=True),
    LedgerEntry("d.py", 5, "h", Rung.DIFFERENT, 3, 2, problems=("call 3: 1.0 before, 2.0 after",)),
    LedgerEntry("d.py", 6, "i", Rung.RAN, notes=("checked as part of line 9",)),
    LedgerEntry("d.py", 7, "j", Rung.SAME_PROGRAM, 1, 1),
    LedgerEntry("d.py", 8, "k", Rung.SAME_IN_TWO_RUNS, 1, 1),
)


def _proved(*entries: LedgerEntry, **more: Any) -> MigrationReport:
    ledger = Ledger(("python", "a b.py"), entries, "copy", **more)
    return MigrationReport("jax", _FILES, ledger.to_dict(), str(ledger), cautions=(_CAUTION,))


def test_the_page_has_the_whole_ledger():
    text = report.FORMS[".md"](_proved(*_ENTRIES))

    for said in (
        "2 of 7 places proved, 1 replayed 7 of 7 calls, ",
        "a.py:12  a | jax.pmap  equal by rules R1",
        "d.py:3   f(            replayed 7 of 7",
        "d.py:4   g             never ran          put back",
        "      different: call 3: 1.0 before, 2.0 after",
        "      checked as part of line 9",
    ):
        assert said in text


def test_json_has_the_whole_ledger():
    found = json.loads(report.FORMS[".json"](_proved(*_ENTRIES)))["verification"]

    assert found["worst"] == "different"
    assert [each["rung"] for each in found["places"]] == [str(each.rung) for each in _ENTRIES]
    assert found["places"][2]["put_back"] is True
    assert found["places"][3]["problems"] == ["call 3: 1.0 before, 2.0 after"]


def test_sarif():
    document = json.loads(report.FORMS[".sarif"](_proved(*_ENTRIES)))
    (run,) = document["runs"]

    assert document["version"] == "2.1.0"
    assert [_row(each) for each in run["results"]] == [
        ("a.py", 12, "pass", "none", "a | jax.pmap: equal by rules; R1."),
        ("d.py", 3, "pass", "none", "f( ...: replayed; 7 of 7 calls."),
        ("d.py", 4, "open", "none", "g: never ran; put back. " + _NEVER.remedy),
        ("d.py", 5, "fail", "error", "h: different; call 3: 1.0 before, 2.0 after."),
        ("d.py", 6, "open", "none", "i: ran; checked as part of line 9."),
        ("d.py", 7, "pass", "none", "j: same program."),
        ("d.py", 8, "pass", "none", "k: same in two runs."),
        ("a.py", 30, "informational", "none", f"jax.pmap: left; {_LOCAL}; line 3."),
        ("c.ipynb", None, "informational", "none", "cell 3, line 1: xmap( ...: left; gone | away."),
        ("c.ipynb", None, "informational", "none", f"cell 4, line 2: jax.pmap: left; {_LOCAL}."),
    ]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[each["ruleIndex"]]["id"] == each["ruleId"] for each in run["results"])
    assert run["results"][1]["properties"]["calls"] == 7
    assert run["results"][2]["properties"]["put_back"] is True
    assert run["invocations"][0]["commandLine"] == "python 'a b.py'"
    assert run["invocations"][0]["exitCode"] == 0
    assert run["invocations"][0]["properties"]["worst"] == "different"
    assert run["properties"] == {"to": "jax", "cautions": [_CAUTION]}


def _row(result: dict[str, Any]) -> tuple[Any, ...]:
    (place,) = (each["physicalLocation"] for each in result["locations"])
    line = place.get("region", {}).get("startLine")
    found = place["artifactLocation"]["uri"], line, result["kind"], result["level"]
    return (*found, result["message"]["text"])


def test_sarif_of_what_failed_as_a_whole():
    made = _proved(problems=("the command ended well before the migration",), exit_code=None)
    (run,) = json.loads(report.FORMS[".sarif"](made))["runs"]

    assert (run["results"][0]["kind"], run["results"][0]["locations"]) == ("fail", [])
    assert run["invocations"][0]["executionSuccessful"] is False
    assert "exitCode" not in run["invocations"][0]


def test_sarif_without_a_proof_says_nothing_of_sameness():
    (run,) = json.loads(report.FORMS[".sarif"](MigrationReport("jax", _FILES)))["runs"]

    assert "invocations" not in run
    assert {each["kind"] for each in run["results"]} == {"review", "informational"}


@pytest.mark.parametrize("rung", Rung)
def test_only_what_was_compared_is_called_the_same(rung: Rung):
    made = _proved(LedgerEntry("a.py", 1, "x", rung))
    (run,) = json.loads(report.FORMS[".sarif"](made))["runs"]
    result = run["results"][0]

    assert (result["kind"] == "pass") is (rung >= Rung.SAME_IN_TWO_RUNS)
    for text in (made.proof, result["message"]["text"], json.dumps(made.verification)):
        said = any(word in text for word in ("same", "by rules", "replayed"))
        assert said is (rung >= Rung.SAME_IN_TWO_RUNS), text
