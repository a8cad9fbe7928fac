"""Starts the recording; a copy named sitecustomize.py, on PYTHONPATH, is what Python imports first.

The file settings.json beside it holds a JSON object: `package`, the folder of this file, and the
arguments of `start`.
"""

import importlib
import importlib.util
import json
import os
import sys

_PACKAGE = "_jax_dist_recording"
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start_recording() -> None:
    """Load the package of this file under a name of its own, and call its `start`."""
    with open(os.path.join(_FOLDER, "settings.json")) as file:
        wanted = json.load(file)
    folder = wanted.pop("package")
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None  # the name ends in .py
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    importlib.import_module(_PACKAGE + ".start").start(**wanted)


if __name__ == "sitecustomize":
    _start_recording()
