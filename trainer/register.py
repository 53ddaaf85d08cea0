"""Registration of custom samplers, weights, families, towers, feature kinds and metrics for recipes.

    @register.weight("damped")
    def damped(log, *, power: float = 0.5):
        ...

A recipe then names it, `weight = { name = "damped", power = 0.25 }`, and may set keyword-only parameters, which are
checked against their annotations. Installed packages offer rows as entry points of `GROUPS`; docs/extending.md has
examples.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points, packages_distributions, version
from inspect import Parameter
from typing import Any, TypeVar, get_args

from longtail.bundle.validation import did_you_mean
from longtail.trainer.layers import FEATURES, TOWERS, FeatureKind, Kind
from longtail.trainer.losses.families import LOSSES, Family
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.weights import WEIGHTS
from longtail.trainer.metric_registry import METRICS, RESERVED
from longtail.trainer.sampling import SAMPLERS

__all__ = ["GROUPS", "family", "feature", "metric", "sampler", "tower", "weight"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

GROUPS = {
    "sampler": "longtail.samplers",
    "weight": "longtail.weights",
    "family": "longtail.families",
    "tower": "longtail.towers",
    "feature": "longtail.features",
    "metric": "longtail.metrics",
}
"""Groups of entry points by kind.

An entry point has the name that recipes use. It loads a function that its module registers, or an unregistered function
(a `Family` or `FeatureKind` for these kinds).
"""

_TABLES: dict[str, dict[str, Any]] = {
    "sampler": SAMPLERS, "weight": WEIGHTS, "family": LOSSES, "tower": TOWERS, "feature": FEATURES,
    "metric": METRICS,
}  # fmt: skip
BUILT_IN = {kind: frozenset(table) for kind, table in _TABLES.items()} | {
    "metric": RESERVED, "feature": frozenset(get_args(Kind)),
}  # fmt: skip
"""Names of our own rows by kind."""
_POSITIONAL = {"sampler": 1, "weight": 1, "family": 3, "tower": 2, "metric": 1}
"""Positional arguments of a kind's functions; those of a feature kind depend on what it reads."""


def sampler(name: str) -> Callable[[_Function], _Function]:
    """Register a sampler of negatives for `loss.sampler`: a function from a `SamplerSetup` to a `Sampler`.

    The noise ν is computed from `log_q_L`, the log of probabilities that sum to 1. A sampler whose q depends on the
    query has `log_q` instead. It needs a weight that cancels q, because ν could not be one number per label for the
    dial to remove [METHODS §9].
    """
    return _register("sampler", name)


def weight(name: str) -> Callable[[_Function], _Function]:
    """Register a weight of negatives for `loss.weight`: a function from `LogProbabilities` to a `LogWeight`.

    `row` may depend only on the positive and `col` only on the negative, because only then is ν computable.
    """
    return _register("weight", name)


def family(
    name: str, *, link: float | None, cosine: bool = False, hits: Hits = "mask"
) -> Callable[[_Function], _Function]:
    """Register a family for `loss.family`: positives [B], negatives [B, M] and log-weights [B, M] to losses [B].

    Args:
        link: slope of the optimal logit in log(p(y|x)/ν) [METHODS §9]; 1 for any loss that converges to log-odds; None
            if the optimum is not linear. A recipe then needs a valid split, or a single `evaluation.bias_removal`,
            to choose λ.
        cosine: the loss is defined on plain cosines: similarity cosine, temperature 1, no label bias.
        hits: default treatment of draws of the row's positive.
    """
    if link is not None and not link > 0:
        raise ValueError(f"family {name!r}: expected link > 0 or None, received {link}")
    return _register("family", name, lambda function: Family(function, link=link, cosine=cosine, hits=hits))


def tower(name: str) -> Callable[[_Function], _Function]:
    """Register a tower for `query.tower` and `label.tower`: the features' combination [B, width] to [B, any width].

    The function builds Keras layers with trained weights only. Projection to `model.dim`, objectives and the unit norm
    follow as for built-in towers.
    """
    return _register("tower", name)


def feature(name: str, *, reads: Kind) -> Callable[[_Function], _Function]:
    """Register a feature's `kind`: a function from its tensors and a `FeatureSetup` to a part [B, any width].

    Columns and requests are read as by the built-in kind `reads`. `FeatureKind` lists its tensors, on which the
    function builds Keras layers.
    """
    if reads not in get_args(Kind):
        raise ValueError(
            f"feature {name!r}: expected reads to be one of {', '.join(get_args(Kind))}, received {reads!r}"
        )
    return _register("feature", name, lambda function: FeatureKind(function, reads))


