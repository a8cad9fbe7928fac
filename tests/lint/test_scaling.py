"""The work that one file takes grows as its size, whatever the file holds."""

import json
import sys
from collections.abc import Callable

import pytest

from jax_dist.lint.engine.linter import RULES, Examiner

_TOP = "import functools\nimport jax\nimport jax.numpy as jnp\n"


def _notebook(n: int) -> str:
    cell = {
        "cell_type": "code",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "source": ["%time f(x)\n", "y = jax.pmap(f)(x)\n", "!ls\n"],
    }
    book = {"cells": [cell] * n, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1)


def _deep(n: int) -> str:
    """Blocks as deep as Python allows, again and again."""
    deep = "".join(f"{'  ' * depth}if x:\n" for depth in range(40))
    return _TOP + (deep + f"{'  ' * 40}f = jax.pmap(f)\n{'  ' * 40}x = f(x)\n") * n


# What is drawn, by a size, of which each takes about 100 kB at 1,000.
SHAPES: dict[str, Callable[[int], str]] = {
    "a name bound again and again": lambda n: _TOP + "f = jax.pmap(g, 'i')\ny = f(x)\n" * n,
    "a name bound in branches": lambda n: _TOP + "if a:\n    y = jax.pmap(f)(y)\nz = y[0]\n" * n,
    "a name bound in loops": lambda n: _TOP + "for x in y:\n    y = jax.pmap(f)(y)\n" * n,
    "a function defined again and again": lambda n: (
        _TOP + "def f(x):\n    return f(x)\nf = jax.pmap(f)\n" * n
    ),
    "functions that read a name bound later": lambda n: (
        _TOP + "def g(x):\n    return f(x)[0]\nf = jax.pmap(g)\n" * n
    ),
    "one function": lambda n: (
        _TOP + "def main():\n" + "    s = jax.pmap(g)(s)\n    print(s[0])\n" * n
    ),
    "many names": lambda n: (
        _TOP + "".join(f"y{i} = f{i}(x)\ny{i} = jax.pmap(y{i})\n" for i in range(n))
    ),
    "attributes of one class": lambda n: (
        _TOP + "class A:\n  def f(self):\n" + "    self.g = jax.pmap(h)\n    self.g(x)\n" * n
    ),
    "one f-string": lambda n: _TOP + 'y = f"' + "{jax.pmap(f)(x)} " * n + '"\n',
    "one line": lambda n: _TOP + "y = [" + "jax.pmap(f)(x)[0], " * n + "]\n",
    "one line that is not ASCII": lambda n: _TOP + "y = ['é', " + "jax.pmap(f)(x), " * n + "]\n",
    "one sum": lambda n: _TOP + ("y = " + "jax.tree_map(f, y) + " * 200 + "0\n") * (n // 100),
    "one call in the other": lambda n: (
        _TOP + ("y = " + "jax.tree_map(f, " * 60 + "y" + ")" * 60 + "\n") * (n // 50)
    ),
    "blocks in blocks": lambda n: _deep(n // 50),
    "elif": lambda n: (
        _TOP + ("if a:\n  y = f\n" + "elif b:\n  y = jax.pmap(y)\n" * 200) * (n // 100)
    ),
    "imports": lambda n: _TOP + "".join(f"from jax import tree_map as f{i}\n" for i in range(n)),
    "one import": lambda n: _TOP + "import " + ", ".join(f"jax as j{i}" for i in range(n)) + "\n",
    "one from-import": lambda n: (
        "from jax import " + ", ".join(f"tree_map as f{i}" for i in range(n)) + "\n"
    ),
    "one import of pmap": lambda n: (
        "from jax import "
        + ", ".join(f"pmap as f{i}" for i in range(n))
        + "\n"
        + "".join(f"f{i}(g)\n" for i in range(n))
    ),
    "shard_map again and again": lambda n: (
        "from jax.experimental.shard_map import shard_map\n" + "f = shard_map(g, mesh, s, s)\n" * n
    ),
    "a chain of aliases": lambda n: (
        _TOP + "f0 = jax.pmap\n" + "".join(f"f{i + 1} = f{i}\n" for i in range(n)) + f"f{n}(g)\n"
    ),
    "a chain of functions": lambda n: (
        _TOP
        + "".join(f"def f{i}(x):\n    return f{i + 1}(x)\n" for i in range(n))
        + "jax.jit(f0)\n"
    ),
    "a chain of partials": lambda n: (
        _TOP
        + "f0 = jax.pmap\n"
        + "".join(f"f{i + 1} = functools.partial(f{i}, a)\n" for i in range(n))
    ),
    "functions that read arrays": lambda n: (
        _TOP + "a = jnp.ones((9999, 9))\n" + "@jax.jit\ndef f(x):\n    return x @ a\n" * n
    ),
    "one traced function": lambda n: (
        _TOP + "import time\n@jax.pmap\ndef f(x):\n" + "    x += time.time() * a\n" * n
    ),
    "gathers": lambda n: (
        _TOP + "def f(x):\n" + "    y = jax.lax.all_gather(x, 'i')\n    x = y.mean(0)\n" * n
    ),
    "noqa": lambda n: _TOP + "jax.pmap(f)  # noqa: JXD001" + ", JXD001" * 10 * n + "\n",
    "noqa without codes": lambda n: _TOP + "jax.pmap(f)  # noqa: " + "a b, " * 20 * n + "\n",
    "noqa with blanks": lambda n: _TOP + "jax.pmap(f)  # noqa: A1" + " " * 100 * n + "-\n",
    "noqa on each line": lambda n: _TOP + "jax.pmap(f)  # noqa: JXD002\n" * n,
    "blanks": lambda n: _TOP + "jax.pmap(f)" + " " * 100 * n + "\n",
    "comments": lambda n: _TOP + "# jax.pmap(f) " * 10 * n + "\n" + "#\n" * n,
    "continued lines": lambda n: _TOP + "y = jax.pmap(f) + \\\n" * n + "0\n",
    "gradients": lambda n: (
        _TOP
        + "from jax import P\ndef f(w, x):\n"
        + "    w = jax.grad(g)(w, x)\n" * n
        + "    return w\nh = jax.shard_map(f, mesh=m, in_specs=P(), out_specs=P())\n"
    ),
    "a notebook": lambda n: _notebook(n // 4),
    "a notebook of one cell": lambda n: json.dumps(
        {"cells": [{"cell_type": "code", "source": "%time x\n!ls\n" * n + "jax.pmap(f)"}]}
    ),
}


def _steps(text: str, path: str) -> int:
    """Count the calls that linting a file makes, of Python functions and of built-in ones."""
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += 1

    examiner = Examiner(frozenset(RULES))
    sys.setprofile(profile)
    try:
        examiner.examine(path, text.encode())
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_work_grows_as_the_size(shape: str):
    path = "/nowhere/case.ipynb" if "notebook" in shape else "/nowhere/case.py"

    few, many = (_steps(SHAPES[shape](n), path) for n in (200, 400))

    assert many < 2.5 * few + 2000


@pytest.mark.parametrize("character", "aé")
def test_findings_keep_a_part_of_a_long_line(character: str):
    line = f"y = ['{character}', " + "jax.pmap(f), " * 2000 + "]"

    findings = Examiner(frozenset({"JXD001"})).examine("case.py", f"import jax\n{line}".encode())

    assert len(findings) == 2000
    assert findings[-1].start.column == line.rindex("jax.pmap") + 1
    assert findings[-1].line_text == "…jax.pmap(f), ]"
    assert max(len(finding.line_text) for finding in findings) <= 1001
