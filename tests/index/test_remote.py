"""Releases at an object store: publishing, races of writers, and verified copies."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import BundleCorruptError, BundleExistsError, objects as objects_module
from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import download_bundle, upload_bundle
from longtail.bundle.store import file_sha256
from longtail.index import (
    LongtailIndexError,
    Release,
    ReleaseCorruptError,
    ReleaseNotFoundError,
    Releases,
    build,
    open_releases,
)
from longtail.index.cli import main
from longtail.index.errors import PublishedMeanwhileError
from longtail.index.release import releases as releases_module
from longtail.index.release.releases import RemoteReleases, find_release
from tests.s3 import S3Server


@pytest.fixture(scope="module")
def shelf(bundle_path: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of three releases, `a` the oldest; nothing published. Tests take copies."""
    url = s3_server.url()
    local = tmp_path_factory.mktemp("built")
    for name in ("a", "b", "c"):
        build(bundle_path, local, name=name, spec="flat")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in s3_server.environment.items():
            patched.setenv(name, value)
        for name in ("a", "b", "c"):
            open_releases(url, local / "cache").upload(local / name)
    return url


@pytest.fixture
def url(shelf: str, s3: S3Server) -> str:
    """Return the URL of the test's own copy of the releases."""
    copied = s3.url()
    source, target = ObjectStore(shelf), ObjectStore(copied)
    for path in source.list():
        assert target.put(path, source.read(path) or b"")
    s3.requests.clear()
    return copied


def local(url: str, folder: Path) -> Releases:
    """Open the releases with the cache of another host."""
    return open_releases(url, folder)


def answers(release: Release) -> tuple[np.ndarray, np.ndarray]:
    bundle = release.bundle
    queries_BE = bundle.augmentation.queries(bundle.calibration_queries[:5], np.full(5, 0.5, np.float32))
    return release.searcher.search(queries_BE, 7)


def downloads(s3: S3Server) -> list[str]:
    """List the index files that were downloaded."""
    return [path.rsplit("/", 1)[1] for method, path in s3.requests if method == "GET" and path.endswith(".faiss")]


@contextmanager
def published_by_another(url: str, name: str, patched: pytest.MonkeyPatch) -> Iterator[None]:
    """Publish from another host while this host verifies the next release."""
    verify = Releases.verify

    def at_last(releases: Releases, which: str) -> object:
        patched.setattr(Releases, "verify", verify)
        open_releases(url).publish(name)
        return verify(releases, which)

    patched.setattr(Releases, "verify", at_last)
    yield


def test_a_release_at_a_url_answers_like_a_local_one(bundle_path: Path, url: str, tmp_path: Path) -> None:
    releases = open_releases(url)
    assert (str(releases), releases.names(), releases.current()) == (url, ["a", "b", "c"], None)
    build(bundle_path, tmp_path / "local", name="a", spec="flat")
    remote_hits, local_hits = (answers(source.open("a")) for source in (releases, open_releases(tmp_path / "local")))
    np.testing.assert_array_equal(remote_hits[1], local_hits[1])
    np.testing.assert_array_equal(remote_hits[0], local_hits[0])


def test_publish_rollback_and_history(url: str, tmp_path: Path) -> None:
    releases, other = open_releases(url), local(url, tmp_path / "other")
    for name in ("a", "b", "a", "c"):
        releases.publish(name)
        assert (releases.current(), other.current()) == (name, name)
    assert [other.rollback() for _ in range(3)] == ["a", "b", "a"]
    with pytest.raises(ReleaseNotFoundError, match="expected a release published before a, found none"):
        releases.rollback()
    assert (releases.current(), releases.pointers().forced) == ("a", "a")
    releases.publish("b")
    assert (releases.pointers().forced, releases.rollback()) == (None, "a")


def test_of_two_publishers_at_once_the_second_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    releases = open_releases(url)
    releases.publish("a")
    with (
        published_by_another(url, "b", monkeypatch),
        pytest.raises(PublishedMeanwhileError, match="another writer changed CURRENT in the meantime"),
    ):
        releases.publish("c")
    assert (releases.current(), releases.rollback()) == ("b", "a")
    releases.publish("c")
    assert releases.current() == "c"


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_write_whose_answer_was_lost_counts_once(name: str, url: str, s3: S3Server) -> None:
    """The store writes the pointer but answers 503; the stored content decides."""
    if name == "c":  # by the tag of one before, else the first
        open_releases(url).publish("a")

    def lose(method: str, path: str) -> str | None:
        return "lose" if method == "PUT" and path.endswith("/CURRENT") else None

    with s3.failing(lose):
        open_releases(url).publish(name)
    assert (open_releases(url).current(), open_releases(url).pointers().history[-1]) == (name, name)


