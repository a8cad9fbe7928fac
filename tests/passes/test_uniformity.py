"""What the analysis says of each kind of equation: traced only, nothing runs."""

import jax
import jax.numpy as jnp
import pytest
from gather_checks import mesh_of
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite.interpreter import equations, named_axes
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import NOWHERE, Invariance, axes_of, cut_along

pytestmark = pytest.mark.rewriting

_ROWS = jax.ShapeDtypeStruct((12, 5), "float32")
_BOTH, _ONLY_J = frozenset({"i", "j"}), frozenset({"j"})


class Inside:
    """The body of a shard_map over i, which cuts its one operand, and over j, which does not."""

    def __init__(self, body, invariance=None):
        mapped = jax.shard_map(
            body, mesh=mesh_of(i=2, j=3), in_specs=P("i"), out_specs=P(("i", "j")), check_vma=False
        )
        (outer,) = jax.make_jaxpr(mapped)(_ROWS).eqns
        self.body = outer.params["jaxpr"]
        self.invariance = invariance or Invariance()
        self.facts = self.invariance.facts(self.body, [_ONLY_J], _BOTH)

    def eqn(self, name):
        return next(eqn for eqn in self.body.eqns if _compat.name_of(eqn) == name)

    def same(self, eqn):
        return [self.invariance.same_of(atom, self.facts, _BOTH) for atom in eqn.invars]

    def results(self):
        return [*self.invariance.outputs(self.body, [_ONLY_J], _BOTH)]

    def entering(self, name):
        """Of the inputs of each body of an equation."""
        eqn = self.eqn(name)
        return self.invariance.of_body_inputs(eqn, self.same(eqn), _BOTH)


def _while(until, turn, start):
    return lax.while_loop(lambda c: c[0] < until, lambda c: (c[0] + 1, turn(c[1])), (0, start))[1]


# ---- what is known of results


def test_a_carry_of_a_while_loop_takes_what_its_body_adds():
    assert Inside(lambda x: _while(3, lambda c: c + x, jnp.ones((6, 5)))).results() == [_ONLY_J]
    assert Inside(lambda x: _while(3, lambda c: c + 1, jnp.ones((6, 5)))).results() == [_BOTH]
    assert Inside(lambda x: _while(3, lambda c: c + 1, x)).results() == [_ONLY_J]


def test_a_while_loop_with_nothing_to_carry():
    def body(x):
        lax.while_loop(lambda _: x.sum() < 0, lambda _: (), ())
        return x

    inside = Inside(body)

    assert not inside.eqn("while").outvars
    assert inside.results() == [_ONLY_J]


def test_what_comes_out_of_a_shard_map_inside_another():
    def body(x):
        inner = jax.shard_map(
            lambda x: lax.psum(x, "j"), in_specs=P(), out_specs=P(), axis_names={"j"},
            check_vma=False,
        )  # fmt: skip
        return inner(lax.psum(x, "i")) + inner(jnp.ones(x.shape))

    mapped = jax.shard_map(
        body, mesh=mesh_of(i=2, j=3), in_specs=P("i"), out_specs=P("i"), axis_names={"i"},
        check_vma=False,
    )  # fmt: skip
    (outer,) = jax.make_jaxpr(mapped)(_ROWS).eqns
    only_i = frozenset({"i"})

    assert Invariance().outputs(outer.params["jaxpr"], [NOWHERE], only_i) == [only_i]


class _Expanding(Invariance):
    """Knows what the primitive of a user computes."""

    def hidden_body(self, eqn):
        jaxpr = jax.make_jaxpr(lambda x: x * 2)(jnp.ones((6, 5)))
        return jaxpr if eqn.primitive.name == "twice" else None


def test_what_an_equation_hides_is_expanded_once(monkeypatch: pytest.MonkeyPatch):
    eqn, asked = Inside(jnp.sin).eqn("sin"), []
    monkeypatch.setattr(_compat, "expanded", lambda eqn: asked.append(eqn) or ("a body", eqn))
    invariance = Invariance()

    first = invariance.hidden_body(eqn)
    assert first == ("a body", eqn)
    assert invariance.hidden_body(eqn) is first
    assert len(asked) == 1


