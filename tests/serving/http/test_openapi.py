"""The committed OpenAPI document is the one that the code makes."""

import json
from pathlib import Path

from typer.testing import CliRunner

from longtail.serving.cli import app

COMMITTED = Path(__file__).parents[3] / "serving" / "openapi.json"


def test_the_committed_document_is_that_of_the_code() -> None:
    result = CliRunner().invoke(app, ["openapi"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(COMMITTED.read_text()), (
        "run: longtail-serve openapi > serving/openapi.json"
    )
