"""The studies of the three papers: data, settings and methods of each table."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.seeds.study import FULL, LOGIT_ADJUSTED, POPULARITY, Ladder, Method, Study

WEIGHTS = ("constant", "importance", "relative", "tail")


def rates(start: float) -> Ladder:
    """Build a ladder of embedding learning rates around a start value."""
    values = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    return Ladder("optimizer.embedding_learning_rate", values, values.index(start))


TEMPERATURES = Ladder("model.temperature", (0.025, 0.05, 0.1, 0.2, 0.4), 2)


_ORDER = (
    "r21.delicious-dot", "re19.mixture-10k", "a2.delicious", "profiles.exp-100", "re19.delicious",
    "r21.movielens-1m", "r21.delicious-cosine", "re19.amazon-beauty", "profiles.step-100",
    "r21.delicious-m", "r21.amazon-beauty",
)  # fmt: skip
"""The order of studies, by which even a short run covers every paper."""


def studies(*, quick: bool = False) -> list[Study]:
    """List all studies in their order; `quick` gives small ones: three methods, no search, 8,000 pairs."""
    by_name = {
        study.name: study
        for study in (
            *labelling_bias(), *profiles(), *mining(), softmax_gap(), more_negatives(), beauty(),
        )
    }  # fmt: skip
    if not quick:
        return [by_name[name] for name in _ORDER]
    return [_small(by_name[name]) for name in ("r21.delicious-dot", "re19.delicious", "a2.delicious")]


def _small(study: Study) -> Study:
    """Reduce a study to its first methods, with their first choice, on few pairs."""
    methods = [
        replace(method, grid=tuple(Ladder(it.key, (it.values[it.start],), 0) for it in method.grid))
        for method in study.methods[:4]
    ]
    return replace(study, methods=tuple(methods), max_pairs=8_000)


_COMMON = {
    "evaluation.log_likelihood": "false",
    "evaluation.bootstrap": "10",
    "optimizer.schedule": '"linear"',
}


def _bag(dim: int, combiner: str = "sqrtn") -> dict[str, str]:
    """Configure the Delicious model of [R21]: a linear layer over features and a vector per label, `dim` wide."""
    feature = f'{{ name = "features", kind = "bag", dim = {dim}, max_length = 500, combiner = "{combiner}" }}'
    return {
        "query": f"{{ features = [{feature}] }}",
        "label": f'{{ features = [{{ name = "tag", kind = "id", dim = {dim} }}] }}',
        "model.dim": str(dim),
        "model.label_bias": "false",
        "evaluation.exclude_seen": "false",
    }


def _ids(dim: int) -> dict[str, str]:
    """Configure a vector per user and a vector per item."""
    return {
        "query": f'{{ features = [{{ name = "user_id", kind = "id", dim = {dim} }}] }}',
        "label": f'{{ features = [{{ name = "item_id", kind = "id", dim = {dim} }}] }}',
        "model.dim": str(dim),
    }


def _dense(dim: int, hidden: int | None = None) -> dict[str, str]:
    """Configure a linear layer over the coordinates of generated rows, or one hidden ReLU layer."""
    layers = f"hidden = [{hidden}], " if hidden else ""
    feature = f'{{ name = "x", kind = "bag", dim = {dim}, max_length = 64, combiner = "sum", unknown_rate = 0.0 }}'
    return {
        "query": f"{{ {layers}features = [{feature}] }}",
        "label": f'{{ features = [{{ name = "label", kind = "id", dim = {dim} }}] }}',
        "model.dim": str(dim),
        "evaluation.exclude_seen": "false",
    }


_DOT = {"model.similarity": '"dot"', "model.temperature": "1.0"}
_COSINE = {"model.similarity": '"cosine"', "model.temperature": "0.1"}


def schemes(
    m: int, grid: tuple[Ladder, ...], samplers: tuple[str, ...] = ("in_batch", "uniform")
) -> tuple[Method, ...]:
    """List methods: sampler × weight, and the full losses as references."""
    negatives = {"in_batch": '"in_batch"', "uniform": f'{{ name = "uniform", negatives = {m} }}'}
    sampled = [
        Method(
            f"{sampler} {weight}", {"loss.sampler": negatives[sampler], "loss.weight": f'"{weight}"'}, grid
        )
        for sampler in samplers
        for weight in WEIGHTS
    ]  # fmt: skip
    return (Method(POPULARITY), *_full(grid), *sampled)


def _full(grid: tuple[Ladder, ...]) -> tuple[Method, Method]:
    return (
        Method(FULL, {"loss.sampler": '"full"', "loss.weight": '"importance"'}, grid),
        Method(LOGIT_ADJUSTED, {"loss.sampler": '"full"', "loss.weight": '"tail"'}, grid),
    )


_BUCKETS = ("/head", "/torso", "/tail")
_RETRIEVAL = (
    "pair_recall@10", *(f"recall@10{bucket}" for bucket in _BUCKETS), "balanced_error@10", "recall@10",
    "pair_recall@1", "pair_recall@50",
)  # fmt: skip
_COMPARED = ("pair_recall@10", *(f"recall@10{bucket}" for bucket in _BUCKETS), "balanced_error@10")


def labelling_bias() -> list[Study]:
    """Compare sampler × weight with the full losses, by bucket [R21 §5.2]."""
    delicious = {
        **_COMMON, **_bag(64), "evaluation.ks": "[1, 3, 5, 10, 50]", "evaluation.metric": '"recall@10"',
        "training.batch_size": "65", "evaluation.propensity": "[0.55, 1.5]",
    }  # fmt: skip
    movielens = {
        **_COMMON, **_ids(32), **_DOT, "evaluation.ks": "[1, 10, 50]", "evaluation.metric": '"recall@10"',
        "training.batch_size": "257",
    }  # fmt: skip
    precisions = tuple(f"{metric}@{k}" for metric in ("precision", "psp") for k in (1, 3, 5))
    common = Study(
        "r21", "delicious", {}, (), epochs=1, hold_out="rows", max_pairs=60_000, choose_by="pair_recall@10",
        show=(*_RETRIEVAL, *precisions), compare=(*_COMPARED, "precision@1", "psp@1"),
        note="linear layer of 64 over 500 words, m = 64 of L = 983, B = 65, 60,000 pairs once",
    )  # fmt: skip
    rate = rates(0.01)
    cosines = schemes(64, (rate, TEMPERATURES))[:7]
    return [
        replace(common, settings=delicious | _DOT, methods=schemes(64, (rate,)), variant="dot"),
        replace(
            common, settings=delicious | _COSINE, methods=(*cosines, *_contrastive(cosines[3:])), variant="cosine"
        ),
        replace(
            common, data="movielens-1m", settings=movielens, methods=schemes(256, (rate,))[:7], hold_out="recipe",
            epochs=3, max_pairs=None, show=_RETRIEVAL, compare=_COMPARED,
            note="a vector of 32 a user and a movie, dot products, m = 256 of L = 3,883, B = 257, 3 epochs",
        ),
    ]  # fmt: skip


def beauty() -> Study:
    """Repeat [R21 §5.2] on a larger catalogue: does `constant` fail because cosines are bounded?"""
    settings = {
        **_COMMON, "evaluation.ks": "[1, 10, 50]", "evaluation.metric": '"recall@10"', "training.batch_size": "257",
    }  # fmt: skip
    rate = rates(0.01)
    rows = [
        Method(
            f"in_batch {weight}, {name}",
            {"loss.sampler": '"in_batch"', "loss.weight": f'"{weight}"', **similarity},
            (rate, TEMPERATURES) if name == "cosine" else (rate,),
        )
        for name, similarity in (("cosine", _COSINE), ("dot", _DOT))
        for weight in ("constant", "importance")
    ]
    full = Method(FULL, {"loss.sampler": '"full"', "loss.weight": '"importance"', **_DOT}, (rate,))
    return Study(
        "r21", "amazon-beauty", settings, (Method(POPULARITY), *rows, full), epochs=3,
        choose_by="pair_recall@10", show=_RETRIEVAL, compare=_COMPARED,
        note="user and history of 64, leave-last-out, m = 256 of L = 12,101, B = 257, 3 epochs; "
        "the full loss with dot products",
    )  # fmt: skip


def profiles() -> list[Study]:
    """Compare methods on EXP and STEP profiles of a generated set with 100 labels [R21 §5.1]."""
    settings = {
        **_COMMON, **_dense(64, hidden=64), **_DOT, "evaluation.buckets": '"count"', "training.batch_size": "33",
        "evaluation.ks": "[1]", "evaluation.metric": '"recall@1"', "optimizer.dense_learning_rate": "0.003",
    }  # fmt: skip
    errors = ("balanced_error@1", *(f"balanced_error@1{bucket}" for bucket in _BUCKETS))
    grid = (rates(0.03),)
    return [
        Study(
            "profiles", data, settings, rows, epochs=epochs, choose_by="recall@1", grid=(0.0,), show=errors,
            compare=errors, note=f"one hidden layer of 64, dot products, m = 32 of L = 100, B = 33, {epochs} epochs",
        )
        for data, epochs, rows in (
            ("exp-100", 3, (*schemes(32, grid), *_contrastive(schemes(32, grid)[3:]), *_momentum())),
            ("step-100", 1, schemes(32, grid)[:7]),
        )
    ]  # fmt: skip


def _contrastive(rows: tuple[Method, ...]) -> tuple[Method, ...]:
    """Replace softmax by the contrastive loss of cosines with margin 0 [R21 §5.1, F.1]."""
    cosine = {"loss.family": '{ name = "contrastive", margin = 0.0 }', **_COSINE, "model.temperature": "1.0"}
    return tuple(
        replace(row, name=f"{row.name}, contrastive", settings={**row.settings, **cosine}, grid=row.grid[:1])
        for row in rows
    )


_SGD = {"optimizer.embeddings": '"sgd"', "optimizer.dense": '"sgd"', "optimizer.momentum": "0.9"}


def _sgd_rates(start: float) -> Ladder:
    values = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    return Ladder("optimizer.embedding_learning_rate", values, values.index(start))


def _momentum() -> tuple[Method, ...]:
    """List the methods of the main contrast with [R21]'s SGD and momentum 0.9."""
    grid = (_sgd_rates(1.0), Ladder("optimizer.dense_learning_rate", (0.01, 0.03, 0.1, 0.3, 1.0), 2))
    full, _ = _full(grid)
    rows = (Method("in_batch constant", {"loss.sampler": '"in_batch"', "loss.weight": '"constant"'}, grid), full)
    return tuple(replace(row, name=f"{row.name}, SGD", settings={**row.settings, **_SGD}) for row in rows)


