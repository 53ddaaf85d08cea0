"""What `test_devices` runs on four devices: rows of a table are read, and their gradients summed, by all-to-all.

Every device reads 64 distinct rows that all lie on the first, of which a round holds 16 + 5·√16 = 36; others read some
of them too.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from longtail.trainer import backend, devices
from longtail.trainer.arrays import assign, read_values
from longtail.trainer.backend import mesh

ROWS, DEVICES = 5000, 4


def main() -> None:
    """Compare what devices read and write with NumPy."""
    devices.spread_over_devices()
    rng = np.random.default_rng(0)
    values_RD = rng.normal(size=(ROWS, 3)).astype(np.float32)
    table = backend.rows_variable(ROWS, 3, name="table")
    assign(table, values_RD)
    first_device = np.flatnonzero(mesh.storage_rows(np.arange(ROWS), ROWS) < table.shape[0] // DEVICES)
    ids = np.stack([rng.choice(first_device, 64, replace=False) for _ in range(DEVICES)]).astype(np.int32)
    assert len(np.unique(ids)) < ids.size

    def step(ids: Any) -> tuple[Any, ...]:
        requested_ids, (positions,) = backend.distinct([ids], ROWS)
        rows_UD = backend.gather(table, requested_ids)
        read = backend.take(rows_UD, positions)
        owned, own_UD, sums_UD = backend.sums(table, [(requested_ids, rows_UD)], [2 * rows_UD])
        with keras.StatelessScope() as scope:
            backend.scatter(table, owned, own_UD - sums_UD)
        return read, scope.get_current_value(table)

    program = jax.jit(step).lower(ids.ravel()).compile()
    read, written = program(ids.ravel())
    np.testing.assert_array_equal(read, values_RD[ids.ravel()])
    expected_RD = values_RD.copy()
    np.subtract.at(expected_RD, ids.ravel(), 2 * values_RD[ids.ravel()])
    table.assign(written)
    np.testing.assert_allclose(read_values(table), expected_RD, rtol=1e-6)


if __name__ == "__main__":
    main()
