"""How near the q of sampler `model` is to the model's own softmax, in total variation, beside uniform draws.

    python -m benchmarks.model_sampler --bundle runs/demo

Of the bundle's label embeddings and calibration queries at several temperatures T; the target is softmax(u·v/T), the
mean is over at most 200 queries. The tables of METHODS §2.1 are of `make demo`'s bundle.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from keras import ops

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32
from longtail.trainer.sampling import SAMPLERS, DrawContext, LabelTable, SamplerSetup

TEMPERATURES = (0.25, 0.15, 0.1)
FEATURES, BANDWIDTHS = (128, 512), (1.0, 2.0, 4.0)
QUERIES = 200


def main() -> None:
    """Print one row for each sampler, one column for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("runs/demo"))
    bundle = Bundle.load(parser.parse_args().bundle)
    queries_BD, labels_LD = bundle.calibration_queries[:QUERIES], bundle.embeddings
    cosines_BL = queries_BD @ labels_LD.T
    print(f"\n{len(labels_LD):,} labels, {len(queries_BD)} queries, cosines ± {cosines_BL.std():.2f}\n")
    print("| q | " + " | ".join(f"T = {temperature:g}" for temperature in TEMPERATURES) + " |")
    print("|---|" + "---:|" * len(TEMPERATURES))
    rows: dict[str, dict[str, Any] | None] = {"uniform": None, "`model`": {}, "`exact = true`": {"exact": True}}
    for features in FEATURES:
        for bandwidth in BANDWIDTHS:
            rows[f"`features = {features}`, `bandwidth = {bandwidth:g}`"] = {
                "features": features,
                "bandwidth": bandwidth,
            }
    for name, arguments in rows.items():
        cells = [f"{variation(queries_BD, labels_LD, temperature, arguments):.3f}" for temperature in TEMPERATURES]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def variation(queries_BD: Float32, labels_LD: Float32, temperature: float, arguments: dict[str, Any] | None) -> float:
    """Mean total variation of a sampler's q to softmax(u·v/T); of uniform draws where there are no arguments."""
    (rows, dims), labels = queries_BD.shape, len(labels_LD)
    logits_BL = queries_BD @ labels_LD.T / temperature
    model_BL = np.exp(logits_BL - np.logaddexp.reduce(logits_BL, axis=1, keepdims=True))
    q_BL = np.full((rows, labels), 1 / labels)
    if arguments is not None:
        setup = SamplerSetup(np.full(labels, -np.log(labels)), rows, dims)
        sampler = SAMPLERS["model"](setup, negatives=1, **arguments)
        if sampler.refresh is None or sampler.log_q is None:
            raise TypeError("expected a sampler that depends on the query")
        sampler.refresh(LabelTable(labels_LD, None, temperature))
        context = DrawContext(ops.zeros((rows,), "int32"), {}, ops.convert_to_tensor(queries_BD))
        every_BL = np.tile(np.arange(labels, dtype=np.int32), (rows, 1))
        log_q_BL = [
            ops.convert_to_numpy(sampler.log_q(context, ops.convert_to_tensor(part_BC)))
            for part_BC in np.array_split(every_BL, max(labels // 100, 1), axis=1)
        ]
        q_BL = np.exp(np.concatenate(log_q_BL, axis=1))
    return float(np.abs(q_BL - model_BL).sum(axis=1).mean() / 2)


if __name__ == "__main__":
    main()