def more_negatives() -> Study:
    """Vary the number of negatives with equal batches [R21 F.3]."""
    grid = (rates(0.01),)
    first = labelling_bias()[0]
    rows = [
        Method(
            f"uniform {weight}, m = {m}",
            {"loss.sampler": f'{{ name = "uniform", negatives = {m} }}', "loss.weight": f'"{weight}"'},
            grid,
        )
        for weight in ("importance", "tail")
        for m in (16, 64, 256)
    ]
    return replace(
        first, variant="m", methods=(Method(POPULARITY), *_full(grid), *rows), show=_RETRIEVAL, compare=_COMPARED,
        note="as the table of Delicious with dot products; m of L = 983",
    )  # fmt: skip


def mining() -> list[Study]:
    """Compare top-k mining with sampling of equal total weight, BOWL with hinge [Re19 Table 2]."""
    common = {
        **_COMMON, "loss.family": '"hinge"', "model.similarity": '"cosine"', "model.temperature": "1.0",
        "evaluation.ks": "[1, 3, 5]", "evaluation.metric": '"recall@1"', "training.batch_size": "256",
        "data.reduction": '"sample"',
    }  # fmt: skip
    columns = tuple(f"{metric}@{k}" for metric in ("recall", "precision") for k in (1, 3, 5))
    delicious = common | _bag(64, "sum") | {"query.input_activation": '"relu"'}
    study = Study(
        "re19", "delicious", delicious, (), epochs=8, hold_out="rows", choose_by="recall@1", show=columns,
        compare=("recall@1", "precision@1"), grid=(0.0,),
        note="ReLU layer of 64, m = 96 of L = 983 without replacement, 8 visits of every row",
    )  # fmt: skip
    mixture = common | _dense(32) | {"query.input_activation": '"relu"', "data.reduction": '"expand"'}
    return [
        replace(study, methods=(*mined(96, (1, 16), hits=("mask", "mask_known")), *_pairwise(96))),
        replace(
            study, data="amazon-beauty", settings=common, methods=mined(512, (1, 16, 64)), epochs=6, hold_out="recipe",
            note="user and history of 64, leave-last-out, m = 512 of L = 12,101 without replacement, 6 visits of every "
            "user",
        ),
        replace(
            study, data="mixture-10k", settings=mixture, methods=(*mined(512, (1, 16, 64)), *_by_sgd(512)), epochs=1,
            hold_out="recipe", compare=("recall@1",), show=columns[:3],
            note="10,000 labels around independent means, Zipf frequencies, ReLU layer of 32, m = 512 without "
            "replacement, 100,000 rows once",
        ),
    ]  # fmt: skip


