"""Whether two mapped programs are the same where arrays have another form: the slice form.

A migration may drop the axis over devices: what was `[N, *s]`, a copy on each device, is `[*s]`,
and what was `[N, b, *s]` is `[N * b, *s]`. Then the programs differ in their signatures, and are
equal as functions of slices. Three things are shown: the bodies are equal, slice by slice; each
argument and result has one of the relations below; and a result of which one copy is kept is equal
on all devices. Imports no jax.

`N` is the number of devices, of a mesh with one axis; the cut is the dimension that lies along it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_dist.codemod.verify import equivalence, host_programs
from jax_dist.codemod.verify.equivalence import Equality, NotProvedError

# By the relation of an argument, and of a result; what stays as it is needs none.
_OF_ARGUMENTS = {"as is": "", "one of equal copies": "R5", "device axis merged": "R7"}
_OF_RESULTS = {"as is": "", "one of equal copies": "R6", "device axis merged": "R7"}
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_MADE_EQUAL = {  # on all devices; by the parameter that names the axes
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "axes"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "axis_name"),
}
_MADE_DIFFERENT = ("axis_index", "ppermute", "all_to_all", "reduce_scatter", "rng_uniform")


@dataclass(frozen=True)
class _Array:
    """An argument or a result of the whole program."""

    kind: str  # such as "float32[8,3]"
    cut: int | None  # None: each device has all of it

    @property
    def dtype(self) -> str:
        return self.kind.partition("[")[0]

    @property
    def shape(self) -> list[int]:
        return equivalence.shape(self.kind)


@dataclass
class _Program:
    """A program that is one shard_map and nothing else."""

    axis: str = ""
    devices: Sequence[int] = ()  # their numbers, in the order of the mesh
    kinds: Sequence[str] = ()  # of its axis
    body: Mapping[str, Any] = field(default_factory=dict)
    given: dict[Any, _Array] = field(default_factory=dict)  # by source, in the order of the body
    returned: list[tuple[int, _Array]] = field(default_factory=list)  # by result of the body
    donated: set[int] = field(default_factory=set)


def proof(signature: Mapping[str, Any]) -> Equality:
    """How the programs of one signature are equal, also where their arrays have another form.

    Args:
      signature: as `equivalence.proof` takes it; of two runs with the relation too: `arguments`,
        for each of `after` the number of that of `before` and how it came from it; and `results`,
        how each came from that of the same number.

    Raises:
      NotProvedError: they are not, as far as texts and rules show.
    """
    if "results" not in signature:
        return equivalence.proof(signature)
    same = [[number, "as is"] for number in range(len(signature["arguments"]))]
    if signature["arguments"] == same and {*signature["results"]} <= {"as is"}:
        with contextlib.suppress(NotProvedError):
            return equivalence.proof(signature)
    if all(map(host_programs.maps_nothing, (signature["before"], signature["after"]))):
        return host_programs.proof(signature)
    return _by_slices(signature)


def _by_slices(signature: Mapping[str, Any]) -> Equality:
    texts = signature["before"], signature["after"]
    for text in texts:
        if (found := equivalence.opaque(text)) is not None:
            raise NotProvedError(f"its text does not show all of it: {found}")
    before, after = map(_program, texts)
    if not before.devices or before.devices != after.devices:
        raise NotProvedError(f"devices {before.devices} before, {after.devices} after")
    if before.kinds != after.kinds:
        raise NotProvedError(f"axes of {before.kinds} before, of {after.kinds} after")
    if texts[0]["weak"] != texts[1]["weak"]:
        raise NotProvedError("its results have other weak types")
    sources = {number: old for number, (old, _) in enumerate(signature["arguments"])}
    if {sources[number] for number in after.donated} != before.donated:
        raise NotProvedError("other arguments are donated")
    rules = {
        *_of_arguments(before, after, signature["arguments"]),
        *_of_results(before, after, signature["results"]),
        *_of_bodies(before, after, sources),
    }
    return Equality(tuple(sorted(rules)))


# --- the program around the body


def _program(text: Mapping[str, Any]) -> _Program:
    found = _Program()
    results = _walk(text, list(range(len(text["in"]))), found)
    if not found.body:
        raise NotProvedError("it has no shard_map")
    arrays = found.returned
    for each in results:
        if not isinstance(each, tuple) or each[0] != "result":
            raise NotProvedError("it returns what its shard_map has not computed")
    found.returned = [arrays[each[1]] for each in results]
    return found


def _walk(text: Mapping[str, Any], inputs: Sequence[Any], found: _Program) -> list[Any]:
    """The sources of the results; those of arguments are their numbers."""
    known: dict[int, Any] = {
        number: source for (number, _), source in zip(text["in"], inputs, strict=True)
    }
    known |= {number: ("const", kind, digest) for number, kind, digest, *_ in text["consts"]}
    for primitive, parameters, operands, results in text["eqns"]:
        given = [known[each] if isinstance(each, int) else ("literal", each) for each in operands]
        if primitive in ("jit", "pjit"):
            flags = zip(given, parameters["donated_invars"], strict=True)
            found.donated |= {source for source, flag in flags if flag and isinstance(source, int)}
            _refuse_options(parameters)
            sources = _walk(parameters["jaxpr"]["jaxpr"], given, found)
        elif primitive == "shard_map":
            sources = _shard_map(parameters, given, operands, text, found)
        else:
            raise NotProvedError(f"it computes outside of its shard_map: {primitive}")
        known |= {number: source for (number, _), source in zip(results, sources, strict=True)}
    return [known.get(each) if isinstance(each, int) else None for each in text["out"]]


def _refuse_options(parameters: Mapping[str, Any]) -> None:
    for name in ("compiler_options_kvs", "in_layouts", "out_layouts"):
        if any(each is not None for each in parameters.get(name) or ()):
            raise NotProvedError(f"its jit has {name}")
    for name in ("in_shardings", "out_shardings"):
        if any(isinstance(each, dict) for each in parameters.get(name) or ()):
            raise NotProvedError(f"its jit has {name}")


def _shard_map(
    parameters: Mapping[str, Any],
    given: Sequence[Any],
    operands: Sequence[Any],
    text: Mapping[str, Any],
    found: _Program,
) -> list[Any]:
    if found.body:
        raise NotProvedError("it has several shard_maps")
    if len(parameters["mesh"]["mesh"]) != 1:
        raise NotProvedError("its mesh has several axes")
    [[found.axis, _]] = parameters["mesh"]["mesh"]
    found.devices, found.kinds = (parameters["mesh"].get(key, ()) for key in ("devices", "kinds"))
    found.body = parameters["jaxpr"]["jaxpr"]
    kinds = equivalence.types(text)
    for source, operand, spec in zip(given, operands, parameters["in_specs"], strict=True):
        if source in found.given:
            raise NotProvedError("its shard_map takes one array twice")
        kind = kinds[operand] if isinstance(operand, int) else operand.partition(" ")[0]
        found.given[source] = _Array(kind, _cut(spec))
    size = parameters["mesh"]["mesh"][0][1]
    local = equivalence.result_types(found.body)
    for number, (kind, spec) in enumerate(zip(local, parameters["out_specs"], strict=True)):
        cut = _cut(spec)
        dtype, shape = kind.partition("[")[0], equivalence.shape(kind)
        if cut is not None:
            shape[cut] *= size
        whole = f"{dtype}[{','.join(map(str, shape))}]"
        found.returned.append((number, _Array(whole, cut)))
    return [("result", number) for number in range(len(local))]


def _cut(spec: Mapping[str, Any]) -> int | None:
    """The dimension that lies along the axis; the mesh has only one."""
    cut = [number for number, names in enumerate(spec["spec"]) if names]
    return cut[0] if cut else None


# --- the relations


def _of_arguments(before: _Program, after: _Program, relation: Sequence[Any]) -> Iterator[str]:
    sources = {number: old for number, (old, _) in enumerate(relation)}
    if sorted(sources.values()) != sorted({*sources.values()}):
        raise NotProvedError("two arguments come from one")
    partners = {_renamed(source, sources): array for source, array in after.given.items()}
    if {*partners} != {*before.given}:
        raise NotProvedError("its shard_map takes other arrays")
    ways = {old: how for old, how in relation}
    for source, array in before.given.items():
        how = ways[source] if isinstance(source, int) else "as is"
        _check(f"argument {source}", array, partners[source], how, len(before.devices))
        if _OF_ARGUMENTS[how]:
            yield _OF_ARGUMENTS[how]


def _of_results(before: _Program, after: _Program, relation: Sequence[str]) -> Iterator[str]:
    if not len(before.returned) == len(after.returned) == len(relation):
        raise NotProvedError("it has another number of results")
    equal = _equal_results(after)
    for number, how in enumerate(relation):
        (_, old), (place, new) = before.returned[number], after.returned[number]
        _check(f"result {number}", old, new, how, len(before.devices))
        if how == "one of equal copies" and not equal[place]:
            raise NotProvedError(f"result {number} may differ between devices, and one is kept")
        if _OF_RESULTS[how]:
            yield _OF_RESULTS[how]


def _check(what: str, old: _Array, new: _Array, how: str, devices: int) -> None:
    """That the slice of each device has the same elements in both, in the same order."""
    mapped = old.cut == 0 and bool(old.shape) and old.shape[0] == devices
    holds = old.dtype == new.dtype and {
        "as is": old == new,
        "one of equal copies": mapped and new.cut is None and new.shape == old.shape[1:],
        "device axis merged": mapped
        and new.cut == 0
        and len(old.shape) > 1
        and new.shape == [devices * old.shape[1], *old.shape[2:]],
    }.get(how, False)
    if not holds:
        raise NotProvedError(f"{what} is {old} before and {new} after, which is not {how!r}")


def _renamed(source: Any, sources: Mapping[int, int]) -> Any:
    return sources[source] if isinstance(source, int) else source


# --- the bodies


def _of_bodies(before: _Program, after: _Program, sources: Mapping[int, int]) -> set[str]:
    """The rules by which they are equal, as functions of slices."""
    names = {source: f"§{number}" for number, source in enumerate(before.given, 1)}
    one, used = _body(before, names)
    renamed = {source: names[_renamed(source, sources)] for source in after.given}
    other, others_used = _body(after, renamed)
    if one != other:
        raise NotProvedError(equivalence.first_difference(one, other))
    return used | others_used


def _body(program: _Program, names: Mapping[Any, str]) -> tuple[str, set[str]]:
    scope = equivalence.Scope(
        rules=True, axes={program.axis: "axis-0"}, counter=[len(program.given)]
    )
    computed = scope.run(program.body, [names[source] for source in program.given])
    results = [computed[place] for place, _ in program.returned]
    lines = [f"options {sorted(scope.options)}", *scope.alive(results), f"out {' '.join(results)}"]
    return equivalence.numbered("\n".join([" ".join(sorted(names.values())), *lines])), scope.used


# --- which results are equal on all devices


def _equal_results(program: _Program) -> list[bool]:
    given = [array.cut is None for array in program.given.values()]
    return _equal(program.body, given, program.axis)


def _equal(text: Mapping[str, Any], given: Sequence[bool], axis: str) -> list[bool]:
    """Which results of a program are the same on all devices, by which arguments are."""
    known = {number: each for (number, _), each in zip(text["in"], given, strict=True)}
    known |= {number: True for number, *_ in text["consts"]}
    for primitive, parameters, operands, results in text["eqns"]:
        inputs = [known[each] if isinstance(each, int) else True for each in operands]
        found = _equal_of(primitive, parameters, inputs, len(results), axis)
        known |= {number: each for (number, _), each in zip(results, found, strict=True)}
    return [known[each] if isinstance(each, int) else True for each in text["out"]]


def _equal_of(
    primitive: str, parameters: Mapping[str, Any], given: list[bool], results: int, axis: str
) -> list[bool]:
    if primitive in _MADE_EQUAL:
        names = parameters[_MADE_EQUAL[primitive]]
        names = names if isinstance(names, list) else [names]
        whole = names == [axis] and parameters.get("axis_index_groups") is None
        return [True] * results if whole else [False] * results
    if primitive in _MADE_DIFFERENT:
        return [False] * results
    if primitive in _CALLS:
        keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
        body = next(parameters[key]["jaxpr"] for key in keys if key in parameters)
        return _equal(body, given, axis)
    if primitive == "scan":
        return _equal_of_scan(parameters, given, axis)
    if primitive == "while":
        return _equal_of_while(parameters, given, axis)
    if primitive == "cond":
        branches = [_equal(each["jaxpr"], given[1:], axis) for each in parameters["branches"]]
        return [given[0] and all(each) for each in zip(*branches, strict=True)]
    if _holds_a_program(parameters):  # of which nothing is known
        return [False] * results
    return [all(given)] * results


def _equal_of_scan(parameters: Mapping[str, Any], given: list[bool], axis: str) -> list[bool]:
    """Carries are equal while each step leaves them so."""
    body, consts, carries = (parameters[key] for key in ("jaxpr", "num_consts", "num_carry"))
    carry = given[consts : consts + carries]
    while True:
        inputs = [*given[:consts], *carry, *given[consts + carries :]]
        found = _equal(body["jaxpr"], inputs, axis)
        settled = [a and b for a, b in zip(carry, found[:carries], strict=True)]
        if settled == carry:
            return [*carry, *found[carries:]]
        carry = settled


def _equal_of_while(parameters: Mapping[str, Any], given: list[bool], axis: str) -> list[bool]:
    """All devices take as many steps only where the condition is equal on them."""
    first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
    tests, consts, carry = given[:first], given[first : first + second], given[first + second :]
    while True:
        found = _equal(parameters["body_jaxpr"]["jaxpr"], [*consts, *carry], axis)
        [same] = _equal(parameters["cond_jaxpr"]["jaxpr"], [*tests, *carry], axis)
        settled = [same and a and b for a, b in zip(carry, found, strict=True)]
        if settled == carry:
            return carry
        carry = settled


def _holds_a_program(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "jaxpr" in value or any(map(_holds_a_program, value.values()))
    return isinstance(value, list) and any(map(_holds_a_program, value))
