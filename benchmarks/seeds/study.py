"""The definition of a study: a data set, a protocol, and methods, which are the rows of a table.

Validation chooses the values of a method's grid, ladder by ladder. The chosen method is then trained with every seed of
`SEEDS` and measured on test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SEEDS = (0, 1, 2)
"""Seeds of the runs; the first seed is used for the search."""
FULL, LOGIT_ADJUSTED, POPULARITY = "full softmax", "full logit adjustment", "popularity"
"""Names of reference rows."""


@dataclass(frozen=True)
class Ladder:
    """Describe one value to choose: its key in a recipe, the candidates in order, and the start."""

    key: str
    values: tuple[float, ...]
    start: int


@dataclass(frozen=True)
class Method:
    """Describe one row of a table.

    Attributes:
        name: name in the table; `popularity` is not trained.
        settings: overrides of the study's recipe, in the form of `--set`.
        grid: ladders to search, one after another.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    grid: tuple[Ladder, ...] = ()


@dataclass(frozen=True)
class Study:
    """Describe methods on one data set with one protocol.

    Attributes:
        paper, data: key of the report's section, and folder of a prepared data set, whose recipe `settings` change.
        methods: the rows, with `popularity` and the full loss.
        hold_out: how validation is cut from training: whole `rows` (queries), or as the `recipe` splits.
        max_pairs: largest number of training pairs, drawn by seed 0.
        choose_by: validation metric, at the best λ of `grid`.
        show: metrics of the table, at λ = 0.
        compare: metrics with stored values per query, for paired intervals.
        variant: distinguishes two studies of one paper on one data set.
        note: the protocol in words, for the report.
    """

    paper: str
    data: str
    settings: Mapping[str, str]
    methods: tuple[Method, ...]
    epochs: int
    choose_by: str
    show: tuple[str, ...]
    compare: tuple[str, ...]
    note: str
    hold_out: Literal["rows", "recipe"] = "recipe"
    max_pairs: int | None = None
    grid: tuple[float, ...] = (0.0, 0.5, 1.0)
    variant: str = ""

    @property
    def name(self) -> str:
        """Return the key of the study, such as `r21.delicious-dot`."""
        return f"{self.paper}.{self.data}" + (f"-{self.variant}" if self.variant else "")
