"""Checks of readable data against a recipe, without Keras."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtail.bundle import BUCKET_NAMES, BundleInvariantError, log_frequencies
from longtail.bundle.arrays import Float64, Int8
from longtail.bundle.display import check_displayable
from longtail.bundle.ids import find_rows
from longtail.bundle.sets import distinct
from longtail.trainer import register
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.errors import DataError, TrainerError
from longtail.trainer.evaluation.groups import check_group
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.evaluation.target import read_shares
from longtail.trainer.evaluation.task import HeldOut, check_metric
from longtail.trainer.losses.families import LOSSES
from longtail.trainer.prior import check_forecast


def find_refusals(recipe: Recipe, dataset: Dataset, held_out: dict[str, HeldOut]) -> Iterator[TrainerError | DataError]:
    """Yield what training, evaluation or export would refuse of readable data, check by check."""
    for check in (
        check_display,
        check_sizes,
        check_choice,
        lambda *_: check_held_out(held_out),
        check_columns,
        check_prior,
        check_tree,
    ):
        # Caught one by one, so that `check` names all that would be refused.
        try:
            check(recipe, dataset)
        except (TrainerError, DataError) as error:
            yield error


def check_display(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse display columns that a service could not show."""
    if dataset.label_table is None:
        return
    for name in recipe.data.display:
        try:
            check_displayable(name, dataset.label_table[name])
        except BundleInvariantError as error:
            raise DataError(
                f"data.display: column {name!r}: expected {error.expected}, found {error.actual}"
            ) from error


