"""What the benchmark of the live figures feeds them is what they take."""

import pytest

from benchmarks.live_monitoring import main


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(labels=300, k=5, batch=4, rate=100, seconds=0.2)
    assert "| files | " in capsys.readouterr().out
