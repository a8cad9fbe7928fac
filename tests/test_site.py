"""The site: nothing is left out, nothing comes from elsewhere, and the tables tell the truth."""

import importlib
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

import jax_dist
from jax_dist import errors
from jax_dist.cli.main import COMMANDS
from jax_dist.lint.engine.linter import RULES

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_CONFIG = (_ROOT / "mkdocs.yml").read_text()
_NAV = set(re.findall(r"([\w/-]+\.md)$", _CONFIG[_CONFIG.index("\nnav:") :], re.MULTILINE))


def _module(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(_DOCS).as_posix() for path in _DOCS.rglob("*.md")}

    assert pages == _NAV
    assert len(pages) <= 20


def test_every_public_name_is_in_the_reference():
    text = (_DOCS / "reference.md").read_text()
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    names = {f"jax_dist.{name}" for name in jax_dist.__all__}
    for module in ("cache", "errors", "multihost", "testing"):
        exported = importlib.import_module(f"jax_dist.{module}").__all__
        names |= {f"jax_dist.{module}.{name}" for name in exported}

    names = {name for name in names if name.rpartition(".")[0] not in shown}
    names -= {f"jax_dist.{name}" for name in errors.__all__}  # shown as part of jax_dist.errors
    modules = {f"jax_dist.{name}" for name in ("cache", "errors", "multihost", "testing")}
    assert names - modules - {"jax_dist.__version__"} - shown == set()


def test_every_command_is_in_the_reference():
    text = (_DOCS / "commands.md").read_text()
    shown = set(re.findall(r"^<!-- help: (\w+) -->$", text, re.MULTILINE))

    assert set(COMMANDS) <= shown


def test_every_picture_has_its_script_and_its_page():
    text = "".join(path.read_text() for path in (_ROOT / "README.md", *_DOCS.rglob("*.md")))
    text += "".join(path.read_text() for path in _DOCS.rglob("pictures/*.py"))
    pictures = [path for path in _DOCS.rglob("*") if path.suffix in (".svg", ".png")]

    assert pictures != []
    for picture in pictures:
        named = [
            script
            for script in (*_DOCS.rglob("*.py"), *_ROOT.glob("examples/**/*.py"))
            if picture.stem in script.read_text()
        ]
        assert named, f"no script makes {picture.name}"
        assert picture.name in text, f"no page shows {picture.name}"


def test_nothing_is_fetched_from_elsewhere():
    for path in [*_DOCS.rglob("*.md"), *_DOCS.rglob("*.css"), *_DOCS.rglob("*.js")]:
        text = path.read_text()
        assert not re.search(r"!\[[^\]]*\]\(https?:", text), path
        assert not re.search(r"<(script|link|img|iframe)[^>]*https?:", text), path
        if path.suffix != ".md":
            assert "http" not in text, path
    assert "font: false" in _CONFIG


def test_the_list_of_versions_has_each_that_changed_something():
    page = (_DOCS / "errors.md").read_text()

    for version in ("0.8.0", "0.9.0", "0.10.0", "0.10.2", "0.11.0"):
        assert re.search(rf"^- {re.escape(version)}:", page, re.MULTILINE), version


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "README.md"])
def test_links_of_the_front_pages_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (_ROOT / name).read_text())

    assert [link for link in links if not (_ROOT / link).exists()] == []


def test_links_to_rules_name_their_headings():
    for path in [*_DOCS.glob("*.md")]:
        for anchor in re.findall(r"rules\.md#([a-z0-9-]+)", path.read_text()):
            code = anchor[:6].upper()
            assert anchor == f"{code.lower()}-{RULES[code].name}", path


def test_the_citation_is_of_this_version():
    text = (_ROOT / "CITATION.cff").read_text()

    assert f"\nversion: {jax_dist.__version__}\n" in text
    assert "\nlicense: Apache-2.0\n" in text