def mined(m: int, keeps: tuple[int, ...], hits: tuple[str, ...] = ("mask",)) -> tuple[Method, ...]:
    """List methods with all negatives and with the hardest, each with total weight 1."""
    sampler = f'{{ name = "uniform", negatives = {m}, replace = false }}'
    grid = (rates(0.03),)
    rows = []
    for masked in hits:
        suffix = {"mask": "", "mask_known": ", known positives masked"}[masked]
        base = {"loss.sampler": sampler, "loss.hits": f'"{masked}"'}
        rows.append(Method(f"all{suffix}", base | {"loss.weight": '"constant"'}, grid))
        for keep in keeps:
            mined = {"loss.weight": '"unit"', "loss.mining": f"{{ keep = {keep} }}"}
            rows.append(Method(f"top {keep}{suffix}", base | mined, grid))
    full = {
        "loss.family": '"softmax"', "model.temperature": "0.1", "loss.sampler": '"full"',
        "loss.weight": '"importance"',
    }  # fmt: skip
    return (Method(POPULARITY), Method(FULL, full, grid), *rows)


def _pairwise(m: int) -> tuple[Method, ...]:
    """List the same methods as POWL, which compares negatives with the positive [Re19 Definition 3]."""
    hinge = {"loss.family": '{ name = "hinge", pairwise = true }'}
    return tuple(
        replace(row, name=f"{row.name}, POWL", settings={**row.settings, **hinge}) for row in mined(m, (1, 16))[2:]
    )


