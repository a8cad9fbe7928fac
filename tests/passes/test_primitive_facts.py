"""What JAX's rules of typing and batching say of primitives that have no record."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import random as extended_random
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import primitive_facts
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.primitives import RECORDS

pytestmark = pytest.mark.rewriting

_X = jnp.ones((2, 3))


def _eqn(function, *operands):
    return jax.make_jaxpr(function)(*operands).eqns[-1]


@pytest.fixture
def new(monkeypatch):
    """Makes primitives that a newer JAX might list, and gives an equation of each."""

    def make(evaluate, batch=None, operands=(_X,), **params):
        made = Primitive("new")
        made.def_abstract_eval(evaluate)
        made.multiple_results = isinstance(evaluate(*map(jax.typeof, operands), **params), list)
        if batch is not None:
            rule = lambda args, dims, **params: batch(made, args, dims, params)
            batching.primitive_batchers[made] = rule
        monkeypatch.setattr(primitive_facts, "_listed", lambda: frozenset({made}))
        return _eqn(lambda *xs: made.bind(*xs, **params), *operands)

    return make


def _facts(eqn):
    record = record_of(eqn)
    return record.kind, record.elementwise


def _itself(made, args, dims, params):
    return made.bind(*args, **params), next(dim for dim in dims if dim is not None)


# ---- what has a record


def test_a_bitcast_to_another_size_has_a_dimension_more():
    other = record_of(_eqn(lambda x: lax.bitcast_convert_type(x, jnp.int8), _X))
    same = record_of(_eqn(lambda x: lax.bitcast_convert_type(x, jnp.int32), _X))

    assert (other.kind, other.exact, other.elementwise) == ("plain", True, False)
    assert (same.kind, same.exact, same.elementwise) == ("plain", True, True)


def test_the_keys_of_a_user_make_functions_of_keys_unknown_and_nothing_else():
    own = extended_random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 2), jnp.uint32),
        random_bits=lambda key, width, shape: jnp.zeros(shape, jnp.uint32),
        fold_in=lambda key, data: key,
        tag="own",
    )
    data = jnp.zeros(2, jnp.uint32)
    wrapped = jax.make_jaxpr(lambda data: jax.random.wrap_key_data(data, impl=own))(data).eqns[-1]
    folded = _eqn(lambda key: jax.random.fold_in(key, 1), jax.random.wrap_key_data(data, impl=own))
    of_jax = _eqn(lambda key: jax.random.fold_in(key, 1), jax.random.key(0))

    assert [record_of(eqn).name for eqn in (wrapped, of_jax)] == ["random_wrap", "random_fold_in"]
    assert [_facts(eqn)[0] for eqn in (wrapped, of_jax, folded)] == ["plain", "plain", "opaque"]


# ---- what has none


def test_a_primitive_of_a_user_is_not_asked(new):
    eqn = new(lambda x: x, _itself)
    assert _facts(eqn) == ("plain", True)

    own = Primitive("own")
    own.def_abstract_eval(lambda x: x)
    assert _facts(_eqn(own.bind, _X)) == ("opaque", False)


def test_what_has_effects_bodies_or_no_operands_is_not_asked(new, monkeypatch):
    eqn = new(lambda x: x, _itself)
    assert _facts(eqn.replace(effects=frozenset({"one"}))) == ("opaque", False)

    with_body = _eqn(lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,)), _X)
    with monkeypatch.context() as patch:
        patch.delitem(RECORDS, "reduce")
        patch.setattr(primitive_facts, "_listed", lambda: frozenset({with_body.primitive}))
        assert primitive_facts.is_plain(with_body)
        assert _facts(with_body) == ("opaque", False)

    alone = new(lambda: _typed_as_varying(), operands=())
    assert primitive_facts.is_plain(alone)
    assert _facts(alone) == ("opaque", False)


def _typed_as_varying():
    mesh = primitive_facts._MESH
    found = []

    def note(x):
        found.append(jax.typeof(_compat.to_varying(x, mesh.axis_names)))
        return ()

    mapped = jax.shard_map(note, mesh=mesh, in_specs=P(), out_specs=(), check_vma=True)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jax.eval_shape(mapped, _X)
    return found[0]


def test_what_its_rule_of_typing_refuses_is_unknown(new):
    def evaluate(x):
        if _compat.varying_axes(x):
            raise TypeError
        return x

    assert _facts(new(evaluate, _itself)) == ("opaque", False)


def test_all_results_have_to_be_typed_as_their_operands(new):
    one, both, none = lambda x: [x, jax.typeof(_X)], lambda x: [x, x], lambda x: []

    assert [_facts(new(each))[0] for each in (one, both, none)] == ["opaque", "plain", "opaque"]


def test_an_answer_is_kept_by_question_types_and_parameters(new, monkeypatch):
    asked = []

    def ask(name):
        rule = getattr(primitive_facts, name)
        monkeypatch.setattr(
            primitive_facts, name, lambda eqn: asked.append((name, eqn.params["n"])) or rule(eqn)
        )

    ask("is_plain")
    ask("is_elementwise")
    evaluate = lambda x, n: x
    batch = lambda made, args, dims, params: (made.bind(*args, n=params["n"] % 2), dims[0])
    eqn = new(evaluate, batch, n=1)
    other = eqn.replace(params={"n": 2})
    wider = eqn.replace(invars=_eqn(jnp.sin, jnp.ones((2, 4))).invars)
    without_hash = eqn.replace(params={"n": 3, "of": []})

    assert [_facts(each) for each in (eqn, other, eqn, other)] == [
        *(("plain", True), ("plain", False)) * 2
    ]
    questions = ("is_plain", "is_elementwise")
    assert asked == [(question, n) for n in (1, 2) for question in questions]
    record_of(wider)
    assert len(asked) > 4
    del asked[:]
    assert [_facts(without_hash) for _ in range(2)] == [("opaque", False)] * 2
    assert asked == [("is_plain", 3)] * 2


# ---- element by element


def test_an_elementwise_primitive_is_its_own_vmap(new):
    binary = lambda x, y: x if x.shape else y
    for operands in ((_X, _X), (_X, 1.0), (1.0, _X)):
        assert _facts(new(binary, _itself, operands)) == ("plain", True)
    assert _facts(new(lambda x: x, _itself, (1.0,))) == ("plain", False)  # there is nothing to map
    assert _facts(new(lambda x: [x, x], lambda *a: _twice(*a))) == ("plain", False)


def _twice(made, args, dims, params):
    return made.bind(*args, **params), [dims[0]] * 2


def _with_parameters(made, args, dims, params):
    return made.bind(*args, more=1), dims[0]


def _swapped(made, args, dims, params):
    return made.bind(*args[::-1]), dims[0]


def _of_another(made, args, dims, params):
    return lax.add(*args), dims[0]


def _not_its_result(made, args, dims, params):
    made.bind(*args)
    return args[0], dims[0]


def _and_more(made, args, dims, params):
    return jnp.sin(made.bind(*args)), dims[0]


@pytest.mark.parametrize(
    "batch", [None, _with_parameters, _swapped, _of_another, _not_its_result, _and_more]
)
def test_a_vmap_that_is_something_else(batch, new):
    eqn = new(lambda x, y, **_: x, batch, (_X, _X + 1))

    assert _facts(eqn) == ("plain", False)


def test_every_dimension_has_to_be_mapped(new):
    """Along the last one it may be a cumulative sum."""
    for wrong in (0, 1):
        rows = lambda made, args, dims, params, wrong=wrong: (
            made.bind(*args) if dims[0] != wrong else args[0] * 2,
            dims[0],
        )
        assert _facts(new(lambda x: x, rows)) == ("plain", False)


def test_an_operand_of_another_shape(new):
    """Each row of the second operand is summed: its vmaps along the shared ones are itself."""
    operands = itertools.permutations([_X, jnp.ones((2, 3, 4))])
    for pair in operands:
        shorter = lambda x, y: min(x, y, key=lambda aval: len(aval.shape))
        assert _facts(new(shorter, _itself, pair)) == ("plain", False)
