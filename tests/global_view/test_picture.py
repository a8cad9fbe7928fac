"""The picture of a report: bars to one scale, with the bytes that the report has."""

import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_dist import global_view

pytestmark = pytest.mark.rewriting

_SVG = "{http://www.w3.org/2000/svg}"


def _step(state, x):
    gradient = lax.pmean(jnp.mean(x) * state["w"], "i")
    return {"w": state["w"] - gradient, "b": state["b"] + 1, "own": state["own"] + jnp.sum(x)}, x


def test_bars_are_as_long_as_the_bytes():
    view = global_view(_step, "i", shardings="fsdp")
    state = {name: np.zeros(size, np.float32) for name, size in (("w", 8192), ("b", 9), ("own", 5))}
    view(state, np.ones((8, 2), np.float32))
    report = view.report()

    root = ET.fromstring(report.picture())

    bars = [rect for rect in root.iter(f"{_SVG}rect") if rect.get("class") != "card"]
    sizes = [int(rect[0].text.split(": ")[1].split()[0].replace(",", "")) for rect in bars]
    assert sizes == [32768, 36, 20, 4096, 36, 20]  # w, b, own; under pmap, and here
    assert sum(sizes[:3]) == report.bytes_under_pmap
    assert sum(sizes[3:]) == report.bytes_per_device
    widths = [float(rect.get("width")) for rect in bars]
    for width, size in zip(widths, sizes, strict=True):
        assert width == pytest.approx(520 * size / report.bytes_under_pmap, abs=0.06)
    names = [rect[0].text.split(":")[0] for rect in bars[3:]]
    assert names == ["sharded", "whole", "different on each device"]
    assert [float(rect.get("x")) for rect in bars[4:]] == pytest.approx(
        [16 + widths[3], 16 + widths[3] + widths[4]], abs=0.11
    )


def test_names_are_escaped():
    view = global_view(lambda w, x: w + lax.psum(x, "i"), "i")
    view(np.float32(1), np.ones(8, np.float32))

    assert "&lt;lambda&gt;" in view.report().picture()
