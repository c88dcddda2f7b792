"""The batched transform against a loop over single images written from the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbayes.data import Examples, Transform, make_transform, register_augmentation
from fedbayes.data.transform import AUGMENTATIONS
from fedbayes.errors import ConfigError, DataError
from fedbayes.experiment import Data


def images(n=24, c=3, h=7, w=9, seed=0) -> Examples:
    rng = np.random.default_rng(seed)
    raw = torch.from_numpy(rng.integers(0, 256, (n, c, h, w), dtype=np.uint8))
    return Examples(raw, torch.from_numpy(rng.integers(0, 4, n)))


SHARDS = [np.arange(0, 10), np.arange(10, 13), np.arange(13, 24)]


def naive(image: np.ndarray, scale, shift, mean, dy, dx, flip) -> np.ndarray:
    """One image: scale, subtract the mean, zero-pad by 4, crop at (dy, dx), mirror."""
    x = (image.astype(np.float64) - shift) / scale - mean
    _, h, w = x.shape
    padded = np.zeros((x.shape[0], h + 8, w + 8))
    padded[:, 4 : 4 + h, 4 : 4 + w] = x
    crop = padded[:, dy : dy + h, dx : dx + w]
    return crop[:, :, ::-1] if flip else crop


@pytest.mark.parametrize("scale", ["unit", "standard", "none"])
@pytest.mark.parametrize("mean", ["none", "global", "client"])
def test_lanes_and_batches_equal_a_loop_over_images(scale, mean):
    train, test = images(), images(8, seed=1)
    transform = make_transform(Data(scale=scale, mean=mean, augment="crop-flip"), train, SHARDS, test)
    rng = np.random.default_rng(3)
    picks = np.stack([rng.choice(s, 5) for s in SHARDS])  # three lanes, one client each
    numbers = {k: v.reshape(3, 5, *v.shape[1:]) for k, v in transform.draw(rng, 15).items()}
    clients = [2, 0, -1]
    out = transform(
        train.inputs[torch.from_numpy(picks)],
        client=torch.tensor(clients),
        **{k: torch.from_numpy(v) for k, v in numbers.items()},
    )
    raw = train.inputs.numpy().astype(np.float64)
    per_channel = (0, 2, 3)
    factor, offset = {
        "unit": (np.full((3, 1, 1), 255.0), np.zeros((3, 1, 1))),
        "none": (np.ones((3, 1, 1)), np.zeros((3, 1, 1))),
        "standard": (raw.std(per_channel).reshape(3, 1, 1), raw.mean(per_channel).reshape(3, 1, 1)),
    }[scale]

    def mean_of(part):
        return ((part.astype(np.float64) - offset) / factor).mean(0)

    for lane, client in enumerate(clients):
        subtracted = {
            "none": 0.0,
            "global": mean_of(raw),
            "client": mean_of(test.inputs.numpy() if client < 0 else raw[SHARDS[client]]),
        }[mean]
        for i in range(5):
            expected = naive(
                raw[picks[lane, i]], factor, offset, subtracted, *numbers["offsets"][lane, i], numbers["flips"][lane, i]
            )
            assert np.allclose(out[lane, i].numpy(), expected, rtol=1e-5, atol=2e-6 * max(1, np.abs(expected).max()))


def test_leading_axes_do_not_matter():
    train = images(12)
    transform = make_transform(Data(augment="crop-flip"), train, [], train)
    numbers = {k: torch.from_numpy(v) for k, v in transform.draw(np.random.default_rng(0), 12).items()}
    flat = transform(train.inputs, **numbers)
    shaped = {k: v.view(2, 3, 2, *v.shape[1:]) for k, v in numbers.items()}
    deep = transform(train.inputs.view(2, 3, 2, 3, 7, 9), **shaped)
    assert torch.equal(deep.view_as(flat), flat)
    single = transform(train.inputs[4], **{k: v[4] for k, v in numbers.items()})
    assert torch.equal(single, flat[4])


def test_without_numbers_nothing_is_augmented():
    train = images()
    plain = make_transform(Data(), train, SHARDS, train)
    augmented = make_transform(Data(augment="crop-flip"), train, SHARDS, train)
    assert torch.equal(plain(train.inputs), augmented(train.inputs))
    assert plain.draw(np.random.default_rng(0), 5) == {}


def test_offset_four_and_no_flip_is_the_image_itself():
    train = images()
    transform = make_transform(Data(augment="crop-flip"), train, SHARDS, train)
    centre = transform(train.inputs, offsets=torch.full((24, 2), 4), flips=torch.zeros(24, dtype=torch.bool))
    assert torch.equal(centre, transform(train.inputs))


def test_padding_is_zero_after_mean_subtraction():
    """A bright image moved to a corner is bordered by zeros, that is, by the mean image."""
    bright = Examples(torch.full((4, 1, 8, 8), 200, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    dark = Examples(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    transform = make_transform(Data(mean="client", augment="crop"), bright, [np.arange(4)], dark)
    moved = transform(bright.inputs[0], client=-1, offsets=torch.tensor([0, 0]))
    assert (moved[0, :4] == 0).all()
    assert (moved[0, :, :4] == 0).all()
    assert torch.allclose(moved[0, 4:, 4:], torch.tensor(200 / 255))


def test_draws_cover_all_offsets_and_repeat_by_seed():
    transform = make_transform(Data(augment="crop-flip"), images(), SHARDS)
    a, b = (transform.draw(np.random.default_rng(5), 4000) for _ in range(2))
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert set(map(tuple, a["offsets"])) == {(y, x) for y in range(9) for x in range(9)}
    assert 0.45 < a["flips"].mean() < 0.55
    assert "flips" not in make_transform(Data(augment="crop"), images(), SHARDS).draw(np.random.default_rng(5), 3)


def test_tables_are_standardised_by_the_training_data_alone():
    rng = np.random.default_rng(0)
    train = Examples(torch.from_numpy(rng.normal(50, 7, (200, 4))).float(), torch.zeros(200, dtype=torch.int64))
    train.inputs[:, 2] = 3.0  # a constant column must not divide by zero
    test = Examples(train.inputs[:5] + 1000, torch.zeros(5, dtype=torch.int64))
    transform = make_transform(Data(scale="standard"), train, [np.arange(200)], test)
    out = transform(train.inputs)
    assert torch.allclose(out.mean(0), torch.zeros(4), atol=1e-4)
    assert torch.allclose(out.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0, 1.0]), atol=1e-4)
    far = (test.inputs - train.inputs.mean(0)) / torch.where(out.std(0) > 0, train.inputs.std(0, correction=0), 1.0)
    assert torch.allclose(transform(test.inputs), far, rtol=1e-4, atol=1e-3)


def test_unit_maps_tables_to_the_unit_interval():
    table = Examples(torch.tensor([[10.0, -1.0], [20.0, -3.0], [15.0, -2.0]]), torch.zeros(3, dtype=torch.int64))
    out = make_transform(Data(mean="none"), table, [], table)(table.inputs)
    assert torch.allclose(out, torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]), atol=1e-6)


def test_the_step_can_be_captured_whole():
    """No graph break, hence nothing that waits for the device or looks at values."""
    train = images()
    transform = make_transform(Data(mean="client", augment="crop-flip"), train, SHARDS, train)
    numbers = {
        k: torch.from_numpy(v).view(3, 8, *v.shape[1:]) for k, v in transform.draw(np.random.default_rng(0), 24).items()
    }
    raw, clients = train.inputs.view(3, 8, 3, 7, 9), torch.tensor([0, 1, 2])
    compiled = torch.compile(lambda r, c, n: transform(r, client=c, **n), fullgraph=True, backend="eager")
    assert torch.equal(compiled(raw, clients, numbers), transform(raw, client=clients, **numbers))


def test_it_works_under_vmap():
    train = images()
    transform = make_transform(Data(augment="crop-flip"), train, SHARDS, train)
    numbers = {k: torch.from_numpy(v) for k, v in transform.draw(np.random.default_rng(0), 24).items()}
    mapped = torch.vmap(lambda r, o, f: transform(r, offsets=o, flips=f))(
        train.inputs, numbers["offsets"], numbers["flips"]
    )
    assert torch.equal(mapped, transform(train.inputs, **numbers))


def test_a_registered_augmentation_gets_its_own_numbers():
    class Gain:
        def draw(self, rng, n):
            return {"gain": rng.random(n).astype(np.float32)}

        def __call__(self, inputs, **numbers):
            return inputs * numbers["gain"][..., None]

    register_augmentation("gain")(lambda train, scale: Gain())
    try:
        table = Examples(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))
        transform = make_transform(Data(augment="gain", scale="none", mean="none"), table, [], table)  # pyright: ignore
        out = transform(table.inputs, gain=torch.tensor([1.0, 2.0, 3.0]))
        assert out[:, 0].tolist() == [1, 2, 3]
    finally:
        del AUGMENTATIONS["gain"]


def test_to_moves_every_tensor():
    moved = make_transform(Data(mean="client"), images(), SHARDS, images()).to("meta")
    assert isinstance(moved, Transform)
    assert moved.scale.device.type == moved.shift.device.type == "meta"


def test_crops_are_for_images():
    table = Examples(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="crops and flips are for images"):
        make_transform(Data(augment="crop"), table, [], table)
    with pytest.raises(ConfigError, match=r"data\.scale 'percent' does not exist"):
        make_transform(Data(scale="percent"), table, [], table)  # pyright: ignore[reportArgumentType]