def test_the_forms_for_issues_can_be_read():
    yaml = pytest.importorskip("yaml")
    forms = sorted((_ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

    assert [form.stem for form in forms] == ["config", "migration", "page", "wrong-result"]
    for form in forms[1:]:
        data = yaml.safe_load(form.read_text())
        assert data["name"]
        assert data["description"]
        assert len({field["id"] for field in data["body"]}) == len(data["body"])
    yaml.safe_load((_ROOT / "CITATION.cff").read_text())


def _table() -> dict[str, list[str]]:
    page = (_DOCS / "comparison.md").read_text()
    lines = re.findall(r"^\| (.*) \|$", page[: page.index("## Tools that read code")], re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {name: cells for name, *cells in rows if not name.startswith("---")}


@pytest.fixture(scope="module")
def comparison():
    for name in ("chex", "equinox", "flax"):
        pytest.importorskip(name)
    return _module(_ROOT / "benchmarks" / "comparison.py")


@pytest.mark.thorough
@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the table is of jax 0.10.2")
def test_the_comparison_computes_its_table(comparison):
    table = _table()
    ways = list(comparison.WAYS)

    assert [way.strip("`") for way in table[""]] == ways
    assert list(table)[1 : 1 + len(comparison.CASES)] == list(comparison.CASES)
    for name, case in comparison.CASES.items():
        found = [comparison.verdict(case, comparison.WAYS[way]) for way in ways]
        assert found == table[name], name


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the table is of jax 0.10.2")
def test_the_comparison_run_two_processes(comparison, monkeypatch):
    monkeypatch.setitem(sys.modules, "comparison", comparison)
    monkeypatch.syspath_prepend(str(_ROOT / "benchmarks"))
    table, found = _table(), comparison.run_two_processes()

    for place, name in enumerate(("2 processes", "2 processes, inside `jit`")):
        cells = [found[way][place] if way in found else "not run" for way in comparison.WAYS]
        assert cells == table[name]


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    return _module(_DOCS / "_site" / "hooks.py")


class _Page:
    def __init__(self, src_uri: str, url: str = ""):
        self.file = self
        self.src_uri = src_uri
        self.url = url
        self.meta = {}


def test_file_names_become_titles(hooks):
    text = "```python file=train.py\nn = 1\n```\n"

    assert hooks.on_page_markdown(text, _Page("a.md")).startswith('```python title="train.py"\n')


def test_help_is_what_the_command_prints(hooks):
    text = hooks.on_page_markdown("<!-- help: cache verify -->\n", _Page("commands.md"))

    assert text.startswith("```text\nusage: jax-dist cache verify")
    assert "--timeout" in text


def test_the_script_for_searching_files_is_our_own(hooks):
    page = _Page("cache.md", "cache.html")
    html = '<script src="https://unpkg.com/iframe-worker/shim"></script>'

    assert hooks.on_post_page(html, page, None) == '<script src="_site/worker.js"></script>'


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_nothing_from_elsewhere(tmp_path):
    for name in ("material", "mkdocstrings", "mermaidx"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr

    pages = list(tmp_path.rglob("*.html"))
    assert {path.stem for path in pages} >= {"index", "errors", "rules", "commands"}
    for page in pages:
        html = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(https?:[^\s\">]+)", html)
        fetched += re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?(https?:[^\s\">]+)", html)
        assert fetched == [], page
        assert "<pre>&gt;&gt;&gt;" not in html


@pytest.mark.slow
def test_the_search_finds_the_page_first(tmp_path):
    for name in ("material", "mkdocstrings", "mermaidx"):
        pytest.importorskip(name)
    if shutil.which("node") is None:
        pytest.skip("needs node, which runs the search of the site")
    pages = {
        "unreplicate": "libraries.html#replace-replicate-and-unreplicate",
        "dropout": "libraries.html#dropout",
        "donate": "pmap.html#training-loops-donate-the-state",
        "equinox": "libraries.html#equinox",
        "batch norm": "libraries.html#batch-norm",
        "orbax": "processes.html#preemption-and-checkpoints-with-orbax",
        "axis_name": "pmap.html#moving-from-jaxpmap-axis_name-and-decorators",
        "in_axes": "pmap.html#which-dimension-is-mapped-in_axes-and-out_axes",
        "FSDP": "global-view.html",
        "ZeRO": "global-view.html",
        "NCCL": "processes.html",
        "replicate": "libraries.html#replace-replicate-and-unreplicate",
        "cache key": "cache.html#why-did-it-miss-the-cache-key",
        "check_vma": "rewriting.html#gradients-that-are-too-large-check_vma-jxd303",
        "captured array": "rewriting.html#captured-arrays-jxd401",
        "recompile": "guards.html#what-makes-jax-recompile",
        "slurm": "processes.html#on-a-cluster",
        "Found an unbound axis name: i": "errors.html#shard_map-by-hand-and-unbound-axis-names",
        "JXD301": "rules.html#jxd301-all-gather-then-reduce",
        "simulated_devices": "testing.html#simulated-devices-simulated_devices",
    }
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, check=True)
    search = ["node", str(_ROOT / "tests" / "site_search.js"), str(tmp_path), *pages]
    ran = subprocess.run(search, capture_output=True, text=True, check=True)

    found = json.loads(ran.stdout)
    # Where only a page is named, the best of its sections may be any.
    first = {q: found[q][0] if "#" in pages[q] else found[q][0].partition("#")[0] for q in pages}
    assert first == pages
