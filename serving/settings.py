"""Define the settings of a service."""

from __future__ import annotations

import ipaddress
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from longtail.bundle.dates import span_seconds
from longtail.bundle.errors import ObjectStoreError, describe
from longtail.bundle.objects import check_scheme, is_url, local_path
from longtail.bundle.one_line import one_line
from longtail.bundle.remote import copies_path
from longtail.bundle.validation import describe_problems, did_you_mean, nearest
from longtail.index import MilvusServer, SpecError
from longtail.state import Postgres, StateLocation

MOST_QUERIES = 1024
"""Bound on queries, events or labels of a request during parsing, before `max_queries` is checked."""
OTHER_VALUE, NO_VALUE = "other", "missing"
"""Values under which `groups` counts queries with an unlisted value, and queries without a value."""
_SHORTEST_KEY = 16
_FILE, _PREFIX = "settings_file", "LONGTAIL_"
MILVUS, MILVUS_TOKEN = "LONGTAIL_MILVUS", "LONGTAIL_MILVUS_TOKEN"
"""Variables that name the Milvus server, for this service and for `longtail-index`."""
READ_ELSEWHERE = frozenset({"cache", "milvus", "milvus_token"})
"""Variables LONGTAIL_… that are no settings, and that bundles and indexes read."""
_MILVUS_SECONDS, _LOADING_SECONDS = 1.0, 5.0
"""Time that a search waits for Milvus, and a release's load; later loads follow, while the present release serves."""
_LABELS_PER_QUERY = 100
"""Labels that a request may have for each of the most queries, in total."""
_ALIKE = 0.8
"""difflib ratio above which an unknown variable counts as a misspelt setting."""


def _split_at_commas(keys: object) -> object:
    """Split a string of keys from the environment at commas; return other values unchanged."""
    return [key for part in keys.split(",") if (key := part.strip())] if isinstance(keys, str) else keys


def _read_releases(value: object) -> object:
    """Read a URL or a path; return other values unchanged."""
    if isinstance(value, str) and is_url(value):
        try:
            check_scheme(value)
        except ObjectStoreError as error:
            raise ValueError(str(error)) from None
        return value.rstrip("/")
    return local_path(value) if isinstance(value, str) else value


def _read_span(value: object) -> object:
    """Convert a duration such as `1h` to seconds."""
    return span_seconds(value) if isinstance(value, str) else value


def _read_groups(value: object) -> object:
    """Parse JSON from the environment; return other values unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError('expected JSON such as {"country": ["NO", "SE"], "history": []}') from None


def _refuse_own_values(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a group; raises ValueError for a reserved value."""
    for value in (OTHER_VALUE, NO_VALUE):
        if value in values:
            raise ValueError(
                f"{value!r} is not allowed because unlisted values count as {OTHER_VALUE!r} and absent ones as "
                f"{NO_VALUE!r}; use values other than these"
            )
    return values


def _read_database(value: object) -> object:
    return Postgres.parse(value) if isinstance(value, str) else value


KeyList = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_at_commas)]
ReleasesSource = Annotated[Path | str, BeforeValidator(_read_releases)]


