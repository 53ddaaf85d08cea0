"""Check the commands and requests of every page.

Every command parses, and names only options, targets, scripts and tests that exist. Requests by `curl`, JSON bodies of
/v1/retrieve and options in sentences get an answer from a service of the shop. Commands of the pages in `docs/` run,
but for those in `NOT_RUN`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import boto3
import duckdb
import httpx2 as httpx
import pytest
from typer.main import get_command

from longtail.index.cli import app as index_app
from longtail.serving import Settings, create_app
from longtail.serving.cli import app as serve_app
from longtail.trainer.audit.cli import app as audit_app
from longtail.trainer.cli import app as train_app
from longtail.trainer.config import Recipe
from tests.pages import ROOT, blocks, script, typed, typed_lines
from tests.serving.client import open_client
from tests.serving.process import free_port, until
from tests.test_docs import PROJECT, targets, tracked
from tests.trainer.conftest import KERAS_VARIABLES_PREDATE_NUMPY_2

PROGRAMS = {
    "longtail-train": train_app, "longtail-audit": audit_app, "longtail-index": index_app, "longtail-serve": serve_app,
}  # fmt: skip
OTHER_PROGRAMS = {
    "cat", "cd", "cp", "docker", "echo", "git", "head", "kafka-topics.sh", "kubectl", "pre-commit", "source", "sqlite3",
    "tar", "$EDITOR",
}  # fmt: skip
OPENAPI = json.loads((ROOT / "serving/openapi.json").read_text())


def schema_keys(part: str) -> set[str]:
    """Return all keys of the schemas that `requestBody` or `responses` of the operations refer to."""
    schemas, names, keys = OPENAPI["components"]["schemas"], set[str](), set[str]()
    text = json.dumps([operation.get(part) for path in OPENAPI["paths"].values() for operation in path.values()])
    while new_names := {*re.findall(r'"#/components/schemas/(\w+)"', text)} - names:
        names |= new_names
        keys |= {key for name in new_names for key in schemas[name].get("properties", ())}
        text = json.dumps([schemas[name] for name in new_names])
    return keys


ANSWER_KEYS = schema_keys("responses") - schema_keys("requestBody")
PAGES = [path for path in tracked(".md") if not path.name.startswith("CHANGELOG")]
FENCE = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$")
INCLUDED = re.compile(r"(?ms)^<!-- (?:include|api|http): .*?^<!-- end -->$")
ANSWER_ID = "AW3tuwhrl1igygAAAD8A…"
QUICK = (
    "--set", "training.epochs=2", "--set", "training.refit=false", "--set", "model.temperature=0.3",
    "--set", 'evaluation.baselines=["popularity"]', "--set", "evaluation.bias_removal=[0,0.5,1]",
    "--set", 'cooccurrence.kinds=["walk"]',
)  # fmt: skip
NOT_RUN = {
    "git clone": "tests/test_readme.py installs",
    "pip install": "tests/test_readme.py installs",
    "-m venv": "tests/test_readme.py installs",
    "make demo": "downloads MovieLens",
    "longtail-train data": "downloads MovieLens",
    "benchmarks": "downloads data sets, or takes hours",
    "examples/": "TFRS and PyTorch are in environments of their own: tests/tfrs, tests/torch",
    "runs/tfrs": "made with TFRS",
    "runs/torch": "made with PyTorch",
    "run releases/torch": "made with PyTorch",
    "queries.npy": "made with RecBole or RecTools",
    "KERAS_BACKEND=jax": "a GPU",
    "--device gpu": "a GPU",
    "--process": "several hosts: tests/trainer/test_devices.py",
    "postgresql://": "a PostgreSQL server: tests/end_to_end/test_replicas.py",
    "milvus": "a Milvus server: tests/end_to_end/test_milvus.py",
    "SEARCH_THREADS": "a Milvus server",
    "kafka": "a Kafka broker: tests/end_to_end/test_kafka.py",
    "docker": "Docker",
}
"""Commands that hold these words only parse, for this reason."""


def statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell text, without variables and redirections."""
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
    """Yield `is_complete` and the words of each command of a page.

    Commands in sentences may lack arguments, and so are not complete.
    """
    for _, language, body in FENCE.findall(text):
        for words in statements(typed_lines(language, body)):
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


