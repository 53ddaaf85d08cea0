"""Check that several devices and processes compute the same as one; JAX splits one processor into devices."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from benchmarks.device_traffic import compiled_step, formula, moved, traffic_of
from longtail.trainer import devices
from longtail.trainer.checkpoint import hash_run
from longtail.trainer.devices import WORLD, Cluster, describe_lost_process, join_processes
from longtail.trainer.errors import RecipeError
from tests.backends import environment
from tests.trainer import tiny
from tests.trainer.device_ranks import ranked
from tests.trainer.test_backends import end, wait

_HANGS_SECONDS = 600


def start(*arguments: object, on: int) -> "subprocess.Popen[str]":
    """Start Python on JAX with so many devices; output goes to a pipe."""
    jax = environment("jax")
    flags = f"{jax.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={on}"
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=os.environ | jax | {"XLA_FLAGS": flags},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def find_address() -> str:
    """Return an address on which no process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_steps(folder: Path, name: str, on: int, *more: object) -> "subprocess.Popen[str]":
    return start("-m", "tests.trainer.device_steps", folder, name, *more, on=on)


@pytest.fixture(scope="module")
def single_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the steps on one device; return the folder with results."""
    folder = tmp_path_factory.mktemp("devices")
    wait(start_steps(folder, "1", 1))
    return folder


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["2", "4", "resumed"])
def test_several_devices_train_as_one(single_device: Path, name: str) -> None:
    """Tables and optimisers are split by rows. `resumed` trains its second half on three devices, from a checkpoint of
    two processes with two devices each."""
    if name == "resumed":
        address = find_address()
        wait(*[start_steps(single_device, "processes", 2, address, number) for number in (0, 1)])
        wait(start_steps(single_device, name, 3))
    else:
        wait(start_steps(single_device, name, int(name)))
    for run_name in (name, "processes") if name == "resumed" else (name,):
        alone, several = np.load(single_device / "1.npz"), np.load(single_device / f"{run_name}.npz")
        assert len(alone.files) == len(several.files) == 3 * 4
        for key in alone.files:
            expected = alone[key]
            if key.endswith("losses"):
                assert expected[0] != expected[-1]
                np.testing.assert_allclose(several[key], expected[-len(several[key]) :], atol=1e-5, err_msg=key)
            else:
                np.testing.assert_allclose(several[key], expected, atol=1e-4, err_msg=key)


@pytest.mark.process
@pytest.mark.nightly
def test_rows_of_one_device_are_exchanged_exactly() -> None:
    wait(start("-m", "tests.trainer.device_rows", on=4))


@pytest.mark.process
@pytest.mark.nightly
def test_a_step_moves_the_documented_bytes() -> None:
    """2 + 4/n + 20/√B arrays of the batch's rows, and some of its ids."""
    batch, dim, on = 1024, 32, 4
    traffic = traffic_of(compiled_step(devices=on, batch=batch, dim=dim, rows=10_000), on)
    arrays = {kind: size / (batch * dim * 4) for kind, size in traffic.items()}
    assert arrays["all-to-all"] == pytest.approx(4 / on + 20 / batch**0.5, abs=0.1)
    assert arrays["all-gather"] == pytest.approx(1, abs=0.15)
    assert arrays["reduce-scatter"] == pytest.approx(1, abs=0.05)
    assert arrays["all-reduce"] < 0.01
    assert moved(traffic, on) == pytest.approx(formula(batch, dim, on), rel=0.1)


@pytest.mark.process
@pytest.mark.nightly
def test_processes_rank_as_one(tmp_path: Path) -> None:
    address = find_address()
    wait(*[start("-m", "tests.trainer.device_ranks", tmp_path, address, number, on=1) for number in (0, 1)])
    alone_GNK, (alone_N,), ranked_rows = ranked()
    assert ranked_rows == [0, 1, 2, 3, 4]
    for number, share in ((0, [0, 1, 2]), (1, [3, 4])):
        several = np.load(tmp_path / f"{number}.npz")
        np.testing.assert_array_equal(several["top"], alone_GNK)
        np.testing.assert_allclose(several["log_p"], alone_N, rtol=1e-7)  # float32 products of other block sizes
        assert several["rows"].tolist() == share


@pytest.mark.process
@pytest.mark.nightly
def test_processes_with_different_data_are_refused(tmp_path: Path) -> None:
    tiny.write_job(tmp_path)
    pq.write_table(tiny.clustered(users=40, items=16, per_user=8, seed=1), tmp_path / "others.parquet")
    others = ["--set", f"data.train={tmp_path / 'others.parquet'}"]
    address = find_address()
    both = [start_fit(tmp_path, "out", address, number, *more) for number, more in enumerate(([], others))]
    try:
        said_by = [process.communicate(timeout=_HANGS_SECONDS)[0] for process in both]
    finally:
        end(*both)
    for process, output in zip(both, said_by, strict=True):
        assert process.returncode == 2
        assert re.fullmatch(OTHERS, clean_output(output, shorten=False)), output


OTHERS = (
    r"longtail-train: ids, pairs and feature tables \(sha256\): expected the same in all 2 processes, found \w{64} in "
    r"process 0 and \w{64} in process 1: start all with the same recipe and data"
)


FREQUENT_CHECKPOINTS = """
from longtail.trainer.cli import main
from longtail.trainer.config import TrainingConfig
TrainingConfig.checkpoint_steps = 2
main()
"""


