"""Count the bytes that XLA's program of a training step moves between devices.

    python -m benchmarks.device_traffic [--devices 2 4 8] [--batch 4096] [--dim 64] [--rows 1000000]

In-batch softmax over id towers, row-wise Adagrad, on devices that JAX makes of this processor: what is moved is that of
any others, how long it takes is not. Columns are arrays of the batch's rows, B·d·4 bytes each, that a device takes part
in moving; `moved` is what it sends, an all-reduce twice, all times (n − 1)/n; `formula` is docs/scale.md's. Loops
count once: rows are exchanged in one round unless a batch's lie unevenly, and blocks of scores move nothing.
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

import numpy as np

KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}
_COLLECTIVE = re.compile(rf"= (?P<shapes>.*?) (?P<kind>{'|'.join(KINDS)}|\S+permute)\(")
_SHAPE = re.compile(r"(?P<type>\w+)\[(?P<sizes>[\d,]*)\]")


def formula(batch: int, dim: int, devices: int) -> float:
    """Return the bytes of rows that a device sends in a step [docs/scale.md]."""
    return (2 + 4 / devices + 20 / math.sqrt(batch)) * batch * dim * 4 * (devices - 1) / devices


def traffic_of(program: str, devices: int) -> dict[str, int]:
    """Count the bytes that collectives of a compiled program move, by their kind."""
    by_kind = dict.fromkeys(KINDS, 0)
    for match in _COLLECTIVE.finditer(program):
        kind = match["kind"]
        for shape in _SHAPE.finditer(match["shapes"]):
            size = math.prod(int(size) for size in shape["sizes"].split(",") if size) * _BYTES[shape["type"]]
            by_kind[kind] = by_kind.get(kind, 0) + size * (devices if kind == "reduce-scatter" else 1)
    return by_kind


def moved(traffic: dict[str, int], devices: int) -> float:
    """Return the bytes that a device sends."""
    return (sum(traffic.values()) + traffic["all-reduce"]) * (devices - 1) / devices


def compiled_step(*, devices: int, batch: int, dim: int, rows: int) -> str:
    """Compile a training step for a number of devices, in a new process."""
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
    unit = batch * dim * 4
    print(f"A batch of {batch:,}, d = {dim}; two tables of {rows:,} rows, {rows * dim * 4 / 1e6:,.0f} MB each\n")
    print(f"| devices | {' | '.join(KINDS)} | moved, MB | formula, MB |")
    print("|---:" * (len(KINDS) + 3) + "|")
    for devices in arguments.devices:
        traffic = traffic_of(compiled_step(devices=devices, batch=batch, dim=dim, rows=rows), devices)
        arrays = " | ".join(f"{size / unit:.2f}" for size in traffic.values())
        sent, expected = moved(traffic, devices) / 1e6, formula(batch, dim, devices) / 1e6
        print(f"| {devices} | {arrays} | {sent:.2f} | {expected:.2f} |")


if __name__ == "__main__":
    main()
