"""A model or a release in Python: recommendations by the retriever of the service, the dial, a card, a server."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import warn
from weakref import finalize

import pyarrow as pa
from pydantic import ValidationError

from longtail.bundle import MAX_PRIORS, Bundle
from longtail.bundle.filterable import filter_kind
from longtail.bundle.manifest import dial_words
from longtail.frames import Source, as_sources, like
from longtail.index import PriorSpec, build, open_releases
from longtail.plain import plain
from longtail.serving.batch import TableOptions, iterate_answers
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import ELSEWHERE, QueriesFor, RetrieveQuery, SimilarQuery
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.settings import explain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from longtail.serving.process.background import BackgroundServer

Options = TypeVar("Options", QueriesFor, RetrieveQuery, SimilarQuery)


class Model:
    """Answers queries with the scores of a service.

    Args:
        bundle: the model; it is indexed exactly, in a temporary folder, at the first answer.
        retriever: a release that is loaded already.
        query_id: column of query ids in frames of queries; None: the one that the bundle remembers, if any.

    Attributes:
        label_id: column of label ids in answers.
    """

    def __init__(self, bundle: Bundle, *, retriever: Retriever | None = None, query_id: str | None = None) -> None:
        self.bundle, together = bundle, bundle.manifest.cooccurrence
        self.query_id = query_id or (None if together is None else together.log.query_id)
        self.label_id = bundle.manifest.own_id or ("label_id" if together is None else together.log.label_id)
        if retriever is not None:
            self.retriever = retriever

    @cached_property
    def retriever(self) -> Retriever:
        """The retriever that a service would answer with."""
        folder = mkdtemp(prefix="longtail-")
        finalize(self, rmtree, folder, ignore_errors=True)
        # An exact index scores any decay, so every column of dates may be named.
        columns = self.bundle.labels.display
        dates = [name for name in columns.column_names if filter_kind(columns.schema.field(name).type) == "date"]
        decay = {name: "1h" for name in dates[:MAX_PRIORS] if columns[name].null_count < len(columns)}
        return load_release(
            open_releases(folder), build(self.bundle, folder, spec="flat", priors=PriorSpec(decay=decay)).name
        )

    def recommend(
        self, queries: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Source = None, k: int = 10, *,
        history: Any = None, exclude: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return the best labels of queries, one row for each query and label.

        A wrong id of a label in `history`, `exclude` or `allow` is a warning.

        Args:
            queries: features of one query, or of several; or a frame, path or URL of queries with a column for each
                feature. None if `vector` is given.
            history, exclude: ids of labels; of a table of queries, the name of a column of such lists. A list to
                `exclude` counts for every query.
            options: options of a query of `POST /v1/retrieve`: `bias_removal`, `popularity`, `cooccurrence`, `bonus`,
                `decay`, `filter`, `buckets`, `allow`, `at_least`, `max_per`, `mmr`, `explain`, `vector`, …

        Returns:
            A frame of the library of `queries`; if that is no frame, of pandas if installed, else of Arrow. Columns:
            the query's id, or `query`, its number from 0, if there are several; `rank` from 1; the label's id; `score`;
            `bucket`; the release's display columns; with their options `propensity` and `explanation`.

        Raises:
            ServingError: an option or a feature is wrong.
        """
        several = isinstance(queries, list | tuple) and all(isinstance(query, Mapping) for query in queries)
        if queries is None or several or isinstance(queries, Mapping):
            values = {"history": history, "exclude": exclude, **options}
            shared = {name: value for name, value in values.items() if value is not None} | {"k": k}
            features: list[Any] = [*queries] if several else [queries]
            resolved = [
                _validate(RetrieveQuery, shared if query is None else {**shared, "features": query})
                for query in features
            ]
            leading = self._leading(features) if several else [{}]
            return like(None, _table(leading, [self.retriever.retrieve(resolved).explain()], self.label_id))
        if history is not None and not isinstance(history, str):
            raise TypeError("history of a table of queries must be the name of a column because each query has its own")
        # One query alone checks the options, in words of a query.
        shared = _plain({"k": k, **options})
        if exclude is not None and not isinstance(exclude, str):
            shared["exclude"], exclude = _plain(exclude), None
        self.retriever.check_options(_validate(RetrieveQuery, {**shared, "features": {}}))
        table_options = TableOptions(
            shared, exclude=exclude, history=history, keep=[self.query_id] if self.query_id else []
        )
        leading, answers, notes = list[dict[str, Any]](), list[Retrieval](), list[str]()
        with as_sources(queries=queries) as paths:
            for rows, retrieval in iterate_answers(self.retriever, paths["queries"], table_options, notes.append):
                leading += rows.to_pylist()
                answers.append(retrieval)
        for note in notes:
            warn(note.removeprefix(f"{Path(paths['queries']).parent}/"), stacklevel=2)
        return like(queries, _table(self._leading(leading), answers, self.label_id))

    def similar(self, ids: Any, k: int = 10, **options: Any) -> Any:
        """Return the labels nearest to a label, or to each of several; columns and options are like `recommend`'s.

        Args:
            ids: a label's id, or a list of ids.
            options: options of `POST /v1/similar`, such as `by="cooccurrence"`.

        Raises:
            ServingError: an option is wrong, or there is no such label.
        """
        ids = _plain(ids)
        several = isinstance(ids, list)
        query = _validate(SimilarQuery, {**options, "k": k, ("ids" if several else "id"): ids})
        leading = [{"query": id_} for id_ in ids] if several else [{}]
        return like(None, _table(leading, [self.retriever.similar([query])], self.label_id))

    def queries_for(self, ids: Any = None, k: int = 10, **options: Any) -> Any:
        """Return the known queries likeliest to choose each label.

        Args:
            ids: a label's id, or a list of ids; None if `features` of a new label are given.
            options: options of `POST /v1/queries`: `filter`, `exclude`, `exclude_history`, `bias_removal`, `by`, …

        Returns:
            A frame: the label's id if there are several, `rank` from 1, the query's id, `score`, `log_p`, `choices`,
            and the columns of queries.

        Raises:
            ServingError: an option is wrong, there is no such label, or the release has no index of queries.
        """
        ids, id_column, rows = _plain(ids), self.query_id or "query_id", list[dict[str, Any]]()
        label = {} if ids is None else {"ids" if isinstance(ids, list) else "id": ids}
        for result in find_known_queries(self.retriever, [_validate(QueriesFor, {**options, **label, "k": k})]):
            leading = {self.label_id: result["id"]} if isinstance(ids, list) else {}
            for rank, query in enumerate(result["queries"], start=1):
                row = {**leading, "rank": rank, id_column: query["id"]}
                row |= {name: query[name] for name in ("score", "log_p", "choices")}
                rows.append({**row, **_rename_clashes(query["display"], row)})
        return like(None, pa.Table.from_pylist(rows))

    def _leading(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the columns that name each query: its id if all have one, else its number."""
        if self.query_id is not None and all(self.query_id in row for row in rows):
            return [{self.query_id: row[self.query_id]} for row in rows]
        return [{"query": number} for number in range(len(rows))]

    def plot_dial(self, k: int | None = None) -> Figure:
        """Plot recall and exposure by bucket, and coverage, over λ; k is that of the metric which chose λ, or 20.

        Raises:
            ValueError: the bundle has no figures for k results at two λ.
        """
        from longtail.trainer import plot_dial

        measured = self.bundle.manifest.bias_removal.chosen_by.rpartition("@")[2]
        return plot_dial(self.bundle, k or (int(measured) if measured.isdecimal() else 20))

    def serve(self, *, host: str = "127.0.0.1", port: int = 0) -> BackgroundServer:
        """Serve the model over HTTP in a thread of this process, for notebooks; its `stop()` ends it.

        Args:
            port: port to bind; 0 lets the system choose one.

        Raises:
            OSError: the port is in use.
        """
        from longtail.serving.process.background import BackgroundServer

        return BackgroundServer(self.retriever, host, port)

    def __fspath__(self) -> str:
        """Return the path of the bundle, for `build` and `evaluate`."""
        return str(self.bundle.path)

    def __repr__(self) -> str:
        return f"Model{repr(self.bundle).removeprefix('Bundle')}"

    def _repr_html_(self) -> str:
        """Return a card for notebooks, with the dial's picture."""
        from longtail.bundle.page import picture

        manifest = self.bundle.manifest
        facts = {
            "Labels": f"{manifest.labels:,}", "Dimensions": manifest.dim,
            "Created": f"{manifest.created_at:%Y-%m-%d %H:%M}",
            "Default": dial_words(manifest.bias_removal.default, manifest.popularity.default),
            "Query": ", ".join(feature.name for feature in manifest.query_features) or "a vector",
        }  # fmt: skip
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(fact))}</td></tr>" for name, fact in facts.items())
        try:
            figure = picture(self.plot_dial(), f"The dial of {manifest.name}")
        except (ValueError, ImportError):  # no curve, or no matplotlib
            figure = ""
        return f"<h4>{html.escape(manifest.name)}</h4><table>{cells}</table>{figure}"


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON can represent, sets to lists; raises InvalidRequestError."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    try:
        return plain([*value] if isinstance(value, set) else value)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(str(error)) from error


