"""The words in a file's bytes, by which the linter skips most files without parsing them."""

import functools
import re
from collections.abc import Callable

# A table for `bytes.translate`: blanks for all but letters, digits, underscores and non-ASCII.
_BLANKS = re.sub(rb"[^\w\x80-\xff]", b" ", bytes(range(256)))
# `from a.b import c, d`, over several lines too, with what the names are.
_FROM = re.compile(
    rb"from[ \t]+((?:jax|flax)[\w.]*)[ \t]+import\b([^(\n#\\]*(?:\\\r?\n[^(\n#\\]*)*"
    rb"(?:\([^)#]*(?:#.*[^)#]*)*)?)"
)
_AS = re.compile(rb"(\w+)(?:\s+as\s+(\w+))?")
_IMPORT_AS = re.compile(rb"import[ \t]+((?:jax|flax)[\w.]*)[ \t]+as[ \t]+(\w+)")
_INTERNAL_MODULES = (b"jax._src.", b"jax._src.lib.", b"jax._src.interpreters.")


class Words:
    """The words of a file, and what they show of the names that it uses, before it is parsed."""

    def __init__(self, data: bytes):
        self.data = data

    @functools.cached_property
    def all(self) -> frozenset[bytes]:
        """All words, each once."""
        return frozenset(self.data.translate(_BLANKS).split())

    def hold(self, *words: bytes) -> bool:
        """Return whether the file has any of these words."""
        return not self.all.isdisjoint(words)

    @functools.cached_property
    def imported(self) -> dict[bytes, set[bytes]]:
        """The names that imports give to a dotted name: `{b"jax.numpy": {b"jnp"}}`."""
        by_name: dict[bytes, set[bytes]] = {}
        for module, names in _FROM.findall(self.data):
            for name, alias in _AS.findall(names):
                by_name.setdefault(b"%s.%s" % (module, name), set()).add(alias or name)
        for module, alias in _IMPORT_AS.findall(self.data):
            by_name.setdefault(module, set()).add(alias)
        return by_name

    def may_name(self, name: bytes) -> bool:
        """Return whether the code may use or import a dotted name, as `jax.core.Primitive`."""
        module, _, last = name.rpartition(b".")
        forms = (b"%s.%s" % (spelling, last) for spelling in self._spellings(module))
        return name in self.imported or any(form in self.data for form in forms)

    def _spellings(self, module: bytes) -> set[bytes]:
        """Return how the code may write "jax.numpy": so, "numpy", or by an alias, "jnp"."""
        above, _, last = module.rpartition(b".")
        # Below `from jax._src import core`, the word "core" is not jax.core.
        is_internal = any(last in self.imported.get(home + last, ()) for home in _INTERNAL_MODULES)
        spellings = {module} if is_internal else {module, last}
        spellings |= self.imported.get(module, set())
        return spellings | {b"%s.%s" % (alias, last) for alias in self.imported.get(above, ())}


def may_use_jax(data: bytes) -> bool:
    """Return whether a file may import jax, or a library that has the functions of jax."""
    return any(library in data for library in (b"jax", b"flax", b"pmap"))  # equinox.filter_pmap


# The words of a file; those of the last file are kept, for all rules ask for them.
words_of: Callable[[bytes], Words] = functools.lru_cache(maxsize=1)(Words)
