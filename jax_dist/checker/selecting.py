"""Which rules are on: what `select`, `ignore` and their kin leave."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax_dist.checker.findings import Code
from jax_dist.checker.misuse import MisuseError, hint
from jax_dist.checker.page import Page

ALWAYS: Code = "JXD901"  # what cannot be parsed was not checked, so it must be said


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What one place (the settings, or the command line) asks for."""

    select: tuple[str, ...] | None = None  # None: nothing is said
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


def resolve(selector: str, pages: Mapping[Code, Page]) -> frozenset[Code]:
    """The codes that a code, the beginning of one, or a name stands for; empty if unknown."""
    upper = selector.upper()
    if upper == "ALL":
        return frozenset(pages)
    if upper.startswith("JXD"):
        return frozenset(code for code in pages if code.startswith(upper))
    return frozenset(code for code, page in pages.items() if page.name == selector.lower())


def selected(choices: Sequence[Choice], pages: Mapping[Code, Page]) -> frozenset[Code]:
    """The codes that are on after all choices, of which a later one speaks the last word.

    Within a choice the more precise selector wins: `--select JXD101 --ignore JXD1` keeps JXD101.

    Raises:
      MisuseError: a selector names no rule.
    """
    on = {code for code, page in pages.items() if page.default}
    for choice in choices:
        if choice.select is not None:
            on = {ALWAYS} & set(pages)
        for selector, turns_on in _by_precision(choice):
            codes = known(selector, pages)
            on = on | codes if turns_on else on - codes
    return frozenset(on)


def known(selector: str, pages: Mapping[Code, Page]) -> frozenset[Code]:
    """As `resolve`, for a selector that must name something.

    Raises:
      MisuseError: it names no rule.
    """
    codes = resolve(selector, pages)
    if not codes:
        names = [name for code, page in pages.items() for name in (code, page.name)]
        word = selector.upper() if selector.upper().startswith("JXD") else selector.lower()
        remedy = hint(word, names, "`jax-dist rule --all` lists the rules.")
        raise MisuseError(f"no rule is called {selector!r}. {remedy}")
    return codes


def split(texts: Iterable[str]) -> tuple[str, ...]:
    """`["JXD1,JXD2", "JXD401"]` as a tuple of three."""
    return tuple(word for text in texts for word in text.replace(",", " ").split())


def _by_precision(choice: Choice) -> list[tuple[str, bool]]:
    """Selectors with whether they turn on; the precise ones, and then ignoring ones, come last."""
    asked = [(selector, True) for selector in (*(choice.select or ()), *choice.extend_select)]
    asked += [(selector, False) for selector in choice.ignore]
    return sorted(asked, key=lambda pair: (_precision(pair[0]), not pair[1]))


def _precision(selector: str) -> int:
    upper = selector.upper()
    if upper == "ALL":
        return 0
    return len(upper) if upper.startswith("JXD") else len("JXD000")
