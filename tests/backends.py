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
    """Tests compile more than they compute: without XLA's emitters for fusions, a third less. A jaxlib that does not
    know the flag ends the process that has it."""
    sooner = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
    known = [sys.executable, "-c", "import jax; jax.devices()"]
    found = subprocess.run(known, env=os.environ | {"JAX_PLATFORMS": "cpu"} | sooner, capture_output=True, check=False)
    return {} if found.returncode else sooner
