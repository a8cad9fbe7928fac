"""Files to try the checker on: drawn programs, other layouts of a file, and damaged files."""

import ast
import io
import itertools
import json
import random
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence

from hypothesis import strategies as st

# --- programs of the kind that the rules speak of

_IMPORTS = (
    ("import jax", "jax"),
    ("import jax as J", "J"),
    ("import numpy, jax as ζ", "ζ"),
    ("from jax import pmap, lax, tree_util, random, jit, local_device_count\nimport jax", "jax"),
    ("if True:\n    import jax\nelse:\n    from a import jax as nothing", "jax"),
    ("try:\n    import jax\nexcept ImportError:\n    import jax", "jax"),
)
_HEADERS = (
    "",
    '"""A docstring."""\n',
    '"""Zwei\nZeilen, ein Ö."""\nfrom __future__ import annotations\n',
    "#!/usr/bin/env python\n# a comment\n\n",
)
_HELPERS = """\
import functools
import flax.jax_utils as U
from flax.training import common_utils
from functools import partial as {partial}
import jax.numpy as jnp
import numpy as np
from jax import lax as L
"""
_BODIES = (
    "def {f}(x, y=0, *rest, **others):\n    return {jax}.lax.pmean(x, 'i') + y\n",
    "def {f}(state, batch):\n"
    "    g = {jax}.grad(lambda w: (w * batch).sum())(state)\n"
    "    return state - L.pmean(g, axis_name='i'), {{'loss': L.psum(1, 'i')}}\n",
    "def {f}(x): return L.all_gather(x, 'i').mean(0)\n",
    "{f} = lambda x, n=3: x * n\n",
    "class {f}:\n    def __init__(self, x): self.x = x\n    def __call__(self, x): return self.x\n",
    "async def {f}(x):\n    return [y async for y in x]\n",
    "def {f}(x):\n    match x:\n        case [{jax}, *jnp]: return jnp\n"
    "        case {{**L}}: return L\n        case int() as U: return U\n"
    "        case True | None: return 1\n        case {f}.k | f.g(x=[]): return 2\n    return x\n",
    "def {f}(x):\n    global y, z\n    try: y = z = x\n    except (A, B) as e: raise e from e\n"
    "    else: del z\n    finally: assert x, f'{{x!r:{{y}}}}'\n    return x\n",
    "def {f}(x, /, y: int = 3, *, z: 'str' = '', **k) -> None:\n    nonlocal_ = lambda: (yield)\n"
    "    a: list[int] = [*x, *(b for c in x for b in c if b if c)]; a[1:, ...] += {{**k, 'a': 1}}\n"
    "    while x: break\n    else: return await_ @ x if x else not x\n"
    "    return x[:, ::2, None], \\\n        a\n",
)
_OPTIONS = (
    "",
    ", 'i'",
    ", axis_name='i'",
    ', axis_name="bätch", donate_argnums=(0, 1)',
    ", in_axes=(0, None), out_axes=0",
    ", axis_name='i', in_axes=({{'a': 0}}, None), static_broadcasted_argnums=(1,)",
    ", devices={jax}.local_devices()[:2], backend=None",
    ", **options",
    ", *args",
    ", axis_name=AXIS, donate_argnums=tuple(range(2)),",
)
_SITES = (
    "{g} = {jax}.pmap({f}{options})\n",
    "{g}, other = {jax}.pmap({f}{options}), 1\n",
    "{g} = {partial}({jax}.pmap{options})({f})\n",
    "@{partial}({jax}.pmap{options})\ndef {g}(x, y): return x\n",
    "@{jax}.pmap\n@{partial}({jax}.jit, static_argnums=1)\ndef {g}(x, y): return x\n",
    "@{jax}.jit\n@{jax}.pmap\ndef {g}(x): return x\n",
    "{g} = {jax}.jit({jax}.pmap({f}{options}))\n",
    "{g} = {jax}.pmap({jax}.vmap({partial}({f}, y=2)){options})\n",
    "{g} = {jax}.pmap(lambda x: L.psum(x, 'i'), 'i')\n",
    "p = {jax}.pmap; {g} = p({f}{options}); del p\n",
    "if ({g} := {jax}.pmap({f}{options})): pass\n",
    "for {g} in [{jax}.pmap({f}{options}), ]: {g}(1)\n",
    "class Owner:\n    def __init__(self):\n        self.{g} = {jax}.pmap(self.{f}{options})\n"
    "    def {f}(self, x):\n        return self.{g}(x)[0]\n",
    "def make():\n    table = jnp.arange(8.0)\n    {g} = {jax}.pmap(lambda x: x + table)\n"
    "    return {g}\n{g} = make()\n",
    "with mesh as {g}: {jax}.pmap({f}{options})(1)\n",
)
_USES = (
    "y = {g}(U.replicate(x), x.reshape({jax}.local_device_count(), -1, *x.shape[1:]))\n",
    "state, metrics = {g}(state, batch); loss = metrics['loss'][0]\n",
    "out = U.unreplicate({g}(x)); out = {jax}.tree_util.tree_map(lambda x: x[0], {g}(x))\n",
    "x = {jax}.device_put_replicated(x, {jax}.local_devices())\n",
    "x = {jax}.device_put_sharded([x] * 8, devices={jax}.devices())\n",
    "keys = {jax}.random.split({jax}.random.PRNGKey(0), {jax}.local_device_count())\n",
    "print('ü', {g}(common_utils.shard(x)), f'{{{g}(x)[0]!r:>{{width}}}} é')\n",
    "n = L.psum(1, 'i') ; m = L.psum(1, axis_name=('i', 'j'))  # Größe\n",
    "x = {jax}.tree_map(lambda x: x[0], {g}(x)); {jax}.tree_util.tree_map(np.asarray, x)\n",
    "{jax}.config.update('jax_pmap_shmap_merge', True)\n",
    "from jax.experimental.shard_map import shard_map as S\n"
    "{g} = S({f}, mesh=mesh, in_specs=None, out_specs=None, check_rep=False)\n",
    "from jax.experimental import pjit\n{g} = pjit.pjit({f})\n",
    "x = {g}.lower(x).compile(); {g}.__wrapped__\n",
    "mesh = {jax}.make_mesh((8,), ('i',)); y = {jax}.lax.pvary(x, ('i',))\n",
    "for batch in U.prefetch_to_device(iter(data), 2): state = {g}(state, batch)\n",
    "y = [{g}(x)[0] for x in xs if (z := {g}(x))]\n",
    "del {g}\n",
    "global_ = {g}; {g} = None\n",
)


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A file that parses and holds pmap in some of its many forms."""
    import_line, jax = draw(st.sampled_from(_IMPORTS))
    names = {
        "jax": jax,
        "partial": draw(st.sampled_from(("partial", "functools.partial"))),
        "f": draw(st.sampled_from(("train_step", "f", "größe", "pmap_fn"))),
        "g": draw(st.sampled_from(("p_step", "g", "pmapped"))),
    }
    helpers = _HELPERS.format(partial="partial")
    parts = [draw(st.sampled_from(_HEADERS)), import_line, "\n", helpers]
    parts.append(draw(st.sampled_from(_BODIES)).format(**names))
    for _ in range(draw(st.integers(1, 3))):
        options = draw(st.sampled_from(_OPTIONS)).format(**names)
        site = draw(st.sampled_from(_SITES)).format(**names, options=options)
        uses = "".join(draw(st.lists(st.sampled_from(_USES), max_size=3))).format(**names)
        parts.append(_placed(draw(st.sampled_from(_PLACES)), site + uses))
    code = "".join(parts)
    ast.parse(code)
    return code


_PLACES = ("", "def main(x, state, batch):\n", "if __name__ == '__main__':\n", "class Trainer:\n")


def _placed(header: str, code: str) -> str:
    if not header:
        return code
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    return header + indented


# --- other layouts: they mean the same

Layout = Callable[[str, random.Random], bytes]


def spread_out(code: str, choice: random.Random) -> bytes:
    """Comments and line breaks between the tokens, wherever Python allows them.

    Dotted names and imports stay as they are: some rules first look for their usual spelling.
    """
    lines = code.splitlines(keepends=True)
    pieces: list[str] = []
    at = (1, 0)
    depth = strings = 0
    is_import = False
    last = ""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        start, end = token.start, token.end
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        gap = _between(lines, at, start)
        plain = last not in ("", "\n") and token.type not in _ENDS and not strings
        is_import = token.string in ("import", "from") or (is_import and plain)
        if plain and not is_import and "." not in (last, token.string) and start[0] == at[0]:
            gap += _filler(choice, depth)
        pieces.append(gap)
        pieces.append(_between(lines, start, end))
        strings += token.type == _STRING_START
        strings -= token.type == _STRING_END
        depth += (token.string in _OPENING) - (token.string in _CLOSING) if not strings else 0
        at, last = end, "\n" if token.type in _ENDS else token.string
    pieces.append(_between(lines, at, (len(lines) + 1, 0)))
    return "".join(pieces).encode()


_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")
_ENDS = (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT)
_STRING_START = getattr(tokenize, "FSTRING_START", -1)  # since Python 3.12
_STRING_END = getattr(tokenize, "FSTRING_END", -1)


def _filler(choice: random.Random, depth: int) -> str:
    if choice.random() < 0.8:
        return ""
    if depth:
        return choice.choice(("  # ein Wörtchen, ) (\n", "\n\n\t", "   ", " \\\n  "))
    return choice.choice((" \\\n", "  ", " \\\n\t "))


def _between(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] > len(lines):
        return ""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    last = lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else ""
    between = lines[start[0] : end[0] - 1]
    return "".join((lines[start[0] - 1][start[1] :], *between, last))


def windows(code: str, choice: random.Random) -> bytes:
    """Lines that end as on Windows, behind a byte order mark."""
    del choice
    return b"\xef\xbb\xbf" + code.replace("\n", "\r\n").encode()


def old_mac(code: str, choice: random.Random) -> bytes:
    """Lines that end in a lone carriage return."""
    del choice
    return code.replace("\n", "\r").encode()


def without_last_newline(code: str, choice: random.Random) -> bytes:
    """Ends within its last line."""
    del choice
    return code.rstrip("\n").encode()


def tabbed(code: str, choice: random.Random) -> bytes:
    """Tabs in the place of four spaces, form feeds between functions."""
    del choice
    lines = code.split("\n")
    return (
        "\n".join(
            re.sub(r"^(?: {4})+", lambda match: "\t" * (len(match[0]) // 4), line) for line in lines
        )
        .replace("\nclass ", "\n\f\nclass ")
        .encode()
    )


def latin(code: str, choice: random.Random) -> bytes:
    """In latin-1, and says so; what latin-1 cannot spell is spelled otherwise."""
    del choice
    code = code.replace("ζ", "zeta")
    return f"# -*- coding: latin-1 -*-\n{code}".encode("latin-1")


LAYOUTS: dict[str, Layout] = {
    "comments and line breaks": spread_out,
    "Windows": windows,
    "old Mac": old_mac,
    "no last newline": without_last_newline,
    "tabs": tabbed,
    "latin-1": latin,
}


def notebook(code: str, choice: random.Random) -> bytes:
    """The statements in cells, between magics, prose and output."""
    lines = code.splitlines(keepends=True)
    starts = [_first_line(node) - 1 for node in ast.parse(code).body]
    starts = [start for start in dict.fromkeys(starts) if not lines[start - 1].endswith("\\\n")]
    cuts = sorted({0, len(lines), *choice.sample(starts, min(3, len(starts)))})
    cells: list[dict[str, object]] = []
    for start, end in itertools.pairwise(cuts):
        text = choice.choice(("", "%matplotlib inline\n", "!pip list\n", "%%time\n"))
        source = (text + "".join(lines[start:end])).rstrip("\n").splitlines(keepends=True)
        cells.append({"cell_type": "markdown", "metadata": {}, "source": ["jax.pmap(f), é"]})
        cells.append(_code_cell(source if choice.random() < 0.5 else "".join(source)))
    kernel = {"kernelspec": {"language": "python", "name": "python3", "display_name": "P"}}
    content = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    text = json.dumps(content, indent=choice.choice((None, 1)), ensure_ascii=choice.random() < 0.5)
    return text.encode() + choice.choice((b"", b"\n"))


def _code_cell(source: object) -> dict[str, object]:
    output = {"output_type": "stream", "name": "stdout", "text": ["jax.pmap(f)\n"]}
    return {
        "cell_type": "code",
        "execution_count": 1,
        "metadata": {},
        "outputs": [output],
        "source": source,
    }


# --- damage: the result may be anything

_INSERTED = (
    b"(", b")", b"[", b"{", b":", b",", b";", b"=", b"*", b"**", b"@", b"#", b"\\\n", b"\n", b"\r",
    b"\t", b" ", b"'", b'"', b'"""', b"\xc3\xa9", b"\xf0\x9d\x94\xb8", b"\x00", b"\xff", b"\x0c",
    b"lambda: ", b"not ", b"await ", b"yield ", b"*_, ", b":= ", b"pmap", b"jax.", b"[0]", b"(x)",
    b"global jax\n", b"import jax as pmap\n", b"# noqa\n", b"# noqa: JXD001\n", b"\xe2\x80\xa8",
)  # fmt: skip
_NAMES = re.compile(rb"[A-Za-z_][A-Za-z_0-9]*")


