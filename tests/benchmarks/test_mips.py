"""The benchmark of head-biased norms: the same files everywhere, exact answers, and rates that come with a recall."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import mips
from tests.pages import blocks

PAGE = (Path(__file__).parents[2] / "docs/benchmark.md").read_text()
SHA256 = {
    "base": "ab6a49a45236c941e90e1f2a8de2419f93b4d0bcdd13d58b6ff9ceaff56f3601",
    "learn": "dd11e142c9d07bfd39febe4d4d800d6827759ac8bc2ba1fa544ba24e7eaefa34",
    "queries": "0f3feb65eacb78556356b96163342d5b237c63d8e3fc1abab72679d9420a1cb8",
    "neighbors": "918bf2e221fbd7b5a1067d859a3f06e6cf1124c59bf6d7a2a2c85e443b97cf01",
    "scores": "08c8c235ef8c421fc595f9683ed01c97ac7a278513d2c3b5321a7df945bdf4a6",
}
"""Of 1,000 labels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "mips-1k"
    mips.make(folder, 1_000)
    return folder


def test_files_are_the_same_on_every_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mips.make(folder, 1_000)
    assert dict(re.findall(r"(\w{64}) (\w+)\.npy", capsys.readouterr().out)) == {v: k for k, v in SHA256.items()}
    assert f"| 1,000 | `{SHA256['base']}` | `{SHA256['neighbors']}` |" in PAGE


def test_norms_grow_with_the_count() -> None:
    labels_LD, counts_L, learn_QD, queries_QD = mips.generate(2_000, dim=8, queries=5)
    assert sorted(counts_L)[-3:] == [3_333_333, 5_000_000, 10_000_000]
    assert counts_L.min() == 5_000
    assert np.linalg.norm(labels_LD, axis=1) == pytest.approx(1)
    assert learn_QD.shape == queries_QD.shape == (5, 8)
    assert not np.isin(learn_QD, queries_QD).any()


def test_answers_are_exact(folder: Path) -> None:
    base, queries, rows, scores = (
        np.load(folder / f"{name}.npy") for name in ("base", "queries", "neighbors", "scores")
    )
    for i, bias_removal in enumerate((0, 0.5, 1)):
        every = queries @ base[:, :-1].T + bias_removal * base[:, -1]
        assert scores[i] == pytest.approx(-np.sort(-every, axis=1)[:, :100], abs=1e-5)
        assert np.take_along_axis(every, rows[i].astype(int), axis=1) == pytest.approx(scores[i], abs=1e-5)


def test_recall_counts_no_answer_twice(folder: Path) -> None:
    dataset = mips.Dataset(folder)
    exact = np.load(folder / "neighbors.npy")[1].astype(np.int64)
    assert dataset.recall(exact, 1) == 1
    assert dataset.recall(exact[:3, :10], 1) == 1
    assert dataset.recall(np.repeat(exact[:, :1], 100, axis=1), 1) == 0.01
    assert dataset.recall(np.where(np.arange(100) < 25, exact, -1), 1) == 0.25
    assert dataset.recall(np.load(folder / "neighbors.npy")[0].astype(np.int64), 1) < 0.9


class Product(mips.Library):
    settings = ((50,), (1_000,))

    def fit(self, rows, learn):  # noqa: ARG002
        self.rows = rows

    def set_query_arguments(self, visited):
        self.visited = visited

    def query(self, vector, k):
        return np.argsort(-(self.rows[: self.visited] @ vector))[:k]


@pytest.mark.parametrize(("scale", "equal_norms"), [(1.0, False), (2.5, False), (1.0, True), (0.5, True)])
def test_forms_of_the_rows_keep_the_answers(folder: Path, scale: float, equal_norms: bool) -> None:
    library, dataset = Product(), mips.Dataset(folder)
    library.scale, library.equal_norms = scale, equal_norms
    dataset.fit(library)
    if equal_norms:
        assert np.ptp(np.linalg.norm(library.rows, axis=1)) < 1e-5
    library.set_query_arguments(1_000)
    answers = np.array([library.query(query, 10) for query in dataset.queries(library, 1.0)])
    assert dataset.recall(answers, 2) == 1


def test_a_run_writes_curves_and_a_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> mips.Library:
        raise ImportError("No module named 'scann'")

    monkeypatch.setattr(mips, "LIBRARIES", {"ScaNN": missing, "Product": Product})
    monkeypatch.setattr(mips, "ROUNDS", 2)
    mips.run(folder, k=10)
    printed = capsys.readouterr().out
    assert "ScaNN is left out: No module named 'scann'" in printed
    assert re.search(r"\| Product \| \d\.\d \| [\d,]+ \([\d,]+–[\d,]+\) 1000 \|", printed)
    lines = list(csv.DictReader((folder / "curves.csv").read_text().splitlines()))
    assert [(line["lambda"], line["setting"]) for line in lines][:3] == [("0.0", "50"), ("0.0", "1000"), ("0.5", "50")]
    assert [float(line["recall"]) for line in lines[1::2]] == [1, 1, 1]
    assert float(lines[0]["recall"]) < 0.2
    mips.plot([folder / "curves.csv"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_library_of_the_page_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("python", PAGE)
    assert len(re.findall(r"(?m)^.+$", program)) == 10
    (tmp_path / "my_index.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mips, "LIBRARIES", {})
    monkeypatch.setattr(mips, "ROUNDS", 1)
    mips.run(folder, library="my_index:LongestRows", only=["LongestRows"], k=20)
    assert re.search(r"\| LongestRows \| \d\.\d \|( [\d,]+ \([\d,]+–[\d,]+\) 1000 \|){3}", capsys.readouterr().out)
