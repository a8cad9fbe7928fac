"""Whether two programs are the same where arrays have another form.

A migration may drop the axis over devices: what was `[N, *s]`, a copy on each device, is `[*s]`,
and what was `[N, b, *s]` is `[N * b, *s]`. Then the programs differ in their signatures, and there
are two proofs. Imports no jax.

Mapped programs are equal as functions of slices. Three things are shown: the bodies are equal,
slice by slice; each argument and result has one of the relations below; and a result of which one
copy is kept is equal on all devices.

The two forms of a host edit map nothing: they copy, cut and place arrays. `unreplicate(x)` takes
the first of equal rows; without the axis over devices, `x` is that row. `replicate(x)` stacks
copies, one on each device; the new form puts `x` on each of them.

`N` is the number of devices, of a mesh with one axis; the cut is the dimension that lies along it.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_dist.migrate.verify import equivalence, text_uniformity
from jax_dist.migrate.verify.equivalence import Equations, NotProvedError

# By the relation of an argument, and of a result; what stays as it is needs none.
_OF_ARGUMENTS = {"as is": "", "one of equal copies": "R5", "device axis merged": "R7"}
_NUMBER = "a number"  # was static: the first of its pair is the literal in its place
_OF_RESULTS = {"as is": "", "one of equal copies": "R6", "device axis merged": "R7"}
_OF_HOST_RESULTS = {"as is": "", "one of equal copies": "R9", "device axis merged": "R7"}
_OPTIONS = (  # of a jit
    *("compiler_options_kvs", "in_layouts", "out_layouts"),
    *("in_shardings", "out_shardings"),
)


@dataclass(frozen=True)
class _Array:
    """An argument or a result of the whole program."""

    kind: str  # such as "float32[8,3]"
    cut: int | None  # None: each device has all of it


def proof(signature: Mapping[str, Any]) -> tuple[str, ...]:
    """The rules by which the programs of one signature are equal; none: they are the same.

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
    texts = signature["before"], signature["after"]
    by_form = _by_copies if all(map(_maps_nothing, texts)) else _by_slices
    equivalence.refuse_opaque(*texts)
    return tuple(sorted(by_form(signature)))


def _maps_nothing(text: Mapping[str, Any]) -> bool:
    """Whether a program has no shard_map."""
    return all(
        primitive != "shard_map"
        and ("jaxpr" not in parameters or _maps_nothing(parameters["jaxpr"]["jaxpr"]))
        for primitive, parameters, _, _ in text["eqns"]
    )


def _check(what: str, old: Any, new: Any, how: str, *, holds: bool) -> None:
    if not holds:
        raise NotProvedError(f"{what} is {old} before and {new} after, which is not {how!r}")


def _has_relation(old: str, new: str, how: str) -> bool:
    """Whether arrays of these types may have the same elements, in the same order."""
    (dtype, was), (new_dtype, now) = (
        (kind.partition("[")[0], equivalence.shape(kind)) for kind in (old, new)
    )
    return dtype == new_dtype and {
        "as is": was == now,
        "one of equal copies": len(was) > 0 and was[1:] == now,
        "device axis merged": len(was) > 1 and now == [was[0] * was[1], *was[2:]],
    }.get(how, False)


# --- mapped programs


def _by_slices(signature: Mapping[str, Any]) -> set[str]:
    texts = signature["before"], signature["after"]
    before, after = map(_Program, texts)
    if not before.devices or before.devices != after.devices:
        raise NotProvedError(f"devices {before.devices} before, {after.devices} after")
    if before.kinds != after.kinds:
        raise NotProvedError(f"axes of {before.kinds} before, of {after.kinds} after")
    if texts[0]["weak"] != texts[1]["weak"]:
        raise NotProvedError("its results have other weak types")
    sources = {number: old for number, (old, _) in enumerate(signature["arguments"])}
    literals = {
        number: f"literal({text})"
        for number, (text, how) in enumerate(signature["arguments"])
        if how == _NUMBER
    }
    if {sources[number] for number in after.donated} != before.donated:
        raise NotProvedError("other arguments are donated")
    rules = {
        *_of_arguments(before, after, signature["arguments"]),
        *_of_results(before, after, signature["results"]),
        *(("R10",) if literals else ()),
    }
    # The bodies, as functions of slices.
    names = {source: f"§{number}" for number, source in enumerate(before.given, 1)}
    one, used = before.written(names)
    renamed = {
        source: literals.get(source) or names[_renamed(source, sources)] for source in after.given
    }
    other, others_used = after.written(renamed)
    equivalence.require_same(one, other)
    return rules | used | others_used


