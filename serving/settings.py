"""Everything an operator can set, read when the process starts."""

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
from longtail.bundle.errors import StorageError, describe
from longtail.bundle.objects import check_scheme, is_url, local_path
from longtail.bundle.remote import copies_of
from longtail.bundle.validation import did_you_mean, nearest, refused
from longtail.index import MilvusServer, SpecError
from longtail.state import Place, Postgres

MOST_QUERIES = 1024
"""Queries, events or labels of one request that are read before `max_queries` is looked at."""
OTHER_VALUE, NO_VALUE = "other", "missing"
"""Values of `groups` that the service counts itself: of queries with a value that is not listed, and without one."""
_SHORTEST_KEY = 16
_FILE, _PREFIX = "settings_file", "LONGTAIL_"
_LOADING_SECONDS = 5.0
"""That a service waits for Milvus to load a release; it is tried again, and what is served goes on meanwhile."""
_ALIKE = 0.8
"""Of difflib's ratio: a variable nearer to a setting's name is taken for that name, misspelt."""


def _split_at_commas(keys: object) -> object:
    """Split a string of keys from the environment at its commas; return anything else as it is."""
    return [key for part in keys.split(",") if (key := part.strip())] if isinstance(keys, str) else keys


def _read_releases(given: object) -> object:
    """Return a URL without a slash at its end, or a path; anything else as it is."""
    if isinstance(given, str) and is_url(given):
        try:
            check_scheme(given)
        except StorageError as error:
            raise ValueError(str(error)) from None
        return given.rstrip("/")
    return local_path(given) if isinstance(given, str) else given


def _read_span(given: object) -> object:
    """Return the seconds of a span such as `1h`."""
    return span_seconds(given) if isinstance(given, str) else given


def _read_groups(given: object) -> object:
    """Return what JSON of the environment says."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        raise ValueError('expected JSON such as {"country": ["DE", "FR"], "history": []}') from None


def _refuse_own_values(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a group; raises ValueError for one that the service counts itself."""
    for value in (OTHER_VALUE, NO_VALUE):
        if value in values:
            raise ValueError(
                f"{value!r} is not allowed because unlisted values count as {OTHER_VALUE!r} and absent ones as "
                f"{NO_VALUE!r}; use values other than these"
            )
    return values


def _read_database(given: object) -> object:
    return Postgres.parse(given) if isinstance(given, str) else given


KeyList = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_at_commas)]
ReleasesPlace = Annotated[Path | str, BeforeValidator(_read_releases)]


