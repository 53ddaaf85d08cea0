"""What a study is: a data set, a protocol, and methods, of which each is one row of a table.

A method's learning rate, and whatever else its grid names, is climbed on validation: values are tried beside the best
one until it is inside the ladder or at its end. Then it is trained by every seed of `SEEDS` and measured on test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SEEDS = (0, 1, 2)
"""The first one is tuned by."""
FULL, LOGIT_ADJUSTED, POPULARITY = "full softmax", "full logit adjustment", "popularity"
"""Names of reference rows."""


@dataclass(frozen=True)
class Ladder:
    """One number to choose: its key in a recipe, the values in order, and where to begin."""

    key: str
    values: tuple[float, ...]
    start: int


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Attributes:
        name: as the table calls it; `popularity` is not trained.
        settings: overrides of the study's recipe, as `--set` takes them.
        grid: what is climbed, one after the other.
        length: epochs, as a multiple of the study's.
        likely_at: λ at which scores are log p(y|x): with the noise removed [BM20 eq. 5]; 0 for NCE.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    grid: tuple[Ladder, ...] = ()
    length: int = 1
    likely_at: float = 1.0


@dataclass(frozen=True)
class Study:
    """Methods on one data set under one protocol.

    Attributes:
        paper, data: key of its section, and folder of a prepared data set, whose recipe `settings` alter.
        methods: the rows; `popularity` and the full loss among them.
        hold_out: what validation is cut from training: whole `rows` (queries), or as the recipe splits.
        max_pairs: training pairs at most, drawn by seed 0.
        choose_by: metric that validation goes by, at the best of the λ of `grid`.
        show: metrics of the table, all at λ = 0 unless `shown_at` says `chosen`.
        compare: metrics whose values per query are kept, for paired intervals.
        shown_at: λ of the table: as trained, or as chosen on validation.
        timed: also measure on the way, at every quarter of a method's epochs.
        variant: tells two studies of one paper on one data set apart.
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
    shown_at: Literal["trained", "chosen"] = "trained"
    timed: bool = False
    variant: str = ""

    @property
    def name(self) -> str:
        """Its key: `r21.delicious-dot`."""
        return f"{self.paper}.{self.data}" + (f"-{self.variant}" if self.variant else "")

    def method(self, name: str) -> Method:
        """The row of that name."""
        return next(method for method in self.methods if method.name == name)
