"""`mapped`, made of parts: it keeps the contract of jax.pmap as far as it goes, and says where not.

A call of jax.pmap runs with the parts that its options need, as a migration chooses them, and with
all of them: values, types, shapes and placement are the same.
"""

import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import mapped_in_processes as in_processes
import numpy as np
import pytest
from jax import lax
from mapped_cases import CASES, as_plain, rows
from parts_in_processes import made, small_forms_in_two_processes, sums_on_all_devices

from jax_dist.migrate import helper_module, site_parts
from jax_dist.testing import run_processes

_SECTIONS = helper_module.PARTS[:-1]
_ALL = frozenset(_SECTIONS)
_EVERY = [
    frozenset(parts)
    for count in range(len(_SECTIONS) + 1)
    for parts in itertools.combinations(_SECTIONS, count)
]
_IS_EARLY = jax.__version_info__ < (0, 10)
_STRAYS = {  # core and pmap of 0.8 and 0.9 take none; pmap of 0.10 moves some
    "what lies on one device",
    "what lies on other devices",
    "what lies in another order",
}


def _name(parts: Collection[str]) -> str:
    return " and ".join(sorted(parts)) or "core"


# --- the text


@pytest.mark.parametrize("parts", _EVERY, ids=_name)
def test_each_text_says_what_it_has_and_is_narrow(parts: frozenset[str]):
    text = helper_module.module({"mapped", *parts})
    known = helper_module.present_in(text)

    assert helper_module.is_unchanged(text)
    assert known >= {"mapped", *parts}
    assert helper_module.module(known) == text  # a second migration adds nothing
    assert max(map(len, text.splitlines())) <= 79
    assert "#:" not in text
    assert "_src" not in text


def test_the_small_forms_are_small():
    def lines(*parts: str) -> int:
        return helper_module.module({"mapped", *parts}).count("\n")

    assert lines() <= 60
    assert lines("axes") <= 100
    assert lines("axes", "static") <= 115
    assert lines(*_ALL) <= 185 < lines("full")


def test_sections_that_are_unlike():
    assert "axes & not static" not in helper_module.text_of("axes.py", ())
    assert "with_static" not in helper_module.text_of("axes.py", ("axes",))
    assert "with_static" in helper_module.text_of("axes.py", ("static",))


# --- the same as jax.pmap


