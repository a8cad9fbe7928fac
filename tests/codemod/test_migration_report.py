"""What the report says, for people and for machines."""

import json
import os

from jax_dist.codemod import report
from jax_dist.codemod.report import MigrationReport
from jax_dist.codemod.results import FileMigration, Helpers, PlaceResult

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
        helpers=Helpers(os.path.abspath("pkg/_mapped.py"), frozenset({"mapped"})),
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

    assert report.as_markdown(found) == _MARKDOWN


def test_json():
    made = MigrationReport("jax", _FILES, {"verdict": "same"}, cautions=(_CAUTION,))
    found = json.loads(report.as_json(made))

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
    places = json.loads(report.as_json(MigrationReport("jax", _FILES)))["places"]

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
    assert json.loads(report.as_json(MigrationReport("jax", _FILES)))["verification"] is None
    assert "Verification" not in report.as_markdown(MigrationReport("jax", _FILES))


def test_nothing_at_all():
    assert report.as_markdown(MigrationReport("jax_dist", ())) == (
        "# Migration to jax_dist\n\n0 files changed, 0 places done, 0 left.\n"
    )