def start_fit(folder: Path, out: str, address: str, number: int, *more: object) -> "subprocess.Popen[str]":
    """Start one of two processes of a job of `tiny.RECIPE`, two devices each."""
    settings = ["training.epochs=8", "training.patience=0", "training.processes=2", "training.devices=all"]
    return start(
        "-c", FREQUENT_CHECKPOINTS, "fit", folder / "recipe.toml", "--out", folder / out,
        "--process", f"{number}@{address}",
        *(word for setting in settings for word in ("--set", setting)), *more,
        on=2,
    )  # fmt: skip


def finish_job(folder: Path, out: str) -> Path:
    """Return the bundle of two processes that end by themselves."""
    address = find_address()
    wait(*[start_fit(folder, out, address, number) for number in (0, 1)])
    return folder / out


def kill_one(folder: Path, out: str, victim: int, *, later_than: int) -> tuple[int, str]:
    """Kill one of two processes once checkpoints are numbered higher; return the other's exit code and output."""
    address = find_address()
    both = [start_fit(folder, out, address, number) for number in (0, 1)]
    select = folder / f"{out}.work" / "select"
    until = time.monotonic() + _HANGS_SECONDS
    try:
        while not [path for path in select.glob("latest-*") if int(path.name.removeprefix("latest-")) > later_than]:
            assert time.monotonic() < until
            assert both[0].poll() is None, both[0].communicate()
            time.sleep(0.05)
        both[victim].kill()
        output, _ = both[1 - victim].communicate(timeout=_HANGS_SECONDS)
    finally:
        end(*both)
    return both[1 - victim].returncode, output


@pytest.mark.process
@pytest.mark.nightly
def test_a_lost_process_ends_the_other_and_the_job_resumes(tmp_path: Path) -> None:
    tiny.write_job(tmp_path)
    uninterrupted = finish_job(tmp_path, "whole")

    for victim, later_than in ((0, 4), (1, 15)):
        code, output = kill_one(tmp_path, "cut", victim, later_than=later_than)
        if code == -signal.SIGABRT:  # JAX ends processes that have lost another, too, and may be the first to see it
            assert "another task died" in output
        else:
            assert code == 3
            assert clean_output(output) == LOST.format(1 - victim)
        assert not (tmp_path / "cut").exists()

    cut = finish_job(tmp_path, "cut")
    for name in ("metrics.json", "history.json", "embeddings.npy"):
        assert (cut / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert len(json.loads((cut / "history.json").read_text())["losses"]) == 8


LOST = (
    "longtail-train: process {} of 2: another one has stopped (…); start all of them again to go on from the last "
    "checkpoint"
)


def clean_output(output: str, *, shorten: bool = True) -> str:
    """Return the command's own line of an output, without JAX's lines."""
    (line,) = [line for line in output.splitlines() if line.startswith("longtail-train: ")]
    return re.sub(r"\(.*\)", "(…)", line) if shorten else line


BAD = {
    "two processes by themselves": (
        {"processes": 2, "devices": "all"}, Cluster("127.0.0.1:1"),
        "cluster: expected both coordinator and process, or neither, received one of them",
    ),
    "a third of two": (
        {"processes": 2, "devices": "all"}, Cluster("127.0.0.1:1", 2), "--process: expected 0 … 1 of 2, received 2",
    ),
    "a cluster of one": (
        {}, Cluster("127.0.0.1:1", 0),
        "--process: expected training.processes above 1, found 1",
    ),
    "another backend": (
        {"processes": 2, "devices": "all"}, Cluster("127.0.0.1:1", 0),
        'training.devices = "all": expected Keras on JAX (KERAS_BACKEND=jax), found tensorflow',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("training", "cluster", "message"), BAD.values(), ids=BAD)
def test_impossible_clusters_are_refused(training: dict[str, object], cluster: Cluster, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        join_processes(tiny.recipe(training=training), cluster)


def test_several_devices_require_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"expected jax to be installed: pip install '.*\[jax\]'"):
        devices.check_installed()


def test_several_processes_are_refused_on_one_device_each() -> None:
    with pytest.raises(ValidationError, match='processes: expected devices = "all" with 2, received devices = "one"'):
        tiny.recipe(training={"processes": 2})


def test_a_run_is_the_same_on_any_number_of_devices() -> None:
    data = tiny.dataset(tiny.pairs((0, 0), (1, 1)), queries=2, labels=2)
    identities = {
        hash_run(tiny.recipe(training=training), data)
        for training in ({}, {"devices": "all"}, {"devices": "all", "processes": 8})
    }
    assert len(identities) == 1


def test_errors_of_one_process_name_no_other() -> None:
    assert (WORLD.processes, WORLD.process) == (1, 0)
    assert describe_lost_process(type("JaxRuntimeError", (Exception,), {})("Connection closed")) is None


@pytest.mark.process
@pytest.mark.nightly
def test_a_batch_size_that_devices_do_not_divide_is_refused(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    arguments = ["-m", "longtail.trainer", "fit", recipe, "--out", tmp_path / "out"]
    with start(*arguments, "--set", "training.devices=all", on=3) as shares:
        unsaid, _ = shares.communicate(timeout=_HANGS_SECONDS)
    assert shares.returncode == 2
    line = "longtail-train: training.batch_size: expected a multiple of 3 devices, received 32 pairs a part"
    assert unsaid.splitlines()[-1] == line
