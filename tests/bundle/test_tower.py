from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from longtail.bundle import Feature, FeatureError, Tower, TowerError
from tests.bundles import make_bundle

RUN = """
import sys
from pathlib import Path
from longtail.bundle import Bundle, Tower
bundle = Bundle.load(Path(sys.argv[1]))
manifest = bundle.manifest
tower = Tower(bundle.query_tower, manifest.query_features, bundle.vocabularies, manifest.dim, file="query")
assert tower.embed(tower.read([tower.example()])).shape == (1, manifest.dim)
"""


@pytest.mark.process
def test_tower_leaves_no_temporary_files(tmp_path: Path) -> None:
    bundle = make_bundle().write(tmp_path / "bundle").path
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", RUN, str(bundle)], check=True, env=environment)
    assert list((tmp_path / "temporary").iterdir()) == []


def number_tower(*, output_dim: int = 2) -> bytes:
    """`[x, x²]`, or one column more."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("Unsqueeze", ["x", "one"], ["first"]),
        helper.make_node("Unsqueeze", ["square", "one"], ["second"]),
        helper.make_node("Concat", ["first", "second", "second"][:output_dim], ["embedding"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "tower",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B"])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", output_dim])],
        [helper.make_tensor("one", TensorProto.INT64, [1], [1])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def test_the_tower_of_a_bundle_embeds_features() -> None:
    bundle = make_bundle(dim=8)
    tower = Tower(bundle.query_tower, bundle.manifest.query_features, bundle.vocabularies, 8)
    tables = {
        initializer.name: onnx.numpy_helper.to_array(initializer)
        for initializer in onnx.load_from_string(bundle.query_tower).graph.initializer
    }
    queries_BD = tower.embed(tower.read([{"user_id": "u2", "history": ["item-5", "nothing"]}, {"user_id": "unknown"}]))
    first = tables["users"][3] + tables["items"][6] + tables["items"][0]
    expected = np.stack([first / np.linalg.norm(first), tables["users"][0]])
    np.testing.assert_allclose(queries_BD, expected, rtol=1e-5)
    assert queries_BD.dtype == np.float32


def test_overflow_in_the_tower_is_refused() -> None:
    tower = Tower(number_tower(), [Feature(name="x", kind="number")], {}, 2)
    np.testing.assert_array_equal(tower.embed(tower.read([{"x": 3}])), [[3, 9]])
    with pytest.raises(FeatureError, match="overflow") as caught:
        tower.embed(tower.read([{"x": 1}, {"x": 1e30}]))
    assert (caught.value.row, caught.value.field) == (1, "features")


def test_tower_with_other_inputs_is_refused() -> None:
    with pytest.raises(TowerError, match=r"expected the inputs \['y'\] .* found \['x'\]"):
        Tower(number_tower(), [Feature(name="y", kind="number")], {}, 2)


def test_invalid_model_is_refused() -> None:
    with pytest.raises(TowerError, match="expected a model that ONNX Runtime loads"):
        Tower(b"not a model", [], {}, 2)
