"""What is trained for each table: a job is a data set's recipe and what it changes there.

Every study holds its seed (0), and all jobs of one table on one data set differ only in what the table compares.
Learning rates are not tuned per method.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHTS = ("constant", "importance", "relative", "tail")
SNM_KEEPS = (1, 16, 64, 256)


@dataclass(frozen=True, eq=False)
class Job:
    """One training run.

    Attributes:
        study: the table it belongs to.
        data: folder of a prepared data set.
        name: its row.
        settings: overrides of the data set's recipe, as `--set` takes them.
        timed: measure the test set after every epoch, for curves over time.
    """

    study: str
    data: str
    name: str
    settings: dict[str, str] = field(default_factory=dict)
    timed: bool = False


def studies(*, quick: bool) -> list[Job]:
    """Every job, in the order they run; `quick` trains a third as long on the two small sets alone."""
    jobs = [*labeling_bias(), *mining(), *softmax_gap(), *approximations(), *propensities()]
    if not quick:
        return jobs
    small = [job for job in jobs if job.data in ("delicious", "amazon-beauty")]
    return [Job(job.study, job.data, job.name, job.settings | _third(job.settings), job.timed) for job in small]


def _third(settings: dict[str, str]) -> dict[str, str]:
    return {"training.epochs": str(max(1, int(settings.get("training.epochs", "6")) // 3))}


_EVALUATION = {
    "training.refit": "false",
    "training.patience": "100",
    "training.evaluate_every": "1000",
    "evaluation.bias_removal": "[0.0, 0.5, 1.0]",
    "evaluation.bootstrap": "10",
}


_LINEAR_512 = {
    "data.split": '{ strategy = "random", valid = 0.1, test = 0 }',
    "query": '{ features = [{ name = "features", kind = "bag", dim = 512, max_length = 500, combiner = "sqrtn" }] }',
    "model": "{ dim = 512, temperature = 0.1 }",
    "optimizer": "{ embedding_learning_rate = 0.005 }",
    "evaluation.exclude_seen": "false",
}
"""[R21]'s model of Delicious, one linear layer of 512, in place of its recipe's."""


def labeling_bias() -> list[Job]:
    """[R21 §5.2]: sampler × weight × family against the full losses."""
    return [job for data in ("delicious", "amazon-beauty", "gowalla") for job in _labeling_bias_on(data)]


def _labeling_bias_on(data: str) -> list[Job]:
    common = _EVALUATION | {
        "evaluation.ks": "[1, 10, 50]",
        "evaluation.metric": '"recall@10"',
        "training.epochs": {"delicious": "4", "amazon-beauty": "8", "gowalla": "3"}[data],
        "training.batch_size": {"delicious": "65", "amazon-beauty": "257", "gowalla": "513"}[data],
        "optimizer.embedding_learning_rate": {"delicious": "0.002", "amazon-beauty": "0.005", "gowalla": "0.01"}[data],
    }
    if data == "delicious":
        common = _LINEAR_512 | common
    if data != "amazon-beauty":
        common |= {"data.split.valid": "0.0"}
    m = {"delicious": 64, "amazon-beauty": 256, "gowalla": 512}[data]
    families = {
        "softmax": {"loss.family": '"softmax"'},
        "contrastive": {"loss.family": '{ name = "contrastive", margin = 0.0 }', "model.temperature": "1.0"},
    }
    samplers = {"in_batch": '"in_batch"', "uniform": f'{{ name = "uniform", negatives = {m} }}'}
    jobs = [
        Job("r21", data, f"{family} {sampler} {weight}", common | settings | {
            "loss.sampler": samplers[sampler], "loss.weight": f'"{weight}"',
        })
        for family, settings in families.items()
        for sampler in samplers
        for weight in WEIGHTS
    ]  # fmt: skip
    if data == "gowalla":  # every label for every pair: hours on 2 cores
        return jobs
    full = common | {"loss.sampler": '"full"'}
    return [
        *jobs,
        Job("r21", data, "softmax full importance", full | families["softmax"] | {"loss.weight": '"importance"'}),
        Job("r21", data, "softmax full tail", full | families["softmax"] | {"loss.weight": '"tail"'}),
        Job("r21", data, "contrastive full importance", full | families["contrastive"] | {
            "loss.weight": '"importance"',
        }),
    ]  # fmt: skip


def mining() -> list[Job]:
    """[Re19 Table 2]: top-k mining beside plain negative sampling, BOWL with hinge; and under softmax."""
    jobs = []
    for data, m, epochs in (("delicious", 512, 8), ("amazon-beauty", 1024, 8)):
        common = _EVALUATION | {
            "evaluation.ks": "[1, 3, 5]",
            "evaluation.metric": '"recall@1"',
            "training.epochs": str(epochs),
            "training.batch_size": "256",
            "loss.weight": '"importance"',
            "loss.sampler": f'{{ name = "uniform", negatives = {m} }}',
        }
        if data == "delicious":
            common = _LINEAR_512 | common | {"query.input_activation": '"relu"', "query.features.0.combiner": '"sum"'}
        families = {
            "hinge": {"loss.family": '"hinge"', "model.temperature": "1.0"},
            "softmax": {"loss.family": '"softmax"', "training.epochs": str(epochs // 2)},
        }
        for family, settings in families.items():
            jobs.append(Job("re19", data, f"{family} all", common | settings))
            for keep in SNM_KEEPS:
                mined = {"loss.mining": f"{{ keep = {keep} }}"}
                jobs.append(Job("re19", data, f"{family} top {keep}", common | settings | mined))
    return jobs


_LINEAR = _EVALUATION | {
    "model.similarity": '"dot"',
    "model.temperature": "1.0",
    "model.label_bias": "true",
    "model.init_scale": "0.01",
    "evaluation.ks": "[1, 5]",
    "evaluation.metric": '"precision@1"',
    "evaluation.log_likelihood": "true",
    "evaluation.exclude_seen": "false",
    "evaluation.bias_removal": "[0.0, 1.0]",
}


def softmax_gap() -> list[Job]:
    """[BM20 A.2]: full softmax beside uniform negative sampling, single label = smallest id, affine linear."""
    common = (
        _LINEAR_512
        | _LINEAR
        | {
            "data.reduction": '"smallest"',
            "training.epochs": "20",
            "training.batch_size": "64",
            "query.features.0.combiner": '"sum"',
        }
    )
    uniform = '{ name = "uniform", negatives = 1, shared = false }'
    return [
        Job("a2", "delicious", "full softmax", common | {"loss.sampler": '"full"', "loss.weight": '"importance"'}),
        Job("a2", "delicious", "uniform negatives", common | {"loss.family": '"logistic"', "loss.sampler": uniform}),
    ]


def approximations() -> list[Job]:
    """[BM20 Fig. 1]: six approximations of softmax over time, one label per visit, affine linear.

    Methods that need no tree train more epochs in about the same time.
    """
    jobs = []
    for data, epochs, every, more, unseen in (
        ("gowalla-history", 40, 8, 2, "true"), ("synthetic-200k", 6, 1, 5, "false"),
    ):  # fmt: skip
        common = _LINEAR | {
            "training.batch_size": "256" if data == "gowalla-history" else "512",
            "evaluation.exclude_seen": unseen,
            "evaluation.max_valid_queries": "2000",
            "optimizer.embeddings": '"adagrad"',
            "optimizer.embedding_learning_rate": "0.1",
        }
        draws = "negatives = 4, shared = false"
        uniform, tree = f'{{ name = "uniform", {draws} }}', '{ name = "adversarial", negatives = 4 }'
        methods = {
            "adversarial": {"loss.family": '"logistic"', "loss.sampler": tree, "loss.regularizer": "0.001"},
            "uniform": {"loss.family": '"logistic"', "loss.sampler": uniform},
            "frequency": {"loss.family": '"logistic"', "loss.sampler": f'{{ name = "popularity", {draws} }}'},
            "NCE": {"loss.family": '"nce"', "loss.sampler": tree},
            "One-vs-Each": {
                "loss.family": '{ name = "logistic", pairwise = true }', "loss.sampler": uniform,
                "loss.weight": '"importance"',
            },
            "Augment & Reduce": {
                "loss.family": '"augment_and_reduce"', "loss.sampler": uniform, "loss.weight": '"importance"',
            },
        }  # fmt: skip
        for name, settings in methods.items():
            longer = 1 if settings["loss.sampler"] == tree else more
            length = {"training.epochs": str(longer * epochs), "training.evaluate_every": str(longer * every)}
            jobs.append(Job("bm20", data, name, common | length | settings, timed=True))
    return jobs


def propensities() -> list[Job]:
    """Delicious by its own recipe, beside the extreme classification repository's table."""
    return [Job("delicious", "delicious", "recipe", {})]
