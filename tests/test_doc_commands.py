"""Commands and requests on every page would be accepted: options and arguments parse, bodies validate, files exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import BaseModel, ValidationError
from typer.main import get_command

from longtail.index.cli import app as index_app
from longtail.serving.cli import app as serve_app
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from longtail.serving.http.schemas import labels, monitoring, retrieval
from longtail.trainer.audit.cli import app as audit_app
from longtail.trainer.cli import app as train_app
from longtail.trainer.config import Recipe
from tests.pages import ROOT, blocks
from tests.test_docs import PROJECT, targets, tracked

PROGRAMS = {
    "longtail-train": train_app, "longtail-audit": audit_app, "longtail-index": index_app, "longtail-serve": serve_app,
}  # fmt: skip
OTHER_PROGRAMS = {
    "cat", "cd", "cp", "docker", "echo", "git", "head", "kafka-topics.sh", "kubectl", "pre-commit", "source", "sqlite3",
    "tar", "$EDITOR",
}  # fmt: skip
OPENAPI = json.loads((ROOT / "serving/openapi.json").read_text())
BODIES = vars(labels) | vars(monitoring) | vars(retrieval)
ANSWER_KEYS = {key for schema in OPENAPI["components"]["schemas"].values() for key in schema.get("properties", ())}
PAGES = [path for path in tracked(".md") if not path.name.startswith("CHANGELOG")]
FENCE = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$")


def statements(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell text, without variables set before and redirections after it."""
    text = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", text.replace("\\\n", " "))
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#\s.*$", "", text), posix=True, punctuation_chars="\n;|&>")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not set(word) <= set("\n;|&"):
            words.append(word)
            continue
        words = words[: words.index(">")] if ">" in words else words
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words and words[0] != "export":
            yield words
        words = []


def commands(text: str) -> Iterator[tuple[bool, list[str]]]:
    """The commands of a page's blocks, and those in its sentences, which may lack arguments: (is_complete, words)."""
    for _, language, body in FENCE.findall(text):
        if language in ("console", "text"):
            body = "".join(re.findall(r"(?m)^\$ ((?:.*\\\n)*.*\n)", body))
        if language in ("sh", "bash", "console", "text"):
            for words in statements(body):
                yield True, words
    starts = "|".join([*PROGRAMS, "make(?! -)", "pip", "pipx", "uv", "python", "curl", "pytest"])
    for span in re.findall(rf"`((?:[A-Z_]+=\S+ )?(?:{starts})\s[^`]+)`", FENCE.sub("", text)):
        for words in statements(re.sub(r"\s+", " ", span)):
            yield False, words


def check_options(program: str, words: list[str], *, is_complete: bool) -> None:
    command: Any = get_command(PROGRAMS[program])
    if words == ["--version"]:
        return
    if hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    if is_complete:
        if command.name == "check":
            Path(words[-1]).mkdir(parents=True, exist_ok=True)  # its release has to exist
        command.make_context(program, words)
    option_names = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= option_names


def check_request(words: list[str]) -> None:
    method, body, url, headers, options = "", None, "", [], iter(words)
    for word in options:
        if word == "-X":
            method = next(options)
        elif word == "-H":
            headers.append(next(options).lower())
        elif word == "-d":
            body = next(options)
        elif not word.startswith("-"):
            url = word
    parts = urlsplit(url if "//" in url else f"//{url}")
    (operations,) = (
        operations
        for path, operations in OPENAPI["paths"].items()
        if re.fullmatch(re.sub(r"{\w+}", r"(?!delete|restore)[^/]+", path), parts.path)
    )
    operation = operations[(method or ("GET" if body is None else "POST")).lower()]
    assert set(parse_qs(parts.query)) <= {parameter["name"] for parameter in operation.get("parameters", ())}
    if body is not None:
        assert "content-type: application/json" in headers
        schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        BODIES[schema.rpartition("/")[2]].model_validate_json(body)


