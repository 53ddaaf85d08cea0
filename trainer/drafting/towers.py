"""The towers of a drafted recipe: features of the columns, and why others are left out."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from longtail.trainer.drafting.columns import Column, look_at
from longtail.trainer.drafting.roles import Roles
from longtail.trainer.errors import DataError

WIDTH = 64
"""Of embeddings, and of the model."""


class Sizes(NamedTuple):
    """Counts that rates, batches and epochs go by.

    Attributes:
        rows: interactions.
        queries, labels: distinct ids in them.
        distinct: distinct pairs.
        median: pairs of the query in the middle.
        bad: rows without an id.
    """

    rows: int
    queries: int
    labels: int
    distinct: int
    median: float
    bad: int


@dataclass(frozen=True)
class Tower:
    """A side of the model.

    Attributes:
        lines: TOML of its features, each with its reason.
        left_out: columns that no feature reads, and why.
        equal: whether all of them are of one width.
        own_id: whether the side's own id is among them.
    """

    lines: list[str]
    left_out: list[str]
    equal: bool
    own_id: bool


class Columns(NamedTuple):
    """What of a feature table a tower may read.

    Attributes:
        features: columns that a feature reads, each with a name that is free.
        left_out: the others, and why.
    """

    features: list[tuple[str, Column]]
    left_out: list[str]

    @property
    def equal(self) -> bool:
        """Whether all of them can be of one width."""
        return all(column.kind not in ("number", "vector") for _, column in self.features)


def query_tower(columns: Columns, roles: Roles, sizes: Sizes, *, described: bool) -> Tower:
    """Own id where queries come back, history, and columns of the feature table.

    Args:
        columns: of the feature table.
        roles: columns of the log.
        sizes: of the log.
        described: whether labels have features beside their id, by which histories then know them.
    """
    lines, left_out = [], columns.left_out
    own_id = sizes.median >= 3 and _is_feature(roles.query_id)
    if own_id:
        lines.append(f'{{ name = {quoted(roles.query_id)}, kind = "id", dim = {WIDTH} }},')
    else:
        few = f"half of the queries have {sizes.median:g} pairs or fewer, too few for a row"
        left_out = [f"{roles.query_id}: {few}", *left_out]
    lines.append("# What it interacted with before; also what a query that training never saw is known by.")
    entries = f"table = {quoted(roles.label_id)}"
    if described:
        lines.append(
            "# Of all that labels are, not of their ids alone: two of one brand have that in common. Few say little."
        )
        entries = f'entries = "both", damping = 5, {entries}'
    lines.append(f'{{ name = "history", kind = "history", {entries}, dim = {WIDTH}, max_length = 50 }},')
    return Tower(lines + _lines(columns), left_out, columns.equal, own_id)


def label_tower(columns: Columns, roles: Roles) -> Tower:
    """Own id, and columns of the feature table.

    Raises:
        DataError: the label ids' column has a name that no feature can have.
    """
    if not _is_feature(roles.label_id):
        raise DataError(f"column {roles.label_id!r}: expected a name of letters, digits and _ for label ids: rename it")
    lines = []
    unknown = ""
    if columns.features:
        lines.append("# A twentieth of its values is unknown in training, so that new labels are found by the others.")
        unknown = ", unknown_rate = 0.05"
    lines.append(f'{{ name = {quoted(roles.label_id)}, kind = "id", dim = {WIDTH}{unknown} }},')
    return Tower(lines + _lines(columns), columns.left_out, columns.equal, True)


def columns_of(table: pa.Table | None, id_name: str, taken: set[str]) -> Columns:
    """What a tower may read of a feature table; names of its features are added to `taken`."""
    features, left_out = [], []
    for column in (
        [] if table is None else [look_at(name, table[name]) for name in table.column_names if name != id_name]
    ):
        if column.kind is None:
            left_out.append(f"{column.name}: {column.holds}")
            continue
        plain = "_".join(re.findall(r"[A-Za-z0-9]+", column.name))
        plain = plain if _is_feature(plain) else f"feature_{plain}".rstrip("_")
        name, number = plain, 2
        while name in taken:
            name, number = f"{plain}_{number}", number + 1
        taken.add(name)
        features.append((name, column))
    return Columns(features, left_out)


def _lines(columns: Columns) -> list[str]:
    """TOML of features, and what was seen of each."""
    lines = []
    for name, column in columns.features:
        width = WIDTH if columns.equal or column.holds in ("words", "joined", "bag") or column.distinct > 1000 else 16
        keys = {"name": quoted(name), "kind": quoted(str(column.kind))}
        if name != column.name:
            keys["column"] = quoted(column.name)
        if column.separator:
            keys["separator"] = quoted(column.separator)
        if column.dims:
            keys["dims"] = str(column.dims)
        if column.kind in ("id", "bag", "text", "date"):
            keys["dim"] = str(width)
        if column.holds == "category" and column.distinct > 1000:
            keys["min_count"] = "2"
        seen = f"{column.distinct:,} values" if column.distinct else column.holds
        missing = f", {column.nulls:,} missing" if column.nulls else ""
        lines.append(f"{{ {', '.join(f'{key} = {value}' for key, value in keys.items())} }},  # {seen}{missing}")
    return lines


def tower_text(tower: Tower) -> str:
    """TOML of a tower."""
    combine = "sum" if tower.equal else "concat"
    why = "features of one width add up" if tower.equal else "side by side, then one linear layer: no id is forgotten"
    left_out = "".join(f"# Left out: {reason}.\n" for reason in tower.left_out)
    lines = "\n".join(f"    {line}" for line in tower.lines)
    return f'{left_out}combine = "{combine}"  # {why}\nfeatures = [\n{lines}\n]'


def _is_feature(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*", name) is not None


def quoted(text: str) -> str:
    """A TOML string."""
    return json.dumps(text, ensure_ascii=False)
