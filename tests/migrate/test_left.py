"""What is left as it is: each refusal, with its whole text.

The file stays byte for byte, and what is said names the line, the reason and what to do.
"""

import json
import pathlib
import textwrap
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_golden as golden

from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import FileMigration, Form, ProjectContext


class Said(NamedTuple):
    line: int
    reason: str
    remedy: str = ""
    detail: str = ""


def _migrated(text: str, to: Any, helpers: str = "", **options: Any) -> FileMigration:
    """As a file of its own, which has its helpers inside where no module is given."""
    source = sources.read("a.py", text.encode())
    context = ProjectContext(Project(), helpers)
    return migration.of_source(source, context, MigrationOptions(to=to, **options))


_ASKED = "pmap is asked about itself, and another function would answer differently"
_DECIDE = "Decide by hand which of the two functions is meant."
_COMPARED = "pmap goes on as a value, and a comparison with jax.pmap may meet it"
_RENAME = "Rename it in all such places by hand."
_REPLACED = "the file has jax.pmap replaced while it runs, and the new function would not be"
_REPLACE = "Replace the new function there too."
_NO_PLACE = "the file imports jax inside of a function or block, and has no place for helpers"
_GIVE = "Give the path of a module for them: --helpers PATH."
_BOTH = ("jax_dist", "jax")
_CASES = {
    "the function is compared": (
        _BOTH,
        "import jax\n\n\ndef f(g):\n    return g is jax.pmap\n",
        Said(5, _COMPARED, _RENAME, "a.py:5"),
    ),
    "the function is wrapped": (
        _BOTH,
        "import functools\nimport jax\n\n\n@functools.wraps(jax.pmap)\n"
        "def fake(*args):\n    return args\n",
        Said(5, _ASKED, _DECIDE),
    ),
    "the type of the result": (
        _BOTH,
        "import jax\n\nkind = type(jax.pmap(lambda x: x))\n",
        Said(3, _ASKED, _DECIDE),
    ),
    "in an f-string": (
        _BOTH,
        "import jax\n\nprint(f'{jax.pmap(abs)}')\n",
        Said(
            3,
            "pmap stands inside of an f-string",
            "Take it out of the string, then migrate again.",
        ),
    ),
    "replaced by chex": (
        ("jax",),
        "import chex\nimport jax\nf = jax.pmap(abs)\nchex.fake_pmap_and_jit().start()\n",
        Said(
            3,
            _REPLACED,
            _REPLACE,
            "chex.fake_pmap_and_jit in line 4",
        ),
    ),
    "replaced by the module of chex that does it": (
        ("jax",),
        "import jax\nfrom chex._src import fake\n\n\ndef test(f):\n"
        "    with fake.fake_pmap():\n        jax.pmap(f)\n",
        Said(
            7,
            _REPLACED,
            _REPLACE,
            "fake.fake_pmap in line 6",
        ),
    ),
    "replaced by a mock": (
        _BOTH,
        "from unittest import mock\nimport jax\nwith mock.patch('jax.pmap'):\n    jax.pmap(abs)\n",
        Said(
            4,
            _REPLACED,
            _REPLACE,
            "mock.patch('jax.pmap') in line 3",
        ),
    ),
    "a shim for other libraries": (
        _BOTH,
        "import jax\nimport jax._src.api as api\n"
        "jax.device_put_replicated = api.device_put_replicated\n",
        Said(
            3,
            _REPLACED.replace("pmap", "device_put_replicated"),
            _REPLACE,
            "jax.device_put_replicated in line 3",
        ),
    ),
    "a removed function that a mock replaces": (
        _BOTH,
        "from unittest import mock\nimport jax\n\n\ndef test(x, f, d):\n"
        "    with mock.patch.object(jax, 'device_put_sharded', f):\n"
        "        jax.device_put_sharded(x, d)\n",
        Said(
            7,
            _REPLACED.replace("pmap", "device_put_sharded"),
            _REPLACE,
            "mock.patch.object(jax, 'device_put_sharded', f) in line 6",
        ),
    ),
    "the pmap of a library that is set": (
        ("jax_dist",),
        "import equinox\nimport jax\nequinox.filter_pmap = jax.jit\n",
        Said(
            3,
            _REPLACED.replace("jax.pmap", "equinox.filter_pmap"),
            _REPLACE,
            "equinox.filter_pmap in line 3",
        ),
    ),
    "imported in a function": (
        ("jax",),
        "def f(g):\n    import jax\n    return jax.pmap(g)\n",
        Said(3, _NO_PLACE, _GIVE),
    ),
    "imported in a try": (
        ("jax",),
        "try:\n    import jax\nexcept ImportError:\n    jax = None\n\n\ndef f(g):\n"
        "    return jax.pmap(g)\n",
        Said(8, _NO_PLACE, _GIVE),
    ),
    "imported for type checkers": (
        _BOTH,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\n\n\n"
        "def f(g):\n    return jax.pmap(g)\n",
        Said(7, "jax is imported for type checkers only"),
    ),
    "a name of the helpers is taken": (
        ("jax",),
        "import jax\n\n\ndef mapped(x):\n    return jax.pmap(x)\n",
        Said(
            5,
            "the file has its own mapped, a name that its helpers need",
            "Rename mapped, or give the path of a module for the helpers: --helpers PATH.",
        ),
    ),
    "a name of the helpers is taken locally": (
        ("jax",),
        "import jax\n\n\ndef f(g, mapped):\n    return jax.pmap(g)(mapped)\n",
        Said(
            5,
            "the file has its own mapped, a name that its helpers need",
            "Rename mapped, or give the path of a module for the helpers: --helpers PATH.",
        ),
    ),
    "an import of the helpers means something else": (
        ("jax",),
        "import jax\nfrom mine import functools\n\n\ndef f(g):\n"
        "    return jax.pmap(g), functools\n",
        Said(
            6,
            "the file has its own functools, a name that its helpers need",
            "Rename functools, or give the path of a module for the helpers: --helpers PATH.",
        ),
    ),
    "an argument given by another name": (
        ("jax_dist",),
        "import jax\n\n\ndef f(y, to):\n    return jax.device_put_replicated(x=y, devices=to)\n",
        Said(
            5,
            "its first argument is given by name, and has another name in the replacement",
            "Give it by position, then migrate again.",
        ),
    ),
    "the spec of a result decides": (
        ("jax",),
        "import jax\n\nf = jax.pmap(abs)\n\n\ndef first(x):\n"
        "    return f(x)[0] if f(x).sharding.spec[0] else f(x)\n",
        Said(
            3,
            "the program decides by the spec of an array's sharding: on one device that of what "
            "jit(shard_map) gives is P(), and jax.pmap says P(axis)",
            "Decide by the shape, then migrate again; or use --to jax_dist.",
            "a.py:7",
        ),
    ),
    "device_put_replicated is compared": (
        ("jax_dist",),
        "import jax\n\n\ndef f(g):\n    return g is jax.device_put_replicated\n",
        Said(5, "the function itself is compared", _DECIDE),
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_it_is_left_and_why(name: str):
    targets, text, said = _CASES[name]
    for to in targets:
        found = _migrated(text, to)

        assert found.after == text.encode()
        (place,) = found.outcomes
        assert place.status == "left"
        assert said == Said(place.line, place.reason, place.remedy, place.detail)


_MAPPED = {
    "the function that it maps may be mapped again, and would be compiled again": (
        "def step(x):\n    return jax.pmap(abs)(x)"
    ),
    "it has axis_size": "def main(x):\n    return jax.pmap(abs, axis_size=8)(x)",
    "its devices may be None": "def main(x, d):\n    return jax.pmap(abs, devices=d)(x)",
    "its in_axes are not literal": "def main(x, a):\n    return jax.pmap(abs, in_axes=a)(x)",
    "pmap is not applied there": "def main(g):\n    return g(jax.pmap)",
    "line 4 calls it with named arguments": "def main(x):\n    return jax.pmap(abs)(a=x)",
    "line 5 runs it under a transformation": (
        "@jax.jit\ndef main(x):\n    return jax.pmap(abs)(x)"
    ),
    "line 7 calls it with named arguments": (
        "def main(x):\n    f = jax.pmap(abs)\n    loop(f, x)\ndef loop(f, x):\n    return f(a=x)"
    ),
    "it donates argument 3 of 2": "def g(a, b): pass\nf = jax.pmap(g, donate_argnums=(0, 3))",
    "its axis_name may be None": "def main(x, a=None):\n    return jax.pmap(abs, axis_name=a)(x)",
    "line 7 would catch what it raises of sizes": (
        "f = jax.pmap(abs)\ndef g(x):\n    try:\n        f(x)\n    except ValueError:\n        pass"
    ),
    "line 6 would end what it raises of sizes": (
        "import contextlib\nf = jax.pmap(abs)\ndef g(x):\n"
        "    with open('a'), contextlib.suppress(ValueError):\n        f(x)"
    ),
    "line 8 would end what it raises of sizes": (
        "class Quiet:\n    def __exit__(self, *_):\n        return True\nf = jax.pmap(abs)\n"
        "def g(x):\n    with Quiet():\n        f(x)"
    ),
    "line 7 would end what it raises of sizes": (
        "import tenacity\nf = jax.pmap(abs)\n\ndef main():\n    @tenacity.retry\n"
        "    def g(x):\n        f(x)"
    ),
    "line 9 would end what it raises of sizes": (
        "def tried(g, x):\n    try:\n        return g(x)\n    except Exception:\n        return 0\n"
        "f = jax.pmap(abs)\nprint(tried(f, 1))"
    ),
    "line 4 takes what it raises of sizes for a result": (
        "f = jax.pmap(abs)\nprint(POOL.submit(f, 1).exception())"
    ),
    "line 5 takes what it raises of sizes for a result": (
        "f = jax.pmap(abs)\nasync def main():\n    await gather(f(1), return_exceptions=True)"
    ),
    "line 4 shares an array that may lie elsewhere": (
        "def main(w, x):\n    return jax.pmap(max, in_axes=(None, 0))(w, x)"
    ),
}
_BOTH = Promises(one_process=True, all_devices=True)


@pytest.mark.parametrize("why", _MAPPED)
def test_it_becomes_mapped_and_why_not_jit_of_shard_map(why: str):
    """Said where something was promised, for then more is expected."""
    text = f"import jax\n\n{_MAPPED[why]}\n"
    found = _migrated(text, "jax", "_mapped.py", promises=_BOTH)

    (place,) = found.outcomes
    assert place.status == "done"
    assert place.reason == f"not jit(shard_map): {why}"


@pytest.mark.parametrize(
    "handler", ["except KeyError:\n        y = x", "except ValueError:\n        raise"]
)
def test_an_error_that_is_seen_is_enough(handler: str):
    text = (
        f"import jax\nf = jax.pmap(abs)\ndef main(x):\n    try:\n        y = f(x)\n    {handler}\n"
    )
    (place,) = _migrated(text, "jax", "_mapped.py", promises=_BOTH).outcomes

    assert place.form is Form.DIRECT


_AXES = {
    "class A:\n    def __init__(s, a=None):\n        s.a = a\n": False,
    "class A:\n    def __init__(s, a='i'):\n        s.a = a\n": True,
    "class A:\n    def set(s, a):\n        s.a = s.a if a else s.a\n": True,
}


@pytest.mark.parametrize("text", _AXES)
def test_an_axis_that_may_be_none_has_no_mesh(text: str):
    use = (
        "    def go(s, x):\n        f = jax.pmap(lambda x: x, axis_name=s.a)\n        return f(x)\n"
    )
    (place,) = _migrated(f"import jax\n{text}{use}", "jax", "_mapped.py", promises=_BOTH).outcomes

    assert (place.form is Form.DIRECT) is _AXES[text]


@pytest.mark.parametrize("promises", [Promises(), Promises(one_process=True), _BOTH])
def test_jit_of_shard_map_needs_a_run_or_both_promises(promises: Promises):
    found = _migrated(
        "import jax\n\ny = jax.pmap(abs)(x)\n", "jax", "_mapped.py", promises=promises
    )

    (place,) = found.outcomes
    said = "not jit(shard_map): nothing shows how it is called: --verify does, or --one-process"
    assert (b"jax.shard_map(" in found.after) is (promises == _BOTH)
    assert place.reason.startswith(said) is (promises == Promises(one_process=True))


def test_helpers_that_are_too_long_for_the_inside():
    """A value may be called in any way, and so needs all that jax.pmap does."""
    text = "import jax\n\n\ndef main(g):\n    return g(jax.pmap)\n"
    found = _migrated(text, "jax")

    assert not found.changed
    (place,) = found.outcomes
    assert (place.status, place.reason, place.by_hand) == (
        "left",
        "its helpers are longer than 90 lines, which is much for the inside",
        "Give the path of a module for them: --helpers PATH. Or have them inside: --helpers full.",
    )
    assert _migrated(text, "jax", "_mapped.py").helpers.needs == {"mapped", "full"}


def test_a_place_that_is_left_needs_nothing():
    text = "import jax\n\nf = jax.pmap(abs)\nis_map = isinstance(f, type(jax.pmap))\n"
    found = _migrated(text, "jax", "_mapped.py")

    assert [place.status for place in found.outcomes] == ["done", "left"]
    assert found.helpers.needs == {"mapped"}


def test_helpers_of_an_earlier_migration_that_can_do_less():
    once = _migrated("import jax\n\nf = jax.pmap(abs)\n", "jax").after.decode()
    again = _migrated(f"{once}\ng = jax.pmap(max, in_axes=(None, 0))\n", "jax")

    assert not again.changed
    (place,) = again.outcomes
    assert (place.status, place.reason, place.by_hand, place.detail) == (
        "left",
        "its helpers are from an earlier migration, and can do less than is needed now",
        "Give the path of a module for them: --helpers PATH.",
        "axes",
    )


def test_what_was_left_once_is_done_now():
    """`mapped` takes what pmap takes, so the form of a place does not matter."""
    text = textwrap.dedent("""\
        import jax


        def build(axes, devices, g, names, xs, **options):
            mappers = [jax.vmap, jax.pmap]
            g(jax.pmap)
            f = jax.pmap(abs, backend="cpu", in_axes=axes, out_axes=(0, -1))
            f = jax.pmap(g, devices=devices, axis_size=2, **options)
            f = jax.pmap(g, static_broadcasted_argnums=tuple(range(len(names))))
            for x in xs:
                jax.pmap(g)(x, mask=x[jax.process_index() :: 2])
            return mappers, f


        p = jax.pmap
        """)

    found = golden.migrated(text, "jax")

    assert [place.status for place in found.outcomes] == ["done"] * 7
    expected = text.replace("jax.pmap", "mapped")
    assert found.after.decode() == expected.replace(
        "import jax\n", "import jax\n\nfrom _mapped import mapped\n"
    )


def test_where_one_place_is_left_the_others_are_migrated():
    text = "import jax\n\nkind = type(jax.pmap(abs))\nf = jax.pmap(abs)\n"

    found = golden.migrated(text, "jax")

    assert [place.status for place in found.outcomes] == ["left", "done"]
    assert found.after.decode() == (
        "import jax\n\nfrom _mapped import mapped\n\nkind = type(jax.pmap(abs))\nf = mapped(abs)\n"
    )


def test_what_would_be_read_before_it_is_bound_leaves_the_whole_file():
    text = "f = jax.pmap(abs)\nimport jax\n"

    found = golden.migrated(text, "jax")

    assert found.after == text.encode()
    assert found.problem == (
        "its line 1 would read mapped before that is imported, for jax is imported below: "
        "move the import of jax up, then migrate again"
    )


@pytest.mark.parametrize(
    ("to", "call"),
    [
        ("jax_dist", "device_put_sharded(shards=x, devices=to)"),
        ("jax", "device_put_sharded(devices=to, shards=x)"),
        ("jax", "device_put_sharded(**x)"),
        ("jax", "device_put_replicated(x=x, devices=to)"),
    ],
)
def test_names_that_the_replacement_has_too_are_no_reason(to: str, call: str):
    found = _migrated(f"import jax\n\n\ndef f(x, to):\n    return jax.{call}\n", to)

    assert [each.status for each in found.outcomes] == ["done"]
    assert call.partition("(")[2] in found.after.decode()


_SETS = 'os.environ["XLA_FLAGS"] = "--xla_dump_to=/tmp/x"\n'
_MAPS = "import jax\n\nf = jax.pmap(lambda x: x)\n"
_SETS_IN = "import os\n{maps}\n\ndef main(name, values):\n    {sets}\n".replace("{maps}", _MAPS)
_MAPPED_WHILE_IMPORTED = {
    "nothing is set": ({"a.py": _MAPS}, True),
    "above": ({"a.py": f"import os\n\n{_SETS}{_MAPS}"}, True),
    "above, in a try": (
        {"a.py": f"import os\n\ntry:\n    import own\nexcept ImportError:\n    {_SETS}{_MAPS}"},
        True,
    ),
    "below": ({"a.py": f"import os\n{_MAPS}{_SETS}"}, False),
    "above and below": ({"a.py": f"import os\n\n{_SETS}{_MAPS}{_SETS}"}, False),
    "in a function above": (
        {"a.py": f"import os\n\n\ndef g():\n    {_SETS}\n\n{_MAPS}g()\n"},
        False,
    ),
    "in another file": ({"a.py": _MAPS, "b.py": f"import os\n\nimport a\n\n{_SETS}"}, False),
    "here above, and in another file": (
        {"a.py": f"import os\n\n{_SETS}{_MAPS}", "b.py": f"import os\n\nimport a\n\n{_SETS}"},
        False,
    ),
    **{
        f"by `{sets}`": ({"a.py": _SETS_IN.format(sets=sets)}, is_direct)
        for sets, is_direct in {
            "os.environ[name] = values": False,
            "os.environ['XLA_' + name] = values": False,
            "os.environ |= values": False,
            "os.environ.update(values)": False,
            "os.environ.setdefault(name, values)": False,
            "os.putenv(name, values)": False,
            "dotenv.load_dotenv()": False,
            "os.environ['LOG_LEVEL'] = values": True,
            "os.environ.setdefault('LOG_LEVEL', values)": True,
            "print(os.environ[name] == values)": True,
        }.items()
    },
    "in a file that is not connected": ({"a.py": _MAPS, "b.py": f"import os\n\n{_SETS}"}, True),
}


@pytest.mark.parametrize("name", _MAPPED_WHILE_IMPORTED)
def test_devices_are_not_asked_for_before_they_are_set(name, tmp_path, monkeypatch):
    texts, is_direct = _MAPPED_WHILE_IMPORTED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    for path, text in texts.items():
        (tmp_path / path).write_text(text)
    promises = Promises(one_process=True, all_devices=True)
    files, _ = migration.migrate(["a.py"], MigrationOptions(to="jax", promises=promises))

    (place,) = (each for file in files for each in file.outcomes if each.path.endswith("a.py"))
    assert (place.form is Form.DIRECT) == is_direct
    if not is_direct:
        assert "before devices may be asked for: see " in place.why


_WORKS = "import multiprocessing as mp\nimport os\n{maps}\n\ndef work(x):\n    return f(x)\n\n\n"
_FORKS = {
    "mp.Process(target=work).start()": "line 12 would end what it raises",
    "mp.Pool().map(work, xs)": "line 12 may run it in a fork",
    "print([*pool.imap_unordered(lambda x: work(x), xs)])": "line 12 may run it in a fork",
    "print(pool.apply_async(work, (x,)).get())": "line 12 may run it in a fork",
    "pool.map(load, xs)": "",
    "jax.tree.map(work, xs)": "",
    "os.fork()": "before a fork: see a.py:12",
}


@pytest.mark.parametrize("forks", _FORKS)
def test_devices_are_not_asked_for_before_a_fork_that_maps(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = _WORKS.replace("{maps}", _MAPS) + forks + "\n"
    (tmp_path / "a.py").write_text(text)
    (file, *_), _ = migration.migrate(["a.py"], MigrationOptions(to="jax", promises=_BOTH))
    (place,) = file.outcomes

    assert place.form is (Form.MAPPED if _FORKS[forks] else Form.DIRECT)
    assert _FORKS[forks] in place.why


def _notebook(path: pathlib.Path, *cells: str) -> str:
    plain = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    found = [{**plain, "source": each} for each in cells]
    book = {"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(book))
    return str(path)


@pytest.mark.parametrize(
    ("cells", "number"),
    [
        (("import jax\nimport numpy as np\nf = jax.pmap(lambda x: x + 1)\n", "f(x)\n"), 2),
        (("import jax\nimport numpy as np\n", "f = jax.pmap(lambda x: x + 1)\n"), 3),
    ],
)
def test_the_helpers_of_a_notebook_stand_above_what_uses_them(tmp_path, cells, number):
    path = _notebook(tmp_path / "a.ipynb", *cells)
    (found,), _ = migration.migrate([path], MigrationOptions(to="jax"))
    texts = ["".join(each["source"]) for each in json.loads(found.after)["cells"]]
    namespace = {"x": np.arange(8)}
    exec("\n".join(texts), namespace)

    assert len(texts) == number
    assert np.asarray(namespace["f"](namespace["x"])).tolist() == [*range(1, 9)]


def test_a_cell_that_would_not_parse_leaves_its_notebook(tmp_path):
    cell = "import jax; import numpy as np; f = jax.pmap(lambda x: x + 1)\nprint(f(np.arange(8)))\n"
    path = _notebook(tmp_path / "a.ipynb", cell)
    (found,), _ = migration.migrate([path], MigrationOptions(to="jax", promises=_BOTH))

    assert not found.changed
    assert found.problem.startswith("the new text would not parse")


def test_a_global_statement_of_a_module_says_nothing():
    text = "import jax\nfor i in range(3):\n    global f, i\n    f = jax.pmap(abs)\nf(x)\n"
    found = _migrated(text, "jax_dist")

    assert [each.status for each in found.outcomes] == ["done"]


def test_a_notebook_goes_back_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = _notebook(tmp_path / "a.ipynb", "import jax\n", "f = jax.pmap(lambda x: x)\n", "f(x)\n")
    (before,), _ = migration.migrate([path], MigrationOptions(to="jax"))
    options = MigrationOptions(to="jax", limits={(path, 0): Form.LEFT})
    (after,), _ = migration.migrate([path], options)

    assert [each.status for each in before.outcomes] == ["done"]
    assert [each.status for each in after.outcomes] == ["left"]
    assert (before.changed, after.changed) == (True, False)
