"""`longtail-serve check RELEASE` on real releases."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.index import IndexSpec, build
from longtail.serving import cli
from tests.bundles import make_bundle


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("check")
    tree = make_bundle(proposal=True)
    # The name of the noise says that nothing of the tree is left; the manifest's files still say that there is a tree.
    named = tree.manifest.bias_removal.model_copy(update={"noise": "p_n(y|x)^0 · π"})
    tree = replace(tree, manifest=tree.manifest.model_copy(update={"bias_removal": named}))
    for name, bundle in (("plain", make_bundle()), ("tree", tree)):
        bundle.write(root / name)
        build(root / name, root / "releases", spec=IndexSpec("flat"), name=name)
    return root / "releases"


def check(capsys: pytest.CaptureFixture[str], release: Path) -> list[str]:
    with pytest.raises(SystemExit) as remaining:
        cli.main(["check", str(release)])
    assert remaining.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_check_describes_a_servable_release(
    releases: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(releases)
    lines = check(capsys, Path("plain"))
    assert [line.partition(":")[0] for line in lines] == [
        "intact", "model", "answers at λ = -1", "answers at λ = 0.5", "answers at λ = 2",
        "one query after the other", "memory", "baseline at λ = 0.5, k = 20",
    ]  # fmt: skip
    assert lines[1] == "model: synthetic, 60 labels, d = 8, cosine"
    for line in lines[2:5]:
        match = re.fullmatch(r"answers at λ = \S+: 20 labels, (\d+) head, (\d+) torso, (\d+) tail, (\d+) new", line)
        assert match is not None
        assert sum(map(int, match.groups())) == 20
    shares = [float(share) for share in re.findall(r"([\d.]+)%", lines[-1])]
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_directory_of_releases_is_refused(releases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as remaining:
        cli.main(["check", str(releases)])
    assert remaining.value.code == 2
    assert "expected one release, found a directory of some: use" in capsys.readouterr().err


def test_unservable_release_is_refused_in_one_line(
    releases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    for path in (releases / "plain").rglob("*"):
        if path.is_file():
            (damaged / path.relative_to(releases / "plain")).parent.mkdir(parents=True, exist_ok=True)
            (damaged / path.relative_to(releases / "plain")).write_bytes(path.read_bytes())
    (damaged / "bundle/query_tower.onnx").write_bytes(b"no tower")
    for release in (damaged, releases):
        with pytest.raises(SystemExit) as remaining:
            cli.main(["check", str(release)])
        message = capsys.readouterr()
        assert (remaining.value.code, message.out, message.err.count("\n")) == (2, "", 1)
        assert message.err.startswith("longtail-serve: ")
    with pytest.raises(SystemExit) as remaining:
        cli.main(["check", str(tmp_path / "none")])
    assert remaining.value.code == 2
