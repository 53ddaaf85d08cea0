"""The environment of a process that computes on one of Keras' backends."""

import os
import subprocess
import sys
from functools import cache


def environment(backend: str) -> dict[str, str]:
    """What to add to this process's own environment for one on `backend`, `tensorflow` or `jax`."""
    return {"KERAS_BACKEND": backend} | ({"JAX_PLATFORMS": "cpu"} | _sooner_compiled() if backend == "jax" else {})


@cache
def _sooner_compiled() -> dict[str, str]:
    """Tests compile more than they compute: without XLA's emitters for fusions, and with LLVM told to optimise nothing,
    the step of a shop of many features compiles in a third of the time. A jaxlib that does not know a flag ends the
    process that has it."""
    flags = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    result = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"} | flags, capture_output=True, check=False
    )
    return {} if result.returncode else flags
