"""Words for users, in both halves: a request that cannot be followed, hints, counted things."""

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


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "array"), counted(2, "array")
    ('1 array', '2 arrays')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
