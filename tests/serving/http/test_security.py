"""What strangers get to see and touch: headers, files, keys; and where the service refuses to start."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx2 as httpx
import pytest
from pydantic import ValidationError

from longtail.bundle.errors import ObjectStoreError
from longtail.index import IndexSpec, build, open_releases
from longtail.serving import Settings, cli, create_app
from longtail.serving.cli import main
from longtail.serving.http.auth import Keys
from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.serving.client import serve_app
from tests.serving.plane import plane_retriever, plane_settings
from tests.serving.process import ServerProcess

ASKING, ADMIN = "ask-0123456789abcdef", "admin-0123456789abcd"
STRICT = "default-src 'none'; frame-ancestors 'none'"
JSON = {"content-type": "application/json"}
OF_EVERY_ANSWER = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


# Headers


@pytest.mark.parametrize(
    ("method", "path", "status", "options"),
    [
        ("GET", "/livez", 200, {}),
        ("POST", "/v1/retrieve", 200, {"content": b'{"queries":[{"features":{}}]}', "headers": JSON}),
        ("POST", "/v1/retrieve", 400, {"content": b"{", "headers": JSON}),
        ("POST", "/v1/retrieve", 422, {"content": b"{}", "headers": JSON}),
        ("POST", "/v1/retrieve", 415, {"content": b"{}"}),
        ("POST", "/v1/retrieve", 413, {"content": b" " * 50_001, "headers": JSON}),
        ("GET", "/v1/labels/nothing", 404, {}),
        ("GET", "/nowhere", 404, {}),
        ("GET", "/v1/retrieve", 405, {}),
        ("HEAD", "/livez", 200, {}),
        ("HEAD", "/v1/retrieve", 405, {}),
        ("OPTIONS", "/v1/retrieve", 405, {"headers": {"origin": "http://localhost:8000"}}),
        ("OPTIONS", "/v1/retrieve", 403, {"headers": {"origin": "https://evil.example"}}),
        ("HEAD", "/docs", 200, {}),
        ("GET", "/docs/assets/swagger-ui.css", 200, {}),
        ("GET", "/docs/assets/swagger-ui.css", 206, {"headers": {"range": "bytes=0-9"}}),
        ("GET", "/docs/assets/swagger-ui.css", 416, {"headers": {"range": "bytes=999999999-"}}),
        ("GET", "/docs/assets/nothing", 404, {}),
        ("GET", "/metrics", 200, {}),
        ("GET", "/", 200, {}),
        ("GET", "/dashboard", 200, {}),
        ("GET", "/openapi.json", 200, {}),
    ],
)
def test_every_answer_forbids_caching_framing_and_sniffing(
    client: httpx.Client, method: str, path: str, status: int, options: dict
) -> None:
    response = client.request(method, path, **options)
    assert response.status_code == status
    for name, value in OF_EVERY_ANSWER.items():
        assert response.headers.get_list(name) == [value]
    assert len(response.headers.get_list("x-request-id")) == 1
    (policy,) = response.headers.get_list("content-security-policy")
    assert policy.startswith("default-src 'none';")
    assert "frame-ancestors 'none'" in policy
    assert (policy == STRICT) is (path not in ("/", "/docs", "/dashboard"))
    assert "server" not in response.headers
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_the_documentation_loads_under_its_policy_and_from_nowhere_else(client: httpx.Client) -> None:
    page = client.get("/docs")
    directives = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert "'unsafe-inline'" not in directives["script-src"]
    for script in re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in directives["script-src"]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3
    for url in loaded:
        assert url.startswith("/docs/assets/")
        assert client.get(url).status_code == 200


def test_links_of_the_first_page_exist(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    style = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in page.headers["content-security-policy"]
    links = re.findall(r'href="([^"]+)"', page.text)
    assert links == ["/dashboard", "/docs", "/v1/release", "/metrics"]
    assert {client.get(link).status_code for link in links} == {200}


# Files


@pytest.mark.parametrize(
    "name",
    ["../one", "..", ".", "", "/etc/passwd", "one/../one", "CURRENT", ".state", "one\u0000", "\u0000", "a" * 128],
)
def test_a_pinned_release_is_looked_up_by_name_and_never_opened(client: httpx.Client, name: str) -> None:
    response = client.post("/v1/retrieve", json={"queries": [{"features": {}}], "release": name})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "unknown_release"


HOSTILE_IDS = [
    "../../../etc/passwd",
    "..",
    "/etc/passwd",
    "a/../../b",
    "\u0000",
    "a\nb",
    "%2e%2e%2f",
    "\\\\host\\c$",
    "CON",
]


@pytest.mark.process
def test_no_id_reaches_the_file_system(tmp_path: Path) -> None:
    publish_bundle(make_bundle(label_tower=True), tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    before = files_below(tmp_path)
    with server(tmp_path / "releases", tmp_path / "log", state=tmp_path / "state") as service:
        service.wait_until_ready()
        with httpx.Client(base_url=service.url) as client:
            for id_ in [*HOSTILE_IDS, str(outside / "secret")]:
                added = client.post("/v1/labels", json={"labels": [{"id": id_, "features": {}}]})
                assert added.status_code == 200
                query = {"features": {"user_id": id_}, "allow": [id_]}
                headers = {"X-Request-ID": id_.encode()} if id_.isprintable() else {}
                answer = client.post("/v1/retrieve", json={"queries": [query]}, headers=headers)
                assert [label["id"] for label in answer.json()["results"][0]["labels"]] == [id_]
                event = {"answer_id": answer.json()["results"][0]["answer_id"], "labels": [id_]}
                assert client.post("/v1/feedback", json={"events": [event]}).status_code == 200
                path = "/v1/labels/" + "".join(f"%{byte:02x}" for byte in id_.encode())
                assert request_path(service, "GET", path) == (200, id_)
                assert request_path(service, "DELETE", path)[0] == 200
            for path in (
                "/docs/assets/..%2f..%2fsecret",
                "/docs/assets/%00",
                "/docs/assets/" + str(outside / "secret"),
                "/docs/assets/..%5c..%5csecret",
                "/.state/labels.sqlite",
                "/CURRENT",
            ):
                assert request_path(service, "GET", path) == (404, None)
            assert client.get("/v1/monitoring").status_code == 200
        assert service.terminate() == 0
    new = {path for path in files_below(tmp_path) - before if path.parts[0] != "state"}
    assert new == {Path("log")}
    names = {path.name for path in files_below(tmp_path / "state")}
    pattern = (
        r"labels\.sqlite(-wal|-shm)?|releases\.json|answer_keys\.json|minutes\.0|only\.shown|\.?[a-z._]+\.lock"
        r"|only\.json|\d{8}T\d{6}-[0-9a-f]{12}\.(jsonl|parquet)"
    )
    assert [name for name in names if not re.fullmatch(pattern, name)] == []


def request_path(service: ServerProcess, method: str, path: str) -> tuple[int, str | None]:
    """Status and id of an answer; the path goes over the wire as it is."""
    connection = HTTPConnection("127.0.0.1", int(service.url.rsplit(":", 1)[1]), timeout=20)
    with closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("id")


def files_below(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*") if path.is_file()}


# Keys


@contextmanager
def started(*words: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command line of the service with its log in a pipe; killed and waited for at the end."""
    command = [sys.executable, "-m", "longtail.serving", *words]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.process
