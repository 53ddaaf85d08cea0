"""How an operator writes settings that are no plain values: keys, places of releases, models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SecretStr
from pydantic_settings import NoDecode

from longtail.bundle.errors import describe
from longtail.bundle.objects import is_url, local_path

DEFAULT_MODEL = "default"
"""What the model of `releases` is called among others."""
_MODEL = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def _split_at_commas(keys: object) -> object:
    """The keys of a string from the environment, which has commas between them; anything else as it is."""
    return [key for part in keys.split(",") if (key := part.strip())] if isinstance(keys, str) else keys


def _read_place(given: object) -> object:
    """A URL without a slash at its end, or a path; anything else as it is."""
    if isinstance(given, str) and is_url(given):
        return given.rstrip("/")
    return local_path(given) if isinstance(given, str) else given


def _read_models(given: object) -> object:
    """Releases by model, of `NAME=RELEASES` (in one string, with commas between them) or of pairs; else as it is."""
    if isinstance(given, str):
        given = [part for one in given.split(",") if (part := one.strip())]
    if isinstance(given, Mapping):
        given = list(given.items())
    if not isinstance(given, list | tuple):
        return given
    models = dict[str, object]()
    for one in given:
        name, releases = one.partition("=")[::2] if isinstance(one, str) else one
        name = str(name).strip()
        if not _MODEL.fullmatch(name) or name == DEFAULT_MODEL:
            raise ValueError(
                f"expected NAME=RELEASES, a name of 1 to 64 of a-z, 0-9, _ and -, no sign first, and not "
                f"{DEFAULT_MODEL}, which is the model of `releases`; received {describe(name)}"
            )
        if name in models:
            raise ValueError(f"expected every model once, received {name} twice")
        if releases in ("", None):
            raise ValueError(f"expected NAME=RELEASES, received no directory of releases for {name}")
        models[name] = releases
    return models


KeyList = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_at_commas)]
ReleasesPlace = Annotated[Path | str, BeforeValidator(_read_place)]
Models = Annotated[dict[str, ReleasesPlace], NoDecode, BeforeValidator(_read_models)]
