"""Run the proofs on JAX, nightly, in two processes that share compiled programs."""

from pathlib import Path

import pytest

from tests.trainer.test_backends import start, wait

pytestmark = [pytest.mark.process, pytest.mark.nightly]

PROOFS = {
    "losses": (
        "proofs_r21", "proofs_bm20", "objective", "hits", "pair_weights", "bilateral", "pairwise_softmax", "top_k",
        "negatives_per",
    ),
    "sampling and steps": (
        "proofs_re19", "mining", "conditional", "frequencies", "optimizers", "average",
        "neighbours", "nearest", "cross_batch", "retrieved", "arrays",
        "blocks",
    ),
}  # fmt: skip
SLOW_ON_JAX = (
    "a_model or central_differences or error_of_rare or many_hits or learn or checkpoint or one_over_m or eta_goes "
    "or popularity or two_epochs or second_layer or get_none_of_it or is_the_smoothed_target or signal_is_clearest "
    "or of_the_whole_catalogue_on_average or ((test_hits or test_top_k) and step_by_hand) or the_pair_twice "
    "or was_killed or best_labels or beside_ or of_each_part or serves_its_average or histories or 50-1 "
    "or no_worse or (test_retrieved and loss_of_a_step) or (test_nearest and step_s_loss) or thirds "
    "or compiled_in_blocks "
    "or (test_blocks and (hinge or ramp or exponential or logistic or pairwise or mined))"
)
"""Steps of whole models whose like `test_backends` compares with TensorFlow's, which are proved; Monte Carlo of many
shapes, each one compiled; one sampler more of the same tables."""


@pytest.mark.parametrize("proofs", PROOFS.values(), ids=PROOFS)
def test_the_proofs_hold_on_jax(proofs: tuple[str, ...]) -> None:
    files = [Path(__file__).with_name(f"test_{name}.py") for name in proofs]
    wait(start("jax", "-m", "pytest", "-p", "no:cacheprovider", "-k", f"not ({SLOW_ON_JAX})", *files))
