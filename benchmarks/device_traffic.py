"""What one training step moves between devices, read from the program that XLA compiles for them.

    python -m benchmarks.device_traffic [--devices 2 4 8] [--batch 4096] [--dim 64] [--rows 1000000]

In-batch softmax over id towers, row-wise Adagrad, on devices that JAX makes of this processor: what is moved is that of
any others, how long it takes is not. `moved` is what a device sends, an all-reduce of x bytes as 2·x·(n − 1)/n and an
all-gather of x as x·(n − 1)/n; `formula` is docs/scale.md's.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}
_COLLECTIVE = re.compile(r"= (?P<shapes>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|\S+permute)\(")
_SHAPE = re.compile(r"(?P<type>\w+)\[(?P<sizes>[\d,]*)\]")


class Traffic(NamedTuple):
    """Of one device in one step.

    Attributes:
        by_kind: bytes that collectives of a kind give.
        largest: numbers in the largest array that one of them gives.
    """

    by_kind: dict[str, int]
    largest: int

    def moved(self, devices: int) -> float:
        """Bytes that a device sends."""
        times = {"all-reduce": 2}
        return sum(times.get(kind, 1) * size for kind, size in self.by_kind.items()) * (devices - 1) / devices


def formula(batch: int, dim: int, devices: int) -> float:
    """Bytes that a device sends in a step: 11 arrays of B·d floats, and B of ids and the like [docs/scale.md]."""
    return 11 * batch * dim * 4 * (devices - 1) / devices


def traffic_of(program: str) -> Traffic:
    """What the collectives of a compiled program give."""
    by_kind: dict[str, int] = {}
    largest = 0
    for found in _COLLECTIVE.finditer(program):
        for shape in _SHAPE.finditer(found["shapes"]):
            numbers = math.prod(int(size) for size in shape["sizes"].split(",") if size)
            by_kind[found["kind"]] = by_kind.get(found["kind"], 0) + numbers * _BYTES[shape["type"]]
            largest = max(largest, numbers)
    return Traffic(by_kind, largest)


def compiled_step(*, devices: int, batch: int, dim: int, rows: int) -> str:
    """The program of a step, compiled for so many devices by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_force_host_platform_device_count={devices} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.device_traffic", "--step", *map(str, (batch, dim, rows))], check=True,
            env=os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, capture_output=True,
        )  # fmt: skip
        programs = Path(folder).glob("*jit_pure*after_optimizations.txt")
        return max(programs, key=lambda path: path.stat().st_size).read_text()


def _step(batch: int, dim: int, rows: int) -> None:
    from benchmarks.step_cost import longtail_step

    rng = np.random.default_rng(0)
    step = longtail_step(rows, "adagrad", batch=batch, dim=dim, queries=rows, devices="all")
    step(*(rng.integers(0, rows, batch).astype(np.int32) for _ in range(2)))


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the query's table and of the label's")
    parser.add_argument("--step", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        _step(*arguments.step)
        return
    batch, dim, rows = arguments.batch, arguments.dim, arguments.rows
    print(f"A batch of {batch:,}, d = {dim}; two tables of {rows:,} rows, {rows * dim * 4 / 1e6:,.0f} MB each\n")
    print("| devices | all-reduce, MB | all-gather, MB | other, MB | moved, MB | formula, MB | largest array, rows |")
    print("|---|---|---|---|---|---|---|")
    for devices in arguments.devices:
        traffic = traffic_of(compiled_step(devices=devices, batch=batch, dim=dim, rows=rows))
        kinds = dict(traffic.by_kind)
        reduced, gathered = kinds.pop("all-reduce", 0), kinds.pop("all-gather", 0)
        figures = (reduced, gathered, sum(kinds.values()), traffic.moved(devices), formula(batch, dim, devices))
        print(f"| {devices} | {' | '.join(f'{size / 1e6:.2f}' for size in figures)} | {traffic.largest / dim:,.0f} |")


if __name__ == "__main__":
    main()
