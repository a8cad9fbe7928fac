"""Which of many words a file holds, and whether it sees JAX from inside only.

In the 34 MB of jax, scenic and flax that say jax, to search for each word takes 1.3 s. To split
them into sets of words, and to look those up, takes 0.8 s.
"""

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Phrases:
    """Phrases such as `pmap`, `jax.jit`, `import jax as`, to be looked for in many files.

    Their words must stand as words of their own in the file, but for those with a star: there may
    be more of the word on its side, as in `*pmap*` and `common_utils.shard*`.

    >>> phrases = Phrases([b"jax.jit", b"jax.pmap", b"pmap", b"*pmap*"])
    >>> sorted(phrases.held_by(b"f = jax.jit(g)  # not pmapped"))
    [b'*pmap*', b'jax.jit']
    """

    def __init__(self, phrases: Iterable[bytes]):
        self._by_word: dict[bytes, list[_Phrase]] = {}  # by one of their words
        self._of_parts: list[_Phrase] = []
        for phrase in map(_taken_apart, dict.fromkeys(phrases)):
            word = max(phrase.words, key=len, default=None)  # the longest is the rarest
            same = self._of_parts if word is None else self._by_word.setdefault(word, [])
            same.append(phrase)

    def held_by(self, data: bytes) -> frozenset[bytes]:
        """Those that a file holds."""
        return frozenset(self._held_by(data))

    def _held_by(self, data: bytes) -> Iterator[bytes]:
        text = data
        if data[:9].lstrip(_BEFORE_JSON).startswith(b"{"):  # a notebook, where lines end with "\\n"
            text = data.replace(b"\\n", b" ")
        words = set(text.translate(_BLANKS).split())
        has = functools.cache(b" ".join([b"", *words, b""]).__contains__)
        found = words.intersection(self._by_word)
        for phrase in (*self._of_parts, *(each for word in found for each in self._by_word[word])):
            if phrase.words <= words and all(map(has, phrase.parts)) and phrase.rest in data:
                yield phrase.text


class _Phrase(NamedTuple):
    text: bytes
    words: frozenset[bytes]
    parts: tuple[bytes, ...]  # of words, with a blank for the end of one
    rest: bytes  # what else must be found; empty where that is all


def _taken_apart(text: bytes) -> _Phrase:
    all_words = text.translate(_BLANKS_AND_STARS).split()
    words = frozenset(word for word in all_words if b"*" not in word)
    parts = tuple(b" %s " % word for word in all_words if b"*" in word)
    parts = tuple(part.replace(b" *", b"").replace(b"* ", b"") for part in parts)
    rest = b"" if all_words == [text] else text.replace(b"*", b"")
    return _Phrase(text, words, parts, rest)


_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
# All but letters, digits, underscores, and what is not ASCII.
_BLANKS = re.sub(rb"[^\w\x80-\xff]", b" ", bytes(range(256)))
_BLANKS_AND_STARS = re.sub(rb"[^\w*\x80-\xff]", b" ", bytes(range(256)))


def is_internal(data: bytes) -> bool:
    r"""Whether a file sees JAX through its private modules only, as those of JAX itself do.

    >>> is_internal(b"import functools\nfrom jax._src import core\n")
    True
    >>> is_internal(b"import jax\nfrom jax._src import core\n")
    False
    """
    if b"jax._src" not in data:
        return False
    seen = False
    for found in _IMPORT.finditer(data):
        name = found[1] or found[2]
        seen = seen or name.startswith(b"jax._src")
        if not name.startswith((b"jax._src", b"jaxlib")) and name.split(b".")[0] not in _OTHERS:
            return False
        if found[3]:  # `import a, b`
            return False
    return seen  # the imports of a notebook stand in strings, and show nothing


_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import\b|import[ \t]+([.\w]+)[^\n,;]*([,;]?))",
    re.MULTILINE,
)
_OTHERS = {b"numpy", b"ml_dtypes", b"opt_einsum", b"absl", b"scipy"}
_OTHERS |= {name.encode() for name in sys.stdlib_module_names}
