"""Texts of programs prove that two forms are equal; a certificate of it is refused when altered."""

import copy
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.verify import certificate, equivalence, slices
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.recording import programs

ROWS = PartitionSpec("i")
X = jax.ShapeDtypeStruct((8, 3), np.float32)


def _text(body: Callable, *, out_specs: Any = ROWS, names: str = "i", **options: Any) -> dict:
    """The text of a body of one slice each, on all devices, as a migration writes it."""
    devices = options.pop("devices", None) or jax.devices()
    split = PartitionSpec(names)
    out_specs = split if out_specs == ROWS else out_specs
    mapped = jax.shard_map(
        lambda x: body(x[0])[None],
        mesh=Mesh(devices, (names,)),
        in_specs=split,
        out_specs=out_specs,
        check_vma=False,
    )
    return programs.text(jax.jit(mapped, **options), [X])


def _proof(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    return slices.proof({"before": before, "after": after, "sizes": {}})


def _step(x: jax.Array) -> jax.Array:
    return x - jax.lax.pmean(jnp.sin(x) * 2, "i")


@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_pmap_and_shard_map_are_the_same_program():
    before = programs.text(jax.pmap(_step, axis_name="i"), [X])

    assert _proof(before, _text(_step)) == ()


def _drawn(x: jax.Array) -> jax.Array:
    return x + jax.random.bits(jax.random.key(0), (3,)).astype(np.float32)


def _around(context: Callable[[], Any], body: Callable) -> Callable:
    def inside(x: jax.Array) -> jax.Array:
        with context():
            return body(x)

    return inside


def _other_bits() -> Any:
    return jax.threefry_partitionable(False)  # noqa: FBT003 - jax has it so


_AROUND = {
    "metadata": (lambda: set_xla_metadata(_scheduling_group="1"), _step),
    "metadata of a call": (lambda: set_xla_metadata(_scheduling_group="1"), jax.jit(_step)),
    "random bits": (_other_bits, _drawn),
    "random bits in a loop": (
        _other_bits,
        lambda x: jax.lax.fori_loop(0, 2, lambda _, y: _drawn(y), x),
    ),
}


@pytest.mark.parametrize(("context", "body"), _AROUND.values(), ids=_AROUND)
def test_what_is_set_around_a_computation_is_a_part_of_it(context: Callable, body: Callable):
    plain, inside = _text(body), _text(_around(context, body))

    assert _proof(plain, plain) == _proof(inside, _text(_around(context, body))) == ()
    for one, other in ((plain, inside), (inside, plain)):
        with pytest.raises(NotProvedError):
            _proof(one, other)


def test_what_is_set_in_vain_makes_no_difference():
    assert _proof(_text(_step), _text(_around(_other_bits, _step))) == ()


@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_what_is_set_around_a_sum_of_a_gather_bars_the_rule():
    context = lambda: set_xla_metadata(_scheduling_group="1")
    total = lambda x: jax.lax.all_gather(x, "i").sum(0)

    assert _proof(_text(total), _text(lambda x: jax.lax.psum(x, "i"))) == ("R1",)
    with pytest.raises(NotProvedError):
        _proof(_text(_around(context, total)), _text(lambda x: jax.lax.psum(x, "i")))


def _step_in_parts(x: jax.Array) -> jax.Array:
    return x - jax.jit(lambda y: jax.lax.pmean(jnp.sin(y) * 2, "batch"))(x)


def test_names_of_axes_and_calls_make_no_difference():
    assert _proof(_text(_step), _text(_step_in_parts, names="batch")) == ()


def _of_two_arrays(body: Callable, *, turned: bool) -> dict:
    """A program whose replicated operands and constants of a scan come in one of two orders."""
    one, other = (np.full((2,), value, np.float32) for value in (2, 3))
    operands = (other, one) if turned else (one, other)

    def mapped(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        a, b = arrays[::-1] if turned else arrays
        consts = (b, a) if turned else (a, b)
        body_ = lambda c, y: (body(c, *(consts[::-1] if turned else consts)), y)
        return jax.lax.scan(body_, x[0], jnp.zeros(3))[0][None]

    specs = (ROWS, PartitionSpec(), PartitionSpec())
    mesh = Mesh(jax.devices(), ("i",))
    whole = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False)
    return programs.text(jax.jit(lambda x: whole(x, *operands)), [X])


def test_the_order_of_what_a_program_closes_over_makes_no_difference():
    step = lambda c, a, b: c * a.sum() - b.sum()
    swapped = lambda c, a, b: c * b.sum() - a.sum()

    assert _proof(*(_of_two_arrays(step, turned=each) for each in (False, True))) == ()
    with pytest.raises(NotProvedError):
        _proof(_of_two_arrays(step, turned=False), _of_two_arrays(swapped, turned=True))
    with pytest.raises(NotProvedError):
        _proof(_of_two_arrays(step, turned=False), _of_two_arrays(swapped, turned=False))


def test_a_reshard_to_nowhere_is_no_equation():
    nowhere = {"sharding": [{"mesh": [], "kinds": []}, {"spec": []}]}
    cut = {"sharding": [{"mesh": [["i", 8]], "kinds": ["AxisType.Explicit"]}, {"spec": [["i"]]}]}
    plain = programs.text(lambda x: jnp.sin(x), [X])
    [sine] = plain["eqns"]

    def resharded(to: Any) -> dict[str, Any]:
        moved = ["reshard", {"concrete_mesh": None, "dst_sharding": to}, [plain["in"][0][0]]]
        return {
            **plain,
            "eqns": [[*moved, [[99, "float32[8,3]"]]], [*sine[:2], [99], sine[3]]],
        }

    assert _proof(plain, resharded(nowhere)) == ()
    with pytest.raises(NotProvedError):
        _proof(plain, resharded(cut))


def _in_a_scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, y: (c + jax.lax.psum(y, "i"), c), x[0], x)[0]


