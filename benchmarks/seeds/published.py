"""What the papers print, to stand beside what is measured here; every figure with the place it is printed at.

[R21] prints no number of its retrieval study: its Figures 2, 8 and 9 are bars. What its text claims of them is what the
study of labeling bias tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One row of a paper's table.

    Attributes:
        data: the data set, as `longtail-train data` calls it.
        method: what was trained.
        figures: by metric; shares as fractions, ratios as the paper prints them.
        source: where it is printed.
    """

    data: str
    method: str
    figures: dict[str, float]
    source: str


def _at(metrics: tuple[str, ...], *values: float) -> dict[str, float]:
    return dict(zip(metrics, values, strict=True))


_P = ("precision@1", "precision@3", "precision@5")
_RATIOS = tuple(f"{metric}@{k}" for metric in ("recall", "precision") for k in (1, 3, 5))
_A2, _TABLE_2, _TABLE_3 = "[BM20 A.2]", "[Re19 Table 2]", "[Re19 Table 3]"

ACCURACY = (
    Published("eurlex-4k", "full softmax", {"accuracy": 0.336}, _A2),
    Published("eurlex-4k", "uniform negatives", {"accuracy": 0.264}, _A2),
)
"""Accuracy of each row's smallest label, 512 principal components, affine linear."""

MINING = (
    Published("amazoncat-13k", "top 1", _at(_RATIOS, 2.59, 1.98, 2.58, 2.33, 2.40, 2.39), _TABLE_2),
    Published("amazoncat-13k", "top 16", _at(_RATIOS, 2.02, 1.97, 1.96, 1.99, 1.97, 1.92), _TABLE_2),
    Published("amazoncat-13k", "top 64", _at(_RATIOS, 1.65, 1.63, 1.60, 1.66, 1.65, 1.61), _TABLE_2),
    Published("amazoncat-13k", "top 256", _at(_RATIOS, 1.32, 1.32, 1.29, 1.30, 1.30, 1.30), _TABLE_2),
    Published("wikilshtc-325k", "top 1", _at(_RATIOS, 2.53, 2.71, 2.64, 2.56, 2.70, 2.59), _TABLE_2),
    Published("wikilshtc-325k", "top 16", _at(_RATIOS, 2.35, 2.46, 2.37, 2.36, 2.46, 2.37), _TABLE_2),
    Published("wikilshtc-325k", "top 64", _at(_RATIOS, 2.13, 2.18, 2.14, 2.17, 2.18, 2.17), _TABLE_2),
    Published("wikilshtc-325k", "top 256", _at(_RATIOS, 1.87, 1.86, 1.83, 1.89, 1.90, 1.87), _TABLE_2),
    Published("amazon-670k", "top 1", _at(_RATIOS, 1.23, 1.28, 1.32, 1.25, 1.27, 1.33), _TABLE_2),
    Published("amazon-670k", "top 16", _at(_RATIOS, 1.17, 1.23, 1.24, 1.21, 1.22, 1.34), _TABLE_2),
    Published("amazon-670k", "top 64", _at(_RATIOS, 1.13, 1.17, 1.18, 1.16, 1.18, 1.23), _TABLE_2),
    Published("amazon-670k", "top 256", _at(_RATIOS, 1.11, 1.15, 1.15, 1.13, 1.14, 1.18), _TABLE_2),
)
"""Stochastic negative mining as multiples of negative sampling, hinge, BOWL; B = 1,024 on AmazonCat, else 32,768."""

PRECISION = (
    Published("amazoncat-13k", "stochastic negative mining", _at(_P, 0.8158, 0.7154, 0.5879), _TABLE_3),
    Published("amazoncat-13k", "SLEEC", _at(_P, 0.9053, 0.7633, 0.6152), _TABLE_3),
    Published("amazoncat-13k", "PfastreXML", _at(_P, 0.9175, 0.7797, 0.6368), _TABLE_3),
    Published("amazoncat-13k", "DiSMEC", _at(_P, 0.934, 0.791, 0.641), _TABLE_3),
    Published("amazoncat-13k", "PD-Sparse", _at(_P, 0.9060, 0.7514, 0.6069), _TABLE_3),
    Published("wikilshtc-325k", "stochastic negative mining", _at(_P, 0.6065, 0.4208, 0.3187), _TABLE_3),
    Published("wikilshtc-325k", "SLEEC", _at(_P, 0.5483, 0.3342, 0.2385), _TABLE_3),
    Published("wikilshtc-325k", "LEML", _at(_P, 0.1982, 0.1143, 0.0839), _TABLE_3),
    Published("wikilshtc-325k", "PfastreXML", _at(_P, 0.5605, 0.3679, 0.2709), _TABLE_3),
    Published("wikilshtc-325k", "DiSMEC", _at(_P, 0.644, 0.425, 0.315), _TABLE_3),
    Published("wikilshtc-325k", "PD-Sparse", _at(_P, 0.6126, 0.3948, 0.2879), _TABLE_3),
    Published("wikilshtc-325k", "PPD-Sparse", _at(_P, 0.6408, 0.4126, 0.3012), _TABLE_3),
    Published("amazon-670k", "stochastic negative mining", _at(_P, 0.4468, 0.4055, 0.3740), _TABLE_3),
    Published("amazon-670k", "SLEEC", _at(_P, 0.3505, 0.3125, 0.2856), _TABLE_3),
    Published("amazon-670k", "LEML", _at(_P, 0.0813, 0.0683, 0.0603), _TABLE_3),
    Published("amazon-670k", "PfastreXML", _at(_P, 0.3946, 0.3581, 0.3305), _TABLE_3),
    Published("amazon-670k", "DiSMEC", _at(_P, 0.447, 0.397, 0.361), _TABLE_3),
    Published("amazon-670k", "PPD-Sparse", _at(_P, 0.4532, 0.4037, 0.3692), _TABLE_3),
)
"""Precision on the original multilabel test sets."""

NOT_RUN = ("eurlex-4k", "amazoncat-13k", "wikilshtc-325k", "amazon-670k")
"""Data sets of the papers whose files were not at hand: jobs on them are made where they are prepared, and marked."""


def published(data: str) -> list[Published]:
    """What is printed about a data set, in the order of the papers' tables."""
    return [row for row in (*ACCURACY, *MINING, *PRECISION) if row.data == data]