class _Program:
    """A program that is one shard_map and nothing else."""

    def __init__(self, text: Mapping[str, Any]):
        self.axis = ""
        self.devices: Sequence[int] = ()  # their numbers, in the order of the mesh
        self.kinds: Sequence[str] = ()  # of its axis
        self.body: Mapping[str, Any] = {}
        self.given: dict[Any, _Array] = {}  # by source, in the order of the body
        self.donated: set[int] = set()
        self._computed: list[_Array] = []
        results = self._walk(text, list(range(len(text["in"]))))
        if not self.body:
            raise NotProvedError("it has no shard_map")
        if not all(isinstance(each, tuple) and each[0] == "result" for each in results):
            raise NotProvedError("it returns what its shard_map has not computed")
        # By result of the body.
        self.returned = [(number, self._computed[number]) for _, number in results]

    def written(self, names: Mapping[Any, str]) -> tuple[str, set[str]]:
        """The body, with these names of its arguments, and the rules that were used."""
        counter = itertools.count(len(self.given) + 1)
        equations = Equations(rules=True, axes={self.axis: "axis-0"}, counter=counter)
        computed = equations.run(self.body, [names[source] for source in self.given])
        results = [computed[place] for place, _ in self.returned]
        variables = sorted(name for name in names.values() if name.startswith("§"))
        return equations.text(variables, results), equations.used

    def _walk(self, text: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
        """The sources of the results; those of arguments are their numbers."""
        known: dict[int, Any] = {
            number: source for (number, _), source in zip(text["in"], inputs, strict=True)
        }
        known |= {number: ("const", kind, digest) for number, kind, digest, *_ in text["consts"]}
        for primitive, parameters, operands, results in text["eqns"]:
            given = [known[e] if isinstance(e, int) else ("literal", e) for e in operands]
            if "ctx" in parameters:
                raise NotProvedError(
                    f"something is set around its {primitive}: {parameters['ctx']}"
                )
            if primitive == "jit":
                flags = zip(given, parameters["donated_invars"], strict=True)
                self.donated |= {each for each, flag in flags if flag and isinstance(each, int)}
                for name in _OPTIONS:
                    values = parameters.get(name) or ()
                    is_set = dict if "shardings" in name else object  # else it is not specified
                    if any(e is not None and isinstance(e, is_set) for e in values):
                        raise NotProvedError(f"its jit has {name}")
                sources = self._walk(parameters["jaxpr"]["jaxpr"], given)
            elif primitive == "shard_map":
                kinds = equivalence.types(text, operands)
                sources = self._shard_map(parameters, given, kinds)
            else:
                raise NotProvedError(f"it computes outside of its shard_map: {primitive}")
            known |= {number: source for (number, _), source in zip(results, sources, strict=True)}
        return [known.get(each) for each in text["out"]]  # of literals, there is none

    def _shard_map(
        self, parameters: Mapping[str, Any], given: Sequence[Any], kinds: Sequence[str]
    ) -> list[Any]:
        if self.body:
            raise NotProvedError("it has several shard_maps")
        mesh = parameters["mesh"]
        if len(mesh["mesh"]) != 1:
            raise NotProvedError("its mesh has several axes")
        [[self.axis, size]] = mesh["mesh"]
        self.devices, self.kinds = mesh.get("devices", ()), mesh.get("kinds", ())
        self.body = parameters["jaxpr"]["jaxpr"]
        for source, kind, spec in zip(given, kinds, parameters["in_specs"], strict=True):
            if source in self.given:
                raise NotProvedError("its shard_map takes one array twice")
            self.given[source] = _Array(kind, _cut(spec))
        local = equivalence.types(self.body)
        for kind, spec in zip(local, parameters["out_specs"], strict=True):
            cut, shape = _cut(spec), equivalence.shape(kind)
            if cut is not None:
                shape[cut] *= size
            whole = f"{kind.partition('[')[0]}[{','.join(map(str, shape))}]"
            self._computed.append(_Array(whole, cut))
        return [("result", number) for number in range(len(local))]


def _cut(spec: Mapping[str, Any]) -> int | None:
    """The dimension that lies along the axis; the mesh has only one."""
    return next((number for number, names in enumerate(spec["spec"]) if names), None)


# --- the relations


def _of_arguments(before: _Program, after: _Program, relation: Sequence[Any]) -> Iterator[str]:
    sources = {number: old for number, (old, how) in enumerate(relation) if how != _NUMBER}
    if sorted(sources.values()) != sorted({*sources.values()}):
        raise NotProvedError("two arguments come from one")
    numbers = {number for number, (_, how) in enumerate(relation) if how == _NUMBER}
    partners = {
        _renamed(source, sources): array
        for source, array in after.given.items()
        if source not in numbers
    }
    if any(after.given[each].cut is not None for each in numbers & {*after.given}):
        raise NotProvedError("its shard_map cuts a number")
    if {*partners} != {*before.given}:
        raise NotProvedError("its shard_map takes other arrays")
    ways = {old: how for old, how in relation}
    for source, array in before.given.items():
        how = ways[source] if isinstance(source, int) else "as is"
        _check_slices(f"argument {source}", array, partners[source], how, len(before.devices))
        if _OF_ARGUMENTS[how]:
            yield _OF_ARGUMENTS[how]


def _of_results(before: _Program, after: _Program, relation: Sequence[str]) -> Iterator[str]:
    if not len(before.returned) == len(after.returned) == len(relation):
        raise NotProvedError("it has another number of results")
    copied = [array.cut is None for array in after.given.values()]
    equal = text_uniformity.alike(after.body, copied, after.axis)
    for number, how in enumerate(relation):
        (_, old), (place, new) = before.returned[number], after.returned[number]
        _check_slices(f"result {number}", old, new, how, len(before.devices))
        if how == "one of equal copies" and not equal[place]:
            raise NotProvedError(f"result {number} may differ between devices, and one is kept")
        if _OF_RESULTS[how]:
            yield _OF_RESULTS[how]


def _check_slices(what: str, old: _Array, new: _Array, how: str, devices: int) -> None:
    """That the slice of each device has the same elements in both, in the same order."""
    mapped = old.cut == 0 and equivalence.shape(old.kind)[:1] == [devices]
    holds = (
        _has_relation(old.kind, new.kind, how)
        and {
            "as is": old == new,
            "one of equal copies": mapped and new.cut is None,
            "device axis merged": mapped and new.cut == 0,
        }[how]
    )
    _check(what, old, new, how, holds=holds)


def _renamed(source: Any, sources: Mapping[int, int]) -> Any:
    return sources[source] if isinstance(source, int) else source


# --- which results are equal on all devices


def alike_results(text: Mapping[str, Any], alike: Sequence[bool]) -> list[bool]:
    """Which results of a mapped program are equal on all devices.

    Args:
      text: of a program that is one shard_map.
      alike: of each argument, whether its slices are equal.

    Raises:
      NotProvedError: it is another program.
    """
    program = _Program(text)
    copied = [
        array.cut is None or (isinstance(source, int) and alike[source])
        for source, array in program.given.items()
    ]
    equal = text_uniformity.alike(program.body, copied, program.axis)
    return [equal[place] for place, _ in program.returned]


# --- programs of the host


def _by_copies(signature: Mapping[str, Any]) -> set[str]:
    """By the relation of arguments and results, where all else is the same."""
    before, after = signature["before"], signature["after"]
    if before["weak"] != after["weak"]:
        raise NotProvedError("its results have other weak types")
    new = _Host(rules=True)
    names = [new.new() for _ in after["in"]]
    old = _Host(rules=True, counter=new.counter)
    given = _host_arguments(old, before, after, signature["arguments"], names)
    ones, others = old.run(before, given, top=True), new.run(after, names, top=True)
    if old.donated or new.donated:
        raise NotProvedError("it donates what it takes")
    if not len(ones) == len(others) == len(signature["results"]):
        raise NotProvedError("it has another number of results")
    kinds = zip(*map(equivalence.types, (before, after)), strict=True)
    related = zip(ones, others, kinds, signature["results"], strict=True)
    for number, (one, other, (was, now), how) in enumerate(related):
        _check(f"result {number}", was, now, how, holds=_has_relation(was, now, how))
        copied = old.source(one) in old.copied, new.source(other) in new.copied
        if copied != (how == "one of equal copies", False):
            raise NotProvedError(f"result {number} is not {how!r}")
        places = old.put.get(one, ("", None))[1], new.put.get(other, ("", None))[1]
        if not _same_place(*places, how, was):
            raise NotProvedError(f"result {number} lies elsewhere")
        old.used |= {_OF_HOST_RESULTS[how]} - {""}
    equivalence.require_same(
        old.text(names, [old.bare(each) for each in ones]),
        new.text(names, [new.bare(each) for each in others]),
    )
    return old.used | new.used


@dataclass
class _Host(Equations):
    """Equations in which copies of an array, and where it is put, are no equations."""

    copied: dict[str, str] = field(default_factory=dict)  # rows that are all one array: this array
    put: dict[str, tuple[str, Any]] = field(default_factory=dict)  # result: source, sharding

    def run(self, text: Mapping[str, Any], inputs: Sequence[str], *, top: bool = False) -> list:
        for _, _, digest, *element in text["consts"]:
            if element:  # of a number of Python, which numpy has stacked
                self.copied[f"const({digest})"] = f"literal({element[0]})"
        return super().run(text, inputs, top=top)

    def _equation(
        self, primitive: str, parameters: Mapping, given: list, kinds: list[str], *, top: bool
    ) -> list[str]:
        if "ctx" in parameters:
            return super()._equation(primitive, parameters, given, kinds, top=top)
        if primitive == "copy":
            return [given[0][0]]
        if primitive == "device_put" and len(given) == 1:
            result = self.new()
            self.put[result] = given[0][0], parameters["devices"][0]
            return [result]
        row = _row(primitive, parameters, given)
        if row and (source := self.copied.get(self.source(given[0][0]))):
            self.used.add("R8")
            return [source]
        sources = {self.source(name) for name, _ in given}
        if _stacks(primitive, parameters, given) and len(sources) == 1:
            result = self.new()
            self.copied[result] = sources.pop()
            return [result]
        return super()._equation(primitive, parameters, given, kinds, top=top)

    def _add(self, results: list[str], given: list, kinds: list[str], head: str) -> None:
        given = [(self.source(name), kind) for name, kind in given]
        if any(name in self.copied for name, _ in given):
            raise NotProvedError(f"it computes with copies: {head.partition('[')[0]}")
        super()._add(results, given, kinds, head)

    def source(self, name: str) -> str:
        """What was put somewhere."""
        while name in self.put:
            name = self.put[name][0]
        return name

    def bare(self, name: str) -> str:
        """The one array that a value is, or is copies of."""
        source = self.source(name)
        return self.bare(self.copied[source]) if source in self.copied else source


def _row(primitive: str, parameters: Mapping, given: Sequence[tuple[str, str]]) -> bool:
    """Whether an equation takes one row, whichever."""
    if primitive != "slice" or parameters["strides"] is not None:
        return False
    starts, ends = parameters["start_indices"], parameters["limit_indices"]
    rest = equivalence.shape(given[0][1])[1:]
    return ends[0] - starts[0] == 1 and not any(starts[1:]) and ends[1:] == rest


def _stacks(primitive: str, parameters: Mapping, given: Sequence[tuple[str, str]]) -> bool:
    """Whether each operand becomes a row."""
    if primitive == "stack":
        return parameters["axis"] == 0
    if primitive != "concatenate" or parameters["dimension"] != 0:
        return False
    return all(equivalence.shape(kind)[0] == 1 for _, kind in given)


def _host_arguments(
    old: _Host,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    relation: Sequence[Any],
    names: Sequence[str],
) -> list[str]:
    """What the arguments of the old program are, by those of the new one."""
    partners = {source: (number, how) for number, (source, how) in enumerate(relation)}
    if sorted(partners) != [*range(len(before["in"]))] or len(relation) != len(after["in"]):
        raise NotProvedError("its programs take other arguments")
    found = []
    for source, (_, kind) in enumerate(before["in"]):
        number, how = partners[source]
        new = after["in"][number][1]
        _check(f"argument {source}", kind, new, how, holds=_has_relation(kind, new, how))
        name = names[number]
        if how == "one of equal copies":
            name = old.new()
            old.copied[name] = names[number]
        old.used |= {_OF_ARGUMENTS[how]} - {""}
        found.append(name)
    return found


def _same_place(old: Any, new: Any, how: str, kind: str) -> bool:
    """Whether two values that were put somewhere are on the same devices."""
    if how != "one of equal copies" or old is None:
        return old is None and new is None
    try:
        (mesh, spec), (new_mesh, new_spec) = old["sharding"], new["sharding"]
    except (KeyError, TypeError):
        return False
    [[name, size]] = mesh["mesh"] if len(mesh["mesh"]) == 1 else [["", 0]]
    cut = [names for names in spec["spec"] if names]
    return (
        [size] == equivalence.shape(kind)[:1]
        and spec["spec"][:1] == [[name]] == cut
        and not any(new_spec["spec"])
        and mesh["devices"] == new_mesh["devices"]
        and mesh["kinds"] == new_mesh["kinds"]
    )
