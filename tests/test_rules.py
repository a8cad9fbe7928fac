"""The catalogue of rules: every page says all it should, and no code is used twice."""

import dataclasses
import re
import subprocess
import sys

import pytest

from jax_dist.rules import pages


@pytest.mark.parametrize("page", pages.PAGES.values(), ids=lambda page: page.code)
def test_page_is_whole(page):
    assert re.fullmatch(r"JXD\d{3}", page.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", page.name)
    for field in dataclasses.fields(page)[2:]:
        text = getattr(page, field.name)
        assert text.endswith("."), field.name
        assert text[0].isupper() or text.startswith("`"), field.name


def test_codes_and_names_are_used_once():
    everything = pages._ALL

    assert len(pages.PAGES) == len(everything)
    assert len({page.name for page in everything}) == len(everything)


def test_a_page_has_its_headings_in_order():
    text = str(pages.PAGES["JXD401"])

    assert text.startswith("JXD401 captured-array\n\nWhat\n  An array that")
    assert re.findall(r"^\w+$", text, re.MULTILINE) == ["What", "Why", "Instead", "Fix"]


def test_the_catalogue_does_not_load_jax():
    code = "import sys, jax_dist.rules.pages; sys.exit('jax' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
