"""The same studies on the papers' own data, for a user who has the files; none of them was run by us.

`longtail-train data NAME --from DIR` prepares a set; the studies whose folder is there run with the others.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.seeds.studies import labelling_bias, mined, mining, schemes, softmax_gap
from benchmarks.seeds.study import FULL, LOGIT_ADJUSTED, Ladder, Study

_FEATURES = '{{ features = [{{ name = "features", kind = "bag", dim = 512, max_length = {}, combiner = "{}" }}] }}'
_LABELS = '{ features = [{ name = "label", kind = "id", dim = 512 }] }'
_RATES = Ladder("optimizer.embedding_learning_rate", (0.01, 0.03, 0.1, 0.3, 1.0), 2)


def papers_data() -> list[Study]:
    """[R21 §5.2] and [Re19 Table 2] with the models of those papers, and [BM20 A.2]."""
    return [
        *(_sampling(name) for name in ("amazoncat-13k", "wikilshtc-325k")),
        *(
            _mining(name, m)
            for name, m in (("amazoncat-13k", 1_024), ("wikilshtc-325k", 32_768), ("amazon-670k", 32_768))
        ),
        _eurlex(),
    ]


def _sampling(data: str) -> Study:
    """m = 256 and a linear layer of 512; the full losses where a step can hold them."""
    first = labelling_bias()[0]
    settings = dict(first.settings) | {
        "query": _FEATURES.format(2000, "sqrtn"), "label": _LABELS,
        "loss": "{ }", "model.dim": "512", "training.batch_size": "257", "data.reduction": '"expand"',
    }  # fmt: skip
    rows = schemes(256, (_RATES,))
    if data != "amazoncat-13k":
        rows = tuple(row for row in rows if row.name not in (FULL, LOGIT_ADJUSTED))
    return replace(
        first, data=data, settings=settings, methods=rows, max_pairs=None, epochs=3, variant="",
        note="linear layer of 512, m = 256, B = 257, 3 epochs",
    )  # fmt: skip


def _mining(data: str, m: int) -> Study:
    """The recipe's ReLU layer of 512, and [Re19]'s m."""
    first = mining()[0]
    settings = {key: value for key, value in first.settings.items() if key.partition(".")[0] in ("evaluation", "model")}
    settings |= {"loss": '{ family = "hinge" }', "model.dim": "512"}
    rows = mined(m, (1, 16, 64, 256))
    if data != "amazoncat-13k":
        rows = tuple(row for row in rows if row.name != FULL)
    return replace(
        first, data=data, settings=settings, methods=rows, epochs=10, hold_out="recipe",
        note=f"ReLU layer of 512, m = {m:,} without replacement, 10 visits of every row",
    )  # fmt: skip


def _eurlex() -> Study:
    first = softmax_gap()
    settings = dict(first.settings) | {
        "query": _FEATURES.format(5000, "sum"), "label": _LABELS, "loss": "{ }", "model.dim": "512",
    }  # fmt: skip
    return replace(
        first, data="eurlex-4k", settings=settings, epochs=30, hold_out="recipe",
        note="smallest label of every row, product of 512 wide factors and a bias, Adagrad per element, 30 epochs",
    )  # fmt: skip