def test_keys_are_in_no_line_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "releases").mkdir()
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    stranger = "stranger-0123456789abcdef"
    environment = os.environ | {
        "LONGTAIL_API_KEYS": ASKING, "LONGTAIL_ADMIN_KEYS_FILE": str(tmp_path / "admin"), "LONGTAIL_ACCESS_LOG": "1",
        "PYTHONASYNCIODEBUG": "1", "LONGTAIL_LOG_LEVEL": "debug",
    }  # fmt: skip
    words = ["run", str(tmp_path / "releases"), "--port", "0"]
    lines = []
    with started(*words, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "startup complete" in line:
                break
        port = re.findall(r"127\.0\.0\.1:(\d+)", "".join(lines))[0]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            for key in (ASKING, ADMIN, stranger):
                for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                    for path in ("/livez", "/v1/release", "/nowhere", f"/v1/labels/x?key={key}"):
                        assert client.get(path, headers=headers).status_code in (200, 401, 404, 503)
                    assert client.post("/v1/labels", content=b"{", headers=headers).status_code in (401, 403, 415)
        process.terminate()
        rest, _ = process.stderr.read(), process.wait(20)
    log = "".join([*lines, rest])
    assert '"milliseconds"' in log
    for key in (ASKING, ADMIN, stranger):
        assert key not in log


@pytest.mark.parametrize(
    "changes",
    [
        {"api_keys": "s3cret"},
        {"admin_keys": "s3cret"},
        {"api_keys": f"{ASKING},s3cret"},
        {"api_keys": ["s3cret" * 5], "port": -1},
        {"api_keys": [1, "s3cret" * 5]},
        {"api_keys": "s3cret" * 5, "queue_limit": 1},
    ],
)
def test_errors_about_settings_show_no_key(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(releases=tmp_path, **changes)
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(caught.value)


@pytest.mark.parametrize("content", [b"s3cret", b"s3cret\xff0123456789012345"])
def test_errors_about_key_files_name_them_and_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "keys").write_bytes(content)
    monkeypatch.setenv("LONGTAIL_API_KEYS_FILE", str(tmp_path / "keys"))
    with pytest.raises(SystemExit) as caught:
        main(["run", str(tmp_path)])
    assert caught.value.code == 2
    displayed = capsys.readouterr().err
    assert "s3cret" not in displayed
    assert "keys:expectedkeys" in re.sub(r"[│\s]", "", displayed), "wherever the lines of the box end"


def test_what_holds_keys_shows_none(tmp_path: Path) -> None:
    settings = Settings(releases=tmp_path, api_keys=ASKING, admin_keys=ADMIN)
    keys = Keys(settings)
    for displayed in (repr(settings), str(settings), settings.model_dump_json(), repr(vars(keys))):
        assert ASKING not in displayed
        assert ADMIN not in displayed


def test_invalid_key_files_keep_the_previous_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, key in (("asking", ASKING), ("admin", ADMIN)):
        (tmp_path / name).write_text(key)
    keys = Keys(Settings(releases=tmp_path, api_keys_file=tmp_path / "asking", admin_keys_file=tmp_path / "admin"))
    before = keys._digests
    (tmp_path / "asking").write_text("short")
    keys.read_again()
    assert "api_keys: expected keys of at least 16 characters, received a shorter one" in caplog.text
    (tmp_path / "asking").write_text("")
    (tmp_path / "admin").write_text("")
    keys.read_again()
    assert "expected at least one key, as before, found none" in caplog.text
    (tmp_path / "admin").unlink()
    keys.read_again()
    assert "No such file" in caplog.text
    assert keys._digests == before
    (tmp_path / "admin").write_text(f"{ADMIN}2")
    keys.read_again()
    assert keys._digests[0] == []
    assert keys._digests[1] != before[1]


# Where to listen


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "example.com", "0", "", "127.0.0.1.example.com", "10.0.0.1"]
)
def test_addresses_that_others_reach_need_keys_or_somebody_who_insists(tmp_path: Path, host: str) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    for changes in ({}, {"api_keys": " , "}, {"admin_keys": ADMIN}, {"api_keys_file": empty}):
        with pytest.raises(ValidationError, match="set LONGTAIL_API_KEYS"):
            Settings(releases=tmp_path, host=host, **changes)
    (tmp_path / "keys").write_text(f"\n{ASKING}\n")
    for changes in ({"insecure": True}, {"api_keys": ASKING}, {"api_keys_file": tmp_path / "keys"}):
        Settings(releases=tmp_path, host=host, **changes)


