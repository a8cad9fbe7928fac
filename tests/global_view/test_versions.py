"""On a jax that is too old, one says so at once."""

import pytest

from jax_dist import _compat, global_view
from jax_dist.errors import UnsupportedError

pytestmark = [pytest.mark.mapping, pytest.mark.rewriting]


def test_an_old_jax_is_refused(monkeypatch):
    monkeypatch.setattr(_compat, "CAN_REWRITE", False)

    with pytest.raises(UnsupportedError, match=r"needs jax 0\.10 or newer"):
        global_view(lambda state, x: state, "i")
