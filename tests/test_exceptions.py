"""The text of exceptions of others: it comes, and is a string that is not too long."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest

import jax_dist
from jax_dist import _exceptions

_NONE = "<its text does not come>"


class _Text(str):
    """A string whose methods cannot be trusted."""

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __getitem__(self, key: object) -> str:
        raise RuntimeError("no parts")

    def __str__(self) -> str:
        return self


class _HostileError(ValueError, RuntimeError):
    """Raised by a user's function; its `how` says what its text does."""

    how = ""

    def __str__(self) -> str:
        match self.how:
            case "never returns":
                threading.Event().wait()
            case "loops":
                for _ in itertools.count():
                    time.sleep(0)
            case "raises":
                raise LookupError("no text")
            case "exits":
                raise SystemExit(3)
            case "is None":
                return None  # type: ignore[return-value]
            case "is a number":
                return 7  # type: ignore[return-value]
            case "is huge":
                return 20_000_000 * "x"
            case "is no plain string":
                return _Text("context mesh")
        raise AssertionError(self.how)


_MUTE = ("never returns", "raises", "exits", "is None", "is a number")
_ALL = (*_MUTE, "is huge", "is no plain string")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exceptions, "_PATIENCE", 0.2)


def _error(how: str, *args: object) -> _HostileError:
    """One with a traceback, that comes from another one of its kind."""
    made = type("NamedError", (_HostileError,), {"how": how})
    try:
        try:
            raise made(*args)
        except made as first:
            raise made(*args) from first
    except made as error:
        return error


@pytest.mark.parametrize("how", [*_ALL, "loops"])
def test_a_text_comes_whatever_the_exception_does(how: str):
    text = _exceptions.text_of(_error(how))

    assert type(text) is str
    assert len(text) < 70_000
    if how == "is huge":
        assert text.startswith("xxxx")
        assert "... [19934464 characters left out] ..." in text
    elif how == "is no plain string":
        assert text == "context mesh"
    else:
        assert text == _NONE


@pytest.mark.parametrize("how", _ALL)
def test_a_traceback_comes_whatever_the_exception_does(how: str):
    said = _exceptions.told(_error(how))

    if how in ("never returns", "raises", "is None", "is a number"):
        assert said.is_whole == (how != "never returns")
    assert {type(said.what), type(said.traceback)} == {str}
    assert len(said.traceback) < 70_000
    assert "NamedError: " in said.what[:60]
    assert "in _error" in said.traceback
    if how == "never returns":
        assert said.what == f"NamedError: {_NONE}"
    if how == "is no plain string":
        assert said.what == "NamedError: context mesh"


def test_where_only_the_cause_has_no_text_the_error_keeps_its_own():
    error = ValueError("no batch")
    error.__cause__ = _error("never returns")

    said = _exceptions.told(error)

    assert said == (
        "ValueError: no batch",
        f"Traceback (most recent call last):\n{said.what}\n",
        False,
    )


class _Mute:
    def __str__(self) -> str:
        threading.Event().wait()
        return ""


def test_an_argument_that_has_no_text_is_no_plain_text():
    assert _exceptions.text_of(ValueError(_Mute())) == _NONE
    assert _exceptions.text_of(ValueError("a", 2)) == "('a', 2)"
    assert _exceptions.text_of(OSError(2, "gone", "a.py")) == "[Errno 2] gone: 'a.py'"


# --- where functions of users raise them


@pytest.mark.parametrize("how", _ALL)
@pytest.mark.parametrize("kind", ["RuntimeError", "NameError"])
def test_an_error_in_a_mapped_function_reaches_its_user(how: str, kind: str):
    made = {
        "RuntimeError": _HostileError,
        "NameError": type("Named", (NameError,), {"__str__": _HostileError.__str__, "how": how}),
    }[kind]
    error = made()
    error.how = how

    def fails(x):
        raise error

    with pytest.raises(made) as caught:
        jax_dist.pmap(fails, axis_name="i")(np.ones(jax.device_count()))
    assert caught.value is error
