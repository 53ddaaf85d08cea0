"""A two-tower model in plain PyTorch, served by Longtail.

    pip install '.[torch]'
    longtail-train data movielens-100k --out data/movielens-100k
    python examples/torch_movielens.py data/movielens-100k --out runs/torch

Then serve it from an environment with the extras `index` and `serve`:

    longtail-index build runs/torch --releases releases --publish
    longtail-serve run releases

The code before `export_torch` is an ordinary training loop.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional

from longtail.bundle import Bundle, TrainingFacts
from longtail.trainer.torch import export_torch

DIM, HISTORY, TEMPERATURE = 32, 20, 0.1
UNKNOWN = 0  # row of unknown ids, and padding of histories


class Users(nn.Module):
    """Embed users by id, age, and the films that they rated last."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, DIM)
        self.film = nn.Embedding(films, DIM, padding_idx=UNKNOWN)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM + 1, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, user_id: Tensor, history: Tensor, age: Tensor) -> Tensor:
        """Embed users, [B], [B, P] and [B]."""
        films = self.film(history).sum(1) / (history != UNKNOWN).sum(1, keepdim=True).clamp(min=1)
        embedded = self.mlp(torch.cat([self.user(user_id), films, (age[:, None] - 33) / 12], 1))
        return functional.normalize(embedded, dim=1)


class Films(nn.Module):
    """Embed films by id and genres, one number per genre."""

    def __init__(self, films: int, genres: int) -> None:
        super().__init__()
        self.film, self.genres = nn.Embedding(films, DIM), nn.Linear(genres, DIM)

    def forward(self, item_id: Tensor, genres: Tensor) -> Tensor:
        """Embed films, [B] and [B, genres]."""
        return functional.normalize(self.film(item_id) + self.genres(genres), dim=1)


def indices(ids: list[str]) -> dict[str | None, int]:
    """Number ids from 1; 0 is the index of unknown ids."""
    return {None: UNKNOWN} | {id_: i + 1 for i, id_ in enumerate(ids)}


def main(folder: Path, out: Path, epochs: int) -> tuple[Bundle, Users, Films]:
    """Train, write the bundle; returns it and the modules."""
    torch.manual_seed(0)
    log = pq.read_table(folder / "interactions.parquet").sort_by("timestamp")
    people, items = pq.read_table(folder / "users.parquet"), pq.read_table(folder / "items.parquet")
    user_ids, item_ids = people["user_id"].cast(pa.string()).to_pylist(), items["item_id"].cast(pa.string()).to_pylist()
    user_index, item_index = indices(user_ids), indices(item_ids)
    user_N = torch.tensor([user_index[id_] for id_ in log["user_id"].cast(pa.string()).to_pylist()])
    item_N = torch.tensor([item_index[id_] for id_ in log["item_id"].cast(pa.string()).to_pylist()])
    age_U = torch.cat([torch.zeros(1), torch.tensor(people["age"].to_pylist(), dtype=torch.float32)])
    genres = [text.split("|") for text in items["genres"].to_pylist()]
    names = sorted({name for some in genres for name in some})
    genres_LG = torch.tensor([[float(name in some) for name in names] for some in genres])

    history_NP = torch.zeros(len(user_N), HISTORY, dtype=torch.long)
    rated: dict[int, list[int]] = {}
    for row, (user, item) in enumerate(zip(user_N.tolist(), item_N.tolist(), strict=True)):
        last = rated.setdefault(user, [])[-HISTORY:]
        history_NP[row, : len(last)] = torch.tensor(last, dtype=torch.long)
        rated[user].append(item)

    users, films = Users(len(user_index), len(item_index)), Films(len(item_index), len(names))
    optimizer = torch.optim.Adam([*users.parameters(), *films.parameters()], lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(user_N)).split(1024):
            # One user in twenty is unknown, so that the row of unknown users is trained too.
            user_rows = torch.where(torch.rand(len(rows)) < 0.05, UNKNOWN, user_N[rows])
            queries = users(user_rows, history_NP[rows], age_U[user_N[rows]])
            labels = films(item_N[rows], genres_LG[item_N[rows] - 1])
            loss = functional.cross_entropy(queries @ labels.T / TEMPERATURE, torch.arange(len(rows)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.3f}")

    last = [rated.get(user, [])[-HISTORY:] for user in range(1, len(user_index))]
    history_UP = torch.tensor([films + [UNKNOWN] * (HISTORY - len(films)) for films in last])
    facts = TrainingFacts(
        ids=pa.array(item_ids), counts=np.bincount(item_N, minlength=len(item_index))[1:], similarity="cosine",
        temperature=TEMPERATURE, display=items.select(["title"]),
    )  # fmt: skip
    bundle = export_torch(
        (users, {"user_id": torch.arange(1, len(user_index)), "history": history_UP, "age": age_U[1:]}),
        (films, {"item_id": torch.arange(1, len(item_index)), "genres": genres_LG}),
        facts,
        vocabularies={"user_id": user_index, "history": item_index, "item_id": item_index},
        label_tower=True,
        out=out,
    )
    print(f"{out}: a bundle of {bundle.manifest.labels:,} films; next: longtail-index build {out} --releases releases")
    return bundle, users, films


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `longtail-train data movielens-100k --out FOLDER` wrote")
    parser.add_argument("--out", type=Path, required=True, help="the bundle")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.out, arguments.epochs)
