"""The proofs once more on JAX, each file in a process of its own."""

from pathlib import Path

import pytest

from tests.trainer.test_backends import start, wait

pytestmark = pytest.mark.process

PROOFS = (
    "test_proofs_r21.py", "test_proofs_bm20.py", "test_proofs_re19.py", "test_mining.py", "test_objective.py",
    "test_conditional.py", "test_frequencies.py", "test_optimizers.py", "test_hits.py", "test_pair_weights.py",
    "test_optimizer_state.py",
)  # fmt: skip
SLOW_ON_JAX = (
    "a_model or central_differences or error_of_rare or many_hits or learn or checkpoint or one_over_m or eta_goes "
    "or popularity or two_epochs"
)
"""Steps of whole models, which `test_backends` runs compiled; Monte Carlo of many shapes, each one compiled; one
sampler more of the same tables."""


@pytest.mark.parametrize("name", PROOFS)
def test_the_proofs_hold_on_jax(name: str) -> None:
    file = Path(__file__).parent / name
    wait(start("jax", "-m", "pytest", "-p", "no:cacheprovider", "-k", f"not ({SLOW_ON_JAX})", file))
