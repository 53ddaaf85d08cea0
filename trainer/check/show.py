"""A check as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longtail.trainer.check.cost import Cost
from longtail.trainer.check.figures import Check


def show(check: Check, console: Console) -> None:
    """Print a check: counts, splits, buckets, features, cost; what is wrong at the end, where it is read."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if check.labels:
        say(f"[bold]{check.name}[/]: {check.queries:,} queries × {check.labels:,} labels")
    for line in check.rows:
        say(escape(line))
    for table in (_splits(check), _spans(check), _buckets(check), _features(check)):
        if table.row_count:
            console.print(table)
    if check.cost is not None:
        say(_cost(check.cost))
    for line in check.warnings:
        say(f"[yellow]Look at[/] {escape(line)}")
    for line in check.problems:
        say(f"[red]Wrong[/] {escape(line)}")
    say("[green]fit would train[/]" if check.ok else "[red]fit would refuse this[/]")


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _splits(check: Check) -> Table:
    table = _table(
        "\nsplit", "\npairs", "\ndistinct", "\nqueries", "\nlabels", "new\nqueries", "new\nlabels", "\nto find"
    )
    for name, split in check.splits.items():
        held_out = split.to_find
        new = [f"{split.new_queries:,}", f"{split.new_labels:,}"] if held_out else ["", ""]
        counts = [f"{count:,}" for count in (split.pairs, split.distinct, split.queries, split.labels)]
        table.add_row(name, *counts, *new, f"{held_out.measured:,}" if held_out else "")
    return table


def _spans(check: Check) -> Table:
    table = _table("\nsplit", "\nfrom", "\nto")
    for name, split in check.splits.items():
        if split.first is not None and split.last is not None:
            table.add_row(name, split.first, split.last)
    return table


def _buckets(check: Check) -> Table:
    table = _table("\nbucket", "\nlabels", "\ntraining pairs", "\nshare")
    pairs = sum(bucket["pairs"] for bucket in check.buckets.values()) or 1
    for name, bucket in check.buckets.items():
        share = f"{bucket['pairs'] / pairs:.1%}"
        table.add_row(name, f"{bucket['labels']:,}", f"{bucket['pairs']:,}", share)
    return table


def _features(check: Check) -> Table:
    table = _table("\nfeature", "\nkind", "\ntable", "\nrows", "\nunknown", "\nmissing")
    for each in check.features:
        rows = "" if each.rows is None else f"{each.rows:,}"
        shares = ["" if share is None else f"{share:.1%}" for share in (each.unknown, each.empty)]
        table.add_row(f"{each.tower}: {each.name}", each.kind, each.table or "", rows, *shares)
    return table


def _cost(cost: Cost) -> str:
    parts = {"tables": cost.tables, "optimizer": cost.optimizer, "data": cost.data, "logits of a batch": cost.batch}
    memory = ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items())
    return (
        f"\n{cost.steps_per_epoch:,} steps an epoch, {cost.steps:,} in all, of {cost.batch_size:,} pairs × "
        f"{cost.negatives:,} negatives: {cost.products / 1e9:.2g} GFLOP of logits a step\n"
        f"About {_bytes(cost.memory)} beside the framework's own: {memory}"
    )


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
