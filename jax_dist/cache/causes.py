"""Why a program is not found in the cache: each cause by name, and what to do about it."""

import dataclasses
import re

from jax_dist import _codes

UNKNOWN = "unknown"

# As users read it, the most telling causes first: what stands beside the program, what is inside
# it, and what keeps a program of the same key from being found.
_TEXT = """
xla-flags: The XLA flags differ; also a flag that only repeats its default counts.
    help: Give the same flags in XLA_FLAGS and on the command line in each run.
cache-directory: The cache has another path, which through jax 0.10.2 is also part of the key.
    help: Keep the path, as jax_dist.cache.enable() does; or, to move a cache, set
    jax_persistent_cache_enable_xla_caches to 'none'.
compiler-options: The compiler_options differ.
    help: Give the same ones in each run.
device-order: The same devices stand in another order.
    help: Build the mesh from devices in a fixed order, such as that of jax.devices().

custom-partitioning: A custom_partitioning operation holds the address of a Python object.
    help: Let jax_dist.rewrite route it through shard_map.
shapes: The arguments have other shapes or types.
    help: Compile for the same shapes in each run; pad what varies.
order: The same operations or names stand in another order: that of a set, of a dict that is
    filled in varying order, or of a shuffled list.
    help: Iterate in sorted order.
axis-name: An axis of the mesh has another name: each process makes up a new one.
    help: Give it a fixed name.
unnamed-pmap: A pmap without axis_name is named by the address of an object, in jax 0.8 to 0.10.1.
    help: Give it an axis_name, use jax_dist.pmap, or a newer jax.
function-name: A function has another name: each process makes up a new one.
    help: Give it a fixed __name__.
result-name: Each process makes up a new key of a dict that the function returns.
    help: Return fixed keys.
captured-array: An array inside the program has other values: the function takes it from around
    it, or makes it with NumPy while it is traced.
    help: Pass it as an argument, or let jax_dist.rewrite or jax_dist.pmap lift it.
traced-value: A number inside the program differs: it is computed again while tracing, from random
    numbers, the time, or a static argument.
    help: Pass it as an array argument.

host-callback: It calls back into Python (jax.debug.print, pure_callback, io_callback), and this
    jax never writes such a program.
    help: Take the callback out, or use jax 0.11 or later.
rank: It was compiled by a process other than the first, which JAX does not let write.
    help: Call jax_dist.cache.enable() in each process.
cache-off: The persistent cache is off: jax_enable_compilation_cache is False.
    help: Call jax_dist.cache.enable().
write-failed: JAX tried to write it, and could not.
    help: Look for a warning of JAX: a full disk, or a folder that cannot be written.
not-in-every-run: The program did not compile it in every run.
    help: Nothing, if it depends on the data; else make the run repeatable.
not-found-again: It was written, and the next run did not find it.
    help: Look for a warning of JAX about the entry.

unknown: Cause unknown.
    help: Look at the lines that differ.
"""

# Rules of `jax-dist lint` that find a cause in the source.
_CODES = {
    "cache-directory": _codes.CACHE_CONFIG,
    "custom-partitioning": _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP,
    "order": _codes.SET_ORDER_IN_TRACE,
    "captured-array": _codes.CAPTURED_ARRAY,
    "traced-value": _codes.UNSTABLE_TRACE_VALUE,
    "host-callback": _codes.CALLBACK_NOT_CACHED,
    "cache-off": _codes.CACHE_CONFIG,
}
_ENTRY = re.compile(r"^([\w-]+): (.+?)^    help: (.+?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cause:
    """One cause of a miss."""

    name: str
    why: str  # a sentence
    remedy: str  # what to do
    code: str | None = None  # of the rule


_CAUSES = {
    name: _Cause(name, " ".join(why.split()), " ".join(remedy.split()), _CODES.get(name))
    for name, why, remedy in _ENTRY.findall(_TEXT)
}
NAMES = tuple(_CAUSES)
_MOST_DETAILS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class CauseFinding:
    """A cause, and where it was seen."""

    cause: _Cause
    details: tuple[str, ...] = ()  # such as "train.py:12: tensor<f32>: 0.25, then 0.75"

    def __str__(self) -> str:
        code = f"{self.cause.code} " if self.cause.code else ""
        details = (f"  {detail}" for detail in self.details)
        head = f"{code}{self.cause.name}: {self.cause.why}"
        return "\n".join((head, *details, f"help: {self.cause.remedy}"))


def finding(name: str, *details: str) -> CauseFinding:
    """A finding, by the name of its cause, with the first few of its details."""
    told = tuple(dict.fromkeys(details))
    more = len(told) - _MOST_DETAILS
    rest = (f"and {more} more",) if more > 0 else ()
    return CauseFinding(_CAUSES[name], (*told[:_MOST_DETAILS], *rest))
