"""`jax-dist server`, where what it needs is missing."""

import argparse
import io
import sys

from jax_dist.commands import server


def test_without_pygls_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax_dist.checker.output.lsp", raising=False)
    monkeypatch.delattr("jax_dist.checker.output.lsp", raising=False)  # where other tests loaded it
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    out, err = io.StringIO(), io.StringIO()

    code = server.run(argparse.Namespace(), out=out, err=err)

    assert code == 2
    assert out.getvalue() == ""
    assert err.getvalue() == (
        'jax-dist server: lsprotocol is not installed. Run: pip install "pygls>=2.0"\n'
    )
