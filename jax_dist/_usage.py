"""What the user asked for cannot be done as asked: the error, and hints at what was meant."""

from collections.abc import Iterable


class MisuseError(ValueError):
    """A path, an option or a setting that cannot be followed; its text says what to do."""


def hint(word: str, known: Iterable[str], otherwise: str) -> str:
    """A sentence that names the nearest known word, or says `otherwise`.

    >>> hint("selct", ["select", "ignore"], "The settings are: ignore, select.")
    'Did you mean select?'
    """
    import difflib  # only here: it is slow to load, and rarely needed

    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise
