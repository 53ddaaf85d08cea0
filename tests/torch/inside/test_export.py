"""Modules of every form, exported where torch is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from longtail.bundle import Bundle, ChosenTogether, Tower, TrainingFacts
from longtail.bundle.manifest import LogColumns
from longtail.trainer.errors import ExportError
from longtail.trainer.torch import export_torch

LABELS, DIM = 12, 4
IDS = [f"label {row}" for row in range(LABELS)]
INDEX: dict[str | None, int] = {None: LABELS} | {id_: row for row, id_ in enumerate(IDS)}


class Session(nn.Module):
    """Reads films, of which the last comes last, and the time since."""

    def __init__(self) -> None:
        super().__init__()
        self.film = nn.Embedding(LABELS + 1, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.dense = nn.Linear(DIM + 3, DIM)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Embed sessions."""
        last = self.gru(self.film(batch["films"]))[0][:, -1]
        return self.dense(self.dropout(torch.cat([last, batch["since"][:, None], batch["place"]], 1)))


class Label(nn.Module):
    """Reads an id and a price."""

    def __init__(self) -> None:
        super().__init__()
        self.film = nn.Embedding(LABELS + 1, DIM)

    def forward(self, film: Tensor, price: Tensor) -> Tensor:
        """Embed labels."""
        return self.film(film) + price[:, None]


class OfTheBatch(nn.Module):
    """Compares a row with the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(3, DIM)

    def forward(self, user: Tensor) -> Tensor:
        """Embed users."""
        return torch.softmax(self.user(user), 0)


def exported(folder: Path, query: nn.Module | None = None, **changes: Any) -> Bundle:
    films = torch.tensor([[LABELS, LABELS, 3], [LABELS, 4, 5], [1, LABELS, 2], [LABELS] * 3])
    arguments = {
        "queries": {"films": films, "since": torch.tensor([1.0, 2, 3, 4]), "place": np.eye(4, 2)},
        "vocabularies": {"films": INDEX, "film": INDEX}, "left_padded": ["films"],
    } | changes  # fmt: skip
    facts = {name: arguments.pop(name) for name in ("ids", "similarity", "temperature", "pairs") if name in arguments}
    torch.manual_seed(0)
    label = Label(), {"film": torch.arange(LABELS), "price": torch.linspace(0, 1, LABELS)}
    return export_torch(
        (query or Session(), arguments.pop("queries")), label,
        TrainingFacts(**{"ids": IDS, "counts": np.arange(LABELS)} | facts), out=folder / "model", **arguments,
    )  # fmt: skip


def test_left_padded_sessions(tmp_path: Path) -> None:
    torch.manual_seed(1)
    session = Session()
    bundle = exported(tmp_path, session, label_tower=True)

    kinds = {item.name: item.kind for item in bundle.manifest.query_features}
    assert kinds == {"films": "history", "since": "number", "place": "vector"}
    assert session.training
    assert bundle.manifest.own_id == "film"
    tower = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, DIM)
    requests = [{"films": ["label 4", "label 5"], "since": 2, "place": [0, 1]}, {"films": ["?"] * 9 + ["label 3"]}]
    session.eval()
    with torch.no_grad():
        films = torch.tensor([[LABELS, 4, 5], [LABELS, LABELS, 3]])
        expected = session(
            {"films": films, "since": torch.tensor([2.0, 2.5]), "place": torch.tensor([[0.0, 1.0], [0.0, 0.0]])}
        )
    np.testing.assert_allclose(tower.embed(tower.read(requests)), expected.numpy(), atol=1e-6)


def test_cosines_are_of_unit_vectors(tmp_path: Path) -> None:
    bundle = exported(tmp_path, similarity="cosine", temperature=0.1)
    np.testing.assert_allclose(np.linalg.norm(bundle.embeddings, axis=1), 1, atol=1e-6)
    tower = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, DIM)
    assert np.linalg.norm(tower.embed(tower.read([{"since": 7}]))) == pytest.approx(1, abs=1e-6)


def test_large_tables_are_files(tmp_path: Path) -> None:
    many: dict[str | None, int] = {None: 0} | {f"u{row}": row + 1 for row in range(70_000)}
    users = nn.Embedding(len(many), DIM)
    queries = {"user": torch.arange(500)}
    bundle = exported(tmp_path, users, queries=queries, vocabularies={"user": many, "film": INDEX}, left_padded=())
    assert [path.stat().st_size > 1 << 20 for path in bundle.tables.values()] == [True]
    tower = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, DIM)
    expected = users.weight[70_000].detach().numpy()
    np.testing.assert_array_equal(tower.embed(tower.read([{"user": "u69999"}]))[0], expected)


def test_a_retrieval_model_of_keras(tmp_path: Path) -> None:
    import keras
    import keras_rs

    class Retrieval(keras.Model):
        """Does what Keras Recommenders' tutorial of retrieval does."""

        def __init__(self) -> None:
            super().__init__()
            self.user_model = keras.Sequential([keras.layers.Embedding(5, DIM), keras.layers.Dense(DIM)])
            self.candidate_model = keras.Sequential([keras.layers.Embedding(LABELS, DIM)])
            self.retrieval = keras_rs.layers.BruteForceRetrieval(k=LABELS)

        def build(self, shape: Any) -> None:
            """Build both towers, and the table to search."""
            self.user_model.build(shape)
            self.candidate_model.build(shape)
            self.retrieval.candidate_embeddings = self.candidate_model.layers[0].embeddings
            self.retrieval.build(shape)
            super().build(shape)

        def call(self, users: Any) -> Any:
            """Find the best labels."""
            return self.retrieval(self.user_model(users))

    model = Retrieval()
    model.build((None,))
    index: dict[str | None, int] = {None: 0, "a": 1, "b": 2, "c": 3, "d": 4}
    bundle = export_torch(
        (model.user_model, {"user": np.arange(5)}), (model.candidate_model, {"film": np.arange(LABELS)}),
        TrainingFacts(pa.array(IDS), np.arange(LABELS)), vocabularies={"user": index, "film": INDEX},
        out=tmp_path / "model",
    )  # fmt: skip
    tower = Tower(bundle.query_model, bundle.manifest.query_features, bundle.vocabularies, DIM)
    result = np.argsort(-(tower.embed(tower.read([{"user": "a"}, {"user": "d"}])) @ bundle.embeddings.T), axis=1)
    _, best = model(np.array([1, 4]))
    assert result.tolist() == best.tolist()


