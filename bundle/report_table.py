"""Print one table in a terminal, as Markdown and as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longtail.bundle.manifest import Interval

if TYPE_CHECKING:
    from rich.table import Table


class Cell(str):
    """Hold a cell's text, its `note` in small print, and its HTML."""

    note: str
    markup: str

    def __new__(cls, text: str, note: str = "", markup: str = "") -> Cell:
        """Create a cell; `markup` is HTML, the others are plain text."""
        cell = super().__new__(cls, text)
        cell.note, cell.markup = note, markup
        return cell

    @property
    def html(self) -> str:
        """Return the content of an HTML cell, escaped."""
        note = f"<small>{html.escape(self.note)}</small>" if self.note else ""
        return (self.markup or html.escape(self)) + note


@dataclass(frozen=True)
class ReportTable:
    """Hold rows of cells under headings.

    Attributes:
        name_columns: number of columns on the left that name a row.
        marked: numbers of the rows to emphasise.
        title, caption: lines above and below the table in a terminal.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    name_columns: int = 1
    marked: Iterable[int] = ()
    title: str = ""
    caption: str = ""

    def _cells(self) -> Iterator[tuple[list[Cell], bool]]:
        """Yield the cells of each row and its mark."""
        marked = {*self.marked}
        for i, row in enumerate(self.rows):
            yield [cell if isinstance(cell, Cell) else Cell(cell) for cell in row], i in marked

    def rich(self) -> Table:
        """Create a table for Rich without the notes; ▶ marks rows."""
        from rich.markup import escape
        from rich.table import Table

        rows = [*self._cells()]
        table = Table(
            title=self.title or None, title_justify="left", caption=self.caption or None, caption_justify="left",
            pad_edge=False, show_edge=False,  # an edge would touch the outer columns; with padding 80 columns are short
        )  # fmt: skip
        for column, heading in enumerate(self.headings):
            numeric = all(row[column][:1] in "+-–0123456789" for row, _ in rows)
            table.add_column(
                heading, justify="right" if numeric else "left", no_wrap=column < self.name_columns and not heading
            )
        for (name, *others), marked in rows:
            texts = [f"▶ {name}" if marked else name, *others]
            table.add_row(*map(escape, texts), style="bold" if marked else None)
        return table

    def lines(self) -> Iterator[str]:
        """Yield lines of plain text without the notes."""
        rows = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()

    def markdown(self) -> str:
        """Return a Markdown table with the notes in brackets; marked rows have bold names."""
        lines = [f"| {' | '.join(self.headings)} |", "|" + "---|" * len(self.headings)]
        for row, marked in self._cells():
            texts = [f"{cell} [{cell.note}]" if cell.note else str(cell) for cell in row]
            if marked:
                texts[: self.name_columns] = [f"**{text}**" for text in texts[: self.name_columns]]
            lines.append(f"| {' | '.join(texts)} |")
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Return an HTML table that can scroll."""
        head = "".join(f"<th>{html.escape(heading)}</th>" for heading in self.headings)
        body = ""
        for row, marked in self._cells():
            tags = ["th" if column < self.name_columns else "td" for column in range(len(row))]
            cells = "".join(f"<{tag}>{cell.html}</{tag}>" for tag, cell in zip(tags, row, strict=True))
            body += f"<tr{' class=chosen' if marked else ''}>{cells}</tr>"
        return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def metric_cells(metrics: Mapping[str, Interval], names: Iterable[str], *, signed: bool = False) -> list[Cell]:
    """Format metrics with their bounds as notes.

    A missing metric is an empty cell, and recall of a bucket without pairs a dash.
    """
    return [
        Cell("")
        if name not in metrics
        else Cell("–")
        if _is_without_pairs(name, metrics[name]) and not signed
        else metric_cell(metrics[name], signed=signed)
        for name in names
    ]


def _is_without_pairs(name: str, figure: Interval) -> bool:
    """Return whether a figure is the recall of a bucket without pairs."""
    # With pairs, of which none is found, the upper bound is above 0.
    return name.startswith("recall@") and "/" in name and (figure.value, figure.low, figure.high) == (0.0, 0.0, 0.0)


def metric_cell(figure: Interval, *, signed: bool = False) -> Cell:
    """Format a metric with its bounds as the note."""
    form, dash = ("+.4f", " to ") if signed else (".4f", "–")
    bounds = "" if figure.low is None or figure.high is None else f"{figure.low:{form}}{dash}{figure.high:{form}}"
    return Cell(f"{figure.value:{form}}", bounds)