def damaged(code: bytes, choice: random.Random) -> bytes:
    """The file after one to four careless edits."""
    for _ in range(choice.randint(1, 4)):
        code = choice.choice(_DAMAGES)(code, choice)
    return code


def _lines_changed(change: Callable[[list[bytes], random.Random], None]):
    def apply(code: bytes, choice: random.Random) -> bytes:
        lines = code.splitlines(keepends=True)
        if lines:
            change(lines, choice)
        return b"".join(lines)

    return apply


def _delete(lines: list[bytes], choice: random.Random) -> None:
    del lines[choice.randrange(len(lines))]


def _duplicate(lines: list[bytes], choice: random.Random) -> None:
    at = choice.randrange(len(lines))
    lines.insert(choice.randrange(len(lines)), lines[at])


def _swap(lines: list[bytes], choice: random.Random) -> None:
    one, other = choice.randrange(len(lines)), choice.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]


def _indent(lines: list[bytes], choice: random.Random) -> None:
    start = choice.randrange(len(lines))
    for at in range(start, min(len(lines), start + choice.randint(1, 6))):
        lines[at] = b"    " + lines[at]


def _dedent(lines: list[bytes], choice: random.Random) -> None:
    at = choice.randrange(len(lines))
    lines[at] = lines[at].lstrip(b" ")