def test_pairs_add_the_term_of_cooccurrence(tmp_path: Path) -> None:
    table = pa.table({"query_id": ["a", "a", "b", "b"], "label_id": [IDS[0], IDS[1], IDS[1], IDS[2]]})
    exported(tmp_path, pairs=ChosenTogether(table, LogColumns(query_id="user")))
    bundle = Bundle.load(tmp_path / "model")
    assert bundle.cooccurrence is not None
    assert bundle.remembered is not None
    assert bundle.cooccurrence.rows_LN[:3, :2].tolist() == [[1, -1], [0, 2], [1, -1]]
    assert bundle.remembered.history("b").tolist() == [1, 2]
    assert bundle.manifest.cooccurrence is not None
    assert bundle.manifest.cooccurrence.log.query_id == "user"


def test_ids_may_be_numbers_and_own_id_uses_all_labels(tmp_path: Path) -> None:
    labels = 300
    index: dict[Any, int] = {None: labels} | {np.int64(row + 7): row for row in range(labels)}
    parents = torch.arange(labels)
    parents[290:] = 0

    class Nested(nn.Module):
        """Reads a parent and an id."""

        def __init__(self) -> None:
            super().__init__()
            self.film = nn.Embedding(labels + 1, DIM)

        def forward(self, parent: Tensor, film: Tensor) -> Tensor:
            """Embed labels."""
            return self.film(film) + self.film(parent)

    module = Nested()
    module.film.eval()
    bundle = export_torch(
        (nn.Embedding(labels + 1, DIM), {"user": torch.arange(5)}),
        (module, {"parent": parents, "film": torch.arange(labels)}),
        TrainingFacts(list(range(7, labels + 7)), np.arange(labels)),
        vocabularies={"user": index, "parent": index, "film": index}, label_tower=True,
        out=str(tmp_path / "model"),  # type: ignore[arg-type]
    )  # fmt: skip
    assert bundle.manifest.own_id == "film"
    assert bundle.labels.ids[0].as_py() == "7"
    assert [item.training for item in module.modules()] == [True, False]


def test_full_histories_may_begin_with_an_unknown_id(tmp_path: Path) -> None:
    films = torch.tensor([[LABELS, 2, 3], [LABELS, 4, 5], [1, 6, 2]])
    exported(tmp_path, queries={"films": films, "since": torch.ones(3), "place": np.eye(3, 2)}, left_padded=())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no vocabulary": ({"vocabularies": {"film": INDEX}}, "query_module: integers 'films' without vocabularies"),
    "no unknown": (
        {"vocabularies": {"films": {"label 1": 1}, "film": INDEX}}, "has no index for unknown ids; use {None: INDEX",
    ),
    "another index": (
        {"vocabularies": {"films": {None: LABELS, "label 1": 1}, "film": INDEX}}, "'films' = 3 is not allowed",
    ),
    "the other side": ({"left_padded": ()}, "1 of the examples begin with two of it and 0 end so; name"),
    "rows": ({"queries": {"films": torch.ones(3, 2).long(), "since": torch.ones(2)}}, "columns of"),
    "shape": ({"queries": {"films": torch.ones(3, 2, 2)}}, r"'films' of shape \[3, 2, 2\] is not allowed"),
    "no list": ({"left_padded": ["films", "since"]}, "left_padded: 'since' is not allowed, because it is no column of"),
    "ids": ({"ids": [(1,)] * LABELS}, r"ids: the id \(1,\) is not allowed; use strings or integers"),
    "another name": (
        {"queries": {"movies": torch.tensor([[1, LABELS, LABELS]])}, "vocabularies": {"movies": INDEX, "film": INDEX},
         "left_padded": ()}, "expected a module on the CPU that takes",
    ),
    "name": ({"queries": {"a film": torch.ones(3)}}, "column 'a film' is not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(ExportError, match=message):
        exported(tmp_path, **changed)
    assert not (tmp_path / "model").exists()


def test_a_module_of_the_batch_is_refused(tmp_path: Path) -> None:
    vocabularies = {"user": {None: 0, "a": 1, "b": 2}, "film": INDEX}
    queries = {"user": torch.tensor([0, 1, 2])}
    with pytest.raises(ExportError, match="rows do not depend on each other"):
        exported(tmp_path, OfTheBatch(), queries=queries, vocabularies=vocabularies, left_padded=())
