"""Whether bytes hold one of many words: those that begin alike are looked for together.

One search a word takes 1.4 s for the 37 MB of jax, scenic and flax; this takes 0.5 s.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable

_ALIKE = 4  # bytes; "jax." and "expe" each begin many words
_WORTH_A_PATTERN = 3  # words; a plain search is faster than a pattern, but only for one


def any_of(words: Iterable[bytes]) -> Callable[[bytes], bool]:
    """A function that says whether one of the words is in what it is given.

    >>> found = any_of([b"jax.pmap", b"jax.jit", b"jax.grad", b"psum"])
    >>> found(b"f = jax.jit(g)"), found(b"f = jax.vmap(g)")
    (True, False)
    """
    groups: dict[bytes, list[bytes]] = {}
    for word in dict.fromkeys(words):
        groups.setdefault(word[:_ALIKE], []).append(word)
    plain = [word for group in groups.values() if len(group) < _WORTH_A_PATTERN for word in group]
    patterns = [_pattern(group) for group in groups.values() if len(group) >= _WORTH_A_PATTERN]

    def found(data: bytes) -> bool:
        for word in plain:
            if word in data:
                return True
        # A plain search is much faster than a pattern, which most files then need not.
        return any(start in data and pattern.search(data) for start, pattern in patterns)

    return found


def is_internal(data: bytes) -> bool:
    r"""Whether a file sees JAX through its private modules only, as those of JAX itself do.

    >>> is_internal(b"import functools\nfrom jax._src import core\n")
    True
    >>> is_internal(b"import jax\nfrom jax._src import core\n")
    False
    """
    if b"jax._src" not in data:
        return False
    for found in _IMPORT.finditer(data):
        name, more = found.groups()
        if not name.startswith((b"jax._src", b"jaxlib")) and name.split(b".")[0] not in _OTHERS:
            return False
        if more and found[0].lstrip().startswith(b"import"):  # `import a, b`
            return False
    return True


_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([.\w]+)[^\n,;]*([,;]?)", re.MULTILINE)
_OTHERS = {b"numpy", b"ml_dtypes", b"opt_einsum", b"absl", b"scipy"}
_OTHERS |= {name.encode() for name in sys.stdlib_module_names}


def _pattern(words: list[bytes]) -> tuple[bytes, re.Pattern[bytes]]:
    """The common beginning, and a pattern in which it stands outside of the alternatives."""
    common = os.path.commonprefix([word.decode("latin-1") for word in words]).encode("latin-1")
    rest = b"|".join(re.escape(word[len(common) :]) for word in words)
    return common, re.compile(re.escape(common) + b"(?:" + rest + b")")
