"""Where settings come from, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtail.serving import Settings
from longtail.serving.settings import no_settings

KEY = "a-key-of-this-service"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_arguments_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(
        tmp_path / "s.toml", f'port = 1\nmax_k = 2\nqueue_limit = 3000\napi_keys = ["{KEY}"]\nhost = "::1"\n'
    )
    monkeypatch.setenv("LONGTAIL_PORT", "9001")
    monkeypatch.setenv("LONGTAIL_MAX_K", "9002")
    settings = Settings(releases=tmp_path, port=9003, settings_file=file)
    assert (settings.port, settings.max_k, settings.queue_limit) == (9003, 9002, 3000)
    assert (settings.read_keys()[0], settings.host, settings.max_total_k) == ([KEY], "::1", 25_600)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_k = ", r"s\.toml: expected TOML, found "),
        ("k = 1", r's\.toml: expected names of settings, such as max_k, found "k"'),
        ('settings_file = "t.toml"', r's\.toml: expected names of settings, such as max_k, found "settings_file"'),
        ("max_k = 0", "greater than or equal to 1"),
        ("[max_k]\nx = 1", "valid integer"),
        (f"[groups]\ncountry = {[str(value) for value in range(51)]}", "at most 50 items"),
        ('[groups]\ncountry = ["DE", "other"]', "'other' is not allowed because unlisted values count as 'other' and"),
        ('[groups]\ncountry = ["missing"]', "'missing' is not allowed because unlisted values count as 'other' and"),
        ('api_keys = ["short"]', "expected keys of at least 16 characters"),
        ("queue_limit = 3", "expected queue_limit >= max_queries"),
        ('refresh = "hourly"', "expected a span such as '90m', '12h', '30d' or '4w', received 'hourly'"),
        ('refresh = "0h"', "expected a span such as '90m', '12h', '30d' or '4w', received '0h'"),
        ('refresh = "1h"\nrecord_features = false', "record_features = false is not allowed with refresh"),
        (
            'refresh = "1h"\nevents = "kafka://localhost:9092/events"',
            "expected events in a folder with refresh",
        ),
        ("\udcff", "expected TOML, found 'utf-8' codec"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "s.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        Settings(releases=tmp_path, settings_file=file)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("LONGTAIL_MAXK", "MAX_K"), ("longtail_api_key", "API_KEYS"), ("LONGTAIL_QUEUE_LIMITS", "QUEUE_LIMIT")],
)
def test_a_misspelt_variable_is_refused(name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    with pytest.raises(ValueError, match=f"^{name}: expected the name of a setting, such as LONGTAIL_{meant}$"):
        Settings(releases=tmp_path)


def test_kubernetes_variables_are_ignored_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_kubernetes = ["LONGTAIL_PORT_8000_TCP_ADDR", "LONGTAIL_SERVICE_HOST", "LONGTAIL_SERVICE_PORT"]
    for name in of_kubernetes:
        monkeypatch.setenv(name, "10.0.0.1")
    Settings(releases=tmp_path)
    assert no_settings([*of_kubernetes, "LONGTAIL_MAX_K", "longtail_port", "LONG_TAIL", "PATH"]) == of_kubernetes


def test_groups_are_json_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAIL_GROUPS", '{"country": ["DE", "FR"], "history": []}')
    assert Settings(releases=tmp_path).groups == {"country": ("DE", "FR"), "history": ()}
    monkeypatch.setenv("LONGTAIL_GROUPS", "country")
    with pytest.raises(ValueError, match="expected JSON such as"):
        Settings(releases=tmp_path)
