"""`--help` shows all that commands say of themselves, and examples in it are commands that would be read."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from longtail.index.cli import app as index_app
from longtail.serving.cli import app as serve_app
from longtail.trainer.audit.cli import app as audit_app
from longtail.trainer.cli import app as train_app

GROUPS = {"longtail-train": train_app, "longtail-index": index_app, "longtail-serve": serve_app}
COMMANDS: dict[str, tuple[typer.Typer, list[str], Any]] = {
    f"{program} {name}": (app, [name], command)
    for program, app in GROUPS.items()
    for name, command in get_command(app).commands.items()
} | {"longtail-audit": (audit_app, [], get_command(audit_app))}
PAGES = pytest.mark.parametrize(("app", "words", "command"), COMMANDS.values(), ids=COMMANDS)


def page(app: typer.Typer, *words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


def bare(text: str) -> str:
    """Text without what wrapping changes."""
    return re.sub(r"\s+", "", text)


@PAGES
def test_help_shows_every_character_of_the_docstring_and_options(
    app: typer.Typer, words: list[str], command: Any
) -> None:
    text_of_page = bare(page(app, *words))
    for text in (command.help, *(parameter.help for parameter in command.params)):
        assert text
        assert bare(text) in text_of_page
    assert "<bool>" not in text_of_page


@PAGES
def test_arguments_are_bare_and_values_in_capitals(app: typer.Typer, words: list[str], command: Any) -> None:
    text = page(app, *words)
    usage, _, options = text.partition("Options:")
    arguments = [
        parameter.metavar + ("..." if parameter.nargs == -1 else "")
        for parameter in command.params
        if parameter.param_type_name == "argument"
    ]
    assert "{" not in usage
    assert usage.splitlines()[0].split("[OPTIONS]")[1].split() == arguments
    assert re.findall("<(?!debug)[^>]*>", options) == []
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.multiple:
            assert re.search(rf"{parameter.opts[0]} \S+ \(repeatable\)", options)


@pytest.mark.parametrize("app", [*GROUPS.values(), audit_app], ids=[*GROUPS, "longtail-audit"])
def test_the_version_is_an_option(app: typer.Typer) -> None:
    assert re.search(r"--version +Show the version and exit\.", page(app))
    assert CliRunner().invoke(app, ["--version"]).output == f"longtail {version('longtail')}\n"


@pytest.mark.parametrize("app", GROUPS.values(), ids=GROUPS)
def test_the_list_of_commands_cuts_no_sentence(app: typer.Typer) -> None:
    text = page(app)
    for name, command in get_command(app).commands.items():
        line = re.search(rf"(?m)^  {name} +(.+)$", text)
        assert line is not None
        assert line[1].endswith(".")
        assert not line[1].endswith("...")
        assert command.help.startswith(line[1].removesuffix("."))


@PAGES
def test_the_command_parses_its_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: typer.Typer, words: list[str], command: Any
) -> None:
    (tmp_path / "releases/shop-2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert command.epilog in page(app, *words)
    program, *arguments = shlex.split(command.epilog.removeprefix("Example: ").split(" > ")[0])
    assert [program, *arguments[: len(words)]] in (name.split() for name in COMMANDS)
    command.make_context(program, arguments[len(words) :])


def test_square_brackets_are_printed() -> None:
    assert "in [tune] for" in page(train_app)


@pytest.mark.parametrize(
    ("app", "arguments", "suggestion"),
    [(train_app, ["fti"], "'fit'"), (train_app, ["fit", "--warmstart", "x"], "--warm-start"),
     (serve_app, ["run", "--hots", "x"], "--host")],
)  # fmt: skip
def test_a_misspelt_command_or_option_gets_the_nearest(app: typer.Typer, arguments: list[str], suggestion: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert suggestion in result.output