class Settings(BaseSettings):
    """Settings of one service.

    Arguments take precedence over LONGTAIL_… in the environment, then `settings_file`, then these defaults.

    Raises:
        ValueError: settings contradict each other, a key has less than 16 characters, an address other than loopback
            has no keys, `settings_file` is not TOML or has an unknown key, or a variable LONGTAIL_… seems to be a
            misspelt setting.
        OSError: `settings_file` or a file of keys cannot be read.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, hide_input_in_errors=True)

    releases: ReleasesSource
    """Directory that `longtail-index` publishes to, or its URL, such as s3://bucket/releases; the service serves the
    published release."""
    state: Path | None = None
    """Directory of data that must outlive the process: added and hidden labels, events, live figures; by default .state
    in the directory of releases."""
    database_url: Annotated[InstanceOf[Postgres], BeforeValidator(_read_database)] | None = None
    """Database that replicas share, `postgresql://USER@HOST/DATABASE?schema=NAME`: added and hidden labels, and the
    keys of answer ids, are in its schema, by default `longtail`; the rest is in `state`, each replica's own."""
    settings_file: Path | None = None
    """A TOML file with settings by these names."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs API keys, or `insecure`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind; 0 lets the system choose one."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that share the port, the mapped index and the state."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device for FAISS searches; a GPU runs one search at a time."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """Interval for reading CURRENT; loading of a published release starts at most this much later."""
    keep_releases: int = Field(default=1, ge=0)
    """Number of previous releases that stay loaded, for requests that name them in `release`."""
    refresh: Annotated[float, BeforeValidator(_read_span)] | None = None
    """Interval for refreshing the forecast of popularity, co-occurrence and the prior `exposed` from the service's own
    events, such as `1h`; set it for one replica alone. By default never."""
    groups: Annotated[
        dict[str, Annotated[tuple[str, ...], Field(max_length=50), AfterValidator(_refuse_own_values)]],
        NoDecode,
        BeforeValidator(_read_groups),
    ] = Field(default={}, max_length=10)
    """Query features by which `longtail_group_…` of /metrics counts answers, each with the values to distinguish; JSON
    in the environment, `{"country": ["NO", "SE"], "history": []}`. An empty list distinguishes only whether a query has
    the feature. The values `other` and `missing` are reserved for unlisted and absent values."""
    mirror_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the queries that a staged release gets as shadow traffic."""

    api_keys: KeyList = ()
    """Keys of clients. Comma-separated in the environment."""
    api_keys_file: Path | None = None
    """File with further API keys, one per line; reloaded on SIGHUP."""
    admin_keys: KeyList = ()
    """Keys of clients that may also change labels and reload releases."""
    admin_keys_file: Path | None = None
    """File with further admin keys, one per line; reloaded on SIGHUP."""
    insecure: bool = False
    """Bind beyond loopback without keys, for a gateway that checks them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    search_threads: int = Field(default=1, ge=1)
    """Concurrent searches, one core each. More threads than cores (less one for the event loop) only add waiting. If
    Milvus holds the index, threads mostly wait, and ten or more are useful."""
    queue_limit: int = Field(default=512, ge=1)
    """Most queries that wait for a search; a request beyond gets 429."""
    request_seconds: float = Field(default=5.0, gt=0)
    """Time after which a request without an answer gets 503, and one with an incomplete head or body 408; a connection
    that has sent nothing until then is closed."""
    drain_seconds: float = Field(default=1.0, ge=0)
    """Time after SIGTERM during which requests are accepted while /readyz returns 503, so that a load balancer can
    react."""

    max_body_bytes: int = Field(default=1 << 20, ge=1)
    """Longest request body that is read; a longer one gets 413 and is never held in memory."""
    max_queries: int = Field(default=256, ge=1, le=MOST_QUERIES)
    """Most queries, label ids, labels or events in one request."""
    max_k: int = Field(default=1000, ge=1)
    """Largest k of a query."""
    max_new_labels: int = Field(default=100_000, ge=0)
    """Most labels added while serving; a new build includes them in the index."""
    events: Path | str | None = None
    """Destination of feedback and other events: a folder, or kafka://HOST:PORT/TOPIC; by default `events` in the state
    directory."""
    events_days: float = Field(default=7.0, gt=0)
    """Age at which a folder deletes events. The latest silence of more than a day counts from half a day after the next
    event, because a clock that jumps ahead looks the same: while no events come, it deletes none."""
    events_bytes: int = Field(default=10 << 30, ge=1)
    """Largest size of the events in a folder; the oldest are deleted first."""
    answer_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the answers that are recorded as events, from which the prior `exposed` follows. Answers that an
    experiment counts are always recorded."""
    record_features: bool = True
    """Keep the features of queries in events, for `export-feedback`."""

    tracing: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests without a caller's trace that get an OpenTelemetry span, configured by the OTEL_…
    variables; sampled traces of callers are always continued."""
    access_log: bool = False
    """Log a line for every request; failures of the service (500) are always logged."""

    # Constants, because changing them has never been useful.
    keep_alive_seconds: ClassVar[int] = 5
    """Time that an idle connection stays open after an answer; a gateway's must be shorter."""
    shutdown_seconds: ClassVar[int] = 30
    """Time for running requests to finish after the drain; none takes longer than `request_seconds`."""
    max_batch: ClassVar[int] = 64
    """Most queries that share a search; a larger request is searched alone."""
    max_answer_bytes: ClassVar[int] = 1 << 24
    """Largest size of an answer; requests for more, such as many labels with a long `display`, get 422."""
    max_features_bytes: ClassVar[int] = 1 << 17
    """Largest size of one query's recorded features, as JSON."""
    __repr__ = one_line

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings, in order of precedence; raises ValueError or OSError."""
        # First, because a misspelt LONGTAIL_API_KEYS would leave the service without keys.
        _refuse_misspelt()
        file = init_settings().get(_FILE) or os.environ.get((_PREFIX + _FILE).upper())
        return init_settings, env_settings, InitSettingsSource(settings_cls, _in_file(file, cls) if file else {})

    @property
    def releases_directory(self) -> Path:
        """Get the directory of the releases or their copies."""
        releases = self.releases
        return releases if isinstance(releases, Path) else copies_path(releases.rstrip("/"))

    @property
    def state_directory(self) -> Path:
        """Return the directory of state in files."""
        return self.releases_directory / ".state" if self.state is None else self.state

    @property
    def refresh_problem(self) -> Path:
        """Return the file that says why nothing is refreshed; absent if the last refresh succeeded."""
        return self.state_directory / "refresh_problem.txt"

    @property
    def milvus_server(self) -> MilvusServer | None:
        """Return the Milvus server that LONGTAIL_MILVUS and LONGTAIL_MILVUS_TOKEN name, if any."""
        if not (uri := os.environ.get(MILVUS)):
            return None
        return MilvusServer(uri, os.environ.get(MILVUS_TOKEN, ""), _MILVUS_SECONDS, _LOADING_SECONDS)

    @property
    def max_total_k(self) -> int:
        """Get the largest sum of k of a request."""
        return max(self.max_k, _LABELS_PER_QUERY * self.max_queries)

    @property
    def state_location(self) -> StateLocation:
        """Get where label changes and signing keys are."""
        return self.database_url or self.state_directory

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        try:
            self.milvus_server  # noqa: B018
        except SpecError as error:
            raise ValueError(str(error)) from None
        if self.state is None and isinstance(self.releases, str):
            raise ValueError(
                "expected a directory for state, which must outlive the cache of releases at a URL, received none: use "
                "--state or LONGTAIL_STATE, such as /var/lib/longtail"
            )
        if self.refresh is not None and str(self.events).startswith("kafka:"):
            raise ValueError(
                "expected events in a folder with refresh, received a topic: export them, and run "
                "`longtail-index refresh RELEASES LOG --publish`"
            )
        if self.refresh is not None and not self.record_features:
            raise ValueError(
                "record_features = false is not allowed with refresh, because repeated events of a client are "
                "recognised by their features; use record_features = true"
            )
        if self.queue_limit < self.max_queries:
            raise ValueError(
                f"expected queue_limit >= max_queries, so that every request fits the queue, "
                f"received {self.queue_limit} and {self.max_queries}"
            )
        self.read_keys()
        return self

    def read_keys(self) -> tuple[list[str], list[str]]:
        """Read API and admin keys from settings and files.

        Raises:
            ValueError: a key is too short, a file is not UTF-8, or an address that others can reach has no key.
            OSError: a file cannot be read.
        """
        asking, changing = (
            _join_keys(self.api_keys, self.api_keys_file),
            _join_keys(self.admin_keys, self.admin_keys_file),
        )
        for name, keys in (("api_keys", asking), ("admin_keys", changing)):
            if any(len(key) < _SHORTEST_KEY for key in keys):
                raise ValueError(
                    f"{name}: expected keys of at least {_SHORTEST_KEY} characters, received a shorter one"
                )
        if not (self.insecure or is_loopback(self.host) or asking):
            raise ValueError(
                f"expected API keys for the address {self.host}, which others can reach, received none: set "
                "LONGTAIL_API_KEYS or LONGTAIL_API_KEYS_FILE, or LONGTAIL_INSECURE=true behind a gateway that checks "
                "keys"
            )
        return asking, changing


def explain(
    error: ValidationError, model: type[BaseModel] | None = None, elsewhere: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    """Return the location and the message of pydantic's first error; no location if several values contradict.

    No key is shown.

    Args:
        model: what refused; settings by default.
        elsewhere: keys of the model by what other libraries call them.
    """
    first = describe_problems(error.errors(include_url=False)[:1], model or Settings, elsewhere)[0]
    field = ".".join(part[:64] for part in first.path.split(".")) or None
    if not first.has_value or "keys" in first.path:
        return field, first.message
    return field, f"{first.message}, received {describe(first.received)}"


def no_settings(environment: Iterable[str]) -> list[str]:
    """List variables LONGTAIL_… that are not settings; Kubernetes sets such variables for a service of that name."""
    return sorted(
        name
        for name in environment
        if name.upper().startswith(_PREFIX)
        and name[len(_PREFIX) :].lower() not in Settings.model_fields.keys() | READ_ELSEWHERE
    )


def _refuse_misspelt() -> None:
    for name in no_settings(os.environ):
        near = nearest(name[len(_PREFIX) :].lower(), Settings.model_fields, _ALIKE)
        if near is not None:
            raise ValueError(f"{name}: expected the name of a setting, such as {_PREFIX}{near.upper()}")


def _in_file(file: str | Path, settings: type[Settings]) -> dict[str, Any]:
    try:
        settings_in_file = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: expected TOML, found {error}") from None
    for name in settings_in_file:
        if name not in settings.model_fields or name == _FILE:
            hint = did_you_mean(name, settings.model_fields)
            raise ValueError(f"{file}: expected names of settings, such as max_k, found {describe(name)}{hint}")
    return settings_in_file


def _join_keys(keys: tuple[SecretStr, ...], file: Path | None) -> list[str]:
    try:
        in_file = [] if file is None else file.read_text(encoding="utf-8").split()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: expected keys in UTF-8, found other bytes") from None
    return [*(key.get_secret_value() for key in keys), *in_file]


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