def test_the_command_refuses_an_open_address_without_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", str(tmp_path), "--host", "0.0.0.0", "--port", "0"])
    assert caught.value.code == 2
    assert "set LONGTAIL_API_KEYS" in capsys.readouterr().err


def test_the_command_proposes_another_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main(["run", str(tmp_path), "--port", str(port), "--state", str(tmp_path / "state")])
    assert caught.value.code == 2
    assert (
        f"expected a free address, found 127.0.0.1 port {port}: Address already in use; choose another port, for "
        f"example --port {port + 1 if port < 65_535 else 8000}"
    ) in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("path", ["/livez", "/v1/release"])
@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.1", "Host: localhost\r\n", 200),
        ("1.0", "", 200),
        ("1.1", "", 400),
        ("1.1", "Host: localhost\r\nHost: localhost\r\n", 400),
        ("1.0", "Host: evil.example\r\nHost: localhost\r\n", 400),
        ("1.1", "Host: localhost\r\n" + "X: 1\r\n" * 98, 200),
        ("1.1", "Host: localhost\r\n" + "X: 1\r\n" * 100, 431),
        ("1.1", "Host: localhost\r\n" + "X: 1\r\n" * 9_000, 431),
    ],
)  # fmt: skip
def test_a_request_has_one_host_and_few_headers(
    tmp_path: Path, path: str, version: str, headers: str, status: int
) -> None:
    app = create_app(plane_settings(tmp_path), retriever=plane_retriever())
    with serve_app(app) as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/{version}\r\n{headers}Connection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    if status != 200:
        assert json.loads(body)["error"]["message"].startswith("expected ")
    app.state.service.close()