def check_command(words: list[str], *, is_complete: bool) -> None:
    program, *words = words
    program = re.sub(r"^(?:\.venv[\w-]*/bin/)?(python|pip)3?$", r"\1", program)
    if program in PROGRAMS:
        check_options(program, words, is_complete=is_complete)
    elif program == "curl":
        check_request(words)
    elif program == "make":
        variables = set(re.findall(r"[A-Z]\w+", (ROOT / "Makefile").read_text()))
        assert {word.partition("=")[0] for word in words if "/" not in word} <= targets() | variables
    elif program in ("pip", "pipx", "uv"):
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
        assert set(",".join(extras).split(",")) <= {"", *PROJECT["optional-dependencies"]}
    elif program == "pytest" or words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    elif program == "python":
        module = find_spec(words[1]) if words[0] == "-m" else None
        package = find_spec(f"{words[1]}.__main__") if module and module.submodule_search_locations else module
        if words[0] == "-m" and package is None:  # it has a commit: tests/benchmarks/test_commands.py
            assert words[1].startswith("benchmarks.")
            return
        source = Path(str(package.origin)) if package else ROOT / words[0]
        for option in re.findall(r" --([\w-]+)", " ".join(words)):
            assert re.search(rf"\b{option.replace('-', '[-_]')}\b", source.read_text()), option
    elif "/" in program:
        assert (ROOT / program).exists()
    else:
        assert program in OTHER_PROGRAMS, program


def check_json(text: str) -> None:
    """Check a request, or some options of one."""
    values = json.loads(text)
    candidates: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (retrieval.RetrieveRequest, {"queries": [{"features": {}} | values]}),
        (retrieval.RetrieveRequest, {"queries": [{"features": {}}]} | values),
        (retrieval.SimilarRequest, {"id": "p7"} | values),
        (retrieval.QueriesRequest, {"id": "p7"} | values),
    ]
    errors = []
    for model, body in candidates:
        try:
            model.model_validate_json(json.dumps(body))
        except ValidationError as error:
            errors.append(error)
    of_request = {key for model in (RetrieveQuery, SimilarQuery) for key in model.model_fields}
    assert len(errors) < len(candidates) or (not of_request & {*values} and {*values} <= ANSWER_KEYS), errors[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_requests_of_a_page_would_be_accepted(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    checks = [(words, partial(check_command, words, is_complete=is_complete)) for is_complete, words in commands(text)]
    if path.parent in (ROOT, ROOT / "docs"):
        json_texts = [
            body for _, language, body in FENCE.findall(text) if language == "json" and body.startswith('{"queries"')
        ]
        json_texts += [f"{{{option}}}" for option in re.findall(r'`("\w+": (?!\[?[A-Z])[^`…]+)`', FENCE.sub("", text))]
        checks += [([value], partial(check_json, value)) for value in json_texts]
    wrong = []
    for words, check in checks:
        try:
            check()
        except Exception as error:
            wrong.append(f"{shlex.join(words)}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


def merge(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The recipe `tree` with the tables and keys of `other` in place of its own."""
    return tree | {
        key: merge(tree[key], value) if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
        for key, value in other.items()
    }


@pytest.mark.parametrize("path", [path for path in PAGES if path.name != "extending.md"], ids=lambda path: path.stem)
def test_parts_of_recipes_on_a_page_are_valid_in_a_recipe(path: Path) -> None:
    """Of extending.md, whose rows have to be registered, tests/trainer checks each."""
    (recipe,) = blocks("toml", (ROOT / "README.md").read_text())
    for text in blocks("toml", path.read_text()):
        part = tomllib.loads(text)
        if {*part} & {*Recipe.model_fields}:
            label_id = part.get("data", {}).get("label_id", "product_id")
            Recipe.model_validate(merge(tomllib.loads(recipe.replace("product_id", label_id)), part))


def test_pages_have_commands() -> None:
    assert sum(is_complete for path in PAGES for is_complete, _ in commands(path.read_text())) > 150
