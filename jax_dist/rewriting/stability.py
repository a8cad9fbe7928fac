"""Whether a fresh process finds a program in the persistent cache, judged by the program itself.

The key of the cache is a hash of the program's text, so whatever differs between two processes in
that text, differs in the key. Some of it shows in a single process: addresses of Python objects, in
operations or in names. Some does not: an order taken from a set, random names without a pattern.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import jax

from jax_dist import _compat


@dataclasses.dataclass(frozen=True, slots=True)
class CacheVerdict:
    """Whether a fresh process would find this program in the persistent cache."""

    stable: bool  # as far as the program shows
    causes: tuple[str, ...] = ()  # why not, each with what to do


def verdict_of(lowered: jax.stages.Lowered, captured: Sequence[str] = ()) -> CacheVerdict:
    """Judges a lowered program.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` returns.
      captured: the names of the arrays that are part of the program, to be told in the cause.
    """
    text = lowered.as_text()
    causes = (*_operations(text), *_names(text), *_values(captured))
    return CacheVerdict(stable=not causes, causes=causes)


def _operations(text: str) -> Iterator[str]:
    if "@CustomSPMDPartitioning(" in text:
        yield (
            "A custom_partitioning operation holds the address of a Python object, another one in "
            "each process. Let rewrite route it through shard_map (partitioning='route')."
        )
    if not _compat.CACHES_HOST_CALLBACKS and _CALLBACK.search(text):
        yield (
            "It calls back into Python (debug.print, pure_callback, io_callback), and this jax, "
            f"{jax.__version__}, never writes such a program. Take the callback out, or use jax "
            "0.12 or later."
        )


def _names(text: str) -> Iterator[str]:
    for what, pattern in _NAMED.items():
        names = dict.fromkeys(name for found in pattern.findall(text) for name in _listed(found))
        for name in names:
            if _MADE_UP.search(name):
                yield (
                    f"The name of {what}, {name!r}, looks made from an address, an id or a time, "
                    "which differ in each process. Give it a fixed name."
                )


def _listed(found: str) -> list[str]:
    """The quoted names of a list, such as `"i"=4, "j"=2`; or the one name that was found."""
    return re.findall(r'"([^"]*)"', found) or [found]


def _values(captured: Sequence[str]) -> Iterator[str]:
    if captured:
        verb = "is" if len(captured) == 1 else "are"
        yield (
            f"{', '.join(captured)} {verb} part of the program, so the key depends on the values: "
            "random ones differ in each process. Pass arrays as arguments, or let rewrite lift "
            "them (captures='lift')."
        )


_CALLBACK = re.compile(r"stablehlo\.custom_call @\w*python\w*callback\(")
_NAMED = {
    "the program": re.compile(r'^module @("[^"]*"|[^\s{]+)', re.MULTILINE),
    "an inner function": re.compile(r'func\.func (?:private )?@("[^"]*"|[^\s(]+)\('),
    "a mesh axis": re.compile(r"sdy\.mesh @\S+ = <\[([^\]]*)\]"),
    "a result": re.compile(r'jax\.result_info = "((?:[^"\\]|\\.)*)"'),
}
_MADE_UP = re.compile(
    r"0x[0-9a-f]{6,}"  # an address
    r"|\d{9,}"  # an id, or seconds since 1970
    r"|(?<![0-9a-z])[0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}",  # a UUID
    re.IGNORECASE,
)
