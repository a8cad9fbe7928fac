"""Programs whose arrays have another form are proved slice by slice, and no wrong one is."""

import copy
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from verified_programs import IDIOMATIC, TRAINING, changed, recorded_together

import jax_dist
from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.verify import calls, program_text, slices
from jax_dist.migrate.verify.comparison import pairs
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.recording import programs

pytestmark = [
    pytest.mark.rewriting,
    pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program"),
]

ROWS, WHOLE = PartitionSpec("i"), PartitionSpec()
COPIES, MERGED, AS_IS = "one of equal copies", "device axis merged", "as is"


def typed(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def before(body: Callable, *shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """The text of a pmap."""
    mapped = jax.pmap(body, axis_name="i", **options)
    return programs.text(lambda *args: mapped(*args), [typed(*shape) for shape in shapes])


def after(
    body: Callable, *shapes: tuple[int, ...], specs: Any, devices: Any = None, **options: Any
) -> dict[str, Any]:
    """The text of what an idiomatic migration writes: state in one copy, a global batch."""
    mapped = jax.shard_map(
        body,
        mesh=Mesh(devices or jax.devices(), ("i",)),
        in_specs=specs[0],
        out_specs=specs[1],
        check_vma=False,
    )
    return programs.text(jax.jit(mapped, **options), [typed(*shape) for shape in shapes])


def step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[3]` and `[b, 3]` of one device."""
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - lax.pmean(gradient, "i"), lax.psum(batch.sum(), "i")


_FORMS = ((8, 3), (8, 4, 3))
_SPECS = ((WHOLE, ROWS), WHOLE)
_RELATION = {"arguments": [[0, COPIES], [1, MERGED]], "results": [COPIES, COPIES]}


def proof(one: Any, other: Any, **relation: Any) -> tuple[str, ...]:
    signature = {"before": one, "after": other, "sizes": {}, **_RELATION, **relation}
    return slices.proof(json.loads(json.dumps(signature)))


def test_a_training_step_with_one_copy_of_its_state():
    one = before(step, *_FORMS, donate_argnums=0)
    other = after(step, (3,), (32, 3), specs=_SPECS, donate_argnums=0)

    assert proof(one, other) == ("R5", "R6", "R7")


def test_what_keeps_its_form_needs_no_rule():
    one = before(lambda x: x * 2, (8, 3))
    other = after(lambda x: (x[0] * 2)[None], (8, 3), specs=(ROWS, ROWS))

    assert proof(one, other, arguments=[[0, AS_IS]], results=[AS_IS]) == ()


def test_rows_of_results_can_be_merged_too():
    one = before(jnp.sin, (8, 4, 3))
    other = after(jnp.sin, (32, 3), specs=(ROWS, ROWS))

    assert proof(one, other, arguments=[[0, MERGED]], results=[MERGED]) == ("R7",)


def test_arguments_may_come_in_another_order():
    one = before(lambda x, y: x - y, (8, 3), (8, 3))
    other = after(lambda y, x: (x[0] - y[0])[None], (8, 3), (8, 3), specs=((ROWS, ROWS), ROWS))
    right, wrong = [[1, AS_IS], [0, AS_IS]], [[0, AS_IS], [1, AS_IS]]

    assert proof(one, other, arguments=right, results=[AS_IS]) == ()
    with pytest.raises(NotProvedError):
        proof(one, other, arguments=wrong, results=[AS_IS])
    with pytest.raises(NotProvedError, match="two arguments come from one"):
        proof(one, other, arguments=[[0, AS_IS], [0, AS_IS]], results=[AS_IS])


def _summed(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - lax.psum(gradient, "i"), lax.psum(batch.sum(), "i")


def _left_apart(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - gradient, lax.psum(batch.sum(), "i")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: after(_summed, (3,), (32, 3), specs=_SPECS), "before, .* after"),
        (lambda: after(_left_apart, (3,), (32, 3), specs=_SPECS), "may differ"),
        (lambda: after(step, (3,), (4, 3), specs=((WHOLE, WHOLE), WHOLE)), "argument 1 is"),
        (lambda: after(step, (3,), (32, 3), specs=_SPECS, donate_argnums=0), "donated"),
        (
            lambda: after(step, (3,), (32, 3), specs=_SPECS, devices=jax.devices()[::-1]),
            "devices",
        ),
        (
            lambda: after(
                lambda s, b: (step(s, b)[0], step(s, b)[1][None]),
                *((3,), (32, 3)),
                specs=((WHOLE, ROWS), (WHOLE, ROWS)),
            ),
            "result 1 is",
        ),
        (
            lambda: after(
                lambda s, b: jax.tree.map(lambda x: x + b.sum() * 0, step(s, b)),
                *((3,), (32, 3)),
                specs=_SPECS,
            ),
            "may differ",
        ),
        (
            lambda: programs.text(
                lambda s, b: jax.jit(
                    jax.shard_map(
                        step,
                        mesh=Mesh(jax.devices(), ("i",)),
                        in_specs=_SPECS[0],
                        out_specs=_SPECS[1],
                        check_vma=False,
                    )
                )(s * 2, b),
                [typed(3), typed(32, 3)],
            ),
            "outside of its shard_map: mul",
        ),
    ],
    ids=[
        *("a sum for a mean", "no collective", "the batch on all devices", "donation"),
        *("devices", "a cut result", "a result that differs", "more around it"),
    ],
)
def test_what_is_another_program_is_not_proved(other, said):
    with pytest.raises(NotProvedError, match=said):
        proof(before(step, *_FORMS), other())


@pytest.mark.parametrize(
    "relation",
    [
        {"arguments": [[0, MERGED], [1, MERGED]]},
        {"arguments": [[0, COPIES], [1, COPIES]]},
        {"arguments": [[0, AS_IS], [1, MERGED]]},
        {"arguments": [[1, COPIES], [0, MERGED]]},
        {"arguments": [[0, "by magic"], [1, MERGED]]},
        {"results": [COPIES, AS_IS]},
        {"results": [COPIES]},
    ],
)
def test_another_relation_is_refused(relation):
    other = after(step, (3,), (32, 3), specs=_SPECS)

    with pytest.raises(NotProvedError):
        proof(before(step, *_FORMS), other, **relation)


def _scan(state: jax.Array, batch: jax.Array, *, joined: bool) -> jax.Array:
    def turn(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (carry + lax.pmean(row, "i") if joined else carry + row), lax.psum(carry, "i")

    return lax.scan(turn, state, batch)[0]


def _delayed(state: jax.Array, batch: jax.Array) -> jax.Array:
    """What differs reaches the result only in the third turn."""
    start = state, state, batch[0]
    return lax.fori_loop(0, 5, lambda _, c: (c[1], c[2], c[2]), start)[0]


def _branch(state: jax.Array, batch: jax.Array, *, by_device: bool) -> jax.Array:
    chosen = lax.axis_index("i") if by_device else lax.pmax(batch.sum(), "i").astype(int)
    return lax.cond(chosen > 2, lambda x: x + 1, lambda x: x - 1, state)


def _steps(state: jax.Array, batch: jax.Array, *, joined: bool) -> jax.Array:
    limit = lax.pmax(batch.max(), "i") if joined else batch.max()
    return lax.while_loop(lambda x: x.sum() < limit, lambda x: x + 1, state)


@pytest.mark.parametrize(
    ("body", "equal"),
    [
        (lambda s, b: _scan(s, b, joined=True), True),
        (lambda s, b: _scan(s, b, joined=False), False),
        (_delayed, False),
        (lambda s, b: _branch(s, b, by_device=False), True),
        (lambda s, b: _branch(s, b, by_device=True), False),
        (lambda s, b: _steps(s, b, joined=True), True),
        (lambda s, b: _steps(s, b, joined=False), False),
        (lambda s, b: s + lax.all_gather(b, "i").sum(), True),
        (
            lambda s, b: s + lax.psum(b.sum(), "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
            False,
        ),
        (lambda s, b: s + lax.ppermute(lax.psum(b.sum(), "i"), "i", [(0, 1)]), False),
        (lambda s, b: s + lax.axis_index("i"), False),
        (lambda s, b: s + jax.random.normal(jax.random.key(0), s.shape), True),
        (lambda s, b: jax.checkpoint(lambda x: x + lax.pmin(b.sum(), "i"))(s), True),
        (lambda s, b: s + lax.rng_uniform(0.0, 1.0, s.shape), False),
        (lambda s, b: jax.jit(lambda x: x + lax.pmin(b.sum(), "i"))(s), True),
    ],
    ids=[
        *("scan", "scan of own rows", "later turns", "cond", "cond by device", "while"),
        *("steps of each device", "gather", "groups", "permuted", "index", "random"),
        *("checkpoint", "without a key", "jit"),
    ],
)
def test_one_copy_is_kept_only_of_what_is_equal_on_all_devices(body, equal):
    one = before(body, *_FORMS)
    other = after(body, (3,), (32, 3), specs=((WHOLE, ROWS), WHOLE))

    if equal:
        assert "R6" in proof(one, other, results=[COPIES])
    else:
        with pytest.raises(NotProvedError, match="may differ between devices"):
            proof(one, other, results=[COPIES])


def test_two_recorded_runs_prove_a_dropped_axis(tmp_path):
    source = changed(("donate_argnums=(0,)", ""), source=TRAINING)
    edits = [(old.replace("donate_argnums=(0,)", ""), new) for old, new in IDIOMATIC]
    texts = {"before": source, "after": changed(*edits, source=source)}
    runs = recorded_together(texts, tmp_path / "program")
    found, _ = pairs(runs["before"].record, runs["after"].record)
    step_, _ = (calls.compare(*pair, 0.0) for pair in found)

    assert step_.unproved == ""
    assert [slices.proof(each) for each in step_.signatures] == [("R5", "R6", "R7")]
    assert step_.signatures[0]["results"] == [COPIES, COPIES]


_SCRIPT = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils


def train_step(w, x):
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * jax.lax.pmean(gradient, "i")


def score(w, x):
    return jax.lax.pmean(jnp.abs(x @ w).mean(), "i")


def main():
    w = jax_utils.replicate(jnp.ones(3))
    step = jax.pmap(functools.partial(train_step), axis_name="i")
    evaluate = jax.pmap(score, axis_name="i")
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(8, 4, 3)).astype(np.float32)
        w = step(w, x)
    print(jax_utils.unreplicate(evaluate(w, x)))


main()
"""


@pytest.mark.thorough
def test_the_command_certifies_an_idiomatic_migration_place_by_place(tmp_path):
    pytest.importorskip("flax")
    (tmp_path / "train.py").write_text(_SCRIPT)
    root = pathlib.Path(jax_dist.__file__).parents[1]
    run = lambda *words: subprocess.run(
        [sys.executable, "-m", "jax_dist", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    options = ("--to", "jax", "--idiomatic", "--one-process", "--write", "--verify")
    program = ("train.py", "--", sys.executable, "train.py")
    ran = run("migrate", *options, "--certificate", "proof.json", *program)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    # Their helpers lie in the script itself, and its lines are those of the old one.
    assert "train.py:20  jax.pmap" in ran.stdout, ran.stdout
    assert "train.py:21  jax.pmap" in ran.stdout
    assert ran.stdout.startswith("4 of 4 places proved."), ran.stdout
    assert ran.stdout.count("equal by rules") == 4
    assert run("certificate", "proof.json").returncode == 0

    certificate = json.loads((tmp_path / "proof.json").read_text())
    by_line = {each["line"]: each for each in certificate["places"]}
    assert {line: each["rules"] for line, each in by_line.items()} == {
        19: ["R9"],
        20: ["R5", "R6"],
        21: ["R5", "R6"],
        25: ["R5", "R8"],
    }
    for line in (20, 25):
        tampered = copy.deepcopy(certificate)
        [place] = [each for each in tampered["places"] if each["line"] == line]
        place["signatures"][0]["results"] = [MERGED]
        (tmp_path / "proof.json").write_text(json.dumps(tampered))
        refused = run("certificate", "proof.json")
        assert refused.returncode == 1
        assert f"train.py:{line}: its programs are not equal: result 0 is" in refused.stdout


def test_a_marked_program_knows_the_lines_before():
    text = "import jax\n\nx = 1\nif x:\n    y = 2\nz = 3\n"
    places = [(3, "x = 1", ""), (5, "y = 2", ""), (6, "z = 3", "")]
    marked = program_text.Marked(text, places, 0, {})
    lines = marked.text.splitlines()

    for number, line in enumerate(text.splitlines(), 1):
        found = [k for k, each in enumerate(lines, 1) if line and each.endswith(line.strip())]
        assert [marked.line_before(k) for k in found] == [number] * bool(line)


_ROW, _ROWS = ("§1", "float32[1,3]"), ("§2", "float32[2,3]")


@pytest.mark.parametrize(
    ("primitive", "parameters", "given", "expected"),
    [
        ("stack", {"axis": 0}, [_ROWS, _ROWS], True),
        ("stack", {"axis": 1}, [_ROWS, _ROWS], False),
        ("concatenate", {"dimension": 0}, [_ROW, _ROW], True),
        ("concatenate", {"dimension": 0}, [_ROW, _ROWS], False),
        ("concatenate", {"dimension": 1}, [_ROW, _ROW], False),
        ("add", {"dimension": 0}, [_ROW, _ROW], False),
    ],
)
def test_operands_become_rows(primitive, parameters, given, expected):
    assert slices._stacks(primitive, parameters, given) is expected


def _lies(spec, names=(("i", 4),), devices=(0, 1, 2, 3), kinds=("auto",)):
    mesh = {"mesh": [list(each) for each in names], "devices": [*devices], "kinds": [*kinds]}
    return {"sharding": [mesh, {"spec": spec}]}


_CUT, _UNCUT = [["i"], []], [[], []]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (_lies(_CUT), _lies([]), True),
        (_lies(_CUT), _lies(_UNCUT), True),
        (_lies(_CUT), _lies([["i"]]), False),
        (_lies(_UNCUT), _lies([]), False),
        (_lies([[], ["i"]]), _lies([]), False),
        (_lies([["i"], ["i"]]), _lies([]), False),
        (_lies(_CUT, names=[("i", 2)]), _lies([]), False),
        (_lies(_CUT, names=[("i", 4), ("j", 1)]), _lies([]), False),
        (_lies(_CUT, devices=[3, 2, 1, 0]), _lies([]), False),
        (_lies(_CUT, kinds=["explicit"]), _lies([]), False),
        (_lies(_CUT), None, False),
        (None, _lies([]), False),
        (None, None, True),
        ({"sharding": None}, _lies([]), False),
        (_lies(_CUT), {}, False),
    ],
)
def test_copies_lie_on_the_devices_that_had_them(old, new, expected):
    assert slices._same_place(old, new, "one of equal copies", "float32[4,3]") is expected
    assert slices._same_place(old, new, "as is", "float32[4,3]") is (old is None and new is None)


@pytest.mark.parametrize(
    ("starts", "ends", "strides", "expected"),
    [
        ([2, 0], [3, 3], None, True),
        ([2, 0], [4, 3], None, False),
        ([2, 1], [3, 3], None, False),
        ([2, 0], [3, 2], None, False),
        ([2, 1, 0], [3, 3, 3], None, False),
        ([2, 0, 1], [3, 3, 3], None, False),
        ([2, 0, 0], [3, 3, 3], None, True),
        ([2, 0], [3, 3], [1, 1], False),
    ],
)
def test_one_row_is_taken(starts, ends, strides, expected):
    parameters = {"start_indices": starts, "limit_indices": ends, "strides": strides}
    given = [("§1", f"float32[{','.join(['4', *['3'] * (len(starts) - 1)])}]")]
    assert slices._row("slice", parameters, given) is expected
    assert not slices._row("dynamic_slice", parameters, given)


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_a_jit_that_puts_its_arrays_somewhere_is_not_proved(name):
    one = before(jnp.sin, (8, 4, 3))
    where = jax.sharding.NamedSharding(Mesh(jax.devices()[::-1], ("i",)), ROWS)
    other = after(jnp.sin, (32, 3), specs=(ROWS, ROWS), **{name: where})
    with pytest.raises(NotProvedError, match=f"its jit has {name}"):
        proof(one, other, arguments=[[0, MERGED]], results=[MERGED])


def test_arguments_that_one_program_does_not_read():
    one = before(lambda x, y: jnp.sin(x), (8, 4, 3), (8, 4, 3))
    mesh = Mesh(jax.devices(), ("i",))
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    other = programs.text(jax.jit(lambda x, y: mapped(x)), [typed(32, 3), typed(32, 3)])
    with pytest.raises(NotProvedError, match="its shard_map takes other arrays"):
        proof(one, other, arguments=[[0, MERGED], [1, MERGED]], results=[MERGED])


def test_constants_of_a_program():
    scale, other_scale = np.arange(3, dtype=np.float32), np.arange(1, 4, dtype=np.float32)
    scaled = lambda by: lambda x: x * jnp.asarray(by)
    one = before(scaled(scale), (8, 4, 3))
    relation = {"arguments": [[0, MERGED]], "results": [MERGED]}
    same = after(scaled(scale), (32, 3), specs=(ROWS, ROWS))
    assert proof(one, same, **relation) == ("R7",)
    with pytest.raises(NotProvedError):
        proof(one, after(scaled(other_scale), (32, 3), specs=(ROWS, ROWS)), **relation)


def _shared_number(rate: float) -> dict[str, Any]:
    """A static number of a pmap, 0.5, that became an argument of which `rate` was given."""

    def block(x: jax.Array, number: Any) -> jax.Array:
        return (x[0] * number)[None]

    mapped = jax.shard_map(
        block,
        mesh=Mesh(jax.devices(), ("i",)),
        in_specs=(ROWS, WHOLE),
        out_specs=ROWS,
        check_vma=False,
    )
    literal = f"float32[] {np.float32(rate).tobytes().hex()}"
    return {
        "before": before(lambda x: x * 0.5, (8, 3)),
        "after": programs.text(jax.jit(mapped), [typed(8, 3), rate]),
        "sizes": {},
        "arguments": [[0, AS_IS], [literal, "a number"]],
        "results": [AS_IS],
    }


def test_a_static_number_is_an_argument_that_all_devices_share():
    assert "R10" in slices.proof(_shared_number(0.5))
    with pytest.raises(NotProvedError):
        slices.proof(_shared_number(0.25))
