"""Traps: what looks like pmap and is not, or must stay what it is. Unchanged byte for byte."""

from typing import Any

import pytest

from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.migrate import imports, migration
from jax_dist.migrate.results import ProjectContext

_TRAPS = {
    "a module that is called pmap": """\
from brax.training import pmap

pmap.assert_is_replicated(3)
""",
    "another library's pmap": """\
import jax
import xarray_jax

f = xarray_jax.pmap(jax.vmap(abs), "i")
""",
    "a method that is called pmap": """\
import jax


class Pool:
    def pmap(self, f):
        return jax.jit(f)

    def run(self):
        return self.pmap(abs)
""",
    "a parameter that hides the import": """\
from jax import pmap, vmap


def apply(pmap):
    return pmap(abs)


g = vmap(abs)
""",
    "a local name that hides the module": """\
import jax


def run(jax):
    return jax.pmap(abs)


jax.jit(abs)
""",
    "the file's own function": """\
import jax


def pmap(f):
    return jax.vmap(f)


g = pmap(abs)
""",
    "words in strings and comments": '''\
import jax

# jax.pmap(f) is what it was
"""Call jax.pmap(f), or jax_utils.replicate(x)."""
text = "jax.pmap"
''',
    "a helper called replicate": """\
import jax


def replicate(x):
    return jax.numpy.stack([x] * 8)


def unreplicate(x):
    return x[0]


y = unreplicate(replicate(3))
""",
    "x[0] of something else": """\
import jax


def first(trajectories):
    return jax.tree.map(lambda x: x[0], trajectories), trajectories[0]
""",
    "a mesh that is meant to be explicit": """\
import jax
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",))
f = jax.shard_map(abs, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
""",
    "flax's own pmap, with what only it takes": """\
import jax
from flax import nnx

f = nnx.pmap(abs, graph_updates=False)
""",
    "another function with the same name in a class": """\
import jax


class jaxlike:
    pmap = staticmethod(jax.jit)


f = jaxlike.pmap(abs)
""",
}
_UNCHANGED_BY_JAX_DIST = {
    "an identity": """\
from jax import pmap


def test(map_fn):
    return map_fn is pmap
""",
    "a comparison": """\
import jax


def test(f):
    assert f(jax.vmap) == jax.pmap
""",
    "functools.wraps": """\
import functools

import jax


@functools.wraps(jax.pmap)
def fake_pmap(fn, *args):
    return fn
""",
    "its signature": """\
import inspect

import jax

parameters = inspect.signature(jax.pmap)
name = jax.pmap.__name__
""",
}


def _after(text: str, to: Any) -> str:
    source = sources.read("a.py", text.encode())
    return migration.of_source(
        source, ProjectContext(Project()), migration.MigrationOptions(to=to)
    ).after.decode()


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
@pytest.mark.parametrize("text", _TRAPS.values(), ids=_TRAPS)
def test_what_is_not_pmap_stays(text: str, to: str):
    assert _after(text, to) == text


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
@pytest.mark.parametrize("text", _UNCHANGED_BY_JAX_DIST.values(), ids=_UNCHANGED_BY_JAX_DIST)
def test_where_it_matters_which_function_it_is_it_stays(text: str, to: str):
    assert _after(text, to) == text


def test_a_file_that_compares_and_applies_gets_both():
    """`from jax import pmap` must stay for the comparison, so the call gets a name of its own."""
    text = "from jax import pmap\n\nf = pmap(abs)\nis_it = f is pmap\n"

    assert _after(text, "jax_dist") == (
        "from jax import pmap\nimport jax_dist\n\nf = jax_dist.pmap(abs)\nis_it = f is pmap\n"
    )


@pytest.mark.parametrize("to", ["jax_dist", "jax"])
@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"import jax",
        b"\xef\xbb\xbfimport jax\r\n",
        b"# -*- coding: latin-1 -*-\nimport jax\nx = '\xe9'  # pmap\n",
        b"import jax\n\x0c\nx = 'pmap'\n",
    ],
)
def test_bytes_of_files_without_a_place_stay(before: bytes, to: Any):
    found = migration.of_source(
        sources.read("a.py", before), ProjectContext(Project()), migration.MigrationOptions(to=to)
    )

    assert (found.after, found.outcomes, found.problem) == (before, (), "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  import jax  # noqa: é\n", "  import jax  # noqa: é\n  import jax_dist\n"),
        ("  import jax; x = 1  # noqa\n", "  import jax; import jax_dist; x = 1  # noqa\n"),
        ("  x = 1; import jax  # noqa\n", "  x = 1; import jax; import jax_dist  # noqa\n"),
        ("  if x: import jax\n", "  if x: import jax; import jax_dist\n"),
        (
            "  try: import jax  # noqa\n  except ImportError: raise\n",
            "  try: import jax; import jax_dist  # noqa\n  except ImportError: raise\n",
        ),
    ],
)
def test_an_import_in_a_function_keeps_its_comment_and_its_line(before: str, after: str):
    text = "def run(x):\n{}  return jax{}.pmap(abs)(jax.numpy.ones(x))\n"

    assert _after(text.format(before, ""), "jax_dist") == text.format(after, "_dist")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pmap, vmap, local_devices", "vmap"),
        ("vmap, pmap, local_devices", "vmap"),
        ("pmap, local_devices, vmap", "vmap"),
        ("local_devices, vmap, pmap, jit", "vmap, jit"),
    ],
)
def test_all_that_is_used_no_more_goes_out_of_an_import(before: str, after: str):
    text = f"from jax import {before}\n\nused = {{}}\n"
    found = imports.tidied(*(_module(text.format(each)) for each in (before, after)))

    assert found.decode() == f"from jax import {after}\n\nused = {after}\n"


def _module(text: str):
    return Project().module(sources.read("a.py", text.encode()))


@pytest.mark.parametrize(
    ("string", "stays"),
    [
        ("Takes jax as it is.", False),
        ("    >>> jax.devices()\n", True),
        ("jax.Array", True),
        ("list[jax.Array]", True),
    ],
)
def test_prose_needs_no_import(string: str, *, stays: bool):
    text = f"import jax\n\n\ndef f(x):\n    {string!r}\n    return {{}}\n"
    found = imports.tidied(_module(text.format("jax.pmap(x)")), _module(text.format("x")))

    assert found.startswith(b"import jax\n") is stays