# What is said at the start


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that `run` would serve with."""
    inputs: list[Settings] = []
    monkeypatch.delenv("LONGTAIL_TFRS_PYTHON", raising=False)  # of `make test`
    monkeypatch.setattr(cli, "serve", inputs.append)
    monkeypatch.setattr(cli, "hold_hangups", lambda: None)
    monkeypatch.setattr(cli.logs, "configure", lambda *_: None)
    return inputs


def exit_code(*words: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main([*words])
    return caught.value.code


def test_the_command_warns_of_a_service_that_anybody_may_change(
    tmp_path: Path, served: list[Settings], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "CURRENT").write_text("{}")
    monkeypatch.setenv("LONGTAIL_INSECURE", "true")
    assert exit_code("run", str(tmp_path), "--host", "0.0.0.0") == 0
    message = ["insecure: no keys, so whoever reaches 0.0.0.0 may ask, change labels and reload"]
    assert caplog.messages == message
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LONGTAIL_API_KEYS", ASKING)
        assert exit_code("run", str(tmp_path), "--host", "0.0.0.0") == 0
    monkeypatch.delenv("LONGTAIL_INSECURE")
    assert exit_code("run", str(tmp_path)) == 0
    assert caplog.messages == message
    assert len(served) == 3


def test_the_command_warns_of_a_directory_without_a_release(
    tmp_path: Path, served: list[Settings], caplog: pytest.LogCaptureFixture
) -> None:
    assert exit_code("run", str(tmp_path)) == 0
    assert caplog.messages == [f"{tmp_path}: no release is published here yet; see longtail-index publish"]
    assert len(served) == 1


@pytest.mark.parametrize("what", ["a bundle", "one release"])
def test_the_command_refuses_a_bundle_and_one_release(
    tmp_path: Path, served: list[Settings], capsys: pytest.CaptureFixture[str], what: str
) -> None:
    make_bundle().write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec=IndexSpec("flat"), name="only")
    i = tmp_path / "bundle" if what == "a bundle" else tmp_path / "releases" / "only"
    before = files_below(i)
    assert exit_code("run", str(i)) == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"expected a directory that longtail-index publishes to, found {what} at" in message
    assert (served, files_below(i)) == ([], before)


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "https://evil.example/r", "ftp://a/b", "memory://r"])
def test_only_object_stores_are_contacted(
    tmp_path: Path, served: list[Settings], capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert exit_code("run", url, "--state", str(tmp_path)) == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "expected s3://, gs:// or az://" in message
    assert not served
    with pytest.raises(ObjectStoreError, match="expected s3://, gs:// or az://"):
        open_releases(url, tmp_path)