def test_a_store_that_ignores_conditions_is_refused(url: str, s3: S3Server) -> None:
    with (
        s3.failing(lambda *_: "overwrite"),
        pytest.raises(LongtailIndexError, match="must refuse to overwrite an object on condition"),
    ):
        open_releases(url).publish("a")
    assert open_releases(url).current() is None


def test_the_probe_of_a_store_has_the_version_that_gcs_demands(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore sends GCS no conditional write whose version lacks its number; there is no such server here."""
    tags, put = [], ObjectStore.put

    def noted(store: ObjectStore, path: str, content: bytes, tag: dict[str, str] | None = None) -> bool:
        if tag is not None:
            tags.append(tag)
        return put(store, path, content, tag)

    monkeypatch.setattr(ObjectStore, "put", noted)
    open_releases(url).publish("a")
    assert tags
    assert tags[0].keys() == {"e_tag", "version"}


def test_an_existing_copy_is_not_downloaded_again(url: str, s3: S3Server, tmp_path: Path) -> None:
    releases = local(url, tmp_path / "other")
    releases.verify("a")
    assert downloads(s3) == ["index.faiss"]
    releases.verify("a")
    assert downloads(s3) == ["index.faiss"]


@pytest.mark.parametrize("fault", ["fail", "tear", "garble"])
def test_a_failing_store_leaves_no_partial_copy(fault: str, url: str, s3: S3Server, tmp_path: Path) -> None:
    releases = local(url, tmp_path / "other")
    raises = pytest.raises(ObjectStoreError, match=rf"{url}.*a/index/index\.faiss")
    with s3.failing(lambda method, path: fault if method == "GET" and path.endswith("index.faiss") else None), raises:
        releases.verify("a")
    assert [path.name for path in releases.root.iterdir() if path.is_dir()] == []
    assert releases.verify("a").name == "a"


def test_a_replaced_object_is_refused(url: str, tmp_path: Path) -> None:
    store = ObjectStore(url)
    file = tmp_path / "file"
    file.write_bytes(bytes(len(store.read("a/index/index.faiss") or b"")))
    store.upload(file, "a/index/index.faiss")
    with pytest.raises(ObjectStoreError, match=r"index.faiss: expected sha256 \w{64}, received bytes of \w{64}"):
        local(url, tmp_path / "other").verify("a")
    store.upload(tmp_path / "file", "a/release.json")
    with pytest.raises(ReleaseCorruptError, match="expected JSON with a schema_version"):
        local(url, tmp_path / "other").verify("a")


def test_a_release_with_a_reused_name_replaces_the_copy(bundle_path: Path, url: str, tmp_path: Path) -> None:
    releases, other = open_releases(url), local(url, tmp_path / "other")
    for name in ("a", "b", "c"):
        releases.publish(name)
        other.verify(name)
    assert releases.prune(1) == ["a"]
    build(bundle_path, tmp_path / "new", name="a", spec="ivf_flat")
    releases.upload(tmp_path / "new" / "a")
    assert other.open("a").manifest.kind == "ivf_flat"


def test_unused_copies_are_deleted(
    bundle_path: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = RemoteReleases(url, tmp_path / "other")
    for name in ("a", "b", "c"):
        releases.fetch(name)
    build(bundle_path, releases.root, name="new", spec="flat")  # not yet uploaded
    (releases.root / ".gone.999999999.abc.tmp").mkdir()
    releases.store.delete([path for path in releases.store.list() if path.startswith("a/")])
    releases.drop_copies({"c"}, ["a"])  # which may be opened this moment
    assert {"a", "b", "c"} <= {path.name for path in releases.root.iterdir()}
    monkeypatch.setattr("longtail.index.release.releases._IN_USE_SECONDS", -1.0)
    releases.drop_copies({"c"}, ["a"])
    assert sorted(path.name for path in releases.root.iterdir() if path.name[0] != ".") == ["c", "new"]
    releases.fetch("b")
    assert sorted(path.name for path in releases.root.iterdir() if path.is_dir()) == ["b", "c", "new"]


def test_prune_deletes_releases_and_unfinished_uploads(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    releases, store = open_releases(url), ObjectStore(url)
    for name in ("a", "b", "c"):
        releases.publish(name)
    folders = lambda: sorted({path.partition("/")[0] for path in store.list()})  # noqa: E731
    store.put("broken/upload.json", b"{}")
    store.put("broken/index/index.faiss", b"half")
    assert releases.prune(1) == ["a"]
    assert folders() == ["CURRENT", "CURRENT.probe", "b", "broken", "c"]
    monkeypatch.setattr(releases_module, "_ABANDONED", timedelta(0))
    assert releases.prune(1) == ["broken"]
    assert folders() == ["CURRENT", "CURRENT.probe", "b", "c"]
    assert (releases.current(), releases.rollback()) == ("c", "b")


def test_an_interrupted_prune_blocks_its_names_and_resumes(
    bundle_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = open_releases(url)
    for name in ("a", "b", "c"):
        releases.publish(name)
    with monkeypatch.context() as patched:
        patched.setattr(RemoteReleases, "delete", lambda *_: (_ for _ in ()).throw(ObjectStoreError("gone")))
        with pytest.raises(ObjectStoreError, match="gone"):
            releases.prune(1)
    with pytest.raises(ReleaseNotFoundError, match="received 'a', which a prune deletes"):
        open_releases(url).publish("a")
    with pytest.raises(BundleExistsError, match="/a: expected a name that is free, found one that a prune is deleting"):
        build(bundle_path, url, name="a")
    assert open_releases(url).prune(3) == ["a"]
    assert open_releases(url).names() == ["b", "c"]


def test_a_prune_during_a_publication_reports_its_deletions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    releases = open_releases(url)
    delete = RemoteReleases.delete

    def published_meanwhile(releases: RemoteReleases, name: str) -> None:
        monkeypatch.setattr(RemoteReleases, "delete", delete)
        open_releases(url).publish("c")
        delete(releases, name)

    for name in ("a", "b", "c", "b"):
        releases.publish(name)
    monkeypatch.setattr(RemoteReleases, "delete", published_meanwhile)
    assert releases.prune(1) == ["a"]
    assert (open_releases(url).current(), open_releases(url).pointers().deleting) == ("c", ())


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_an_error() -> None:
    for method in (RemoteReleases.names, RemoteReleases.current):
        with pytest.raises(ObjectStoreError, match="expected a store that answers, could not"):
            method(RemoteReleases("s3://nosuchbucket/releases"))


def test_a_store_need_not_name_the_failed_condition(
    bundle_path: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3.url()
    with s3.failing(lambda *_: "terse"):
        for name in ("a", "b"):
            build(bundle_path, url, name=name, spec="flat")
            open_releases(url).publish(name)
        open_releases(url).upload(open_releases(url).root / "a")
        with published_by_another(url, "a", monkeypatch), pytest.raises(PublishedMeanwhileError):
            open_releases(url).publish("b")
    assert local(url, tmp_path / "other").rollback() == "b"


def test_another_release_can_replace_a_damaged_one(url: str, tmp_path: Path) -> None:
    open_releases(url).publish("a")
    ObjectStore(url).delete(["a/index/index.faiss"])
    other = local(url, tmp_path / "other")
    with pytest.raises(ObjectStoreError, match="expected an object, found none"):
        other.verify("a")
    other.publish("b")
    assert other.current() == "b"


def test_a_damaged_copy_is_downloaded_again(url: str, tmp_path: Path) -> None:
    releases = local(url, tmp_path / "other")
    file = releases.verify("a").path / "index" / "index.faiss"
    file.chmod(0o644)
    file.write_bytes(bytes(file.stat().st_size))
    assert releases.verify("a").name == "a"
    assert any(file.read_bytes())


def test_a_corrupt_download_is_not_repeated(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ObjectStore(url).delete(["a/bundle/manifest.json"])
    releases, fetched = local(url, tmp_path / "other"), []
    fetch = RemoteReleases.fetch
    monkeypatch.setattr(RemoteReleases, "fetch", lambda self, name: fetched.append(name) or fetch(self, name))
    with pytest.raises(BundleCorruptError, match=r"manifest\.json: expected a manifest, found none"):
        releases.open("a")
    assert fetched == ["a"]


def test_a_failed_upload_names_the_command_that_resumes_it(bundle_path: Path, s3: S3Server) -> None:
    url = s3.url()
    raises = pytest.raises(
        ObjectStoreError, match=rf"the release is built: longtail-index upload (\S+)/x {url} resumes it"
    )
    with s3.failing(lambda _, path: "fail" if path.endswith("labels.arrow") else None), raises as error:
        build(bundle_path, url, name="x", spec="flat")
    path = str(error.value).rpartition("longtail-index upload ")[2].split()[0]
    open_releases(url).upload(Path(path))
    assert open_releases(url).names() == ["x"]


def test_names_that_lead_out_of_the_cache_write_nothing(bundle_path: Path, s3: S3Server, tmp_path: Path) -> None:
    url = s3.url()
    copy = tmp_path / "copy"
    shutil.copytree(bundle_path, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["../../../out"] = manifest["files"].pop("labels.arrow")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (copy / "manifest.sha256").write_text(file_sha256(copy / "manifest.json"))
    store = ObjectStore(url)
    for name in ("manifest.sha256", "manifest.json"):
        store.upload(copy / name, name)
    with pytest.raises(BundleCorruptError, match="expected file names below the directory, found"):
        download_bundle(url)
    assert not list(tmp_path.rglob("out"))


def test_a_release_name_is_used_once(bundle_path: Path, url: str, tmp_path: Path) -> None:
    with pytest.raises(BundleExistsError, match="/a already exists: expected a name that is free"):
        build(bundle_path, url, name="a")
    build(bundle_path, tmp_path / "new", name="d")
    ObjectStore(url).put("d/upload.json", b'{"sha256": "other"}')
    with pytest.raises(BundleExistsError, match="d/: expected a free folder, found another upload"):
        open_releases(url).upload(tmp_path / "new" / "d")
    assert open_releases(url).names() == ["a", "b", "c"]


def test_a_bundle_is_uploaded_and_downloaded(bundle_path: Path, s3: S3Server, tmp_path: Path) -> None:
    url = s3.url()
    with pytest.raises(BundleCorruptError, match=r"expected a bundle \(a folder with manifest.json\), found none"):
        download_bundle(url)
    upload_bundle(bundle_path, url)
    upload_bundle(bundle_path, url)
    copy = download_bundle(url, tmp_path / "other")
    files = sorted(path.relative_to(bundle_path) for path in bundle_path.rglob("*") if path.is_file())
    assert sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file()) == files
    assert all((copy / file).read_bytes() == (bundle_path / file).read_bytes() for file in files)
    # A folder without its manifest is no bundle, whatever else is there.
    ObjectStore(url).delete(["manifest.json"])
    with pytest.raises(BundleCorruptError, match="found none"):
        download_bundle(url)


def test_another_bundle_is_not_written_over(bundle_path: Path, large_bundle_path: Path, s3: S3Server) -> None:
    url = s3.url()
    upload_bundle(bundle_path, url)
    with pytest.raises(BundleExistsError, match="expected a free folder, found another upload"):
        upload_bundle(large_bundle_path, url)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


def test_the_commands(bundle_path: Path, s3: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, bundle = s3.url(), s3.url()
    upload_bundle(bundle_path, bundle)
    run("build", bundle, "--releases", url, "--name", "a", "--publish")
    assert capsys.readouterr().out.splitlines()[-2:] == [f"written: {url}/a", "published: a"]
    build(bundle_path, tmp_path, name="b")
    run("upload", str(tmp_path / "b"), url)
    assert capsys.readouterr().out == f"uploaded: {url}/b\n"
    run("publish", f"{url}/b")
    run("rollback", url)
    run("stage", f"{url}/b")
    run("unstage", url)
    run("verify", f"{url}/b")
    assert (find_release(f"{url}/b/"), find_release(url)) == ((url, "b"), (url, None))
    capsys.readouterr()
    run("list", url)
    assert ["*" in line for line in capsys.readouterr().out.splitlines() if "(flat)" in line] == [True, False]
    run("prune", url, "--keep", "1")
    assert open_releases(url).names() == ["a", "b"]


def test_no_store_behind_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectStoreError, match="nosuch://bucket/x: expected s3://, gs:// or az://"):
        open_releases("nosuch://bucket/x")
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ObjectStoreError, match=r"expected the extra `remote`, pip install '.*\[remote\]'"):
        open_releases("s3://bucket/x")


def test_a_file_url_is_a_directory(bundle_path: Path, tmp_path: Path) -> None:
    build(bundle_path, tmp_path, name="a")
    open_releases(f"file://{tmp_path}").publish("a")
    assert open_releases(tmp_path).current() == "a"
    with pytest.raises(LongtailIndexError, match="upload of a: expected the URL of an object store"):
        open_releases(tmp_path).upload(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema_version": 2}', b'{"schema_version": 1, "history": 3}'])
def test_a_garbled_current_file_is_refused(content: bytes, url: str) -> None:
    ObjectStore(url).put("CURRENT", content)
    for use in (open_releases(url).current, lambda: open_releases(url).publish("a")):
        with pytest.raises(ReleaseCorruptError, match=r"CURRENT: expected what is published, as JSON"):
            use()


def test_a_poll_is_one_request(url: str, s3: S3Server) -> None:
    releases = open_releases(url)
    for name in ("a", "b", "c"):
        releases.publish(name)
    assert releases.current() == "c"
    s3.requests.clear()
    assert releases.current() == "c"
    assert [(method, path.rsplit("/", 1)[1]) for method, path in s3.requests] == [("GET", "CURRENT")]


def test_a_hanging_store_is_an_error(url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "_CLIENT", objects_module._CLIENT | {"read_timeout": "300ms"})
    releases = open_releases(url)
    with s3.failing(lambda *_: "hang"):
        began = time.monotonic()
        with pytest.raises(ObjectStoreError, match="expected a store that answers, could not read CURRENT: "):
            releases.current()
        assert time.monotonic() - began < 15
    assert releases.current() is None
