"""Files by their bytes: what cannot be read is said, and never passed over."""

import pytest

from jax_dist.lint.engine import linter
from jax_dist.lint.engine.linter import Examiner
from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import UnreadableError

_TEXT = "import jax\nf = jax.pmap(abs)\n"


def _found(data: bytes) -> list[tuple[str, str]]:
    found = Examiner(frozenset(linter.RULES)).examine("a.py", data)
    return [(finding.code, finding.message) for finding in found]


def test_a_cookie_of_no_text_has_a_finding():
    data = f"# coding: rot13\n{_TEXT}".encode()
    message = (
        "the file is not rot13: 'rot13' is not a text encoding; use codecs.decode() to handle "
        "arbitrary codecs"
    )

    with pytest.raises(UnreadableError) as caught:
        sources.read("a.py", data)

    assert str(caught.value) == message
    assert _found(data) == [("JXD901", message)]


@pytest.mark.parametrize("cookie", ["latin-1", "cp1252", "shift_jis", "utf-8"])
def test_other_cookies_are_followed_to_the_byte(cookie: str):
    data = f"# coding: {cookie}\nname = 'é'\n".encode(cookie, "ignore")

    source = sources.read("a.py", data)

    assert source.written(source.code) == data


def test_a_line_of_f_strings_that_the_parser_takes_minutes_for_is_a_finding():
    line = 's = f"' + "{x}" * 40_000 + '"'

    ((code, message),) = _found(f"{_TEXT}{line}\n".encode())

    assert code == "JXD901"
    assert message.endswith(
        "f-strings in a line of 120,007 bytes, which takes minutes; split the line"
    )
