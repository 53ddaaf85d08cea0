"""What is cited of the papers stands in their ICML, ICLR and AISTATS editions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.test_docs import ROOT, tracked

PLACES = {
    "R21": {
        "§2.1": "long-tail learning: re-weighting, adaptive and equalised margins, logit adjustment",
        "§2.2": "negative sampling: samplers, and weights of Table 1",
        "§3": "implicit losses, of draws that are never the positive",
        "§4.1": "in-batch negatives: constant weights for the tail, relative ones for the head",
        "§5.1": "long-tail benchmarks: the contrastive loss, buckets by count",
        "limits": "§5.1, the limits of sampling: logit adjustment of all labels beside the tail weight",
        "§5.2": "retrieval benchmarks: a pair per label, one linear layer of 512, buckets by quantile",
        "eq. 6": "softmax cross-entropy with pairwise margins ρ",
        "eq. 7": "sampled softmax cross-entropy",
        "eq. 8": "sampled decoupled loss",
        "eq. 10": "variance of the sampled decoupled loss",
        "eq. 11": "implicit loss of the sampled softmax cross-entropy",
        "eq. 16": "the tail weight π_y'/(m q_y' π_y)",
        "eq. 17": "the sampler of least variance",
        "eq. 18": "weights as a correction of logits",
        "Lemma 1": "mean and variance of the sampled decoupled loss",
        "Lemma 2": "implicit loss of the sampled softmax cross-entropy",
        "Thm 3": "the squared gap to the implicit loss falls as 1/m",
        "Prop. 4": "any margin through any sampler",
        "Prop. 5": "the sampler of least variance",
        "Remark 4": "weights as a correction of logits",
        "Table 1": "samplers and weights",
        "Table 2": "implicit losses of the softmax cross-entropy",
        "Table 3": "implicit losses of decoupled losses",
        "Table 4": "the retrieval data sets",
        "Fig. 1": "balanced error by bucket, long-tail benchmarks",
        "Fig. 2": "recall by bucket, in-batch negatives",
        "Fig. 3": "error by bucket, contrastive loss, long-tail benchmarks",
        "Fig. 4": "balanced error, softmax cross-entropy, long-tail benchmarks",
        "Fig. 6": "numbers of negatives",
        "Fig. 8": "recall by bucket, uniform negatives",
        "F.1": "contrastive loss on the long-tail benchmarks",
        "F.2": "balanced error: constant weights beside the loss of all labels",
        "F.3": "numbers of negatives",
    },
    "BM20": {
        "§3": "the tree: model, greedy fit, details",
        "§4": "the two theorems",
        "§5": "results: data, baselines, hyperparameters",
        "eq. 2": "negative sampling with the logistic loss",
        "eq. 5": "the bias and its removal",
        "eq. 6": "the regulariser",
        "eq. 9": "Δ_y, by which a node's labels are split",
        "eq. 12": "the signal-to-noise ratio",
        "eq. 15": "its inverse, query by query",
        "eq. 16": "the overlap of noise and data that decides it",
        "Thm 1": "softmax and negative sampling end at the same scores but for log p_n",
        "Thm 2": "p_n = p_D has the best signal-to-noise ratio",
        "Fig. 1": "learning curves",
        "A.1": "proof of Theorem 2",
        "A.2": "full softmax beside uniform negatives on EURLex-4K",
    },
    "Re19": {
        "§3": "surrogates φ, ordered weighted losses",
        "§3.1": "stochastic negative mining",
        "§5": "experiments: the model, one label drawn a visit",
        "Definition 3": "POWL",
        "Definition 4": "BOWL",
        "BOWL": "each score against 0",
        "POWL": "each score against the positive's",
        "footnote 2": "ϑ beyond the top k is 0 or a small ε, which keeps calibration",
        "Lemma 2": "stochastic negative mining is an ordered weighted loss",
        "Thm 2": "convexity",
        "Thm 3": "surrogates of the retrieval loss",
        "Algorithm 1": "stochastic negative mining",
        "Table 1": "the data sets",
        "Table 2": "mining beside negative sampling",
        "Table 3": "mining beside other methods",
    },
    "Yi19": {"Algorithm 2": "streaming frequencies"},
}
"""What is cited of each paper, and what stands there. A new entry is looked up in the edition that docs/methods.md
names; [R21]'s arXiv version numbers equations 6 to 17 as 4 to 15 and remarks 4 to 6 as 3 to 5."""

CITING = tracked(".py", ".md", ".toml")
_SHORT = {"Theorem": "Thm", "Proposition": "Prop.", "Figure": "Fig.", "Equation": "eq."}
_PAPER = re.compile(rf"^\s*({'|'.join(PLACES)})\b[ ,]*(.*)$", re.DOTALL)


def places(cited: str) -> list[str]:
    """What one citation names: `Lemma 1, eq. 10` is two places, `Tables 1 and 2` and `Fig. 2, 8` are two as well."""
    found, kind = [], ""
    for part in cited.split(","):
        words = " ".join(part.split()).removeprefix("Appendix ")
        numbers = words
        if not words[:1].isdigit():
            kind, _, numbers = words.partition(" ")
            kind = kind.removesuffix("s") if " and " in numbers else kind
            kind = _SHORT.get(kind, kind)
        found += [f"{kind} {number}".strip() for number in numbers.split(" and ")]
    return [place for place in found if place]


def citations() -> Iterator[tuple[str, str, str]]:
    """Every place of a paper that is cited in brackets: file, paper, place."""
    for path in CITING:
        for brackets in re.findall(r"\[([^\[\]]+)\]", path.read_text()):
            for part in brackets.split(";"):
                if match := _PAPER.match(part):
                    for place in places(match[2]):
                        yield str(path.relative_to(ROOT)), match[1], place


def test_every_place_that_is_cited_is_known() -> None:
    assert len(list(citations())) > 80
    unknown = [(path, paper, place) for path, paper, place in citations() if place not in PLACES[paper]]
    assert unknown == [], "look it up in the edition that docs/methods.md names, and add what stands there to PLACES"


@pytest.mark.parametrize(
    ("cited", "found"),
    [
        ("eq. 7", ["eq. 7"]),
        ("Lemma 1, eq. 10", ["Lemma 1", "eq. 10"]),
        ("Tables 1 and 2", ["Table 1", "Table 2"]),
        ("Theorem 3", ["Thm 3"]),
        ("§5.2, Fig. 2, 8", ["§5.2", "Fig. 2", "Fig. 8"]),
        ("Appendix A.1", ["A.1"]),
        ("§5.2", ["§5.2"]),
        ("", []),
    ],
)
def test_places_of_a_citation(cited: str, found: list[str]) -> None:
    assert places(cited) == found
