"""Safety of fixes."""

import pytest
import rule_cases

from jax_dist.lint.engine import linter
from jax_dist.lint.findings import Safety
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project

SAFE = Safety.SAFE
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
        ("JXD106", _PJIT + "pjit(f, in_shardings=s)\n", [None]),
        ("JXD106", _PJIT + "pjit(f)\npjit(f, s)\n", [None]),
        (
            "JXD106",  # one name moves, the other stays
            "from jax.experimental.pjit import pjit, with_sharding_constraint as c\n"
            "pjit(f, s)\nc(x, s)\n",
            [None, SAFE],
        ),
        ("JXD108", "import jax.numpy as jnp\ndef f(x) -> jnp.DeviceArray: ...\n", [SAFE]),
        ("JXD108", "import jax.numpy as jnp\nisinstance(x, jnp.DeviceArray)\n", [None]),
        ("JXD108", "from jax.random import KeyArray\ndef f(k: KeyArray): ...\n", [SAFE]),
        ("JXD108", "from jax.random import KeyArray\nKey = KeyArray\n", [None]),
        (
            "JXD108",
            "from jax.lib import xla_bridge as b\nb.device_count()\nb.other()\n",
            [None, SAFE],
        ),
    ],
)
def test_safety(code, text, safeties):
    fixes = [finding.fix for finding in _lint(code, text)]

    assert [fix and fix.safety for fix in fixes] == safeties


def test_what_another_file_renames_is_found_there(tmp_path):
    (tmp_path / "compat.py").write_text("import jax  # partial\ntree_map = jax.tree_map\n")
    text = "import jax\nimport compat\ncompat.tree_map(f, x)\njax.tree_map(f, x)\n"
    source = sources.read(str(tmp_path / "user.py"), text.encode())
    found = linter.check_module(Project().module(source), frozenset({"JXD108"}))

    assert [finding.start.line for finding in found] == [4]


_TOP = "import jax\nimport jax.numpy as jnp\nfrom flax import jax_utils\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("JXD203", "y = jax.pmap(g, out_axes=1)(x)\nz = jax_utils.unreplicate(y)\n"),
        ("JXD203", "y = jax.pmap(g, **options)(x)\nz = jax_utils.unreplicate(y)\n"),
        ("JXD203", "z = jax_utils.unreplicate(load())\n"),
        ("JXD203", "y = jax.device_get(jax.pmap(g)(x))\nz = jax_utils.unreplicate(y)\n"),
        ("JXD203", "y = jnp.stack([x] * jax.device_count())\nz = jax_utils.unreplicate(y)\n"),
        ("JXD203", "y = jax.pmap(lambda x: x * 2, out_axes=1)(x)[0]\n"),
        ("JXD203", "y = (jax.pmap(lambda x: x * 2)(x))[0]\n"),
        ("JXD301", "y = (jax.lax.all_gather(x, 'i')).mean(0)\n"),
        ("JXD301", "y = jax.lax.all_gather(x, 'i').mean(0  # of all\n)\n"),
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