class Settings(BaseSettings):
    """Settings of one service: arguments first, then LONGTAIL_… in the environment, then `settings_file`, then these
    defaults.

    Raises:
        ValueError: settings that contradict each other, a key shorter than 16 characters, an address other than
            loopback without keys, a `settings_file` that is not TOML or names what is no setting, or a variable
            LONGTAIL_… that reads like a setting and is none.
        OSError: one that cannot be read, or a file of keys.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, hide_input_in_errors=True)

    releases: ReleasesPlace
    """Directory that `longtail-index` publishes to, or its URL, such as s3://bucket/releases; what is published there
    is served."""
    state: Path | None = None
    """Directory of what must outlive the process: added and hidden labels, events, live figures; by default .state in
    the directory of releases."""
    database_url: Annotated[InstanceOf[Postgres], BeforeValidator(_read_database)] | None = None
    """Database that replicas share, `postgresql://USER@HOST/DATABASE?schema=NAME`: added and hidden labels, and the
    keys of answer ids, are in its schema, by default `longtail`; the rest is in `state`, each replica's own."""
    cache: Path | None = None
    """Directory of what is downloaded from URLs, of this host alone; by default `longtail` in the user's cache
    directory. All of it may be deleted while no service runs."""
    milvus: str | None = None
    """Address of the Milvus server, http://HOST:PORT/DATABASE, that holds the rows of releases built with it."""
    milvus_token: SecretStr | None = None
    """USER:PASSWORD or a key, where it asks for one."""
    settings_file: Path | None = None
    """A TOML file of settings by these names."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs API keys, or `insecure`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind; 0 lets the system choose one."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that share the port, the mapped index and the state."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where FAISS searches; on a GPU one search at a time."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """How often CURRENT is read; a published release is loaded at most this much later."""
    keep_releases: int = Field(default=1, ge=0)
    """Releases before the one served that stay loaded, for requests that name them in `release`."""
    refresh_prior: Annotated[float, BeforeValidator(_read_span)] | None = None
    """How often the forecast of popularity is refreshed from the service's own events, such as `1h`; of replicas, by
    one of them. By default never."""
    groups: Annotated[
        dict[str, Annotated[tuple[str, ...], Field(max_length=50), AfterValidator(_refuse_own_values)]],
        NoDecode,
        BeforeValidator(_read_groups),
    ] = Field(default={}, max_length=10)
    """Query features that `longtail_group_…` of /metrics counts answers by, each with the values to tell apart; JSON in
    the environment, `{"country": ["DE", "FR"], "history": []}`. Without values: whether a query has the feature. The
    values `other` and `missing` are refused, as unlisted and absent ones count so."""
    mirror_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the queries that a staged release is asked, too, unseen."""

    api_keys: KeyList = ()
    """Keys that may ask. Comma-separated in the environment."""
    api_keys_file: Path | None = None
    """More of them, one a line; read again on SIGHUP."""
    admin_keys: KeyList = ()
    """Keys that may also change labels and reload."""
    admin_keys_file: Path | None = None
    """More of them, one a line; read again on SIGHUP."""
    insecure: bool = False
    """Bind beyond loopback without keys, for a gateway that checks them."""

    search_threads: int = Field(default=1, ge=1)
    """Searches at once, one core each; more than there are cores beside the event loop's only adds
    waiting, unless Milvus holds the index: then a thread mostly waits, and ten or more are of use."""
    queue_limit: int = Field(default=512, ge=1)
    """Queries that wait for a search, at most; a request beyond gets 429."""
    request_seconds: float = Field(default=5.0, gt=0)
    """After this a request that has no answer gets 503, and one of whose body only a part has arrived 408."""
    drain_seconds: float = Field(default=1.0, ge=0)
    """After SIGTERM, how long requests are still taken while /readyz says 503, for a load balancer to look away."""

    max_body_bytes: int = Field(default=1 << 20, ge=1)
    """Longest request body that is read; a longer one gets 413 and is never held in memory."""
    max_queries: int = Field(default=256, ge=1, le=MOST_QUERIES)
    """Most queries, label ids, labels or events in one request."""
    max_k: int = Field(default=1000, ge=1)
    """Most labels that one query may ask for."""
    max_total_k: int = Field(default=25_600, ge=1)
    """Most labels that one request may ask for: k summed over its queries, or k for each id it asks about. A single
    query may ask for `max_k` all the same."""
    max_new_labels: int = Field(default=100_000, ge=0)
    """Labels added while serving, at most; a rebuild takes them in."""
    events: Path | str | None = None
    """Where feedback and other events are kept: a folder, or kafka://HOST:PORT/TOPIC; by default `events` in the state
    directory."""
    events_days: float = Field(default=7.0, gt=0)
    """How long a folder keeps events."""
    events_bytes: int = Field(default=10 << 30, ge=1)
    """Bytes of events that a folder keeps, at most; the oldest go first."""
    answer_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the answers that are events, too. Every answer that an experiment counts is one."""
    record_features: bool = True
    """Keep the features of queries in events, for `export-feedback`."""

    tracing: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that send an OpenTelemetry span where their caller sent no trace, as the OTEL_… variables
    say; of callers' traces the sampled ones are continued. Needs the extra `otel`."""
    access_log: bool = False
    """A line for every request; one that breaks the service (500) has one anyway."""

    # Nobody has a reason to turn these.
    batch_window_ms: ClassVar[float] = 2.0
    """Longest wait for company while another search is under way; an idle service never waits."""
    answer_id_hours: ClassVar[float] = 48.0
    """How long an answer's `answer_id` is taken in feedback."""
    milvus_seconds: ClassVar[float] = 1.0
    """Seconds after which a search that Milvus has not answered gets 503."""
    keep_alive_seconds: ClassVar[int] = 5
    """Seconds that an idle connection stays open after an answer; a gateway's must be shorter."""
    shutdown_seconds: ClassVar[int] = 30
    """Seconds that requests under way may take to finish after the drain; none takes longer than `request_seconds`."""
    max_batch: ClassVar[int] = 64
    """Queries that share a search, at most; a larger request is searched alone."""
    max_answer_bytes: ClassVar[int] = 1 << 24
    """Bytes of an answer, at most: labels with a long `display` get 422."""
    max_embed_bytes: ClassVar[int] = 1 << 20
    """Bytes of float32 vectors that one request of /v1/embed may ask for."""
    max_features_bytes: ClassVar[int] = 1 << 17
    """Bytes of one query's features that are recorded, as JSON."""
    organic_k: ClassVar[int] = 20
    """Labels retrieved for an organic interaction, to see whether it would have been answered."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Where settings come from, first the one that wins; raises ValueError and OSError as the class."""
        _refuse_misspelt()
        file = init_settings().get(_FILE) or os.environ.get((_PREFIX + _FILE).upper())
        return init_settings, env_settings, InitSettingsSource(settings_cls, _in_file(file, cls) if file else {})

    @property
    def releases_directory(self) -> Path:
        """Where the releases are that are served; copies, if `releases` is a URL."""
        place = self.releases
        return place if isinstance(place, Path) else copies_of(place.rstrip("/"), self.cache)

    @property
    def state_directory(self) -> Path:
        """Where state is kept that is in files."""
        return self.releases_directory / ".state" if self.state is None else self.state

    @property
    def milvus_server(self) -> MilvusServer | None:
        """The server that these settings name, if any."""
        if self.milvus is None:
            return None
        token = "" if self.milvus_token is None else self.milvus_token.get_secret_value()
        return MilvusServer(self.milvus, token, self.milvus_seconds, _LOADING_SECONDS)

    @property
    def place(self) -> Place:
        """Where label changes and the keys of answer ids are kept."""
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
        if self.refresh_prior is not None and str(self.events).startswith("kafka:"):
            raise ValueError(
                "expected events in a folder with refresh_prior, received a topic: export them, and run "
                "`longtail-index priors RELEASES --events PLACE --publish`"
            )
        if self.refresh_prior is not None and not self.record_features:
            raise ValueError("expected record_features with refresh_prior, so that a client's many events count once")
        if self.queue_limit < self.max_queries:
            raise ValueError(
                f"expected queue_limit >= max_queries, so that every request fits the queue, "
                f"received {self.queue_limit} and {self.max_queries}"
            )
        self.read_keys()
        return self

    def read_keys(self) -> tuple[list[str], list[str]]:
        """Read the keys that may ask, and those that may also change things, from settings and files.

        Raises:
            ValueError: a key that is too short, a file that is not UTF-8, no key for an address that others can reach.
            OSError: a file that cannot be read.
        """
        asking, changing = _keys(self.api_keys, self.api_keys_file), _keys(self.admin_keys, self.admin_keys_file)
        for name, keys in (("api_keys", asking), ("admin_keys", changing)):
            if any(len(key) < _SHORTEST_KEY for key in keys):
                raise ValueError(
                    f"{name}: expected keys of at least {_SHORTEST_KEY} characters, received a shorter one"
                )
        if not (self.insecure or is_loopback(self.host) or asking):
            raise ValueError(
                f"expected API keys for the address {self.host}, which others can reach, received none: set "
                "LONGTAIL_API_KEYS or LONGTAIL_API_KEYS_FILE, or use --insecure behind a gateway that checks keys"
            )
        return asking, changing


