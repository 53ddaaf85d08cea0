"""Compare λ, a bonus and reserved slots by recall and recall of the tail.

Legend: `N` rows of a task, `K` list length, `L` labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int8, Int32
from longtail.trainer.evaluation.dial import BONUSES, Dial, Setting, select_line
from longtail.trainer.evaluation.metrics import LabelFacts
from longtail.trainer.evaluation.task import Task

_FIRST = 1e3
"""β that puts every label of the tail before all others."""
_STEPS = 8
"""Most numbers of reserved slots that are measured."""
_TAIL = BUCKET_NAMES.index("tail")


class FrontierPoint(NamedTuple):
    """Hold recall, and recall of torso and tail, at a setting."""

    at: str
    recall: float
    torso: float
    tail: float


Frontier = Mapping[str, Sequence[FrontierPoint]]
"""Points by way: `dial λ` or `dial μ`, `bonus`, and `places`."""


def bonus_settings(default: Setting) -> list[Setting]:
    """List settings with a rising β of the tail; the last puts the tail first."""
    # If the default gives new labels the tail's β, every setting of the line does.
    of_tail, shared = sorted({0.0, *BONUSES, default.tail}), default.new == default.tail != 0
    line = [
        default._replace(torso=default.torso if tail else 0.0, tail=tail, new=tail if shared else default.new)
        for tail in of_tail
    ]
    return [*line, line[0]._replace(tail=_FIRST)]


def reserve_slots(top_NK: Int32, tail_first_NK: Int32, buckets_L: Int8, reserved: int) -> Int32:
    """Reserve slots of lists for the tail, int32 [N, K].

    The best labels of the tail replace the last other labels of a list.

    Args:
        tail_first_NK: the same rows' lists with all labels of the tail first; −1 where a list ends early.
    """
    in_tail_NK, tail_first_tail_NK = ((buckets_L[top] == _TAIL) & (top >= 0) for top in (top_NK, tail_first_NK))
    tail_N = in_tail_NK.sum(axis=1)
    short_N = np.maximum(np.minimum(reserved, tail_first_tail_NK.sum(axis=1)) - tail_N, 0)
    others_NK = np.cumsum(~in_tail_NK[:, ::-1], axis=1)[:, ::-1]  # other labels from here to the end
    dropped_NK = ~in_tail_NK & (others_NK <= short_N[:, None])
    # Stable: what stays keeps its order, and what is dropped goes to the end.
    order_NK = np.argsort(dropped_NK, axis=1, kind="stable")
    lists_NK = np.take_along_axis(top_NK, order_NK, axis=1)
    added_NK = np.arange(top_NK.shape[1]) - (top_NK.shape[1] - short_N)[:, None]
    next_NK = np.take_along_axis(tail_first_NK, np.maximum(added_NK + tail_N[:, None], 0), axis=1)
    return np.where(added_NK >= 0, next_NK, lists_NK)


def frontier(dial: Dial, task: Task, top_of: Mapping[Setting, Int32], facts: LabelFacts, k: int) -> Frontier:
    """Measure lists along bonus and reserved slots, and read λ's line.

    Args:
        top_of: the task's lists at `bonus_settings`, int32 [N, ≥ K] each.
    """
    names = [f"recall@{k}", f"recall@{k}/torso", f"recall@{k}/tail"]
    of_bonus = {at: top_NK[:, :k] for at, top_NK in top_of.items()}
    *line_of_bonus, tail_first = of_bonus
    without = line_of_bonus[0]
    dial_name, symbol = ("popularity", "μ") if without.popularity else ("bias_removal", "λ")
    line = [
        FrontierPoint(str(Setting.read_point(point)), *(point.metrics[name].value for name in names))
        for point in select_line(dial.curve, dial_name, without)
    ]

    def point(words: str, top_NK: Int32) -> FrontierPoint:
        ratios = task.ratios(str(k), top_NK, facts)
        sums = ((float(part_N.sum()) for part_N in ratios[name]) for name in names)
        return FrontierPoint(words, *(value / max(total, 1e-300) for value, total in sums))

    slots = [
        point(
            f"{reserved} of {k} places",
            reserve_slots(of_bonus[without], of_bonus[tail_first], facts.buckets_L, reserved),
        )
        for reserved in np.unique(np.linspace(0, k // 2, _STEPS + 1).astype(int)).tolist()
    ]
    bonus = [point(str(at), of_bonus[at]) for at in line_of_bonus]
    return ({f"dial {symbol}": line} if len(line) > 1 else {}) | {"bonus": bonus, "places": slots}
