"""How far each fix may be trusted, and what is only shown."""

import pytest
import rule_cases

from jax_dist.lint.engine import linter
from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Safety, apply_edits
from jax_dist.lint.model.project import Project

SAFE, UNSAFE, DISPLAY = Safety.SAFE, Safety.UNSAFE, Safety.DISPLAY
_SHARD_MAP = "from jax.experimental.shard_map import shard_map\n"
_PJIT = "from jax.experimental.pjit import pjit\n"


def _lint(code: str, text: str):
    module = Project().module(sources.read("case.py", text.encode()))
    return linter.check_module(module, frozenset({code}))


@pytest.mark.parametrize(
    ("code", "text", "safeties"),
    [
        ("JXD105", _SHARD_MAP + "shard_map(f, m, i, o, auto=a)\n", [None]),
        ("JXD105", _SHARD_MAP + "shard_map(f, m, i, o)\nshard_map(f, **kwargs)\n", [None]),
        ("JXD106", _PJIT + "pjit(f, in_shardings=s)\n", [DISPLAY]),
        ("JXD106", _PJIT + "pjit(f)\npjit(f, s)\n", [None]),
        (
            "JXD106",  # one name moves, the other stays
            "from jax.experimental.pjit import pjit, with_sharding_constraint as c\n"
            "pjit(f, s)\nc(x, s)\n",
            [None, SAFE],
        ),
        (
            "JXD106",  # one name moves for sure, the other is only sketched
            "from jax.experimental.pjit import pjit, with_sharding_constraint as c\n"
            "pjit(f, in_shardings=s)\nc(x, s)\n",
            [DISPLAY, SAFE],
        ),
        ("JXD108", "import jax.numpy as jnp\ndef f(x) -> jnp.DeviceArray: ...\n", [SAFE]),
        ("JXD108", "import jax.numpy as jnp\nisinstance(x, jnp.DeviceArray)\n", [UNSAFE]),
        ("JXD108", "from jax.random import KeyArray\ndef f(k: KeyArray): ...\n", [SAFE]),
        ("JXD108", "from jax.random import KeyArray\nis_key = KeyArray, 1\n", [UNSAFE]),
        ("JXD108", "import jax\nwith jax.sharding.use_mesh(m): f()\n", [SAFE]),
        ("JXD108", "import jax\njax.sharding.use_mesh(m)\n", [UNSAFE]),
        (
            "JXD108",
            "from jax.lib import xla_bridge as b\nb.device_count()\nb.other()\n",
            [None, SAFE],
        ),
        ("JXD108", "import jax\njax.ops.index_add(x, 0, y=y)\n", [None]),
    ],
)
def test_safety(code, text, safeties):
    fixes = [finding.fix for finding in _lint(code, text)]

    assert [fix and fix.safety for fix in fixes] == safeties


@pytest.mark.parametrize(
    ("code", "text", "shown"),
    [
        (
            "JXD106",
            _PJIT + "f = pjit(g, in_shardings=specs)\n",
            "from jax import jit as pjit\nf = pjit(g, in_shardings=specs)\n",
        ),
        (
            "JXD108",
            "import jax\ny = jax.ops.index_update(x + 1, i, 0.5)\n",
            "import jax\ny = (x + 1).at[i].set(0.5)\n",
        ),
        (
            "JXD108",
            "import jax\nb = x.device_buffers\n",
            "import jax\nb = [shard.data for shard in x.addressable_shards]\n",
        ),
    ],
)
def test_what_is_only_shown(code, text, shown):
    (found,) = _lint(code, text)

    assert found.fix is not None
    assert found.fix.safety is Safety.DISPLAY
    assert apply_edits(text.encode(), found.fix.edits).decode() == shown


def test_what_another_file_renames_is_found_there(tmp_path):
    (tmp_path / "compat.py").write_text("import jax  # partial\ntree_map = jax.tree_map\n")
    text = "import jax\nimport compat\ncompat.tree_map(f, x)\njax.tree_map(f, x)\n"
    source = sources.read(str(tmp_path / "user.py"), text.encode())
    found = linter.check_module(Project().module(source), frozenset({"JXD108"}))

    assert [finding.start.line for finding in found] == [4]


def test_slices_of_indexed_updates_are_written_as_indices():
    text = "import jax\ny = jax.ops.index_add(x, jax.ops.index[2:, ...], y)\n"
    (update,) = [each.fix for each in _lint("JXD108", text) if each.fix is not None]

    assert apply_edits(text.encode(), update.edits).decode() == (
        "import jax\ny = x.at[2:, ...].add(y)\n"
    )


_TOP = "import jax\nimport jax.numpy as jnp\nfrom flax import jax_utils\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("JXD202", "y = jax.pmap(g, out_axes=1)(x)\nz = jax_utils.unreplicate(y)\n"),
        ("JXD202", "y = jax.pmap(g, **options)(x)\nz = jax_utils.unreplicate(y)\n"),
        ("JXD202", "z = jax_utils.unreplicate(load())\n"),
        ("JXD202", "y = jax.device_get(jax.pmap(g)(x))\nz = jax_utils.unreplicate(y)\n"),
        ("JXD202", "y = jnp.stack([x] * jax.device_count())\nz = jax_utils.unreplicate(y)\n"),
        ("JXD203", "y = jax.pmap(lambda x: x * 2, out_axes=1)(x)[0]\n"),
        ("JXD203", "y = (jax.pmap(lambda x: x * 2)(x))[0]\n"),
        ("JXD301", "g = jax.lax.all_gather(x, 'i')\ny = g.mean(0)\n"),
        ("JXD301", "y = (jax.lax.all_gather(x, 'i')).mean(0)\n"),
        ("JXD301", "y = jax.lax.all_gather(x, 'i').mean(0  # of all\n)\n"),
        ("JXD002", "f = jax.jit(jax.pmap\n\n  (g))\n"),
        ("JXD306", "n = jax.lax.psum(1,  # one each\n    'i')\n"),
        ("JXD306", "print(f'{jax.lax.psum(1, \"i\")} devices')\n"),
        ("JXD306", "print(f'{f\"{jax.lax.psum(1, chr(105))}\"} devices')\n"),
        ("JXD406", "if d: jax.config.update('jax_compilation_cache_dir', d)\n"),
    ],
)
def test_no_fix_where_what_it_needs_is_not_shown(code: str, text: str):
    assert [finding.fix for finding in _lint(code, _TOP + text)] == [None]


def test_no_fix_writes_a_name_of_this_library():
    """A project that lints need not depend on jax_dist."""
    for code, cases in rule_cases.by_code().items():
        for case in cases:
            text = case.before if isinstance(case, rule_cases.Fixed) else case.code
            for finding in _lint(code, text):
                edits = finding.fix.edits if finding.fix else ()
                assert not any("jax_dist" in edit.text for edit in edits), text
                assert not any("jax_dist" in line for line in getattr(finding.fix, "imports", ()))
