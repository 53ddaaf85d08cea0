"""SASRec (Kang and McAuley 2018) of RecTools, on pairs that `benchmarks.shops` writes.

It runs in an environment of its own, which `benchmarks.shops --peer PYTHON` uses:

    python -m venv .venv-peer && .venv-peer/bin/pip install 'rectools[torch]==0.19.0' 'pyarrow<22'

The model has a full softmax over all products, the dimension of Longtail's model, and two blocks. A product is the sum
of its id, category and brand embeddings, if there are such columns. Validation chooses the epoch, as for Longtail; then
the model trains on both sets.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytorch_lightning
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

DIMS, EPOCHS, LENGTH, BATCH, RATE, AT = 64, 40, 50, 64, 0.003, 20


def main() -> None:
    """Write `FOLDER/sasrec.npy`, int32 [N, K] of product numbers, and `FOLDER/sasrec.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder, k = arguments.folder, arguments.k
    train, valid = pd.read_parquet(folder / "train.parquet"), pd.read_parquet(folder / "valid.parquet")
    features = pd.read_parquet(folder / "features.parquet") if (folder / "features.parquet").exists() else None
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    pytorch_lightning.seed_everything(arguments.seed)
    began = time.perf_counter()
    model, values = fresh(), [0.0]
    known, wanted = dataset(train, features), valid.groupby(Columns.User)[Columns.Item].agg(set)
    wanted = wanted.sample(min(len(wanted), 2_000), random_state=0)
    while len(values) <= EPOCHS and len(values) - int(np.argmax(values)) <= arguments.patience:
        model.fit_partial(known, min_epochs=1, max_epochs=1)
        values.append(recall(answers(model, known, wanted.index.to_numpy(), AT), wanted))
        print(f"SASRec, epoch {len(values) - 1}: valid recall@{AT} {values[-1]:.4f}", file=sys.stderr, flush=True)
    epochs, chosen = int(np.argmax(values)), time.perf_counter() - began
    everything = dataset(pd.concat([train, valid]), features)
    began, model = time.perf_counter(), fresh()
    model.fit_partial(everything, min_epochs=epochs, max_epochs=epochs)
    asked = np.load(folder / "asked.npy")
    np.save(folder / "sasrec.npy", answers(model, everything, asked, k))
    seconds = time.perf_counter() - began
    figures = {"epochs": epochs, "valid": values[epochs], "seconds": seconds, "choosing": chosen}
    (folder / "sasrec.json").write_text(json.dumps(figures), encoding="utf-8")


def fresh() -> SASRecModel:
    """Create a model with initial weights."""
    return SASRecModel(
        n_blocks=2,
        n_heads=2,
        n_factors=DIMS,
        session_max_len=LENGTH,
        dropout_rate=0.2,
        loss="softmax",
        lr=RATE,
        batch_size=BATCH,
    )


def dataset(pairs: pd.DataFrame, features: pd.DataFrame | None) -> Dataset:
    """Build a data set of pairs, with categories of the products that occur."""
    if features is None:
        return Dataset.construct(pairs)
    features = features[features["id"].isin(pairs[Columns.Item])]
    return Dataset.construct(pairs, item_features_df=features, cat_item_features=sorted(features["feature"].unique()))


def answers(model: SASRecModel, known: Dataset, users: np.ndarray, k: int) -> np.ndarray:
    """Return product numbers by user, best first, int32 [N, K]; −1 for a user without a known pair."""
    top = np.full((len(users), k), -1, np.int32)
    counts = known.get_raw_interactions()[Columns.User].value_counts()
    askable = np.isin(users, counts.index[counts >= 1])
    found = model.recommend(users[askable], known, k=k, filter_viewed=True, on_unsupported_targets="ignore")
    rows = pd.Series(np.arange(len(users)), users)
    top[rows[found[Columns.User]].to_numpy(), found[Columns.Rank].to_numpy() - 1] = found[Columns.Item]
    return top


def recall(top: np.ndarray, wanted: pd.Series) -> float:
    """Compute the mean share of held-out products in the lists."""
    return float(np.mean([len(set(row) & want) / len(want) for row, want in zip(top, wanted, strict=True)]))


if __name__ == "__main__":
    main()