def test_of_a_primitive_with_a_hidden_body_that_body_counts():
    twice = Primitive("twice")
    twice.def_abstract_eval(lambda x: x)
    body = lambda x: twice.bind(lax.psum(x, "i"))

    assert Inside(body).results() == [NOWHERE]
    assert Inside(body, _Expanding()).results() == [_BOTH]


def test_facts_are_found_once_for_each_body():
    """Each loop asks for its body twice at least, and so does the body of a body."""
    inside = Inside(lambda x: lax.scan(lambda c, row: (c + row, None), jnp.zeros(5), x)[0])
    again = inside.invariance.facts(inside.body, [_ONLY_J], _BOTH)

    assert again is inside.facts
    assert inside.invariance.facts(inside.body, [_BOTH], _BOTH) is not inside.facts


# ---- what enters bodies


def test_branches_take_all_operands_but_the_first():
    inside = Inside(
        lambda x: lax.cond(lax.psum(x, "i").sum() > 0, lambda a, b: a + b, jnp.subtract, x, x * 0)
    )

    assert inside.entering("cond") == [[_ONLY_J, _ONLY_J]] * 2


@pytest.mark.parametrize(("call", "name"), [(jax.jit, "jit"), (jax.checkpoint, "remat2")])
def test_a_call_hands_its_operands_on(call, name):
    inside = Inside(lambda x: call(lambda a, b: a + b)(lax.psum(x, "i"), x))

    assert inside.entering(name) == [[_BOTH, _ONLY_J]]


def test_of_what_other_bodies_take_nothing_is_known():
    """They may be called on anything, in any order."""
    inside = Inside(lambda x: lax.composite(lambda a, b: a + b, "a.b")(lax.psum(x, "i"), x))

    assert record_of(inside.eqn("composite")).kind == "plain"
    assert inside.entering("composite") == [[NOWHERE, NOWHERE]]


def test_the_inputs_of_a_while_loop_come_in_the_order_of_its_bodies():
    def body(x):
        total = lax.psum(x, "i").sum()
        return _while(total, lambda c: c + x, jnp.ones((6, 5)))

    cond, turn = Inside(body).entering("while")

    assert cond == [_BOTH, _BOTH, _ONLY_J]
    assert turn == [_ONLY_J, _BOTH, _ONLY_J]


# ---- names of axes


def _over_rows(function):
    mapped = jax.shard_map(
        function, mesh=mesh_of(rows=2, j=3), in_specs=P("rows"), out_specs=P(), check_vma=False
    )
    found = equations(jax.make_jaxpr(mapped)(_ROWS))
    return [eqn for eqn in found if record_of(eqn).kind == "collective"]


def test_the_axes_that_an_equation_names():
    (index,) = _over_rows(lambda x: lax.axis_index("rows"))
    (total,) = _over_rows(lambda x: lax.psum(x, ("rows", "j")))
    (of_vmap,) = _over_rows(
        jax.vmap(lambda x: lax.psum(x, ("each", "rows")), axis_name="each", axis_size=6)
    )
    (plain,) = jax.make_jaxpr(jnp.sin)(1.0).eqns

    assert index.params["axis_name"] == "rows"
    assert 0 in of_vmap.params["axes"]
    assert [named_axes(eqn) for eqn in (index, total, of_vmap, plain)] == [
        *(("rows",), ("rows", "j"), ("rows",), ())
    ]
    assert [axes_of(eqn, record_of(eqn)) for eqn in (index, total, of_vmap)] == [
        *(("rows",), ("rows", "j"), ("rows",))
    ]


def test_the_axes_that_a_spec_cuts_along():
    assert cut_along(P(None, ("i", "j"), "rows")) == {"i", "j", "rows"}
    assert cut_along(P()) == NOWHERE