@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_the_text_of_a_scan_shows_all_of_it():
    before = programs.text(jax.pmap(_in_a_scan, axis_name="i"), [X])

    assert _proof(before, _text(_in_a_scan)) == ()
    with pytest.raises(NotProvedError):
        _proof(before, _text(lambda x: jax.lax.scan(lambda c, y: (c, y), x[0], x)[0]))


@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_the_carries_of_a_scan_have_an_order():
    """The first goes on with the other's value, and the second with its own."""

    def crossed(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: ((c[1] * 2, c[0] * 3), None), (x, x + 1), None, 3)[0][0]

    def straight(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: ((c[0] * 2, c[1] * 3), None), (x + 1, x), None, 3)[0][0]

    assert _proof(_text(crossed), _text(crossed)) == ()
    with pytest.raises(NotProvedError):
        _proof(_text(crossed), _text(straight))


def _gathered(x: jax.Array) -> jax.Array:
    return x + jnp.sum(jax.lax.all_gather(x, "i"), axis=0)


def _reduced(x: jax.Array) -> jax.Array:
    return x + jax.lax.psum(x, "i")


def _over_one(x: jax.Array) -> jax.Array:
    return jnp.max(x[None], axis=0) * 3


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (_gathered, _reduced, "R1"),
        (lambda x: jax.lax.reduce_sum_p.bind(x, axes=(), out_sharding=None), lambda x: x, "R2"),
        (lambda x: jnp.sin(x) / 1.0, jnp.sin, "R3"),
        (_over_one, lambda x: x * 3, "R4"),
    ],
    ids=["R1", "R2", "R3", "R4"],
)
def test_each_rule_by_itself(before: Callable, after: Callable, rule: str):
    if rule == "R2" and not CAN_REWRITE:
        pytest.skip("the primitive takes other parameters")
    assert _proof(_text(before), _text(after)) == (rule,)
    assert rule in equivalence.RULES


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + jnp.max(jax.lax.all_gather(x, "i"), axis=0),
        lambda x: x + jnp.sum(jax.lax.all_gather(x, "i"), axis=1)[:3],
        lambda x: x + jnp.sum(jax.lax.all_gather(x, "i", tiled=True).reshape(8, 3)[:4], axis=0),
        lambda x: (x + jax.lax.psum(x, "i")) / 2.0,
        lambda x: x + jnp.sum(x),
    ],
    ids=["max", "other dimension", "half", "by two", "whole"],
)
def test_no_rule_reaches_further(other: Callable):
    with pytest.raises(NotProvedError):
        _proof(_text(other), _text(_reduced))