def check_sizes(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse data with too few pairs for a step, or too few labels."""
    sampled, parts = recipe.data.reduction == "sample", recipe.training.accumulate
    visits, labels = dataset.count_visits(one_label_per_query=sampled), len(dataset.label_ids)
    # In-batch negatives are the other rows of a part, so each part needs two.
    if visits < 2 * parts:
        raise DataError(f"training: expected at least {2 * parts} {'queries' if sampled else 'pairs'}, found {visits}")
    if labels < 2:
        raise DataError("training: expected at least 2 labels, found 1: a single label has no negatives")
    if len(dataset.valid) or len(dataset.test):
        check_metric(recipe.evaluation, labels=labels)
    check_negatives(recipe, labels=labels, batch_size=min(recipe.training.batch_size, visits) // parts)
    limits = {}
    if recipe.loss.retrieved_negatives is not None:
        limits["retrieved_negatives.depth"] = recipe.loss.retrieved_negatives.depth, labels
    if (top_k := recipe.loss.top_k) is not None and top_k.k_overall:
        limits["top_k.k"] = top_k.k_overall, labels
    elif top_k is not None:
        buckets_L = assign_buckets(recipe, dataset)
        for name, k in top_k.by_bucket.items():
            limits[f"top_k.k.{name}"] = k, int(np.sum(buckets_L == BUCKET_NAMES.index(name)))
    for key, (value, count) in limits.items():
        if value > count:
            raise DataError(f"loss.{key}: expected at most {count}, the labels there are, received {value}")
    if threshold := recipe.loss.weight.argument("threshold"):
        highest = float(np.exp(compute_log_frequencies(recipe, dataset).max()))
        if threshold > highest:
            raise DataError(
                f"loss.weight.threshold: expected at most {highest:.3g}, the frequency of the most frequent "
                f"label, beyond which there are no negatives, received {threshold}"
            )


def check_negatives(recipe: Recipe, *, labels: int, batch_size: int) -> None:
    """Refuse more negatives than labels to draw or than a row has to mine."""
    sampler, mining = recipe.loss.sampler, recipe.loss.mining
    drawn, others = sampler.argument("negatives") or 0, labels - bool(sampler.argument("exclude_positive"))
    # The memory of `cross_batch` holds labels of earlier batches, and may hold one several times.
    if drawn > others and sampler.name != "cross_batch":
        raise DataError(
            f"loss.sampler.negatives: expected at most {others}, the labels there are to draw, received {drawn}"
        )
    available = drawn + (batch_size if sampler.of_the_batch else labels if sampler.name == "full" else 0)
    ranks = 0 if mining is None else mining.mining().named_count or 0
    if mining is not None and ranks > available:
        key = "theta" if mining.keep is None else "keep"
        raise DataError(f"loss.mining.{key}: expected at most {available}, the negatives of a row, received {ranks}")


def warn_of_future(dataset: Dataset) -> str | None:
    """Return a warning if training pairs are later than held-out pairs; else None."""
    if dataset.train.times is None or not len(dataset.train):
        return None
    newest, shares = dataset.train.times.max(), []
    for name, pairs in (("valid", dataset.valid), ("test", dataset.test)):
        if pairs.times is not None and len(pairs) and (share := float((pairs.times < newest).mean())):
            shares.append(f"{100 * share:.3g} % of the {name} pairs")
    if not shares:
        return None
    return (
        f"data.split: {' and '.join(shares)} are older than the newest training pair: figures predict the future "
        "less well than those of data.split.strategy = 'temporal'"
    )


def check_choice(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse a family, metric or target prior that cannot choose λ on these data."""
    evaluation, family, prior = recipe.evaluation, recipe.loss.family.name, recipe.evaluation.target_prior
    bucket = evaluation.metric.partition("/")[2]
    if len(dataset.valid) and bucket:
        if not (assign_buckets(recipe, dataset)[dataset.valid.labels] == BUCKET_NAMES.index(bucket)).any():
            raise DataError(
                f"evaluation.metric: expected valid pairs of {bucket} labels for {evaluation.metric}, found none"
            )
    elif not len(dataset.valid) and prior is not None:
        raise DataError(f"evaluation.target_prior: expected valid pairs to choose λ on for {prior}, found none")
    # Theory chooses λ by the family's link; without one it takes valid pairs to choose.
    unlinked = family not in register.BUILT_IN["family"] and LOSSES[family].link is None
    if unlinked and not len(dataset.valid) and len(evaluation.bias_removal) > 1:
        raise DataError(
            f"loss.family {family!r}: expected a link, one evaluation.bias_removal or validation pairs to choose λ "
            "by, received none of them"
        )
    if recipe.model.temperature == "auto" and not len(dataset.valid):
        raise DataError("model.temperature: expected valid pairs to choose it on for 'auto', found none")
    if isinstance(prior, Path):
        ids, shares = read_shares(prior)
        held_out = dataset.label_ids.take(pa.array(distinct(dataset.valid.labels)))
        if not shares[np.asarray(find_rows(ids, held_out).is_valid())].any():
            raise DataError(f"target prior {prior}: expected a share of some label with held-out pairs, found none")


def check_held_out(held_out: dict[str, HeldOut]) -> None:
    """Refuse held-out pairs, by split, of which none is left to find."""
    for split, pairs in held_out.items():
        if not pairs.measured:
            raise DataError(
                f"evaluation: expected {split} pairs to find, found none of {pairs.distinct:,}: "
                f"{pairs.repeated:,} seen before, {pairs.short:,} with too few earlier pairs; use "
                "evaluation.exclude_seen = false "
                "where a query may choose a label again, or a smaller evaluation.least_history"
            )


def count_held_out(recipe: Recipe, dataset: Dataset) -> dict[str, HeldOut]:
    """Count the held-out pairs of `valid` and `test` that can be found, and the others."""
    config, labels = recipe.evaluation, len(dataset.label_ids)
    return {
        split: HeldOut.count(
            *dataset.with_past(pairs, dataset.pairs_before(split), config.history), config, labels=labels
        )
        for split in ("valid", "test")
        if len(pairs := getattr(dataset, split))
    }


def check_columns(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse `evaluation.groups` that are no columns of queries, or of no values to group by."""
    if len(dataset.valid) or len(dataset.test):
        for name in recipe.evaluation.groups:
            check_group(name, dataset)


def check_prior(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse a forecast that times and dates do not allow."""
    if recipe.prior.kind == "count":
        return
    # A forecast is fitted twice: on what is known before `valid`, and on what is known before `test`.
    for pairs in (dataset.train, dataset.pairs_before("test")):
        check_forecast(recipe, dataset, pairs)


def check_tree(recipe: Recipe, _dataset: Dataset) -> None:
    """Refuse sampler `adversarial` without a feature of the query to split by."""
    features = [feature.name for feature in recipe.query.features if feature.in_tree]
    if recipe.loss.sampler.name == "adversarial" and not {*features} - {recipe.data.query_id}:
        raise DataError(
            f"adversarial sampler: expected a query feature besides the query's own id {recipe.data.query_id!r} "
            f"(a history, bag, text, number or category), found {features}"
        )


def compute_log_frequencies(recipe: Recipe, dataset: Dataset, *, weighted: bool = True) -> Float64:
    """Return log π of training's visits, by pairs' weights or number, float64 [L], nats."""
    sampled = recipe.data.reduction == "sample"
    counts_L = dataset.label_visits(one_label_per_query=sampled, weighted=weighted)
    return log_frequencies(counts_L, smoothing=recipe.loss.smoothing)


def assign_buckets(recipe: Recipe, dataset: Dataset) -> Int8:
    """Return the bucket of every label, an index of `BUCKET_NAMES`, int8 [L]."""
    counts_L = dataset.label_counts()
    return define_buckets(recipe.evaluation, counts_L).assign(counts_L)