def explain(
    error: ValidationError, model: type[BaseModel] | None = None, elsewhere: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    """Say where the first of pydantic's errors is, None if several values do not go together, and what is wrong.

    No key is shown.

    Args:
        model: what refused; settings by default.
        elsewhere: keys of the model by what other libraries call them.
    """
    first = refused(error.errors(include_url=False)[:1], model or Settings, elsewhere)[0]
    where = ".".join(part[:64] for part in first.where.split(".")) or None
    if not first.shown or "keys" in first.where:
        return where, first.wrong
    return where, f"{first.wrong}, received {describe(first.received)}"


def no_settings(environment: Iterable[str]) -> list[str]:
    """Variables LONGTAIL_… that no setting has; Kubernetes makes such ones for a service of that name."""
    return sorted(
        name
        for name in environment
        if name.upper().startswith(_PREFIX) and name[len(_PREFIX) :].lower() not in Settings.model_fields
    )


def _refuse_misspelt() -> None:
    for name in no_settings(os.environ):
        near = nearest(name[len(_PREFIX) :].lower(), Settings.model_fields, _ALIKE)
        if near is not None:
            raise ValueError(f"{name}: expected the name of a setting, such as {_PREFIX}{near.upper()}")


def _in_file(file: str | Path, settings: type[Settings]) -> dict[str, Any]:
    try:
        found = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: expected TOML, found {error}") from None
    for name in found:
        if name not in settings.model_fields or name == _FILE:
            hint = did_you_mean(name, settings.model_fields)
            raise ValueError(f"{file}: expected names of settings, such as max_k, found {describe(name)}{hint}")
    return found


def _keys(given: tuple[SecretStr, ...], file: Path | None) -> list[str]:
    try:
        in_file = [] if file is None else file.read_text(encoding="utf-8").split()
    except UnicodeDecodeError:
        raise ValueError(f"{file}: expected keys in UTF-8, found other bytes") from None
    return [*(key.get_secret_value() for key in given), *in_file]


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
