"""Whether two programs are the same, from their texts alone: a normal form, and named rules.

A text is what `recording/programs.py` writes. In the normal form, calls are written out, dead
equations are gone, variables and mesh axes have numbers, and a reshape that moves no element is no
equation: each operand is its source with the shape that it is used in. Imports no jax.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_dist import primitives

RULES = {
    "R1": "a sum over an all_gather is a psum, up to the order of summation",
    "R2": "a sum over no dimension changes nothing",
    "R3": "a division by one changes nothing",
    "R4": "a reduction over a dimension of size 1 changes nothing but the sign of a zero",
    "R5": "rows that are equal on all devices are one array; compared at each call of the run",
    "R6": "a result that is equal on all devices is one array; shown by its program",
    "R7": "rows of each device are rows of one array, in the order of the devices",
    "R8": "one of equal rows is the array that they are copies of",
    "R9": "copies of an array, one on each device, are that array on all devices",
    "R10": "a static number is an argument that all devices share; for the numbers of the run",
    "R11": "a conversion to the type that a value has changes nothing",
}
_AXIS_PARAMETERS = ("axes", "axis_name", "spmd_axis_name", "newly_manual_axes", "manual_axes")
_ONES = (
    "literal(float32[] 0000803f)",
    "literal(float64[] 000000000000f03f)",
    "literal(bfloat16[] 803f)",
)
_VARIABLE = re.compile(r"§\d+")  # json.dumps writes no § otherwise


class NotProvedError(Exception):
    """Why two texts say nothing of their programs, or differ."""


def proof(signature: Mapping[str, Any]) -> tuple[str, ...]:
    """The rules by which the programs of one signature are equal; none: they are the same.

    Args:
      signature: the texts `before` and `after`, for the same arguments; and in `sizes`, by the
        number of devices, both again; only those of the forms that take that number. Where one
        form alone takes it, there is nothing to compare, and the ledger says so.

    Raises:
      NotProvedError: they are not, as far as texts and rules show.
    """
    found: set[str] = set()
    sizes = [texts for texts in signature["sizes"].values() if len(texts) == 2]
    for texts in (signature, *sizes):
        both = texts["before"], texts["after"]
        refuse_opaque(*both)
        one, other = (_normal_form(each)[0] for each in both)
        if one != other:
            (one, used), (other, more) = (_normal_form(each, rules=True) for each in both)
            require_same(one, other)
            found |= used | more
    return tuple(sorted(found))


def _normal_form(text: Mapping[str, Any], *, rules: bool = False) -> tuple[str, set[str]]:
    """The normal form, a line for each equation, and the rules that were used."""
    equations = Equations(rules=rules)
    inputs = [equations.new() for _ in text["in"]]
    results = equations.run(text, inputs, top=True)
    typed = [
        f"{each}:{kind}{'~' if weak else ''}"
        for each, kind, weak in zip(results, types(text), text["weak"], strict=True)
    ]
    lines = [
        f"in {' '.join(f'{n}:{kind}' for n, (_, kind) in zip(inputs, text['in'], strict=True))}",
        f"donated {[number for number, each in enumerate(inputs) if each in equations.donated]}",
        f"options {sorted(equations.options)}",
        *equations.alive(results),
        f"out {' '.join(typed)}",
    ]
    return _numbered("\n".join(lines)), equations.used


@dataclass
class _Line:
    results: list[str]
    operands: list[str]
    text: str
    group: int  # which call of the host it belongs to
    moves: bool  # and computes nothing: no other equation changes its numbers


@dataclass
class Equations:
    """The equations of one program, with the calls in it written out."""

    rules: bool
    axes: dict[str, str] = field(default_factory=dict)
    counter: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    used: set[str] = field(default_factory=set)
    lines: list[_Line] = field(default_factory=list)
    donated: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    gathers: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # by result
    placed: dict[str, tuple[str, str]] = field(default_factory=dict)  # result: source, sharding
    mapped: dict[str, str] = field(default_factory=dict)  # results of a shard_map: their sharding
    group: int = 0

    def new(self) -> str:
        return f"§{next(self.counter)}"

    def run(
        self, text: Mapping[str, Any], inputs: Sequence[str], *, top: bool = False
    ) -> list[str]:
        """Adds the equations of a program; its results."""
        names: dict[int, str] = {}
        types: dict[int, str] = {}
        for (number, kind), name in zip(text["in"], inputs, strict=True):
            names[number], types[number] = name, kind
        for number, kind, digest, *_ in text["consts"]:
            names[number], types[number] = f"const({digest})", kind
        for primitive, parameters, operands, results in text["eqns"]:
            types.update({number: kind for number, kind in results})
            given = [
                (names[each], types[each]) if isinstance(each, int) else _literal(each)
                for each in operands
            ]
            if top:
                self.group += 1
            found = self._equation(primitive, parameters, given, [k for _, k in results], top=top)
            names.update({number: name for (number, _), name in zip(results, found, strict=True)})
        return [names[each] if isinstance(each, int) else _literal(each)[0] for each in text["out"]]

    def _equation(
        self, primitive: str, parameters: Mapping, given: list, kinds: list[str], *, top: bool
    ) -> list[str]:
        if "ctx" in parameters:  # what is set around it is set around all of it
            results = [self.new() for _ in kinds]
            self._add(results, given, kinds, f"{primitive}{self._parameters(parameters)}")
            return results
        if (body := called(primitive, parameters)) is not None:
            return self._call(body, parameters, given, top=top)
        if _moves_nothing(primitive, parameters, given, kinds):
            return [given[0][0]]
        if self.rules and (found := self._by_rule(primitive, parameters, given, kinds)):
            return [found]
        if primitive == "shard_map":
            return self._shard_map(parameters, given, kinds)
        results = [self.new() for _ in kinds]
        if primitive == "scan":
            self._with_body(primitive, parameters, given, results, kinds, "linear")
            return results
        if primitive == "all_gather":
            self.gathers[results[0]] = (*given[0], kinds[0], parameters)
        self._add(results, given, kinds, f"{primitive}{self._parameters(parameters)}")
        return results

    def _call(self, body: Mapping, parameters: Mapping, given: list, *, top: bool) -> list[str]:
        names = [name for name, _ in given]
        if top:
            flags = zip(names, parameters.get("donated_invars", ()), strict=False)
            self.donated |= {name for name, flag in flags if flag}
        for key in ("compiler_options_kvs", "in_layouts", "out_layouts"):
            if any(each is not None for each in parameters.get(key) or ()):
                self.options.add(f"{key} {self._value(parameters[key])}")
        results = self.run(body, self._put(given, parameters.get("in_shardings")))
        values = list(zip(results, types(body), strict=True))
        return self._put(values, parameters.get("out_shardings"))

    def _put(self, values: list, shardings: list | None) -> list[str]:
        """Values where a jit wants them, if a shard_map does not have them there already."""
        found = []
        for (name, kind), sharding in zip(values, shardings or [""] * len(values), strict=True):
            wanted = self._value(sharding) if isinstance(sharding, dict) else None
            if wanted is None or self.mapped.get(name) == wanted:  # or it is not specified
                found.append(name)
                continue
            result = self.new()
            self.placed[result] = name, wanted
            self._add([result], [(name, kind)], [kind], f"placed[{wanted}]")
            found.append(result)
        return found

    def _shard_map(self, parameters: Mapping, given: list, kinds: list[str]) -> list[str]:
        mesh = self._value(parameters["mesh"])  # numbers its axes
        where = [f"{mesh} {self._value(each)}" for each in parameters["in_specs"]]
        sources = []
        for (name, kind), wanted in zip(given, where, strict=True):
            source, sharding = self.placed.get(name, (name, ""))
            sources.append((source if sharding == wanted else name, kind))
        results = [self.new() for _ in kinds]
        for result, spec in zip(results, parameters["out_specs"], strict=True):
            self.mapped[result] = f"{mesh} {self._value(spec)}"
        self._with_body("shard_map", parameters, sources, results, kinds, "in_specs")
        return results

    def _with_body(
        self,
        primitive: str,
        parameters: Mapping,
        given: list,
        results: list[str],
        kinds: list[str],
        by_operand: str,
    ) -> None:
        """With what it only reads in the order in which the body uses it.

        Args:
          by_operand: the parameter that says something of each operand.
        """
        free = parameters["num_consts"] if primitive == "scan" else len(given)
        body, order = self._nested(parameters["jaxpr"]["jaxpr"], free=free)
        order += range(free, len(given))
        rest = {name: value for name, value in parameters.items() if name != "jaxpr"}
        if isinstance(values := rest.get(by_operand), list):
            rest[by_operand] = [values[i] for i in order]
        head = f"{primitive}{self._parameters(rest)} {body}"
        self._add(results, [given[i] for i in order], kinds, head)

    def _add(self, results: list[str], given: list, kinds: list[str], head: str) -> None:
        left = " ".join(f"{each}:{kind}" for each, kind in zip(results, kinds, strict=True))
        right = " ".join(f"{name}:{kind}" for name, kind in given)
        operands = [name for name, _ in given]
        record = primitives.record(head.partition("[")[0])
        moves = record.moves or record.name == "copy"
        self.lines.append(_Line(results, operands, f"{left} = {head} {right}", self.group, moves))

    def alive(self, results: Sequence[str]) -> list[str]:
        """The lines that results need, those of one call of the host together."""
        needed, kept = set(results), []
        for line in reversed(self.lines):
            if needed.intersection(line.results):
                kept.append(line)
                needed.update(line.operands)
        texts, last = [], 0
        for line in reversed(kept):
            if line.group != last and not line.moves:
                texts.append("call of the host")
                last = line.group
            texts.append(line.text)
        return texts

    def text(self, names: Sequence[str], results: Sequence[str]) -> str:
        """The equations that results need, with numbers for names, as what others compare."""
        lines = [" ".join(names), f"options {sorted(self.options)}", *self.alive(results)]
        return _numbered("\n".join([*lines, f"out {' '.join(results)}"]))

    # --- parameters

    def _parameters(self, parameters: Mapping) -> str:
        shown = []
        for name, value in sorted(parameters.items()):
            if name in _AXIS_PARAMETERS:
                is_set = isinstance(value, dict) and "set" in value
                names = value["set"] if is_set else value if isinstance(value, list) else [value]
                shown.append(f"{name}={json.dumps([self._axis(each) for each in names])}")
            else:
                shown.append(f"{name}={self._value(value)}")
        return f"[{', '.join(shown)}]"

    def _axis(self, name: Any) -> Any:
        return self.axes.get(name, name) if isinstance(name, str) else name

    def _value(self, value: Any) -> str:
        if isinstance(value, list):
            return f"({', '.join(map(self._value, value))})"
        if not isinstance(value, dict) or _says_nothing(value):
            return json.dumps(None if isinstance(value, dict) else value)
        if "jaxpr" in value:
            return self._nested(value["jaxpr"])[0]
        if "spec" in value:
            cut = [[self._axis(name) for name in each] for each in value["spec"]]
            while cut and not cut[-1]:
                cut.pop()
            return f"P{json.dumps(cut)}"
        if "mesh" in value:
            for name, _ in value["mesh"]:
                self.axes.setdefault(name, f"axis-{len(self.axes)}")
            sizes = [[self.axes[name], size] for name, size in value["mesh"]]
            return f"mesh{json.dumps([sizes, value['kinds'], value.get('devices')])}"
        if "sharding" in value:
            return " ".join(map(self._value, value["sharding"]))
        return json.dumps({key: self._value(each) for key, each in value.items()})

    def _nested(self, text: Mapping[str, Any], free: int = 0) -> tuple[str, list[int]]:
        """A program inside an equation, which sees no value of the outer one.

        Args:
          text: the program.
          free: how many of its first inputs come in the order in which it uses them.

        Returns:
          Its normal form, and the order that it gives to these inputs.
        """
        inner = Equations(self.rules, self.axes, self.counter, self.used)
        inputs = [inner.new() for _ in text["in"]]
        results = inner.run(text, inputs)
        lines = " ; ".join(inner.alive(results))
        right = " ".join(f"{name}:{kind}" for name, kind in zip(results, types(text), strict=True))
        uses: dict[str, int] = {}
        for found in _VARIABLE.finditer(f"{lines} {right}"):
            uses.setdefault(found[0], found.start())
        order = sorted(range(free), key=lambda i: uses.get(inputs[i], math.inf))
        ordered = [*order, *range(free, len(inputs))]
        left = " ".join(f"{inputs[i]}:{text['in'][i][1]}" for i in ordered)
        return f"{{{left} | {lines} | {right}}}", order

    # --- rules

    def _by_rule(
        self, primitive: str, parameters: Mapping, given: list, kinds: list[str]
    ) -> str | None:
        """The value that takes the place of an equation."""
        if primitive == "convert_element_type" and given[0][1] == kinds[0]:
            return self._used("R11", given[0][0])
        if primitive == "div" and given[1][0] in _ONES and given[0][1] == kinds[0]:
            return self._used("R3", given[0][0])
        if not primitives.record(primitive).reduces:
            return None
        axes, sizes = parameters["axes"], shape(given[0][1])
        if not axes:
            return self._used("R2", given[0][0])
        gathered = self.gathers.get(given[0][0])
        if primitive == "reduce_sum" and gathered and gathered[2] == given[0][1]:
            source, kind, _, how = gathered
            whole = how["axis_index_groups"] is None and how["tiled"] is False
            if whole and axes == [how["all_gather_dimension"]] and kind == kinds[0]:
                result = self.new()
                head = {"axes": how["axis_name"], "axis_index_groups": None}
                self._add([result], [(source, kind)], kinds, f"psum{self._parameters(head)}")
                return self._used("R1", result)
        if all(sizes[axis] == 1 for axis in axes):
            return self._used("R4", given[0][0])
        return None

    def _used(self, rule: str, name: str) -> str:
        self.used.add(rule)
        return name


def _moves_nothing(primitive: str, parameters: Mapping, given: list, kinds: list[str]) -> bool:
    """Whether an equation only names other dimensions of size 1, or groups elements otherwise."""
    if primitive == "reshard":
        return _says_nothing(parameters["dst_sharding"])
    if not _says_nothing(parameters.get("sharding")):
        return False
    if primitive == "reshape":
        return parameters.get("dimensions") is None
    if primitive == "squeeze":
        return True
    if primitive != "broadcast_in_dim" or len(given) != 1:
        return False
    old, new = shape(given[0][1]), shape(kinds[0])
    dimensions = parameters["broadcast_dimensions"]
    kept = all(old[i] == new[each] for i, each in enumerate(dimensions))
    return kept and all(size == 1 for i, size in enumerate(new) if i not in dimensions)


def _says_nothing(sharding: Any) -> bool:
    """Whether nothing is cut, of a mesh whose axes are all manual."""
    if not isinstance(sharding, dict) or "sharding" not in sharding:
        return sharding is None
    mesh, spec = sharding["sharding"]
    return not any(spec["spec"]) and set(mesh["kinds"]) <= {"AxisType.Manual"}


def _literal(text: str) -> tuple[str, str]:
    return f"literal({text})", text.partition(" ")[0]


def shape(kind: str) -> list[int]:
    inner = kind.partition("[")[2].partition("]")[0]
    return [int(each) for each in inner.split(",") if each]


def types(text: Mapping[str, Any], operands: Iterable[int | str] | None = None) -> list[str]:
    """The types, such as "float32[8,3]", of some variables and literals; else of the results."""
    known = {number: kind for number, kind, *_ in (*text["in"], *text["consts"])}
    for _, _, _, results in text["eqns"]:
        known.update({number: kind for number, kind in results})
    wanted = text["out"] if operands is None else operands
    return [known[each] if isinstance(each, int) else _literal(each)[1] for each in wanted]


def _numbered(text: str) -> str:
    """Variables by their first use, so that equal programs have equal texts."""
    numbers: dict[str, str] = {}
    return _VARIABLE.sub(lambda found: numbers.setdefault(found[0], f"§{len(numbers)}"), text)


def called(primitive: str, parameters: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The program that a call has inside; None where the equation is no call."""
    if primitives.record(primitive).call not in ("inline", "ruled"):
        return None
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next(parameters[key]["jaxpr"] for key in keys if key in parameters)


def refuse_opaque(*texts: Mapping[str, Any]) -> None:
    """Raises a NotProvedError where a text hides something."""
    for text in texts:
        if (found := _opaque(text)) is not None:
            raise NotProvedError(f"its text does not show all of it: {found}")


def _opaque(value: Any) -> str | None:
    """What is hidden in a text; None where nothing is."""
    if isinstance(value, dict):
        if "opaque" in value:
            return str(value["opaque"])
        value = list(value.values())
    if isinstance(value, str):
        return value if value.startswith(("opaque", "key opaque")) else None
    if isinstance(value, list):
        if len(value) == 4 and isinstance(value[0], str) and "callback" in value[0]:
            return value[0]
        return next((found for each in value if (found := _opaque(each)) is not None), None)
    return None


def require_same(one: str, other: str) -> None:
    """Raises a NotProvedError that says where two normal forms part."""
    if one == other:
        return
    for line, against in zip(one.split("\n"), other.split("\n"), strict=False):
        if line != against:
            at = len(os.path.commonprefix([line, against]))
            shown = slice(max(0, at - 30), at + 40)
            raise NotProvedError(f"{line[shown]!r} before, {against[shown]!r} after")
    raise NotProvedError("one has more equations than the other")
