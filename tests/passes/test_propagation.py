"""What Shardy says is read as specs, or not at all."""

import jax
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite import propagation

pytestmark = pytest.mark.rewriting


class Written:
    """A lowered program, of which only the text counts."""

    def __init__(self, *lines, meshes=('@mesh = <["i"=4, "j"=2]>',), arguments):
        body = "\n".join(lines)
        declared = "\n".join(f"sdy.mesh {mesh}" for mesh in meshes)
        text = (
            f"module {{\n{declared}\nfunc.func public @main({arguments}) {{\n{body}\nreturn\n}}}}"
        )
        context = jax.jit(lambda: 0).lower().compiler_ir().context
        self._module = ir.Module.parse(text, context)

    def compiler_ir(self):
        return self._module


def call(name, operand):
    """Of an array `[8, 6]`, elementwise; kept, though nobody reads its result."""
    rule = "#sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=6}, custom>"
    attributes = f"api_version = 2 : i32, has_side_effect = true, sdy.sharding_rule = {rule}"
    array = "tensor<8x6xf32>"
    return (
        f"%r{name} = stablehlo.custom_call @Op(%{operand}) {{{attributes}}} : ({array}) -> {array} "
        f'loc("jax_dist_site_{name}")'
    )


def argument(name, sharding):
    return f"%{name}: tensor<8x6xf32> {{sdy.sharding = #sdy.sharding<{sharding}>}}"


def layouts(program):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    return propagation.read_layouts(program, "Op", mesh)


def reason(program):
    [layout] = layouts(program).values()
    assert isinstance(layout, str)
    return layout


def test_each_call_is_found_by_its_name():
    program = Written(
        call("0", "x"),
        call("1", "y"),
        arguments=argument("x", '@mesh, [{"i"}, {}]')
        + ", "
        + argument("y", '@mesh, [{"j", "i"}, {}]'),
    )

    by_i, by_both = P("i", None), P(("j", "i"), None)
    assert layouts(program) == {
        (0,): propagation.CallLayout((by_i,), (by_i,)),
        (1,): propagation.CallLayout((by_both,), (by_both,)),
    }


def test_the_program_asked_about_stays_as_it_is():
    program = Written(call("0", "x"), arguments=argument("x", '@mesh, [{"i"}, {}]'))
    before = str(program.compiler_ir())

    layouts(program)

    assert str(program.compiler_ir()) == before


def test_a_part_of_an_axis_is_not_known():
    program = Written(call("0", "x"), arguments=argument("x", '@mesh, [{"i":(1)2}, {}]'))

    assert reason(program) == "one of its values is split along a part of axis 'i'"


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param('<["a"=4, "j"=2]>', id="other name"),
        pytest.param('<["i"=2, "j"=4]>', id="other size"),
        pytest.param('<["j"=2, "i"=4]>', id="other order of axes"),
        pytest.param('<["i"=4, "j"=2], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>', id="other devices"),
    ],
)
def test_another_mesh_is_not_known(mesh):
    program = Written(
        call("0", "x"), meshes=[f"@other = {mesh}"], arguments=argument("x", '@other, [{"j"}, {}]')
    )

    assert reason(program) == "its values are on another mesh"


def test_copies_that_lie_differently_are_not_known():
    second = call("1", "y").replace("site_1", "site_0")
    arguments = [argument("x", '@mesh, [{"i"}, {}]'), argument("y", '@mesh, [{"j"}, {}]')]
    program = Written(call("0", "x"), second, arguments=", ".join(arguments))

    assert reason(program) == "the compiler makes copies of it that are sharded differently"


def test_operands_made_of_constants_are_told():
    array = "tensor<8x6xf32>"
    program = Written(
        f"%c = stablehlo.constant dense<1.0> : {array}",
        f"%d = stablehlo.add %c, %c : {array}",
        f"%e = stablehlo.add %d, %x : {array}",
        "%zero = stablehlo.constant dense<0> : tensor<i32>",
        "%i = stablehlo.add %zero, %zero : tensor<i32>",
        # Its operand is a constant, and yet it gives an argument.
        f'%f = "stablehlo.case"(%i) ({{"stablehlo.return"(%x) : ({array}) -> ()}}) '
        f": (tensor<i32>) -> {array}",
        call("0", "d"),
        call("1", "e"),
        call("2", "f"),
        arguments=argument("x", '@mesh, [{"i"}, {}]'),
    )

    constants = {name: layout.constants for name, layout in layouts(program).items()}
    assert constants == {(0,): (0,), (1,): (), (2,): ()}


def test_an_argument_of_an_unknown_region_is_not_known():
    program = Written(
        '%r = "stablehlo.all_reduce"(%x) <{replica_groups = dense<0> : tensor<1x1xi64>}> ({',
        "^bb0(%lhs: tensor<f32>, %rhs: tensor<f32>):",
        "%a = stablehlo.custom_call @Op(%lhs) {api_version = 2 : i32, has_side_effect = true} "
        ': (tensor<f32>) -> tensor<f32> loc("jax_dist_site_0")',
        '"stablehlo.return"(%a) : (tensor<f32>) -> ()',
        "}) : (tensor<8x6xf32>) -> tensor<8x6xf32>",
        arguments=argument("x", '@mesh, [{"i"}, {}]'),
    )

    assert reason(program) == "it reads an argument of stablehlo.all_reduce"
