from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from longtail.bundle import TowerError, onnx_session
from longtail.bundle.mapped_model import without_tables
from tests.bundles import make_bundle

INPUTS = {
    "user_id": np.array([3, 0], np.int32),
    "history": np.array([[1, 60], [5, 0]], np.int32),
    "history__weight": np.array([[1, 1], [0.5, 0]], np.float32),
}


def test_a_tower_whose_tables_are_mapped_computes_the_same(tmp_path: Path) -> None:
    model, file = make_bundle().query_tower, tmp_path / "tower.onnx"
    file.write_bytes(model)
    small = without_tables(file, least=64)
    assert small is not None
    tables = {tensor.name: tensor for tensor in onnx.load_from_string(small).graph.initializer}
    assert {name for name, tensor in tables.items() if tensor.data_location == TensorProto.EXTERNAL} == {
        "users", "items"
    }  # fmt: skip
    assert {entry.key: entry.value for entry in tables["items"].external_data}["location"] == "tower.onnx"
    (expected,) = onnx_session(model, "tower").run(None, INPUTS)
    (found,) = onnx_session(file, "tower").run(None, INPUTS)
    assert np.array_equal(found, expected)


def test_a_large_table_is_mapped_by_the_session(tmp_path: Path) -> None:
    model, file = make_bundle(labels=5000, dim=64).query_tower, tmp_path / "tower.onnx"
    file.write_bytes(model)
    small = without_tables(file)
    assert small is not None
    assert len(small) < 50_000 < 5000 * 64 * 4 < len(model)
    (expected,) = onnx_session(model, "tower").run(None, INPUTS)
    (found,) = onnx_session(file, "tower").run(None, INPUTS)
    assert np.array_equal(found, expected)


def test_a_session_that_takes_no_mapped_tables_reads_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = make_bundle().query_tower, tmp_path / "tower.onnx"
    file.write_bytes(model)
    monkeypatch.setattr("longtail.bundle.tower.without_tables", lambda _: b"no model")
    assert np.array_equal(
        onnx_session(file, "tower").run(None, INPUTS)[0], onnx_session(model, "tower").run(None, INPUTS)[0]
    )


def test_a_table_that_something_else_reads_stays(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.ones((50, 2), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "id"], ["row"]),
        helper.make_node("MatMul", ["row", "sum"], ["out"]),
        helper.make_node("ReduceSum", ["table"], ["sum"], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("id", TensorProto.INT32, ["B"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [table],
    )
    file = tmp_path / "tower.onnx"
    file.write_bytes(helper.make_model(graph).SerializeToString())
    assert without_tables(file, least=64) is None


@pytest.mark.parametrize(
    "content", [b"", b"no tower", b"\x3a\xff\xff\xff\xff\x7f", b"\xff" * 64, b"\x3a\x04\x2a\x7f\x00\x00"]
)
def test_what_is_no_model_is_left_to_onnx_runtime(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tower.onnx"
    file.write_bytes(content)
    assert without_tables(file, least=1) is None
    with pytest.raises(TowerError, match="expected a model that ONNX Runtime loads"):
        onnx_session(file, "tower")
