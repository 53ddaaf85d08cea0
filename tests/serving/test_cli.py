import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longtail.serving import Settings, cli


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What would have been served."""
    runs: list[Settings] = []
    monkeypatch.setattr(cli.logs, "configure", lambda *_: None)
    monkeypatch.setattr(cli, "hold_hangups", lambda: None)
    monkeypatch.setattr(cli, "serve", lambda settings, *_: runs.append(settings))
    return runs


def error_of(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    return re.sub(r"[^\w/.:,<>='-]+", " ", result.output)


def test_arguments_come_before_the_environment_and_that_before_defaults(
    tmp_path: Path, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGTAIL_PORT", "9001")
    monkeypatch.setenv("LONGTAIL_MAX_K", "50")
    assert CliRunner().invoke(cli.app, ["run", str(tmp_path), "--port", "9002"]).exit_code == 0
    (settings,) = served
    assert (settings.releases, settings.port, settings.max_k) == (tmp_path, 9002, 50)
    assert (settings.host, settings.max_queries, settings.max_body_bytes) == ("127.0.0.1", 256, 1_048_576)


def test_a_file_of_settings_comes_after_both(
    tmp_path: Path, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGTAIL_MAX_K", "50")
    (tmp_path / "s.toml").write_text("port = 9001\nmax_k = 60\nmax_total_k = 70\n")
    arguments = ["run", str(tmp_path), "--port", "9002", "--settings", str(tmp_path / "s.toml")]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    (settings,) = served
    assert (settings.port, settings.max_k, settings.max_total_k) == (9002, 50, 70)


def test_a_wrong_file_of_settings_is_refused_in_one_line(tmp_path: Path, served: list[Settings]) -> None:
    (tmp_path / "s.toml").write_text("max_kk = 60\n")
    said = error_of("run", str(tmp_path), "--settings", str(tmp_path / "s.toml"))
    assert "s.toml: expected names of settings, such as max_k, found max_kk" in said
    assert not served


def test_a_directory_that_is_not_there(tmp_path: Path, served: list[Settings]) -> None:
    said = error_of("run", str(tmp_path / "typo"))
    assert "expected a directory that longtail-index publishes to, found none at" in said
    assert not served


def test_a_setting_out_of_range_names_it_and_its_variable(
    tmp_path: Path, served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGTAIL_MAX_K", "0")
    assert "max_k LONGTAIL_MAX_K : Input should be greater than or equal to 1, received 0" in error_of(
        "run", str(tmp_path)
    )
    assert not served


def test_an_unknown_log_level(tmp_path: Path, served: list[Settings]) -> None:
    message = error_of("run", str(tmp_path), "--log-level", "loud")
    assert "'loud' is not one of 'debug', 'info', 'warning', 'error'" in message
    assert not served