_CONSTANT = np.arange(256.0, dtype=np.float32)
_OTHER = np.where(np.arange(256) == 200, 1.0, _CONSTANT).astype(np.float32)


@pytest.mark.parametrize(
    "other",
    [
        lambda: _text(lambda x: x - jax.lax.psum(jnp.sin(x) * 2, "i")),
        lambda: _text(lambda x: x - jax.lax.pmean(jnp.sin(x) * 2.5, "i")),
        lambda: _text(_step, out_specs=PartitionSpec()),
        lambda: _text(_step, devices=jax.devices()[::-1]),
        lambda: _text(_step, donate_argnums=0),
    ],
    ids=["psum", "constant", "out_specs", "order of devices", "donation"],
)
def test_what_no_call_of_the_run_may_show_is_seen(other: Callable):
    with pytest.raises(NotProvedError, match="before"):
        _proof(_text(_step), other())


def test_one_element_of_a_captured_array_is_seen():
    texts = [
        _text(lambda x, table=table: x + table[:3] + table.sum()) for table in (_CONSTANT, _OTHER)
    ]

    with pytest.raises(NotProvedError):
        _proof(*texts)


def test_a_callback_shows_nothing():
    text = _text(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), np.float32), x))

    with pytest.raises(NotProvedError, match="does not show all of it"):
        _proof(text, text)


def test_the_mapped_dimensions_are_resized():
    ((one, values), *_) = programs.other_sizes(_text(_step), [X])

    assert (one, values[0].shape, values[0].dtype) == (1, (1, 3), np.float32)


# --- the certificate


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "train.py").write_text("new")
    return tmp_path


@pytest.fixture
def proved(folder: pathlib.Path) -> dict[str, Any]:
    """Two proved places, one by a rule, and one that never ran."""
    same = {"before": _text(_step), "after": _text(_step_in_parts, names="batch"), "sizes": {}}
    ruled = {"before": _text(_gathered), "after": _text(_reduced), "sizes": {"2": {}, "4": same}}
    place = {"path": "train.py", "what": "jax.pmap", "put_back": False, "notes": []}
    places = [
        {"line": 3, "rung": "same program", "rules": [], "calls": 2, "equal": 2},
        {"line": 5, "rung": "equal by rules", "rules": ["R1"], "calls": 4, "equal": 4},
        {"line": 9, "rung": "never ran", "rules": [], "calls": 0, "equal": 0},
    ]
    texts = ([same], [ruled], [])
    return certificate.made(
        ({**place, **each, "signatures": s} for each, s in zip(places, texts, strict=True)),
        command=["python", "train.py"],
        files=[(str(folder / "train.py"), b"old", b"new")],
        folder=str(folder),
    )


def _problems(found: dict[str, Any], folder: pathlib.Path) -> list[str]:
    """Of a certificate whose digest was made anew, as by someone who means to deceive."""
    content = {key: value for key, value in found.items() if key != "seal"}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return list(certificate.problems({**content, "seal": seal}, folder))


def test_a_certificate_holds(proved: dict[str, Any], folder: pathlib.Path):
    read = json.loads(json.dumps(proved))

    assert list(certificate.problems(read, folder)) == []
    assert certificate.headline(read) == "2 of 3 places proved, 1 never ran"
    assert read["not covered"] == ["train.py:9 jax.pmap: never ran"]


def _set(*path: Any, to: Any) -> Callable[[dict], None]:
    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = to

    return change


