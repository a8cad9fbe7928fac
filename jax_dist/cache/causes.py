"""Why a program is not found in the cache: each cause by name, and what to do about it."""

import dataclasses

from jax_dist import _codes


@dataclasses.dataclass(frozen=True, slots=True)
class _Cause:
    """One cause of a miss."""

    name: str
    why: str  # a sentence
    remedy: str  # what to do
    code: str | None = None  # of the rule of `jax-dist lint` that finds it in the source


UNKNOWN = "unknown"

_ALL = (
    # The program differs.
    _Cause(
        "captured-array",
        "An array inside the program has other values: the function takes it from around it, or "
        "makes it with NumPy while it is traced.",
        "Pass it as an argument, or let jax_dist.rewrite or jax_dist.pmap lift it.",
        _codes.CAPTURED_ARRAY,
    ),
    _Cause(
        "custom-partitioning",
        "A custom_partitioning operation holds the address of a Python object.",
        "Let jax_dist.rewrite route it through shard_map.",
        _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP,
    ),
    _Cause(
        "traced-value",
        "A number inside the program differs: it is computed again while tracing, from random "
        "numbers, the time, or a static argument.",
        "Pass it as an array argument.",
        _codes.UNSTABLE_TRACE_VALUE,
    ),
    _Cause(
        "order",
        "The same operations or names stand in another order: that of a set, of a dict that is "
        "filled in varying order, or of a shuffled list.",
        "Iterate in sorted order.",
        _codes.SET_ORDER_IN_TRACE,
    ),
    _Cause(
        "function-name",
        "A function has another name: each process makes up a new one.",
        "Give it a fixed __name__.",
    ),
    _Cause(
        "axis-name",
        "An axis of the mesh has another name: each process makes up a new one.",
        "Give it a fixed name.",
    ),
    _Cause(
        "unnamed-pmap",
        "A pmap without axis_name is named by the address of an object, in jax 0.8 to 0.10.1.",
        "Give it an axis_name, use jax_dist.pmap, or a newer jax.",
    ),
    _Cause(
        "result-name",
        "Each process makes up a new key of a dict that the function returns.",
        "Return fixed keys.",
    ),
    _Cause(
        "shapes",
        "The arguments have other shapes or types.",
        "Compile for the same shapes in each run; pad what varies.",
    ),
    _Cause(
        "metadata",
        "Source lines are part of the key, and the code has moved: "
        "jax_compilation_cache_include_metadata_in_key is set.",
        "Set it to False.",
    ),
    # What stands beside the program differs.
    _Cause(
        "xla-flags",
        "The XLA flags differ; also a flag that only repeats its default counts.",
        "Give the same flags in XLA_FLAGS and on the command line in each run.",
    ),
    _Cause(
        "compiler-options",
        "The compiler_options differ.",
        "Give the same ones in each run.",
    ),
    _Cause(
        "cache-directory",
        "The cache has another path, which is part of the key through jax 0.10.2.",
        "Keep the path, or set jax_persistent_cache_enable_xla_caches to 'none'.",
        _codes.CACHE_CONFIG,
    ),
    _Cause(
        "device-order",
        "The same devices stand in another order.",
        "Build the mesh from devices in a fixed order, such as that of jax.devices().",
    ),
    _Cause(
        "device-count",
        "The number of devices or processes differs.",
        "Run on as many devices and processes, or warm the cache for this number.",
    ),
    _Cause(
        "hardware",
        "The machine is another one: its accelerators, how they are connected, or the features of "
        "its CPU.",
        "Keep one cache for each kind of machine.",
    ),
    _Cause(
        "versions",
        "Another jaxlib or another backend compiled it.",
        "Compile once with the new version.",
    ),
    _Cause(
        "compression",
        "The package zstandard is installed in one place only.",
        "Install it in both, or in none.",
    ),
    _Cause("custom-hook", "JAX's custom_hook for keys gave another text.", "Make it repeatable."),
    # The key is the same, and yet the program is compiled again.
    _Cause(
        "host-callback",
        "It calls back into Python (jax.debug.print, pure_callback, io_callback), and this jax "
        "never writes such a program.",
        "Take the callback out, or use jax 0.11 or later.",
        _codes.CALLBACK_NOT_CACHED,
    ),
    _Cause(
        "threshold",
        "It compiled too quickly or is too small to be written.",
        "Call jax_dist.cache.enable(), or set jax_persistent_cache_min_compile_time_secs to 0.",
        _codes.CACHE_CONFIG,
    ),
    _Cause(
        "rank",
        "It was compiled by a process other than the first, which JAX does not let write.",
        "Call jax_dist.cache.enable() in each process.",
    ),
    _Cause(
        "cache-off",
        "The persistent cache is off: it has no directory, or jax_enable_compilation_cache is "
        "False.",
        "Call jax_dist.cache.enable().",
        _codes.CACHE_CONFIG,
    ),
    _Cause(
        "damaged-entry",
        "Its entry cannot be read, and JAX does not replace it.",
        "Run jax-dist cache doctor --fix, or call jax_dist.cache.enable().",
    ),
    _Cause(
        "write-failed",
        "JAX tried to write it, and could not.",
        "Look for a warning of JAX: a full disk, or a folder that cannot be written.",
    ),
    _Cause(
        "moving-directory",
        "The program chooses another directory for its cache in each run.",
        "Keep one: call jax_dist.cache.enable().",
        _codes.CACHE_CONFIG,
    ),
    _Cause(
        "not-in-every-run",
        "The program did not compile it in every run.",
        "Nothing, if it depends on the data; else make the run repeatable.",
    ),
    _Cause(
        "not-found-again",
        "It was written, and the next run did not find it.",
        "Look for a warning of JAX about the entry.",
    ),
    _Cause(
        UNKNOWN,
        "Cause unknown.",
        "Look at what differs; jax-dist cache diff of two records says all of it.",
    ),
)

_CAUSES = {cause.name: cause for cause in _ALL}


@dataclasses.dataclass(frozen=True, slots=True)
class CauseFinding:
    """A cause, and where it was seen."""

    cause: _Cause
    details: tuple[str, ...] = ()  # such as "train.py:12: tensor<f32>: 0.25, then 0.75"

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        code = f"{self.cause.code} " if self.cause.code else ""
        lines = (
            f"{code}{self.cause.name}: {self.cause.why}",
            *(f"  {detail}" for detail in self.details),
            f"  {self.cause.remedy}",
        )
        return "\n".join(lines)


def finding(name: str, *details: str) -> CauseFinding:
    """A finding, by the name of its cause."""
    return CauseFinding(_CAUSES[name], details)
