"""What a client sees: batches, padding, augmentation; and which lane it is on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.engine.packing import IDLE, block_size, lane_steps, pack, widest
from fedbayes.engine.plan import draw_batches
from fedbayes.errors import ConfigError, DataError
from fedbayes.seeds import numpy_rng


def draw(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"offsets": rng.integers(0, 9, (n, 2))}


def batches(n: int, batch: int = 8, **fields: int):
    about = {"epochs": 1, "steps": 0, "seed": 3, "round": 2, "client": 5} | fields
    return draw_batches(np.arange(100, 100 + n), batch, draw=draw, **about)


def test_every_example_counts_once_per_epoch():
    b = batches(21, epochs=3)
    assert b.indices.shape == b.real.shape == (9, 8)
    assert b.tail == 3
    for epoch in range(3):
        rows = slice(3 * epoch, 3 * epoch + 3)
        counted = b.indices[rows][b.real[rows] == 1]
        assert sorted(counted) == list(range(100, 121))


def test_the_order_is_the_address_s_permutation():
    b = batches(21)
    order = numpy_rng(3, "order", 2, 5, 0).permutation(np.arange(100, 121))
    np.testing.assert_array_equal(b.indices.ravel()[:21], order)
    np.testing.assert_array_equal(b.indices.ravel()[21:], order[:3])  # completed from the epoch's beginning
    np.testing.assert_array_equal(
        b.augmentation["offsets"].reshape(-1, 2), draw(numpy_rng(3, "augment", 2, 5, 0), 24)["offsets"]
    )


def test_a_client_smaller_than_a_batch_repeats_itself():
    b = batches(3)
    assert b.steps == 1
    np.testing.assert_array_equal(b.indices[0, :3], b.indices[0, 3:6])
    assert b.real.sum() == 3
    assert batches(1).real.tolist() == [[1.0] + [0.0] * 7]


def test_steps_instead_of_epochs():
    b = batches(21, steps=7, epochs=1)
    assert b.steps == 7
    assert b.tail == 1  # two whole epochs of three steps, and one step
    np.testing.assert_array_equal(b.indices[:3], batches(21).indices)


def test_nothing_to_do_is_refused():
    with pytest.raises(DataError, match="client 5 holds no examples"):
        batches(0)
    with pytest.raises(ConfigError, match="epochs is 0 and steps is 0"):
        batches(4, epochs=0)


@pytest.mark.parametrize("size", [100_000, 99999999999999999999])
def test_batches_far_beyond_a_client_are_refused_before_memory_is_asked_for(size: int):
    with pytest.raises(ConfigError, match=f"local.batch_size is {size}, but a client holds 18 examples"):
        batches(18, size)
    assert batches(18, 1 << 16).real.sum() == 18


jobs = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(jobs, st.integers(1, 20), st.integers(1, 7), st.booleans())
def test_packing_gives_every_job_its_steps_in_order(lengths: list[int], lanes: int, block: int, compact: bool):
    done = dict.fromkeys(range(len(lengths)), 0)
    place: dict[int, int] = {}
    for segment in pack(lengths, lanes, block=block, compact=compact):
        busy = [job for job in segment.jobs if job != IDLE]
        assert len(set(busy)) == len(busy)
        assert segment.steps % block == 0
        assert len(segment.jobs) <= lanes
        if compact:
            assert IDLE not in segment.jobs
        for lane, (job, first) in enumerate(zip(segment.jobs, segment.begins, strict=True)):
            if job == IDLE:
                continue
            assert done[job] == first
            done[job] += segment.steps
            if not compact:  # a fixed width never moves a client
                assert place.setdefault(job, lane) == lane
    assert all(-(-n // block) * block == done[j] for j, n in enumerate(lengths))


@settings(max_examples=100, deadline=None)
@given(jobs, st.integers(1, 20))
def test_closed_up_lanes_waste_nothing(lengths: list[int], lanes: int):
    assert lane_steps(pack(lengths, lanes)) == sum(lengths)


def test_dirichlet_clients_keep_nine_tenths_of_the_lane_steps_busy():
    rng = np.random.default_rng(0)
    for seed in range(5):
        sizes = np.maximum(1, (rng.dirichlet(np.full(100, 0.1)) * 50_000).astype(int))
        lengths = [-(-int(n) // 32) for n in sizes]
        block = block_size(lengths)
        width = widest([lengths], 30, block=block)
        packed = pack(lengths, width, block=block, compact=False)
        assert width > 1
        assert sum(lengths) >= 0.9 * lane_steps(packed), (seed, width)


def test_blocks_waste_little():
    assert block_size([157] * 10) == 8
    assert block_size([5] * 50) == 5
    assert block_size([1, 3, 5, 9]) == 1


def test_longest_first():
    assert pack([1, 5, 3], 2)[0].jobs == (1, 2)
    assert pack([2, 2, 2], 3) == pack([2, 2, 2], 99)