def _options(case: Callable[[Callable], Any]) -> set[str]:
    """The options with which a case calls pmap."""
    seen: set[str] = set()

    def spying(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return jax.pmap(*args, **options)

    case(spying)
    return seen


@pytest.mark.filterwarnings("ignore:The function jit")  # of the old pmap
@pytest.mark.parametrize("name", CASES)
def test_it_does_what_pmap_does(name: str):
    case = CASES[name]
    if _IS_EARLY and name in _STRAYS:
        pytest.skip("jax.pmap refuses it")
    expected = as_plain(case(jax.pmap))
    needed = {site_parts.PART_OF[option] for option in _options(case) - site_parts.IN_CORE}
    if name in _STRAYS:
        needed.add("axes")

    assert as_plain(case(made(needed))) == expected, needed
    assert as_plain(case(made(_ALL))) == expected


@pytest.mark.parametrize("parts", [(), ("devices",), ("axes",), ("static",)], ids=_name)
def test_an_option_that_is_not_there_is_an_error(parts: tuple[str, ...]):
    missing = ({*site_parts.PART_OF.values()} - {*parts}) - (
        {"axes"} if "static" in parts else set()
    )
    for option, part in site_parts.PART_OF.items():
        if part in missing:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
                made(parts)(jnp.sin, **{option: None})


# --- what it refuses


def _f(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


_f.__name__ = "f"
_SIZES = "f takes arrays with a slice for each of up to 8 devices, not of the sizes {}"


@pytest.mark.parametrize("parts", [frozenset(), frozenset(("axes",)), _ALL], ids=_name)
def test_it_says_what_does_not_fit(parts: frozenset[str]):
    mapped = made(parts)
    cases = {
        "{(9,)}": lambda: mapped(_f)(rows(9)),
        "{()}": lambda: mapped(_f)(3.0),
        "of none": lambda: mapped(_f)(),
        "{(0,)}": lambda: mapped(_f)(np.zeros((0, 2))),
    }
    for sizes, call in cases.items():
        with pytest.raises(ValueError, match=f"^{re.escape(_SIZES.format(sizes))}"):
            call()
    with pytest.raises(ValueError, match=r"not of the sizes \{.*\(8,\).*\}"):
        mapped(_f)(rows(8), y=rows(4))


def test_axes_from_behind_and_sizes_and_devices():
    mapped = made(_ALL)

    with pytest.raises(ValueError, match="^f: -1 is no axis from the front"):
        mapped(_f, out_axes=-1)(rows(8, 3))
    with pytest.raises(ValueError, match=r"not of the sizes \{\(\)\}"):
        mapped(_f, in_axes=-1)(rows(3, 8))
    with pytest.raises(ValueError, match="^f got 8 slices; axis_size=4"):
        mapped(_f, axis_size=4)(rows(8))
    with pytest.raises(ValueError, match="^devices is empty; None stands for all of them$"):
        mapped(_f, devices=[])


@pytest.mark.parametrize("parts", [("axes",), _ALL], ids=_name)
def test_axes_that_are_too_many_or_for_keywords(parts: Collection[str]):
    mapped = made(parts)

    with pytest.raises(ValueError, match="tuple"):
        mapped(_f, in_axes=(0, 0))(rows(8))
    with pytest.raises(ValueError, match="tuple"):
        mapped(_f, in_axes=((0, 0), 0))(x=(rows(8), rows(8)), y=rows(8))
    with pytest.raises(ValueError, match="tuple"):
        mapped(_f, out_axes=(0, 0, 0))(rows(8))


@pytest.mark.parametrize("parts", [(), ("axes",)], ids=_name)
@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine")])
def test_errors_of_the_function_stay_what_they_are(parts: tuple[str, ...], error: Exception):
    def fails(x: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        made(parts)(fails)(rows(8))
    assert caught.value is error


def test_arrays_on_other_devices_are_an_error_of_jit_in_the_core():
    first = jax.device_put(rows(8), jax.devices()[3])

    with pytest.raises(ValueError, match="devices"):
        made(())(_f)(first)


# --- how often it compiles


def _traces(mapped: Callable, times: int) -> int:
    """How often a function is traced that is mapped so many times."""
    count = 0

    def step(x: Any) -> Any:
        nonlocal count
        count += 1
        return x + 1

    for _ in range(times):
        mapped(step, axis_name="i")(rows(8))
    return count


def test_a_function_that_is_mapped_again():
    assert _traces(jax.pmap, 3) == 1
    assert _traces(made(("again",)), 3) == 1
    assert _traces(made(("again", "axes", "processes")), 3) == 1
    assert _traces(made(()), 3) == 3  # for places that map once


@pytest.mark.parametrize("parts", [(), ("axes", "static")], ids=_name)
def test_a_call_again_traces_nothing(parts: tuple[str, ...]):
    count = 0

    def step(x: Any) -> Any:
        nonlocal count
        count += 1
        return x + 1

    call = made(parts)(step)
    x = call(rows(8))
    for _ in range(3):
        x = call(x)

    assert count <= 2  # for NumPy, and for what it gives
    assert x.tolist() == (rows(8) + 4).tolist()


def test_options_are_part_of_what_is_mapped_again():
    mapped = made(("again", "axes", "devices"))
    add = lambda x: x + lax.axis_index("i")

    assert mapped(add, "i")(np.zeros((8, 2))).tolist() == [[i, i] for i in range(8)]
    assert mapped(add, "i", in_axes=1)(np.zeros((2, 8))).tolist() == [[i, i] for i in range(8)]
    assert mapped(add, "i", devices=jax.devices()[:4])(np.zeros(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("parts", [(), ("axes",), _ALL], ids=_name)
def test_lower_and_names(parts: Collection[str]):
    def scaled(x: Any) -> Any:
        """Doubles."""
        return x * 2

    call = made(parts)(scaled)
    lowered = call.lower(jax.ShapeDtypeStruct((4, 2), np.float32))

    assert lowered.compile()(np.ones((4, 2), np.float32)).tolist() == [[2, 2]] * 4
    assert (call.__name__, call.__doc__, call.__wrapped__) == ("scaled", "Doubles.", scaled)
    assert "jit_scaled" in lowered.as_text()


# --- other numbers of devices, and several processes


@pytest.mark.parametrize("devices", [1, 4])
def test_fewer_devices(devices: int):
    (outcome,) = run_processes(sums_on_all_devices, processes=1, cpu_devices=devices, timeout=120)

    total = sum(range(devices))
    assert outcome.error is None
    assert outcome.value == {name: [[total] * devices] * 2 for name in ("core", "all")}


def test_several_processes():
    """Two, with 4 devices each."""
    outcomes = run_processes(small_forms_in_two_processes, cpu_devices=4, timeout=300)

    assert [outcome.error for outcome in outcomes] == [None, None]
    for found in (outcome.value for outcome in outcomes):
        assert found["mapped"] == found["pmap"]
        assert found["mapped"].keys() == in_processes.CASES.keys() - {
            "tangents of whole numbers"  # only the full form has them
        }
        for_one = "f is for one process: migrate with --helpers full"
        assert found["core"] == found["axes"] == ("NotImplementedError", for_one)
        assert found["in jit"][0] == "NotImplementedError"
        assert "is called inside jit, grad or vmap" in found["in jit"][1]
        assert found["local devices"] == [2.0] * 4
