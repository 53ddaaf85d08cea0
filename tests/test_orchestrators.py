"""The page of orchestrators: its commands and files are real, and its Triton repository runs a bundle's tower."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import yaml
from typer.main import get_command

from longtail.bundle import Bundle, FeatureReader, Tower
from longtail.index.cli import app as index_app
from longtail.trainer.cli import app as train_app

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/orchestrators.md").read_text()
BUNDLE = ROOT / "tests/fixtures/0.1.0/releases/ivf/bundle"
COMMANDS = {
    f"{program} {name}": {option for parameter in command.params for option in parameter.opts}
    for program, app in (("longtail-train", train_app), ("longtail-index", index_app))
    for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
}
OF_OTHERS = {"--from-file", "--no-serve-artifacts"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", PAGE)


def test_commands_and_options_exist() -> None:
    named = set(re.findall(r"longtail-(?:train|index) [a-z]+", PAGE)) - {"longtail-train and"}
    assert {"longtail-train check", "longtail-train fit", "longtail-train upload", "longtail-index build"} <= named
    assert named <= COMMANDS.keys()
    options = set().union(*(COMMANDS[name] for name in named))
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) - OF_OTHERS <= options


def test_files_are_yaml_and_the_steps_of_argo_name_their_template() -> None:
    argo, kserve = (yaml.safe_load(block) for block in blocks("yaml"))
    assert kserve["spec"]["predictor"]["model"]["modelFormat"] == {"name": "triton"}
    spec = argo["spec"]["workflowSpec"]
    templates = {entry["name"]: entry for entry in spec["templates"]}
    steps = [step for (step,) in templates[spec["entrypoint"]]["steps"]]
    assert [step["name"] for step in steps] == ["check", "fit", "release"]
    assert {step["template"] for step in steps} <= templates.keys()
    container = templates["longtail"]["container"]
    volumes = {entry["name"] for entry in spec["volumes"]} | {
        entry["metadata"]["name"] for entry in spec["volumeClaimTemplates"]
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    kustomization = yaml.safe_load((ROOT / "docker/kustomization.yaml").read_text())
    tags = {entry["name"]: entry["newTag"] for entry in kustomization["images"]}
    assert container["image"] == f"longtail-trainer:{tags['longtail-trainer']}"


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_code_is_python(number: int) -> None:
    compile(blocks("python")[number], f"orchestrators.md, block {number}", "exec")


@pytest.mark.parametrize("tower", ["query_tower", "label_tower"])
def test_the_repository_of_triton_runs_the_tower(tower: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(next(block for block in blocks("python") if "def triton_model" in block), names)
    assert (BUNDLE / "tables").is_dir()
    names["triton_model"](BUNDLE, tmp_path, tower)
    config = (tmp_path / tower / "config.pbtxt").read_text()
    tensors = {
        (side, name): (type_, [int(size) for size in dims.split(",")])
        for side, name, type_, dims in re.findall(
            r'(input|output) \{ name: "(.+?)" data_type: (\w+) dims: \[ (.+?) \] \}', config
        )
    }
    bundle = Bundle.load(BUNDLE)
    model, features = (
        (bundle.query_model, bundle.manifest.query_features)
        if tower == "query_tower"
        else (bundle.label_model, bundle.manifest.label_features)
    )
    assert model is not None
    inputs = FeatureReader(features, bundle.vocabularies).read([FeatureReader(features, bundle.vocabularies).example()])
    types = {"int32": "TYPE_INT32", "float32": "TYPE_FP32"}
    assert {name: tensors["input", name] for name in inputs} == {
        name: (types[str(values.dtype)], [-1] * values.ndim) for name, values in inputs.items()
    }
    (output,) = [name for side, name in tensors if side == "output"]
    assert tensors["output", output] == ("TYPE_FP32", [-1, bundle.manifest.dim])
    # The folder alone, as a server mounts it.
    session = onnxruntime.InferenceSession((tmp_path / tower).rename(tmp_path / "moved") / "1" / "model.onnx")
    (embedded,) = session.run([output], inputs)
    expected = Tower(model, features, bundle.vocabularies, bundle.manifest.dim, file=f"{tower}.onnx").embed(inputs)
    np.testing.assert_array_equal(embedded, expected)