def _by_sgd(m: int) -> tuple[Method, ...]:
    """List the ends of the ladder with the optimizer of [Re19 §5]: SGD, with momentum in the dense layer."""
    rows = [row for row in mined(m, (1,)) if row.name in ("all", "top 1")]
    sgd = {**_SGD, "optimizer.embedding_momentum": "0.0"}
    return tuple(
        replace(row, name=f"{row.name}, SGD", settings={**row.settings, **sgd}, grid=(_sgd_rates(10.0),))
        for row in rows
    )


_AFFINE = {
    **_DOT, "model.label_bias": "true", "evaluation.ks": "[1, 5]", "evaluation.metric": '"precision@1"',
    "evaluation.log_likelihood": "true", "optimizer.embeddings": '"adagrad_elementwise"',
}  # fmt: skip
_L2 = Ladder("optimizer.l2", (0.0, 1e-5, 1e-4, 1e-3, 1e-2), 1)


def softmax_gap() -> Study:
    """Compare full softmax with uniform negative sampling, one label per row, affine, L2 [BM20 A.2]."""
    settings = {
        **_COMMON, **_bag(128, "sum"), **_AFFINE, "data.reduction": '"smallest"', "training.batch_size": "128",
        "optimizer.schedule": '"constant"',
    }  # fmt: skip
    rows = (
        Method(POPULARITY),
        Method(FULL, {"loss.sampler": '"full"', "loss.weight": '"importance"'}, (rates(0.01), _L2)),
        Method(
            "uniform negative sampling",
            {"loss.family": '"logistic"', "loss.sampler": '{ name = "uniform", negatives = 1, shared = false }'},
            (rates(0.01), _L2),
        ),
    )
    return Study(
        "a2", "delicious", settings, rows, epochs=8, hold_out="rows", choose_by="precision@1",
        show=("precision@1", "precision@5", "log_likelihood"), compare=("precision@1", "log_likelihood"),
        grid=(0.0,), note="smallest label of every row, product of 128 wide factors and a bias, Adagrad per "
        "element, 8 epochs",
    )  # fmt: skip
