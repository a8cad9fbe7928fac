"""Findings that must come without a fix: what it would need is not shown."""

import pytest

from jax_dist.lint.engine import linter
from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Code
from jax_dist.lint.model.semantic_model import Module

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
        ("JXD406", "set = lambda d: jax.config.update('jax_compilation_cache_dir', d)\n"),
        ("JXD306", "print(f'{jax.lax.psum(1, \"i\")} devices')\n"),
        ("JXD306", "print(f'{f\"{jax.lax.psum(1, chr(105))}\"} devices')\n"),
        ("JXD406", "if d: jax.config.update('jax_compilation_cache_dir', d)\n"),
    ],
)
def test_no_fix(code: Code, text: str):
    module = Module(sources.read("case.py", (_TOP + text).encode()))
    findings = linter.check_module(module, frozenset((code,)))

    assert [finding.fix for finding in findings] == [None]
