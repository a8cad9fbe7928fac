"""Which results of a program are the same on all devices, from its text alone.

The analysis is that of `jax_dist.uniformity`; here it reads programs as JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_dist import primitives
from jax_dist.primitives import Primitive
from jax_dist.uniformity import NOWHERE, Same, Uniformity, cut_along


class _TextUniformity(Uniformity):
    """The analysis of what is the same on all devices, of the texts of programs."""

    def record(self, eqn: "_TextEquation") -> Primitive:
        return primitives.record(eqn.primitive)

    def opened(self, body: "_TextProgram") -> "_TextProgram":
        return body

    def bodies(self, eqn: "_TextEquation") -> list[Any]:
        return list(_programs(eqn.params))

    def hidden_body(self, eqn: "_TextEquation") -> None:
        return None

    def is_literal(self, atom: Any) -> bool:
        return isinstance(atom, str)

    def carries(self, eqn: "_TextEquation") -> list[tuple[int, int]]:
        first, count = eqn.params["num_consts"], eqn.params["num_carry"]
        return [(first + number, number) for number in range(count)]

    def inside(self, eqn: "_TextEquation", scope: Same) -> Same:
        return scope | {name for name, _ in eqn.params["mesh"]["mesh"]}

    def cut(self, eqn: "_TextEquation") -> list[Same]:
        return [cut_along(spec["spec"]) for spec in eqn.params["in_specs"]]


@dataclass(frozen=True)
class _TextEquation:
    primitive: str
    params: Mapping[str, Any]
    invars: Sequence[Any]  # numbers of variables, and the texts of literals
    outvars: Sequence[int]


@dataclass(frozen=True, eq=False)
class _TextProgram:
    invars: Sequence[int]
    constvars: Sequence[int]
    eqns: Sequence[_TextEquation]
    outvars: Sequence[Any]

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> "_TextProgram":
        return cls(
            [number for number, _ in text["in"]],
            [number for number, *_ in text["consts"]],
            [
                _TextEquation(
                    primitive,
                    {name: _with_programs(value) for name, value in parameters.items()},
                    operands,
                    [number for number, _ in results],
                )
                for primitive, parameters, operands, results in text["eqns"]
            ],
            text["out"],
        )


def _with_programs(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "jaxpr" in value:
            return _TextProgram.of(value["jaxpr"])
        return {name: _with_programs(each) for name, each in value.items()}
    return [_with_programs(each) for each in value] if isinstance(value, list) else value


def _programs(value: Any) -> Iterator[_TextProgram]:
    """Those among the parameters of an equation, however deep, in order."""
    if isinstance(value, _TextProgram):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _programs(each)


def alike(text: Mapping[str, Any], given: Sequence[bool], axis: str) -> list[bool]:
    """Which results of a program are the same on all devices, by which arguments are."""
    scope = frozenset({axis})
    ins = [scope if each else NOWHERE for each in given]
    found = _TextUniformity().outputs(_TextProgram.of(text), ins, scope)
    return [axis in same for same in found]
