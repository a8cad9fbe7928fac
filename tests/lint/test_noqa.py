"""Comments that switch findings off."""

import pytest

from jax_dist.lint.engine.linter import RULES, Examiner

_TOP = "import jax\n"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("jax.pmap(f)\n", ["JXD001"]),
        ("jax.pmap(f)  # noqa\n", []),
        ("jax.pmap(f)  # NOQA:JXD001\n", []),
        ("jax.pmap(f)  # noqa: E501, JXD001\n", []),
        ("jax.pmap(f)  # noqa: JXD0 for now\n", []),
        ("jax.pmap(f)  # noqa: JXD\n", []),
        ("jax.pmap(f)  # noqa: E501\n", ["JXD001"]),
        ("jax.pmap(f)  # noqa: JXD002\n", ["JXD001"]),
        ("jax.pmap(f)  # of noqa it says nothing\n", ["JXD001"]),
        ("jax.pmap(f)  # why # noqa: JXD001\n", []),
        ("x = '# noqa'; jax.pmap(f)\n", ["JXD001"]),
        ("# noqa: JXD001\njax.pmap(f)\n", ["JXD001"]),
        ("jax.jit(  # noqa: JXD002\n    jax.pmap(f))\n", ["JXD001"]),
        ("jax.jit(\n    jax.pmap(f)\n)  # noqa: JXD002\n", ["JXD001"]),
        ("g(\n    jax.pmap(f),\n)  # noqa: JXD001\n", ["JXD001"]),
        ("g(\n    jax.pmap(f),  # noqa: JXD001\n    jax.pmap(h),\n)\n", ["JXD001"]),
        ("if x:  # noqa: JXD001\n    jax.pmap(f)\n", ["JXD001"]),
        ("jax.pmap(f)  # noqa: JXD901\ndef (:\n", ["JXD901"]),
    ],
)
def test_noqa(text, codes):
    findings = Examiner(frozenset(RULES)).examine("a.py", (_TOP + text).encode())

    assert [finding.code for finding in findings] == codes
