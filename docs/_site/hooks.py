"""What the site does to the pages while it is built: they are written for a plain reader first.

`docs/` is Markdown that GitHub shows and the tests run. Here the file names of code blocks become
their titles, and diagrams become pictures, so that the site needs no script from elsewhere.
"""

import contextlib
import io
import os
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from jax_dist.cli.main import main

os.environ["COLUMNS"] = "80"  # of the help texts, whatever terminal builds the site

_FILE = re.compile(r"^```(\w+) file=(\S+)$", re.MULTILINE)
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HELP = re.compile(r"^<!-- help: ([a-z ]+) -->$", re.MULTILINE)
_WORKER = "https://unpkg.com/iframe-worker/shim"  # that the offline plugin would load
_SEARCH_BOOST = {
    "architecture.md": 0.1,  # its list of files has every word; other pages explain it
    "index.md": 0.3,  # it has a word of each page
    "reference.md": 0.2,  # after the page that explains a name
    "commands.md": 0.5,
    "examples.md": 0.5,
    "libraries.md": 3,
    "errors.md": 2,
    "rewriting.md": 2,
    "linting.md": 0.5,
    "global-view.md": 1.5,
}


def on_page_markdown(text: str, page: Page, **_: Any) -> str:
    if boost := _SEARCH_BOOST.get(page.file.src_uri):
        page.meta.setdefault("search", {"boost": boost})
    text = _FILE.sub(r'```\1 title="\2"', text)
    text = _HELP.sub(lambda match: _help(match[1].split()), text)
    return _MERMAID.sub(lambda match: _drawn(match[1]), text)


def _help(command: list[str]) -> str:
    """Return the text that `--help` of a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return f"```text\n{out.getvalue()}```"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the script that searches a site without a server from beside the page."""
    up = "../" * page.url.count("/")
    return output.replace(_WORKER, f"{up}_site/worker.js")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    return output_content.replace(_WORKER, "_site/worker.js")


def _drawn(source: str) -> str:
    """Return a diagram as a picture in the page; its colours are those of the page."""
    import mermaidx  # slow to load, and one page in all needs it

    config = {"flowchart": {"htmlLabels": False, "nodeSpacing": 30, "rankSpacing": 30}}
    svg = mermaidx.Diagram(source, config=config).svg()
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)  # it has colours for white paper
    return f'<figure class="diagram">{svg}</figure>'
