"""Which parts of `mapped` a place needs, by what its file shows."""

import pytest

from jax_dist.lint.model import pmaps, sources
from jax_dist.lint.model.project import Project
from jax_dist.migrate import site_parts

_CASES = {
    "a plain pmap": ("f = jax.pmap(g, axis_name='i', donate_argnums=0)", ""),
    "axes": ("f = jax.pmap(g, in_axes=(None, 0))", "axes"),
    "axes of results and static values": (
        "f = jax.pmap(g, out_axes=1, static_broadcasted_argnums=1)",
        "axes static",
    ),
    "devices": ("f = jax.pmap(g, devices=d)", "devices"),
    "unlike devices": ("f = jax.pmap(g, devices=d)\nh = jax.pmap(g)", "axes devices"),
    "a decorator": ("@jax.pmap\ndef f(x):\n    return x", ""),
    "a value": ("g(jax.pmap)", "full"),
    "options that are not read": ("f = jax.pmap(g, **options)", "full"),
    "an option that is not known": ("f = jax.pmap(g, other=1)", "full"),
    "an alias with all its uses": ("p = jax.pmap\nf = p(g, in_axes=1)", "axes"),
    "an alias that goes on": ("p = jax.pmap\nk(p)", "full"),
    # --- mapped again
    "in a function, a function of the module": (
        "def f(x):\n    return jax.pmap(g)(x)",
        "again",
    ),
    "in a method, an attribute": (
        "class A:\n    def f(self, x):\n        return jax.pmap(self.g)(x)",
        "again",
    ),
    "a new function each time": ("def f(x):\n    return jax.pmap(lambda x: x)(x)", ""),
    "a new partial each time": (
        "def f(x):\n    return jax.pmap(functools.partial(g, 1))(x)",
        "",
    ),
    "a function of the function around": (
        "def f(x):\n    def h(x):\n        return x\n    return jax.pmap(h)(x)",
        "",
    ),
    "that in a loop": (
        "def f(x):\n    def h(x):\n        return x\n    for _ in x:\n        jax.pmap(h)(x)",
        "again",
    ),
    "a new one in each step of a loop": (
        "def f(x):\n    for _ in x:\n        h = lambda x: x\n        jax.pmap(h)(x)",
        "",
    ),
    "in a comprehension": ("y = [jax.pmap(g)(x) for x in xs]", "again"),
    "in main": ("def main(x):\n    return jax.pmap(g)(x)", ""),
    "in a loop of main": ("def main(x):\n    for _ in x:\n        jax.pmap(g)(x)", "again"),
    "in what main calls once": (
        "def train(x):\n    return jax.pmap(g)(x)\n\ndef main(x):\n    return train(x)",
        "",
    ),
    "in what main calls twice": (
        "def train(x):\n    return jax.pmap(g)(x)\n\ndef main(x):\n    return train(train(x))",
        "again",
    ),
    "what was made elsewhere": ("def f(x):\n    h = make(x)\n    return jax.pmap(h)(x)", "again"),
}


def _needed(text: str, *, several_processes: bool = False) -> set[str]:
    source = sources.read("a.py", f"import functools\nimport jax\n\n{text}\n".encode())
    module = Project().module(source)
    found: set[str] = set()
    for site in pmaps.sites(module):
        found |= site_parts.needed(module, site, several_processes=several_processes)
    return found


@pytest.mark.parametrize("name", _CASES)
def test_a_place_needs_what_its_text_shows(name: str):
    text, parts = _CASES[name]

    assert _needed(text) == set(parts.split())


def test_several_processes_are_for_the_program_to_say():
    assert _needed(_CASES["axes"][0], several_processes=True) == {"axes", "processes"}