def metric(name: str) -> Callable[[_Function], _Function]:
    """Register a metric for `evaluation.metrics`, and `NAME@K`: `RankedLists` to numerators and denominators, [N].

    The value is `Σ numerator / Σ denominator`. The interval comes from the bootstrap, as for all metrics.
    """
    return _register("metric", name)


_ELSEWHERE = {
    "bpr": "family 'logistic' with pairwise = true, weight 'unit' and sampler 'uniform'",
    "bce": "family 'logistic'",
    "cross_entropy": "family 'softmax'",
    "sampled_softmax": "family 'softmax'",
    "info_nce": "family 'softmax'",
    "infonce": "family 'softmax'",
    "logq": "weight 'relative'",
}
"""Settings that correspond to names in other libraries."""


def find(kind: str, name: str) -> Callable[..., Any]:
    """Return the function of a row, also of an installed package's row.

    Raises:
        ValueError: no package or two packages have such a row, or it has a wrong type.
    """
    table = _TABLES[kind]
    if name not in table:
        entries = list(entry_points(group=GROUPS[kind], name=name))
        if not entries:
            names = [*(get_args(Kind) if kind == "feature" else ()), *table]
            hint = f": did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else did_you_mean(name, names)
            raise ValueError(
                f"{kind}: expected one of {', '.join(names) or 'none'}, received {name!r}, which is neither registered "
                f"nor an entry point of {GROUPS[kind]}{hint}"
            )
        if len(entries) > 1:
            packages = ", ".join(entry.dist.name if entry.dist else entry.value for entry in entries)
            raise ValueError(f"{kind} {name!r}: expected one package with this entry point, found {packages}")
        expected = f"{kind} {name!r}: expected {entries[0].value!r}"
        try:
            loaded = entries[0].load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{expected} to load: {error}") from error
        if name not in table:  # else its decorator has registered it
            row = {"family": Family, "feature": FeatureKind}.get(kind, object)
            if not isinstance(loaded, row):
                raise ValueError(f"{expected} to be a {row.__name__}, found {loaded!r}")
            _check_signature(kind, name, loaded)
            table[name] = loaded
    return _get_function(table[name])


def describe_origin(kind: str, name: str) -> str:
    """Return `MODULE:FUNCTION`, package, version and the source's sha256 of a custom row."""
    function = _get_function(_TABLES[kind][name])
    origin = f"{function.__module__}:{function.__qualname__}"
    for package in _packages(tuple(sys.path)).get(function.__module__.partition(".")[0], [])[:1]:
        origin += f" of {package} {version(package)}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed into an interpreter
        return origin
    return f"{origin} {hashlib.sha256(source.encode()).hexdigest()[:12]}"


# `sys.path` is the key of the cache: a package added to it later is looked up.
@cache
def _packages(_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Map modules to the packages that install them, which takes about a second."""
    return packages_distributions()


def list_modules(named: Iterable[tuple[str, str]]) -> list[str]:
    """List the modules that register the rows of these kinds and names, sorted."""
    return sorted({_get_function(_TABLES[kind][name]).__module__ for kind, name in named})


def _get_function(row: Any) -> Callable[..., Any]:
    if isinstance(row, FeatureKind):
        return row.part
    return row.loss if isinstance(row, Family) else row


def _register(
    kind: str, name: str, create_row: Callable[[Any], Any] = lambda function: function
) -> Callable[[_Function], _Function]:
    if name in BUILT_IN[kind]:
        raise ValueError(f"{kind} {name!r}: expected a name that is not Longtail's own, received one that is")

    def decorate(function: _Function) -> _Function:
        row = create_row(function)
        _check_signature(kind, name, row)
        _TABLES[kind][name] = row
        return function

    return decorate


def _check_signature(kind: str, name: str, row: Any) -> None:
    """Refuse a function whose signature does not fit a step's tensors or a recipe's parameters."""
    function = _get_function(row)
    expected = row.tensors + 1 if isinstance(row, FeatureKind) else _POSITIONAL[kind]
    parameters = list(inspect.signature(function).parameters.values())
    kinds = [parameter.kind for parameter in parameters]
    positional = kinds.count(Parameter.POSITIONAL_ONLY) + kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    if positional != expected or {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} & {*kinds}:
        raise ValueError(
            f"{kind} {name!r}: expected {expected} positional argument(s) and a recipe's parameters "
            f"keyword-only, received {function.__name__}{inspect.signature(function)}"
        )
    if "name" in (parameter.name for parameter in parameters):
        raise ValueError(f"{kind} {name!r}: expected parameters of other names than the row's, received ['name']")