def _to_psum(found: dict) -> None:
    text = json.dumps(found["places"][0]["signatures"][0]["after"])
    found["places"][0]["signatures"][0]["after"] = json.loads(text.replace('"psum"', '"pmax"'))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_to_psum, "its programs are not equal"),
        (_set("places", 0, "signatures", 0, "after", "eqns", to=[None]), "cannot be read"),
        (_set("places", 1, "rules", to=["R2"]), "it needs the rules ['R1'], and names ['R2']"),
        (_set("places", 1, "rung", to="same program"), "and is equal by rules"),
        (_set("places", 0, "calls", to=40), "2 of 40 calls were equal"),
        (_set("places", 0, "signatures", to=[]), "has no texts"),
        (_set("places", 2, "rung", to="replayed"), "0 of 0 calls were equal"),
        (_set("counts", "never ran", to=0), "its counts"),
        (_set("places", 2, "rules", to=["R1"]), "it has rules or texts, and is called never ran"),
        (_set("places", 2, "signatures", to=[{}]), "it has rules or texts, and is called never"),
        (_set("not covered", to=[]), "its list of what is not covered"),
        (_set("premises", to=[]), "its premises are not those"),
        (_set("files", 0, "after", to="0"), "does not hold what was certified"),
        (_set("format", to=2), "its format is 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_altered_certificate_is_refused(
    proved: dict[str, Any], folder: pathlib.Path, change: Callable, said: str
):
    altered = copy.deepcopy(proved)
    change(altered)

    assert any(said in problem for problem in _problems(altered, folder))
    assert any(
        "altered" in each or "format" in each for each in certificate.problems(altered, folder)
    )


@pytest.mark.parametrize("found", [None, "text", ["seal"]])
def test_what_is_no_certificate_is_refused(proved: dict[str, Any], folder: pathlib.Path, found):
    said = ["it is no certificate of jax-dist"]
    less = {key: value for key, value in proved.items() if key != "premises"}

    for each in (found, [*proved], less, {**proved, "more": 1}):
        assert list(certificate.problems(each, folder)) == said


def test_each_file_is_read(proved: dict[str, Any], folder: pathlib.Path):
    (folder / "train.py").write_text("another")
    proved["files"][:0] = [{"path": "gone.py", "before": "", "after": ""}]

    assert _problems(proved, folder) == [
        "gone.py cannot be read: No such file or directory",
        "train.py does not hold what was certified: it holds other text",
    ]


def test_what_a_certificate_holds(folder: pathlib.Path):
    """Of texts, what a proof needs, and once for all in which environment they were traced."""
    same = {"before": _text(_step), "after": _text(_step), "sizes": {}}
    formed = {**same, "arguments": [[0, "as is"]], "results": ["as is"]}
    traced = {**formed, "environment": {"jax": "0"}, "path": "here"}
    place = {"path": "train.py", "line": 3, "what": "f", "put_back": False, "notes": []}
    once = {"calls": 1, "equal": 1, "rules": []}
    found = certificate.made(
        [
            {**place, **once, "rung": "same program", "signatures": [traced]},
            {**place, **once, "rung": "replayed", "signatures": [], "what": "g"},
            {**place, **once, "rung": "never ran", "signatures": [], "put_back": True},
        ],
        command=["python"],
        files=[],
        folder=str(folder),
    )

    assert _problems(found, folder) == []
    assert found["environment"] == {"jax": "0"}
    assert found["places"][0]["signatures"] == [formed]
    assert found["not covered"] == [
        "train.py:3 g: other arguments than those of the run",
        "train.py:3 f: it stays as it was",
    ]
    assert certificate.headline(found) == "1 of 3 places proved, 1 never ran, 1 replayed"
    assert len(found["premises"]) == 4
    nothing = certificate.made([], command=[], files=[], folder=str(folder))
    assert nothing["environment"] is None
    some = certificate.made([found["places"][1]], command=[], files=[], folder=str(folder))
    assert certificate.headline(some) == "0 of 1 place proved, 1 replayed"


def test_the_seal_is_of_the_content_in_one_form():
    said = b'{"a": "\\u00e9", "b": 1}'

    assert certificate._seal({"b": 1, "a": "\xe9"}) == hashlib.sha256(said).hexdigest()


def test_a_file_that_changed_is_refused(proved: dict[str, Any], folder: pathlib.Path):
    (folder / "train.py").write_text("old")

    (said,) = certificate.problems(proved, folder)
    assert "what it held before the migration" in said
