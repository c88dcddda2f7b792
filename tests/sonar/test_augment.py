"""Augmentation does what its numbers say, and nothing else."""

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedbayes.data import Examples, make_transform
from fedbayes.data.sonar.augment import SonarPictures, SonarWaveforms, hashed, roll
from fedbayes.errors import DataError
from fedbayes.experiment import Data


def numbers(n, **given):
    neutral = {
        "shift": torch.zeros(n, dtype=torch.float64),
        "gain": torch.zeros(n, dtype=torch.float64),
        "band": torch.tensor([[-1000.0, 0.0, 0.5, 7.0]] * n, dtype=torch.float64),
        "masks": torch.zeros(n, 4, dtype=torch.float64),
    }
    return neutral | {k: torch.as_tensor(v, dtype=torch.float64) for k, v in given.items()}


def pictures(n=3):
    return 0.1 * torch.randn(n, 1, 20, 10, generator=torch.Generator().manual_seed(0))


def test_neutral_numbers_change_nothing():
    x = pictures()
    assert torch.allclose(SonarPictures()(x, **numbers(3)), x, atol=1e-6)
    w = torch.randn(3, 1, 501)
    assert torch.allclose(SonarWaveforms()(w, **numbers(3)), w, atol=1e-5)


def test_time_shift_turns_each_example_by_its_own_share():
    x = pictures()
    out = SonarPictures()(x, **numbers(3, shift=[0.0, 0.3, 0.95]))
    for i, steps in enumerate((0, 3, 9)):
        assert torch.allclose(out[i], torch.roll(x[i], -steps, -1), atol=1e-6)


def test_gain_is_in_decibels():
    x = pictures()
    out = SonarPictures()(x, **numbers(3, gain=[0.0, 2.0, -3.0]))
    assert torch.allclose((out - x).amax((1, 2, 3)) * 100, torch.tensor([0.0, 2.0, -3.0]), atol=1e-4)
    w = torch.randn(3, 1, 400)
    louder = SonarWaveforms()(w, **numbers(3, gain=[0.0, 20.0, -20.0]))
    assert torch.allclose(louder / w, torch.tensor([1.0, 10.0, 0.1])[:, None, None], rtol=1e-2)


def test_masks_hide_what_they_say():
    x = pictures() + 5
    out = SonarPictures()(x, **numbers(3, masks=[[0.25, 0.1, 0.0, 0.0], [0.0, 0.0, 0.5, 0.2], [0.0, 0.0, 0.0, 0.0]]))
    hidden = out == 0
    assert hidden[0, 0].any(1).nonzero().flatten().tolist() == [5, 6]
    assert hidden[1, 0].any(0).nonzero().flatten().tolist() == [5, 6]
    assert not hidden[2].any()
    assert torch.allclose(out[~hidden], x[~hidden], atol=1e-5)


def test_band_noise_adds_power_in_its_band_only():
    x = torch.zeros(4000, 1, 20, 4)
    out = SonarPictures()(x, **numbers(4000, band=np.stack([np.zeros(4000), np.full(4000, 0.5), np.full(4000, 0.25), np.arange(4000)], 1)))  # fmt: skip
    power = 10 ** (out * 10)
    assert torch.allclose(power[:, :, :10], torch.ones(()), atol=1e-4)
    assert torch.allclose(power[:, :, 15:], torch.ones(()), atol=1e-4)
    # unit power plus noise of unit mean power
    assert float(power[:, :, 10:15].mean()) == pytest.approx(2.0, rel=0.01)


def test_band_noise_of_a_waveform_has_its_level():
    w = torch.zeros(200, 1, 4000)
    band = np.stack([np.full(200, -6.0), np.full(200, 0.2), np.full(200, 0.3), np.arange(200)], 1)
    out = SonarWaveforms()(w, **numbers(200, band=band))
    assert 10 * np.log10(float(out.square().mean())) == pytest.approx(-6.0, abs=0.2)
    spectrum = torch.fft.rfft(out).abs().square().mean((0, 1))
    inside = torch.arange(len(spectrum)) / len(spectrum)
    inside = (inside > 0.19) & (inside < 0.51)
    assert float(spectrum[~inside].sum() / spectrum.sum()) < 1e-6


