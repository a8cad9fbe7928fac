"""Python imports this first, as its folder is on PYTHONPATH; it starts the recording."""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "_jax_dist_recording"


def _run_the_hidden_one():
    """The sitecustomize that Python would have imported without us."""
    others = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _start_recording():
    folder = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    importlib.import_module(_PACKAGE + ".start").start()


_run_the_hidden_one()
if "JAX_DIST_RECORD" in os.environ and _PACKAGE not in sys.modules:
    _start_recording()