def check_command(words: list[str], *, is_complete: bool) -> None:
    program, *words = words
    program = re.sub(r"^(?:\.venv[\w-]*/bin/)?(python|pip)3?$", r"\1", program)
    if program in PROGRAMS:
        check_options(program, words, is_complete=is_complete)
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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_page_parse(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for is_complete, words in commands(path.read_text()):
        try:
            if words[0] != "curl":
                check_command(words, is_complete=is_complete)
        except Exception as error:
            wrong.append(f"{shlex.join(words)}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


def make_shop(folder: Path) -> None:
    """Copy the shop with README's recipe, and write exports of its tables with bad rows."""
    shutil.copytree(ROOT / "examples/shop", folder / "shop")
    (folder / "shop/recipe.toml").write_text(blocks("toml", (ROOT / "README.md").read_text())[0])
    duckdb.sql(f"COPY (FROM '{folder}/shop/products.parquet') TO '{folder}/products.csv'")
    duckdb.sql(f"""COPY (
        SELECT if(i % 240 = 73, 'undefined', user_id) AS user_id, product_id, if(i % 6, 'view', 'purchase') AS event,
            if(i % 300 = 60, '0000-00-00 00:00:00', clicked_at::TEXT) AS clicked_at, '' AS note
        FROM (SELECT *, row_number() OVER () AS i FROM '{folder}/shop/clicks.parquet')) TO '{folder}/clicks.csv'""")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of the shop's service, with the release of the page of promises."""
    folder, page = tmp_path_factory.mktemp("requests"), (ROOT / "docs/promises.md").read_text()
    make_shop(folder)
    (folder / "shop/priors.toml").write_text(blocks("toml", page)[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for program, *words in statements(blocks("sh", page)[0]):
            if words[0] != "run":
                options = QUICK if words[0] == "fit" else ()
                get_command(PROGRAMS[program]).main([*words[:2], *options, *words[2:]], standalone_mode=False)
    with open_client(create_app(Settings(releases=folder / "releases/shop"))) as opened:
        until(lambda: opened.get("/readyz").status_code == 200)
        yield opened


def curls(text: str) -> Iterator[list[str]]:
    return (words[1:] for _, words in commands(text) if words[0] == "curl")


def json_texts(text: str) -> list[str]:
    """Return bodies of /v1/retrieve, and options in sentences as objects."""
    sentences = FENCE.sub("", text)
    return [
        *(body for _, language, body in FENCE.findall(text) if language == "json" and body.startswith('{"queries"')),
        *(f"{{{option}}}" for option in re.findall(r'`("\w+": (?!\[?[A-Z])[^`…]+)`', sentences)),
        *re.findall(r'`(\{"(?:id|bucket|display)": (?:(?!features)[^`…])+\})`', sentences),
    ]


def send_curl(client: httpx.Client, words: list[str]) -> httpx.Response:
    method, body, url, headers, options = "", None, "", [], iter(words)
    for word in options:
        if word == "-X":
            method = next(options)
        elif word == "-H":
            headers.append(next(options).split(": ", 1))
        elif word == "-d":
            body = next(options)
        elif not word.startswith("-"):
            url = word.removeprefix("localhost:8000")
    return client.request(method or ("GET" if body is None else "POST"), url, content=body, headers=dict(headers))


def send_json(client: httpx.Client, text: str) -> list[httpx.Response]:
    """Send a body, or some options in each body that may have them."""
    values, query = json.loads(text), {"features": {"user_id": "u42"}}
    bodies = [
        ("retrieve", {"queries": [query]} | values), ("retrieve", {"queries": [query | values]}),
        ("retrieve", {"queries": [query | {"at_least": values}]}),
        ("retrieve", {"queries": [query | {"at_least": [values]}]}),
        ("similar", {"id": "p7"} | values), ("queries", {"id": "p7"} | values),
        ("labels", {"labels": [{"id": "p7"} | values]}),
    ]  # fmt: skip
    return [
        client.request("PATCH" if route == "labels" else "POST", f"/v1/{route}", json=body)
        for route, body in bodies[: 1 if "queries" in values else None]
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings(KERAS_VARIABLES_PREDATE_NUMPY_2)
@pytest.mark.parametrize("path", [path for path in PAGES if path.stem != "vectors"], ids=lambda path: path.stem)
def test_requests_of_a_page_are_answered(path: Path, client: httpx.Client) -> None:
    """Send a page's requests; nightly tests run those on staged releases and on vectors."""
    text, wrong = path.read_text(), []
    if ANSWER_ID in text:
        (result,) = client.post("/v1/retrieve", json={"queries": [{"features": {}}]}).json()["results"]
        text = text.replace(ANSWER_ID, result["answer_id"])
    for words in curls(text):
        response = send_curl(client, words)
        if response.status_code != (404 if response.url.path.endswith("/staged") else 200):
            wrong.append(f"{shlex.join(words)}: {response.text}")
    for body in json_texts(text):
        if {*json.loads(body)} <= ANSWER_KEYS:
            continue
        responses = send_json(client, body)
        if all(response.status_code != 200 for response in responses):
            wrong.append(f"{body}: {responses[0].text} {responses[-1].text}")
    assert not wrong, "\n".join(wrong)


def keep_runnable(block: re.Match[str]) -> str:
    indent, language, body = block.groups()
    lines = re.findall(r"(?m)^(?:.*\\\n)*.*\n", body)  # with their continuations
    runnable_lines = [line for line in lines if not any(word in line for word in NOT_RUN)]
    return f"{indent}```{language}\n{''.join(runnable_lines)}{indent}```"


def page_script(path: Path, port: int) -> str:
    """Return a page's commands without `NOT_RUN`, with short trainings and a service."""
    text = INCLUDED.sub("", path.read_text()).replace(f'"answer_id": "{ANSWER_ID}", ', "")
    text = FENCE.sub(keep_runnable, text).replace("/var/lib/longtail", "state")
    if "\ncurl " in text and "longtail-serve run" not in text:
        text = f"```sh\nlongtail-serve run releases/shop &\n```\n\n{text}"
    lines = script(f"```sh\nsource .venv/bin/activate\n```\n\n{text}", port)
    lines = re.sub(r"(?ms)^python - <<.*?^END_OF_FILE\n", "", lines)
    lines = re.sub(r"longtail-train (?:fit|tune) \S+", lambda start: f"{start[0]} {shlex.join(QUICK)}", lines)
    return re.sub(r"longtail-train tune \S+", r"\g<0> --set tune.trials=2", lines)


def count_commands(text: str) -> int:
    return len(re.findall(r"(?m)^(?:\w+=\S+ (?:\\\n *)?)*longtail-", text))


TUTORIALS = {"tutorial_engineer", "tutorial_operator", "tutorial_researcher"}
"""tests/test_tutorials.py runs them, and tests/test_readme.py README."""
RUN = [
    path for path in PAGES
    if path.parent == ROOT / "docs" and path.stem not in TUTORIALS and count_commands(page_script(path, 0))
]  # fmt: skip


@pytest.fixture(scope="module")
def served_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the bundle, release and state of README's shop."""
    folder = tmp_path_factory.mktemp("shop")
    make_shop(folder)
    (folder / ".venv").symlink_to(sys.prefix)
    lines = "longtail-index build runs/shop --releases releases/shop --publish\nlongtail-serve run releases/shop &\n"
    train = f"longtail-train fit shop/recipe.toml --out runs/shop {shlex.join(QUICK)}\n"
    typed(script(f"```sh\nsource .venv/bin/activate\n{train}{lines}```\n", free_port()), folder)
    return folder


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_commands_of_a_page_run(path: Path, served_shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3.client("s3").create_bucket(Bucket="shop")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    shutil.copytree(served_shop, tmp_path / "reader", symlinks=True)
    typed(page_script(path, free_port()), tmp_path / "reader")


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
    texts = [path.read_text() for path in PAGES]
    assert sum(is_complete for text in texts for is_complete, _ in commands(text)) > 150
    assert sum(len([*curls(text), *json_texts(text)]) for text in texts) >= 70
    assert sum(count_commands(page_script(path, 0)) for path in RUN) >= 38
    assert [word for word in NOT_RUN if not any(word in text for text in texts)] == []