def _join(lines: list[bytes], choice: random.Random) -> None:
    at = choice.randrange(len(lines))
    lines[at] = lines[at].rstrip(b"\r\n") + choice.choice((b"; ", b" ", b", "))


def _insert(code: bytes, choice: random.Random) -> bytes:
    at = choice.randint(0, len(code))
    return code[:at] + choice.choice(_INSERTED) + code[at:]


def _cut(code: bytes, choice: random.Random) -> bytes:
    start = choice.randint(0, len(code))
    return code[:start] + code[start + choice.randint(1, 40) :]


def _rename(code: bytes, choice: random.Random) -> bytes:
    """One name becomes another name of the file: everywhere, or at one place."""
    names = sorted(set(_NAMES.findall(code)))
    if not names:
        return code
    old, new = choice.choice(names), choice.choice(names)
    places = [match.start() for match in re.finditer(rb"\b%b\b" % old, code)]
    if choice.random() < 0.5:
        return re.sub(rb"\b%b\b" % old, new, code)
    at = choice.choice(places)
    return code[:at] + new + code[at + len(old) :]


_DAMAGES = (
    *map(_lines_changed, (_delete, _duplicate, _swap, _indent, _dedent, _join)),
    _insert,
    _cut,
    _rename,
    _rename,
)


def statements_shuffled(code: str, choice: random.Random) -> str:
    """The statements of one block in another order; it still parses."""
    tree = ast.parse(code)
    blocks = [node.body for node in ast.walk(tree) if isinstance(node, _BLOCKS)]
    block = choice.choice([block for block in blocks if len(block) > 1] or blocks)
    spans = [(_first_line(node) - 1, node.end_lineno or 0) for node in block]
    if any(one[1] > two[0] for one, two in zip(spans, spans[1:], strict=False)):
        return code  # two statements on a line
    lines = code.splitlines(keepends=True)
    one, two = sorted(choice.choices(spans, k=2))
    if one == two:
        return code
    before, between, after = lines[: one[0]], lines[one[1] : two[0]], lines[two[1] :]
    swapped = before + lines[slice(*two)] + between + lines[slice(*one)] + after
    changed = "".join(swapped)
    return changed if _parses(changed) else code


_BLOCKS = (ast.Module, ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.With)


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def spread(items: Sequence[str], count: int) -> Iterator[str]:
    """`count` of the items, at even distances."""
    step = max(1, len(items) // count)
    yield from items[::step][:count]
