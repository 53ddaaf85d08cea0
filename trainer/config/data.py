"""Where interactions and feature tables are: `[data]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from longtail.trainer.config.base import Section


class Split(Section):
    """How to cut interactions when `valid` or `test` files are not given."""

    strategy: Literal["random", "temporal", "leave_last_out"]
    """`random`: pairs by seed. `temporal`: the latest pairs of all. `leave_last_out`: per query, its last
    pair is test and the one before is valid; file order stands in for time where there is no timestamp."""
    valid: float = Field(default=0.1, ge=0, lt=1)
    """Share of all pairs; not used by `leave_last_out`."""
    test: float = Field(default=0.1, ge=0, lt=1)
    """Share of all pairs; not used when there is a test file (nor `valid`, when there is a valid file)."""

    @model_validator(mode="after")
    def _something_to_train_on(self) -> Self:
        if self.valid + self.test >= 1:
            raise ValueError(f"split: expected valid + test < 1, received {self.valid} + {self.test}")
        return self


class Data(Section):
    """Where interactions and feature tables are. Paths are relative to the recipe."""

    train: Path
    valid: Path | None = None
    test: Path | None = None
    format: Literal["auto", "parquet", "csv", "tsv", "lists", "xmc"] = "auto"
    """`auto` goes by the file's ending. `lists`: one line per query, `query label label …`, oldest first.
    `xmc`: header `rows features labels`, then `label,label feature:value …`; every row is a query whose
    features become the bag column `features`."""
    query_id: str = "query_id"
    label_id: str = "label_id"
    timestamp: str | None = None
    """Number or timestamp column that orders a query's interactions."""
    weight: str | None = None
    """Column of finite weights ≥ 0 that scale each pair's loss."""
    queries: Path | None = None
    """Feature table of queries, keyed by `query_id`."""
    labels: Path | None = None
    """Feature table of labels, keyed by `label_id`; its labels are in the catalogue even if never seen."""
    display: list[str] = Field(default_factory=list)
    """Columns of the label table that answers carry along, such as a title."""
    reduction: Literal["expand", "sample", "smallest"] = "expand"
    """What a query with several labels trains on. `expand`: a pair for every label [R21]. `sample`: an epoch
    visits every training query once, with one of its labels drawn uniformly by (seed, epoch) [Re19]; what is
    held out keeps all its labels, and frequencies are those of the visits. `smallest`: every query keeps its
    smallest label id alone, in every file, before a split is cut: by number if all label ids are integers, else by
    text; labels that are nobody's smallest leave the catalogue unless `labels` lists them [BM20 A.2]."""
    split: Split | None = None
