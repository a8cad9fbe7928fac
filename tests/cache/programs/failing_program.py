"""Compiles a call that XLA knows no handler of, twice: `FOLDER [retry] [registered] [untyped]`."""

import ctypes
import sys

import jax
import numpy as np

from jax_dist import cache

jax.config.update("jax_platforms", "cpu")
cache.enable(sys.argv[1], retry="retry" in sys.argv)
if "registered" in sys.argv:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda out, ins: None)
    pointer = jax.ffi.pycapsule(ctypes.cast(function, ctypes.c_void_p))
    jax.ffi.register_ffi_target("nobody_knows", pointer, api_version=0)

version = 1 if "registered" in sys.argv or "untyped" in sys.argv else 4


@jax.jit
def step(x):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("nobody_knows", result, custom_call_api_version=version)(x)


for _ in range(2):
    try:
        step.lower(np.ones(3, np.float32)).compile()
        sys.stdout.write("compiled\n")
    except RuntimeError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