def test_hashed_numbers_are_uniform_and_independent():
    u = hashed(torch.arange(200), 500, 1)
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(u.var()) == pytest.approx(1 / 12, abs=0.002)
    assert abs(float(torch.corrcoef(u[:2])[0, 1])) < 0.15
    assert abs(float(torch.corrcoef(torch.stack([u.flatten(), hashed(torch.arange(200), 500, 2).flatten()]))[0, 1])) < 0.02  # fmt: skip


@pytest.mark.parametrize("augmentation", [SonarPictures(), SonarWaveforms()])
def test_leading_axes_and_vmap_agree_with_one_by_one(augmentation):
    shape = (1, 12, 8) if isinstance(augmentation, SonarPictures) else (1, 96)
    x = torch.randn(2, 3, *shape)
    drawn = {k: torch.from_numpy(v) for k, v in augmentation.draw(np.random.default_rng(0), 6).items()}
    lanes = {k: v.unflatten(0, (2, 3)) for k, v in drawn.items()}
    together = augmentation(x, **lanes)
    flat = augmentation(x.flatten(0, 1), **drawn)
    assert torch.allclose(together.flatten(0, 1), flat, atol=1e-5)
    mapped = vmap(lambda a, b: augmentation(a, **b))(x, lanes)
    assert torch.allclose(mapped, together, atol=1e-5)


def test_drawing_is_by_generator_and_in_range():
    a = SonarPictures().draw(np.random.default_rng(1), 2000)
    b = SonarPictures().draw(np.random.default_rng(1), 2000)
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert all(len(v) == 2000 for v in a.values())
    assert 0.45 < (a["band"][:, 0] > -100).mean() < 0.55
    assert (a["masks"][:, 0] + a["masks"][:, 1] <= 1).all()
    assert (SonarPictures(timeless=True).draw(np.random.default_rng(1), 50)["shift"] == 0).all()


@pytest.mark.parametrize("scale", ["unit", "standard"])
def test_through_the_transform_a_decibel_is_a_decibel(scale):
    grey = torch.randint(60, 160, (40, 1, 8, 6), dtype=torch.uint8)
    train = Examples(grey, torch.zeros(40, dtype=torch.int64), {"picture": np.full(40, "logmel")})
    transform = make_transform(Data(augment="sonar", scale=scale), train, [np.arange(40)])
    plain = transform(grey)
    louder = transform(grey, **numbers(40, gain=np.full(40, 10.0)))
    step = (plain.max() - plain.min()) / float(grey.float().sub(grey.float().mean(0)).max() - grey.float().sub(grey.float().mean(0)).min())  # fmt: skip
    assert float((louder - plain).mean() / step) == pytest.approx(25.5, rel=1e-3)  # 10 of 100 dB are 25.5 of 255


def test_demon_pictures_are_not_shifted_and_tables_are_refused():
    grey = torch.zeros(4, 1, 8, 6, dtype=torch.uint8)
    labels = torch.zeros(4, dtype=torch.int64)
    demon = make_transform(Data(augment="sonar"), Examples(grey, labels, {"picture": np.full(4, "demon")}), [])
    assert (demon.draw(np.random.default_rng(0), 10)["shift"] == 0).all()
    with pytest.raises(DataError, match="pictures and waveforms"):
        make_transform(Data(augment="sonar"), Examples(torch.zeros(4, 3), labels), [])


def test_roll_is_torch_roll():
    x = torch.arange(12.0).reshape(2, 6)
    assert torch.equal(roll(x, torch.tensor([0.5, 0.0])), torch.stack([x[0].roll(-3), x[1]]))