def _validate(model: type[Options], values: Mapping[str, Any]) -> Options:
    """Validate a query as the service does.

    Raises:
        InvalidRequestError: a value is wrong.
    """
    try:
        return model.model_validate(_plain(values))
    except ValidationError as error:
        field, message = explain(error, model, ELSEWHERE)
        raise InvalidRequestError(": ".join(filter(None, (field, message))), field=field) from None


def _table(leading: Sequence[Mapping[str, Any]], answers: Sequence[Retrieval], label_id: str) -> pa.Table:
    """Return answers as one table, in the order of the queries; warn of ids that no label has."""
    unknown = {name: sum(answer.unknown[name] for answer in answers) for name in answers[0].unknown}
    if any(unknown.values()):
        counts = ", ".join(f"{count:,} in {name}" for name, count in unknown.items() if count)
        warn(f"ids that this release does not have were left out: {counts}", stacklevel=3)
    rows = [*_rows(leading, answers, label_id)]
    fixed = [*(leading[0] if leading else ()), "rank", label_id, "score", "bucket"]
    names = dict.fromkeys([*fixed, *(name for row in rows for name in row)])
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def _rows(
    leading: Sequence[Mapping[str, Any]], answers: Sequence[Retrieval], label_id: str
) -> Iterator[dict[str, Any]]:
    results = [result for answer in answers for result in answer.results]
    for first, result in zip(leading, results, strict=True):
        for rank, label in enumerate(result["labels"], start=1):
            extras = {name: label[name] for name in ("propensity", "explanation") if name in label}
            fixed = {**first, "rank": rank, label_id: label["id"], "score": label["score"], "bucket": label["bucket"]}
            yield {**fixed, **_rename_clashes(label["display"], fixed), **extras}


def _rename_clashes(display: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return display columns; one with the name of another column gets `label_` before it."""
    return {f"label_{name}" if name in fixed else name: value for name, value in display.items()}
