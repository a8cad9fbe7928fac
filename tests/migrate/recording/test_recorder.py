"""What stands in for `jax.pmap` and `jax.jit` writes down their calls, and changes none."""

import atexit
import dataclasses
import functools
import json
import os
import pathlib
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_dist.migrate.verify import evidence
from jax_dist.migrate.verify.evidence import RunRecord, SiteRecord
from jax_dist.migrate.verify.recording import functions, lost, recorder
from jax_dist.migrate.verify.recording.flow import Flow
from jax_dist.migrate.verify.recording.recorder import CallRecorder

ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)


class Recording:
    """A recorder of this process, what it hooks, and what it has written."""

    def __init__(self, folder: pathlib.Path, flow: Flow | None = None):
        self.folder = folder
        self.recorder = CallRecorder(folder=str(folder), files=[__file__], flow=flow)
        self.pmap: Any = self.recorder.hooked("jax", "pmap", jax.pmap)
        self.jit: Any = self.recorder.hooked("jax", "jit", jax.jit)

    @property
    def record(self) -> RunRecord:
        return evidence.read(0, "", self.folder).record

    @property
    def sites(self) -> dict[str, SiteRecord]:
        return {site.function: site for site in self.record.sites}

    @property
    def events(self) -> list[dict[str, Any]]:
        (path,) = self.folder.glob("process-*/calls.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable]:
    found: list[Callable] = []
    monkeypatch.setattr(atexit, "register", found.append)
    return found


@pytest.fixture
def made(tmp_path: pathlib.Path, at_exit: list[Callable]) -> Recording:
    return Recording(tmp_path)


def double(x: Any) -> Any:
    """Doubles."""
    return x * 2


def scaled(x: Any, by: Any) -> Any:
    return x * by


# --- what is mapped


def test_what_is_hooked_looks_like_what_it_is(made: Recording):
    assert (made.pmap.__name__, made.pmap.__module__) == ("pmap", "jax")
    assert made.pmap.__wrapped__ is jax.pmap


def test_each_way_to_map_a_function(made: Recording):
    for function in (
        made.pmap(double),
        made.pmap(fun=double),
        functools.partial(made.pmap, axis_name="i")(double),
        made.pmap(axis_name="i")(double),
        made.pmap(double, "i"),
    ):
        assert isinstance(function, functions.Recorded)
        assert np.asarray(function(ROWS)).tolist() == (ROWS * 2).tolist()
    assert [site.count for site in made.record.sites] == [1] * 5
    assert made.record.problems == ()


def test_mistakes_are_for_jax_to_tell(made: Recording):
    for mistake in (lambda: made.jit(3), lambda: made.jit(double, no_such_option=3)):
        with pytest.raises(TypeError):
            mistake()
    assert [site.count for site in made.record.sites] == [0]


def test_where_it_was_mapped(made: Recording):
    def apply() -> Any:
        return made.pmap(double)

    apply()(ROWS)
    for _ in range(2):  # in a loop, one site
        made.pmap(double)(ROWS)
    one, other = made.pmap(double), made.pmap(double)
    one(ROWS), other(ROWS)
    first, looped, *two = made.record.sites

    assert first.file == os.path.realpath(__file__)
    assert first.line == apply.__code__.co_firstlineno + 1
    here = "test_where_it_was_mapped"
    assert first.within[:2] == (f"{here}.<locals>.apply", here)
    assert (looped.count, [site.count for site in two]) == (2, [1, 1])
    assert {site.line for site in two} == {looped.line + 1}
    assert [site.number for site in made.record.sites] == [0, 1, 2, 3]


def _from(where: str, text: str, names: dict[str, Any]) -> Any:
    """A value of a text that stands in a file."""
    return eval(compile(text, where, "eval"), names)


def test_what_libraries_map_inside_is_not_the_users_call(made: Recording):
    def is_plain(function: Any) -> bool:
        result = np.asarray(function(ROWS))
        return not isinstance(function, functions.Recorded) and (result == ROWS * 2).all()

    for name in ("jax", "jax.numpy", "jaxlib.x", "jax_dist._pmap"):
        names = {"__name__": name, "pmap": made.pmap, "double": double}
        assert is_plain(_from("/a.py", "pmap(double)", names))
    names = {"__name__": "jaxtyping", "pmap": made.pmap, "double": double}
    assert isinstance(_from("/a.py", "pmap(double)", names), functions.Recorded)

    class _Program:
        def map(self) -> Any:
            return made.pmap(double)

    assert is_plain(_Program().map())
    assert len(made.record.sites) == 1


def test_a_jit_of_what_is_installed_is_no_part_of_the_program(made: Recording):
    names = {"__name__": "json", "jit": made.jit, "pmap": made.pmap, "double": double}

    for name in ("stdlib", "purelib", "platlib"):
        file = os.path.join(sysconfig.get_path(name), "a.py")
        plain = _from(file, "jit(double)", names)
        assert not isinstance(plain, functions.Recorded)
        assert (np.asarray(plain(ROWS)) == ROWS * 2).all()
    beside = os.path.join(sys.prefix, "a.py")
    assert isinstance(_from(beside, "jit(double)", names), functions.Recorded)
    assert isinstance(_from(json.__file__, "pmap(double)", names), functions.Recorded)
    assert isinstance(_from("/a.py", "jit(double)", names), functions.Recorded)
    assert isinstance(_from(__file__, "jit(double)", names), functions.Recorded)
    mapped = _from(json.__file__, "jit(pmap(double))", names)
    assert isinstance(mapped, functions.Recorded)


def test_migrated_files_may_be_installed(tmp_path: pathlib.Path, at_exit: list[Callable]):
    made = CallRecorder(folder=str(tmp_path), files=[json.__file__])
    names = {"__name__": "json", "jit": made.hooked("jax", "jit", jax.jit), "double": double}

    assert isinstance(_from(json.__file__, "jit(double)", names), functions.Recorded)


def test_a_jit_of_a_mapped_function_is_that_function(made: Recording):
    mapped = made.pmap(double)
    outer, around = made.jit(mapped), made.jit(functools.partial(mapped))
    for function in (mapped, outer, around):
        function(ROWS)
    (site,) = made.record.sites

    assert (site.function, site.count) == ("double", 3)
    assert len(site.made) == len(site.told) == 1
    assert site.inside is False
    made.pmap(mapped)
    assert len(made.record.sites) == 2
    inner = made.jit(double)
    made.jit(inner)(ROWS)
    assert len(made.record.sites) == 4
    assert made.sites["double"].is_mapped is False


def test_a_jit_of_a_mapped_function_has_one_program(made: Recording):
    made.jit(made.pmap(double))(ROWS)

    assert [event["event"] for event in made.events].count("text") == 1


def test_static_arguments_are_constants(made: Recording):
    mapped = made.pmap(scaled, static_broadcasted_argnums=1)
    assert mapped._recorded_static == (1,)
    mapped(ROWS, 3)
    last = made.jit(scaled, static_argnums=(-1,))
    last(ROWS, 3)
    assert made.jit(mapped)._recorded_static == (1,)
    assert made.jit(mapped, static_argnums=(0, 1))._recorded_static == (0, 1)
    jitted = made.jit(scaled, static_argnums=[1])
    jitted(ROWS, 3)
    named = made.jit(scaled, static_argnames="by")
    named(ROWS, by=3)
    several = made.jit(lambda x, by, z: x * by * z, static_argnames=("by", "z"))
    several(ROWS, by=3, z=2)
    by_name = made.jit(scaled, static_argnums=1)
    assert np.asarray(by_name(x=ROWS, by=3)).tolist() == (ROWS * 3).tolist()
    free = made.jit(scaled)
    free(ROWS, by=3)

    called = made.record.called + tuple(s for s in made.record.sites if s.count and not s.is_mapped)
    paths = [[each.path for each in site.calls[0].given] for site in called]
    assert paths == [["[0]"]] * 5 + [["['by']", "['x']"], ["[0]", "['by']"]]


# --- what is called


def test_what_a_call_is_given_and_returns(made: Recording):
    found = made.jit(double, donate_argnums=0)
    x = jnp.array(ROWS)
    y = found(x)
    with pytest.raises((RuntimeError, ValueError)):
        found(x)  # it was donated
    (site,) = made.record.sites
    first, second = site.calls

    assert (first.given[0].values() == ROWS).all()
    assert (first.returned[0].values() == np.asarray(y)).all()
    assert (first.given[0].dtype, first.given[0].path) == ("float32", "[0]")
    assert (first.raised, first.structure[:5]) == (None, "leaf ")  # pyright: ignore
    assert first.text is not None
    assert first.text["text"]["in"] == [[1, "float32[8,2]"]]
    assert second.raised in ("RuntimeError", "ValueError", "JaxRuntimeError")
    assert (second.returned, second.text, second.donated) == ((), None, ())
    assert made.record.problems == (
        "double: RuntimeError: Array has been deleted with shape=float32[8,2].",
    )
    assert site.count == 2


def test_what_was_donated_is_told_by_its_number(made: Recording):
    taken = made.pmap(lambda a, b, c: (a + c, b), donate_argnums=2)
    taken(ROWS, jnp.asarray(ROWS), jax.pmap(double)(ROWS))

    assert made.record.sites[0].calls[0].donated == (2,)


def test_arguments_are_as_a_trace_takes_them(made: Recording):
    made.pmap(double)(np.full((8, 2), 0.1))
    (array,) = made.record.sites[0].calls[0].given

    assert (array.dtype, array.values().dtype) == ("float64", np.float32)


def test_each_function_that_a_place_makes_is_told(made: Recording):
    for n in (1, 2, 3):
        mapped = made.pmap(lambda x, n=n: x * n)
        if n < 3:
            mapped(ROWS)
    (site,) = made.record.sites

    assert len(site.made) == 3
    assert len(site.told) == 2
    assert site.told < site.made


def test_what_is_traced_as_a_part(made: Recording):
    inner = made.pmap(double)
    outer = made.jit(lambda x: inner(x) + 1)
    outer(ROWS)
    outer(ROWS)
    jax.grad(lambda x: inner(x).sum())(jnp.asarray(ROWS))
    jax.make_jaxpr(inner)(ROWS)
    part, whole = made.record.sites

    assert (part.count, part.inside, part.hidden) == (0, True, True)
    assert part.covers == [whole]
    assert part.traced[0]["text"]["in"] == [[1, "float32[8,2]"]]
    assert (whole.count, whole.is_mapped) == (2, True)
    assert [event["cover"] for event in made.events if event["event"] == "inside"] == [1, None]


def test_a_function_is_no_part_of_itself(made: Recording):
    mapped = made.pmap(double)
    made.jit(mapped)(ROWS)
    (site,) = made.record.sites

    assert (site.inside, site.count) == (False, 1)


def test_a_result_that_is_traced_is_a_part_too(made: Recording):
    """Of constants alone, in a larger trace."""
    constant = made.jit(lambda: jnp.ones(2))
    jax.make_jaxpr(lambda x: constant() + x)(np.ones(2, np.float32))
    (site,) = made.record.sites

    assert (site.inside, site.hidden, site.calls) == (True, True, [])
    assert made.record.problems == ()


def test_other_threads_have_calls_of_their_own(made: Recording):
    inner = made.pmap(double)

    def outer(x: Any) -> Any:
        thread = threading.Thread(target=lambda: inner(ROWS))
        thread.start()
        thread.join()
        return x

    made.jit(outer)(ROWS)
    assert [(site.count, site.inside) for site in made.record.sites] == [(1, False), (1, False)]


def test_a_value_of_a_host_edit_is_a_call(made: Recording):
    assert made.recorder.host(3, lambda v: v[0], ["text", 1]) == "text"
    assert made.recorder.host(3, lambda v: v[0], [np.float64(0.1), 1]) == 0.1
    (site,) = made.record.hosts

    assert (site.function, site.file, site.line, site.count) == ("3", "", 0, 2)
    assert site.within == ("",)
    assert [each.dtype for each in site.calls[0].given] == ["builtins.str", "int"]
    assert site.calls[1].given[0].values().dtype == np.float64
    (event,) = [each for each in made.events if each["event"] == "text"][1:2]
    assert event["paths"] == ["[0][0]"]  # a number of Python is a part of the program


def test_a_call_tells_the_rank_and_a_host_edit_does_not_ask_for_it(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    """To ask for it starts JAX, and a host edit may run before the program joins its processes."""
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    made.pmap(double)(ROWS)
    made.recorder.host(1, lambda v: v[0], ROWS)

    calls = [each for each in made.events if each["event"] == "call"]
    assert [each.get("rank") for each in calls] == [3, None]


def test_a_fork_that_nobody_is_told_of_writes_nothing_and_is_lost(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    lost.install(str(made.folder))
    made.recorder._flow = Flow()
    mapped = made.pmap(double)
    mapped(ROWS)
    before, files = made.events, sorted(made.folder.glob("*/*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert made.record.is_complete
        assert np.asarray(mapped(ROWS)).tolist() == (ROWS * 2).tolist()
        assert not made.record.is_complete
        made.pmap(scaled, static_broadcasted_argnums=1)(ROWS, 2)
        made.recorder._write_totals()

    assert [event for event in made.events if event["event"] != "site"] == [
        event for event in before if event["event"] != "site"
    ]
    assert sorted(made.folder.glob("*/*")) == files


def test_what_a_trace_for_the_text_calls_is_no_call(made: Recording):
    made.jit(lambda x: x + made.recorder.host(9, lambda v: v, 3))(ROWS)

    assert made.record.sites[0].calls[0].text is not None
    assert [site.count for site in made.record.hosts] == [1]


# --- what is written


def test_large_arrays_leave_digests(made: Recording, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "_LARGE", ROWS.nbytes)
    pair = made.jit(lambda x: (jnp.concatenate([x, x]), x))
    pair(ROWS)
    first, second = made.record.sites[0].calls[0].returned

    assert (first.archive, len(first.rows), first.mean) == (None, 16, 7.5)
    assert (second.values() == ROWS).all()
    assert (ROWS.nbytes, 1073741824) == (recorder._LARGE, recorder._KEPT)
    monkeypatch.undo()
    assert recorder._LARGE == 33554432


def test_after_so_much_all_arrays_count_as_large(made: Recording):
    made.recorder._left = 3 * ROWS.nbytes
    mapped = made.pmap(double)
    for _ in range(2):
        mapped(ROWS)
    one, two = made.record.sites[0].calls

    assert [array.archive is None for array in (*one.given, *one.returned)] == [False, False]
    assert [array.archive is None for array in (*two.given, *two.returned)] == [False, True]
    assert made.recorder._left == 0


def test_the_totals_are_written_at_the_end(made: Recording, at_exit: list[Callable]):
    made.pmap(double)(ROWS)
    (end,) = at_exit
    end()
    assert made.events[-1] == {"event": "total", "site": 0, "calls": 1}
    assert not list(made.folder.glob("process-*/flow.json"))
    gone = made.folder / "process-0"
    gone.rename(made.folder / "moved")
    end()
    assert not gone.exists()


def test_each_process_has_a_folder_of_its_own(tmp_path: pathlib.Path, at_exit: list[Callable]):
    for number in range(3):
        Recording(tmp_path)
        assert (tmp_path / f"process-{number}").is_dir()


def test_a_fork_begins_with_what_its_parent_knew(
    tmp_path: pathlib.Path, at_exit: list[Callable], monkeypatch: pytest.MonkeyPatch
):
    hooks: list[dict[str, Callable]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **them: hooks.append(them))
    made = Recording(tmp_path, Flow())
    mapped, other = made.pmap(double), made.pmap(jnp.sin)
    made.recorder.placed(4, mapped)
    mapped(ROWS), mapped(ROWS), other(ROWS)
    hooks[0]["before"]()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    hooks[0]["after_in_child"]()
    at_exit[0]()
    assert len(list(tmp_path.glob("process-*"))) == 1  # it has nothing to tell yet
    mapped(ROWS)
    at_exit[0]()
    parent, _, child, idle = made.record.sites

    assert [(site.count, len(site.calls)) for site in made.record.sites] == [
        *((2, 2), (1, 1), (1, 1), (0, 0))
    ]
    assert (child.process, child.places) == (1, {4})
    assert child.made == child.told == parent.told
    assert child.calls[0].text == parent.calls[0].text is not None
    assert (idle.function, idle.told) == ("sin", set())
    assert not list(tmp_path.glob("process-*/flow.json"))  # it is of the parent


def test_a_flow_that_cannot_be_written_is_lost(
    tmp_path: pathlib.Path, at_exit: list[Callable], monkeypatch: pytest.MonkeyPatch
):
    lost.install(str(tmp_path))
    Recording(tmp_path, Flow())
    (tmp_path / "process-0" / "flow.json").mkdir()
    at_exit[0]()

    assert (tmp_path / "lost").read_bytes() == b"\1"


class _Unhappy:
    """A node of a tree that cannot be flattened."""


def _raise(_: Any) -> Any:
    raise ValueError("it cannot be flattened")


jax.tree_util.register_pytree_node(_Unhappy, _raise, _raise)


def test_what_goes_wrong_with_us_is_noted_and_the_program_goes_on(made: Recording):
    known = made.jit(lambda x, y: x * 2, static_argnums=1)
    assert np.asarray(known(ROWS, _Unhappy())).tolist() == (ROWS * 2).tolist()
    (site,) = made.record.sites

    said = ".<lambda>: ValueError: it cannot be flattened"
    assert [each.partition("<locals>")[2] for each in made.record.problems] == [said] * 2
    assert site.calls[0].text is None
    assert (site.calls[0].given[0].values() == ROWS).all()


class _Touchy:
    """Something that nobody can ask anything."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError("it tells nothing")

    def __hash__(self) -> int:
        raise LookupError("it tells nothing")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Holding:
    x: Any
    held: Any = dataclasses.field(metadata={"static": True})


def test_a_result_of_which_nothing_can_be_told_has_a_text_all_the_same(made: Recording):
    touchy = object.__new__(type("T", (_Touchy,), {"__hash__": object.__hash__}))
    made.pmap(lambda x: _Holding(x * 2, touchy))(ROWS)
    (call,) = made.record.sites[0].calls

    assert call.text is not None
    assert (call.structure, call.donated) == (None, ())
    assert made.record.problems[0].endswith(".<lambda>: LookupError: it tells nothing")
    assert (call.returned[0].values() == ROWS * 2).all()


def test_a_value_without_an_identity_has_no_text(made: Recording):
    assert made.recorder.host(3, lambda v: 1, [_Touchy()]) == 1

    assert made.record.problems == ("3: LookupError: it tells nothing",) * 2
    assert made.record.hosts[0].calls[0].text is None


def test_what_cannot_be_written_is_noted(made: Recording, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise ValueError("full")

    mapped = made.pmap(double)
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        mapped(ROWS)

    assert made.record.problems == ("double: ValueError: full",)
    assert made.record.sites[0].calls == []
    assert made.record.sites[0].count == 1


class _OwnError(Exception):
    def __str__(self) -> str:
        raise AssertionError("it runs code of the user's")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a", 1, 2.5), "('a', 1, 2.5)"),
        (ValueError("a" * 2000), "a" * 1000),
        (ValueError(_OwnError()), "ValueError"),
        (ValueError("a", _OwnError()), "ValueError"),
        (KeyError("a"), "KeyError"),
        (_OwnError("a"), "_OwnError"),
    ],
)
def test_what_an_error_says_without_code_of_its_own(error: Exception, said: str):
    assert recorder._text_of(error) == said


# --- places


def test_a_place_that_names_what_maps(made: Recording):
    one = made.recorder.placed(4, made.pmap)
    assert one == made.pmap
    assert one is made.recorder.placed(4, made.pmap)
    other = made.recorder.placed(5, one)
    other(double)(ROWS)
    one(scaled, static_broadcasted_argnums=1)(ROWS, 2)
    other(axis_name="i")(jnp.sin)(ROWS)
    made.pmap(jnp.cos)(ROWS)

    assert {name: site.places for name, site in made.sites.items()} == {
        **{"double": {4, 5}, "scaled": {4}, "sin": {4, 5}, "cos": set()}
    }


def test_a_place_that_holds_a_mapped_function(made: Recording):
    mapped = made.pmap(double)

    assert made.recorder.placed(7, mapped) is mapped
    assert made.record.sites[0].places == {7}


def test_a_place_that_holds_a_part_of_a_call(made: Recording):
    partial = functools.partial(made.pmap, axis_name="i")
    found = made.recorder.placed(4, partial)

    assert (found.keywords, found.args) == ({"axis_name": "i"}, ())
    found(double)(ROWS)
    assert made.record.sites[0].places == {4}
    bound = functools.partial(made.pmap(scaled), ROWS)
    assert made.recorder.placed(5, bound) is bound
    assert made.sites["scaled"].places == {5}
    assert made.recorder.placed(6, functools.partial(double)) is None


def test_a_place_of_anything_else_is_told_by_the_call_around_it(made: Recording):
    assert made.recorder.placed(4, 3) is None
    assert made.recorder.placed(4, double) is None
    inner = made.jit(lambda x: (made.recorder.placed(6, 3), x)[1])
    found: list[Any] = []
    outer = made.jit(lambda x: (found.append(made.recorder.placed(5, "text")), inner(x))[1])
    outer(ROWS)
    assert found[0] == "text"
    part, whole = made.record.sites

    assert (part.around, part.is_mapped) == (set(), False)
    assert (whole.around, whole.is_mapped) == ({5, 6}, True)


# --- where arrays come from


def test_the_flow_is_told_of_what_pmap_takes_and_gives(
    tmp_path: pathlib.Path, at_exit: list[Callable]
):
    flow = Flow()
    made = Recording(tmp_path, flow)
    mapped = made.pmap(scaled, static_broadcasted_argnums=1)
    x = jnp.asarray(ROWS)
    y = mapped(x, 2)
    made.jit(double)(x)
    flow.see(0, y)
    at_exit[0]()
    (found,) = made.record.flows

    assert found["slots"] == {"0": [[0, "in", 0]], "1": [[0, "out"]]}
    assert found["static"] == [[0, 1, ["int"]]]
    assert found["expressions"]["0"]["sites"] == [0]
    assert found["again"] == []
    for _ in range(2):
        made.pmap(double)
    assert flow._again == {2}


def test_a_call_that_raises_gives_the_flow_nothing(tmp_path: pathlib.Path, at_exit: list[Callable]):
    flow = Flow()
    made = Recording(tmp_path, flow)
    with pytest.raises(ZeroDivisionError):
        made.pmap(lambda x: 1 / 0)(ROWS)
    jax.make_jaxpr(made.pmap(double))(ROWS)

    assert flow._forms == {0: {'{"arguments": 1, "words": []}'}}


def test_errors_of_all_kinds_are_told(made: Recording):
    def stop(x: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.jit(stop)(ROWS)
    (call,) = made.record.sites[0].calls
    assert (call.raised, call.returned, call.structure) == ("KeyboardInterrupt", (), None)


def test_a_psum_is_what_it_was(made: Recording):
    total = made.pmap(lambda x: lax.psum(x, "i"), axis_name="i")

    assert np.asarray(total(ROWS))[0].tolist() == ROWS.sum(0).tolist()
    assert isinstance(types.MethodType(total, made), types.MethodType)
