"""docs/errors.md is right about this version of jax: what raises, with which words; every cure."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import textwrap
import warnings

import jax
import pytest

from jax_dist.testing import run_processes

_PAGE = pathlib.Path(__file__).parents[1] / "docs" / "errors.md"
_SECTION = re.compile(r"^### (.*)\n((?:(?!^##).*\n?)*)", re.MULTILINE)
_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VERSION = r"\d+(?:\.\d+)+"
_ALSO = re.compile(r"[Rr]eads: (`[^`]+`(?: \([^)]*\))?(?:, or `[^`]+`(?: \([^)]*\))?)*)")
_QUOTED = re.compile(r"``(.+?)``|`([^`]+)`")


class Section:
    """One error: its code, the words it may have, and which versions raise it or run it."""

    def __init__(self, title: str, body: str):
        self.title = title
        self.once = "once in a process" in body
        self.code = "\n".join(_CODE.findall(body))
        prose = re.sub(r"\s+", " ", _CODE.sub("", body))
        raised = re.search(rf"Raised by jax ((?:{_VERSION}|,|and|\s)+)", prose)
        runs = re.search(rf"jax ((?:{_VERSION}|,|and|\s)+) runs? it", prose)
        self.raised = re.findall(_VERSION, raised[1]) if raised else []
        self.runs = re.findall(_VERSION, runs[1]) if runs else []
        also = "".join(_ALSO.findall(prose))
        self.raised += re.findall(_VERSION, "".join(re.findall(r"\([^)`]*\)", also)))
        self.words = [double or single for double, single in _QUOTED.findall(title + also)]

    def matches(self, message: str) -> bool:
        flat = re.sub(r"\s+", " ", message.replace("`", ""))
        return any(words in flat for words in self.words)


_TEXT = _PAGE.read_text()
_SECTIONS = [Section(title, body) for title, body in _SECTION.findall(_TEXT)]
_SETUP = _CODE.findall(_TEXT[: _TEXT.index("\n## ")])


def _names_before(section: Section) -> dict[str, object]:
    """What the page has defined when it comes to a section: later ones use earlier helpers."""
    names: dict[str, object] = {"__name__": "errors"}
    for code in _SETUP:
        exec(code, names)
    for each in _SECTIONS:
        for name in ("wrong", "cured", "silent"):
            names.pop(name, None)
        exec(each.code, names)
        if each is section:
            return names
    raise AssertionError(section.title)


def _with(name: str) -> list:
    chosen = [each for each in _SECTIONS if f"def {name}()" in each.code]
    return [pytest.param(each, id=each.title) for each in chosen]


@pytest.mark.parametrize("section", _with("wrong"))
def test_what_is_wrong_raises_these_words(section: Section):
    message = _from_a_fresh_process(section) if section.once else _from_here(section)

    if jax.__version__ in section.raised:
        assert section.matches(message), message or "it ran"
    elif jax.__version__ in section.runs:
        assert not section.matches(message), message


def _from_here(section: Section) -> str:
    names = _names_before(section)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            names["wrong"]()
            message = ""
        except Exception as error:  # noqa: BLE001  # which error it is, is what is looked at
            message = str(error)
    return message + " ".join(str(each.message) for each in caught)


def _from_a_fresh_process(section: Section) -> str:
    code = "\n".join([*_SETUP, section.code, "wrong()"])
    command = [sys.executable, "-W", "always", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("section", _with("cured"))
def test_what_is_cured_runs(section: Section):
    _names_before(section)["cured"]()


@pytest.mark.parametrize("section", _with("silent"))
def test_what_is_silent_is_still_so(section: Section):
    _names_before(section)["silent"]()


def test_every_section_that_says_who_raises_it_has_code():
    said = [each for each in _SECTIONS if each.raised]

    assert len(said) > 30
    assert [each.title for each in said if "def wrong" not in each.code] == []
    assert [each.title for each in said if "def cured" not in each.code] == []
    assert [each.title for each in said if not each.words] == []
    assert {version for each in said for version in each.raised} == {"0.7.2", "0.10.2", "0.12.0.1"}


_IN_PROCESSES = [each for each in _SECTIONS if "_in_processes" in each.code]


def test_the_errors_of_several_processes(tmp_path, monkeypatch):
    outcomes = run_processes(_module(tmp_path, monkeypatch).run, processes=2, cpu_devices=4)

    assert [outcome.error for outcome in outcomes] == [None, None]
    for said in (outcome.value for outcome in outcomes):
        assert len(said) == len(_IN_PROCESSES) == 5
        for section, (message, cured) in zip(_IN_PROCESSES, said, strict=True):
            assert cured == "", f"{section.title}: {cured}"
            if jax.__version__ in section.raised:
                assert section.matches(message), f"{section.title}: {message or 'it ran'}"
            elif jax.__version__ in ("0.10.2", "0.12.0.1"):  # where silent_in_processes holds
                assert not section.matches(message), f"{section.title}: {message}"


def _module(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """The code of these sections as a module, for processes import what they run."""
    parts = [_SETUP[0], _CODE.findall(_TEXT[_TEXT.index("## Several processes") :])[0]]
    for number, each in enumerate(_IN_PROCESSES):
        code = each.code.replace("silent_in_processes", "wrong_in_processes")
        code += f"\nwrong_{number}, cured_{number} = wrong_in_processes, cured_in_processes\n"
        parts.append(code)
    parts.append(
        textwrap.dedent(f"""\
            def _says(fun):
                try:
                    fun()
                except BaseException as error:
                    return str(error) or type(error).__name__
                return ""


            def run():
                return [
                    (_says(globals()[f"wrong_{{n}}"]), _says(globals()[f"cured_{{n}}"]))
                    for n in range({len(_IN_PROCESSES)})
                ]
            """)
    )
    path = folder / "errors_in_processes.py"
    path.write_text("\n".join(parts))
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module
