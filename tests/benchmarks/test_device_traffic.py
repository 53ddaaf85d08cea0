"""What a step moves between devices is what docs/scale.md says, and no table is among it."""

import pytest

from benchmarks.device_traffic import compiled_step, formula, traffic_of


def test_collectives_are_counted_by_what_they_give() -> None:
    program = """
  %a = f32[8,4]{1,0} all-gather(%x), channel_id=1
  %b = (f32[8,4]{1,0}, s32[8]{0}) all-reduce(%y, %z), channel_id=2
  %c = f32[2,4]{1,0} collective-permute(%w)
  %d = f32[100,4]{1,0} fusion(%all-gather)
"""
    traffic = traffic_of(program)
    assert traffic.by_kind == {"all-gather": 128, "all-reduce": 160, "collective-permute": 32}
    assert traffic.largest == 32
    assert traffic.moved(4) == (128 + 2 * 160 + 32) * 3 / 4


@pytest.mark.process
def test_a_step_on_four_devices_moves_rows_of_the_batch_alone() -> None:
    batch, dim, rows = 512, 32, 50_000
    traffic = traffic_of(compiled_step(devices=4, batch=batch, dim=dim, rows=rows))
    assert traffic.largest == batch * dim
    assert 1 <= traffic.moved(4) / formula(batch, dim, 4) < 1.05 + 4 / dim
