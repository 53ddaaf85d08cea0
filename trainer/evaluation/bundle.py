"""Measure a bundle from its own files: ONNX query tower, embeddings, log p_n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from rich.console import Console

from longtail.bundle import BiasRemoval, Bundle, onnx_session
from longtail.trainer.config import load_recipe
from longtail.trainer.data.dataset import Pairs, load_dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.evaluation.ranking import Catalogue, evaluate, log_proposal_of
from longtail.trainer.evaluation.report import evaluation_markdown, evaluation_table


def evaluate_bundle(
    path: Path, recipe_path: Path | None, split: str, overrides: Sequence[str], *, markdown: bool, console: Console
) -> None:
    """Print the λ table of a bundle.

    Args:
        path: the bundle.
        recipe_path: measure on this recipe's data; None prints what the bundle holds.
        split: `valid` or `test`.
        overrides: of the recipe, KEY=VALUE.
        markdown: print Markdown.
        console: where to.

    Raises:
        RecipeError: `split` is neither valid nor test.
        DataError: no held-out pair is of a label in the bundle.
    """
    if split not in ("valid", "test"):
        raise RecipeError(f"--split: expected valid or test, received {split!r}")
    if recipe_path is None and (split != "test" or overrides):
        raise RecipeError("--split and --set: expected --recipe beside them, received none: a bundle holds one table")
    bundle = Bundle.load(path)
    dial = bundle.manifest.bias_removal
    metric = _metric_of(dial)
    if recipe_path is not None:
        recipe = load_recipe(recipe_path, overrides)
        metric = recipe.evaluation.metric
        dataset = load_dataset(recipe.data, seed=recipe.seed, strings=recipe.string_columns)
        rows_L = pc.fill_null(pc.index_in(dataset.label_ids, value_set=bundle.labels.ids), -1).to_numpy()
        known = dataset.train.followed_by(dataset.valid) if split == "test" and len(dataset.valid) else dataset.train
        held_out = dataset.test if split == "test" else dataset.valid
        encoding = Encoding.fit(recipe, dataset, dict(bundle.vocabularies))
        features = encoding.query.knowing(known)
        session = onnx_session(bundle.query_tower, "query_tower.onnx")
        training_queries = bundle.manifest.training_data.get("training_queries", dataset.training_queries())
        known, held_out = _in_catalogue(known, rows_L), _in_catalogue(held_out, rows_L)
        if not len(held_out):
            raise DataError(f"{recipe_path}: expected {split} pairs of labels in {path}, found none")
        curve = evaluate(
            held_out,
            known,
            lambda rows_B: session.run(None, features.of_queries(rows_B))[0],
            Catalogue.of_labels(
                bundle.labels, bundle.embeddings, bundle.augmentation, training_queries=int(training_queries)
            ),
            recipe.evaluation,
            queries=len(dataset.query_ids),
            seed=recipe.seed,
            log_proposal=log_proposal_of(bundle.proposal, features),
        )
        dial = dial.model_copy(update={"curve": curve, "curve_split": split})
    if markdown:
        print(evaluation_markdown(dial, metric))
    else:
        console.print(evaluation_table(f"{bundle.manifest.name}: {dial.curve_split}", dial, metric))


def _metric_of(dial: BiasRemoval) -> str:
    """The metric that chose the stored λ; recall at the first k there is where nothing chose it."""
    measured = dial.curve[0].metrics if dial.curve else {"recall@20": None}
    chosen = dial.chosen_by.split()[-1]
    return chosen if chosen in measured else next(name for name in measured if name.startswith("recall@"))


def _in_catalogue(pairs: Pairs, rows_L: np.ndarray) -> Pairs:
    """Pairs whose label the bundle has, by its rows."""
    rows = rows_L[pairs.labels]
    kept = pairs.take(rows >= 0)
    return replace(kept, labels=rows[rows >= 0].astype(np.int32))
