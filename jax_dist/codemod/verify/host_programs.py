"""Whether two forms of a host edit are the same: programs that copy, cut and place arrays.

`unreplicate(x)` takes the first of equal rows; without the axis over devices, `x` is that row.
`replicate(x)` stacks copies, one on each device; the new form puts `x` on each of them. Imports no
jax.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_dist.codemod.verify import equivalence
from jax_dist.codemod.verify.equivalence import Equality, NotProvedError, Scope

_OF_ARGUMENTS = {"as is": "", "one of equal copies": "R5", "device axis merged": "R7"}
_OF_RESULTS = {"as is": "", "one of equal copies": "R9", "device axis merged": "R7"}


def maps_nothing(text: Mapping[str, Any]) -> bool:
    """Whether a program has no shard_map."""
    return all(
        primitive != "shard_map"
        and ("jaxpr" not in parameters or maps_nothing(parameters["jaxpr"]["jaxpr"]))
        for primitive, parameters, _, _ in text["eqns"]
    )


def proof(signature: Mapping[str, Any]) -> Equality:
    """How the programs of one signature are equal, by the relation of arguments and results.

    Args:
      signature: as `slices.proof` takes it.

    Raises:
      NotProvedError: they are not, as far as texts and rules show.
    """
    before, after = signature["before"], signature["after"]
    for text in (before, after):
        if (found := equivalence.opaque(text)) is not None:
            raise NotProvedError(f"its text does not show all of it: {found}")
    if before["weak"] != after["weak"]:
        raise NotProvedError("its results have other weak types")
    new = _Host(rules=True)
    names = [new.new() for _ in after["in"]]
    old = _Host(rules=True, counter=new.counter)
    given = _of_arguments(old, before, after, signature["arguments"], names)
    ones, others = old.run(before, given, top=True), new.run(after, names, top=True)
    if old.donated or new.donated:
        raise NotProvedError("it donates what it takes")
    _of_results(old, ones, before, new, others, after, signature["results"])
    ones, others = (
        [scope.bare(each) for each in each_side]
        for scope, each_side in ((old, ones), (new, others))
    )
    if (one := _text(old, names, ones)) != (other := _text(new, names, others)):
        raise NotProvedError(equivalence.first_difference(one, other))
    return Equality(tuple(sorted(old.used | new.used)))


@dataclass
class _Host(Scope):
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


def _of_arguments(
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
        _check(f"argument {source}", kind, after["in"][number][1], how)
        name = names[number]
        if how == "one of equal copies":
            name = old.new()
            old.copied[name] = names[number]
        old.used |= {_OF_ARGUMENTS[how]} - {""}
        found.append(name)
    return found


def _of_results(
    old: _Host,
    ones: Sequence[str],
    before: Mapping[str, Any],
    new: _Host,
    others: Sequence[str],
    after: Mapping[str, Any],
    relation: Sequence[str],
) -> None:
    if not len(ones) == len(others) == len(relation):
        raise NotProvedError("it has another number of results")
    kinds = equivalence.result_types(before), equivalence.result_types(after)
    for number, (one, other, how) in enumerate(zip(ones, others, relation, strict=True)):
        _check(f"result {number}", kinds[0][number], kinds[1][number], how)
        copied = old.source(one) in old.copied, new.source(other) in new.copied
        if copied != (how == "one of equal copies", False):
            raise NotProvedError(f"result {number} is not {how!r}")
        (_, was), (_, now) = old.put.get(one, ("", None)), new.put.get(other, ("", None))
        if not _same_place(was, now, how, kinds[0][number]):
            raise NotProvedError(f"result {number} lies elsewhere")
        old.used |= {_OF_RESULTS[how]} - {""}


def _check(what: str, old: str, new: str, how: str) -> None:
    """That the elements are the same, in the same order."""
    (dtype, was), (new_dtype, now) = (
        (kind.partition("[")[0], equivalence.shape(kind)) for kind in (old, new)
    )
    holds = dtype == new_dtype and {
        "as is": was == now,
        "one of equal copies": len(was) > 0 and was[1:] == now,
        "device axis merged": len(was) > 1 and now == [was[0] * was[1], *was[2:]],
    }.get(how, False)
    if not holds:
        raise NotProvedError(f"{what} is {old} before and {new} after, which is not {how!r}")


def _same_place(old: Any, new: Any, how: str, kind: str) -> bool:
    """Whether two values that were put somewhere are on the same devices."""
    if how != "one of equal copies" or old is None or new is None:
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


def _text(scope: _Host, names: Sequence[str], results: Sequence[str]) -> str:
    options = f"options {sorted(scope.options)}"
    lines = [" ".join(names), options, *scope.alive(results), f"out {' '.join(results)}"]
    return equivalence.numbered("\n".join(lines))
