"""Server inputs of another size or number of channels."""

import numpy as np
import pytest
import torch

from fedbayes import config, runner
from fedbayes.data import Examples
from fedbayes.distill.inputs import fit
from fedbayes.errors import DataError


def examples(images):
    return Examples(images, torch.zeros(len(images), dtype=torch.int64), {})


def test_inputs_that_fit_are_left_alone():
    these = examples(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))
    assert fit(these, (1, 8, 8)) is these


def test_halving_a_linear_ramp_keeps_its_slope():
    """A linear picture is resized exactly away from its border: pixel centres move, values on the line do not."""
    ramp = torch.arange(64.0).expand(64, 64).clone()[None, None]
    half = fit(examples(ramp), (1, 32, 32)).inputs[0, 0]
    assert torch.allclose(half[5, 2:-2], (2 * torch.arange(32.0) + 0.5)[2:-2], atol=1e-4)


def test_bytes_stay_bytes_and_constants_stay_constant():
    images = torch.full((2, 3, 64, 64), 200, dtype=torch.uint8)
    small = fit(examples(images), (3, 32, 32)).inputs
    assert small.dtype == torch.uint8
    assert small.shape == (2, 3, 32, 32)
    assert (small == 200).all()


def test_grey_and_colour():
    grey = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)
    colour = fit(examples(grey), (3, 4, 4)).inputs
    assert all(torch.equal(colour[:, i], grey[:, 0]) for i in range(3))
    back = fit(examples(torch.tensor([0, 30, 90], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 4, 4)), (1, 4, 4))
    assert (back.inputs == 40).all()


def test_what_cannot_fit_is_refused():
    with pytest.raises(DataError, match=r"shape \(13,\).*\(1, 8, 8\)"):
        fit(examples(torch.zeros(3, 13)), (1, 8, 8))
    with pytest.raises(DataError, match="2 channels.*3"):
        fit(examples(torch.zeros(3, 2, 8, 8)), (3, 8, 8))


def test_another_data_set_of_other_size_and_domain_teaches(tmp_path):
    """The server's images are noise in colour, 16 x 16; the clients' are grey digits, 8 x 8."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "noise.npz", x_train=rng.integers(0, 256, (40, 3, 16, 16), dtype=np.uint8),
             y_train=np.arange(40) % 10, x_test=rng.integers(0, 256, (10, 3, 16, 16), dtype=np.uint8),
             y_test=np.arange(10))  # fmt: skip
    e = config.override(
        config.Experiment(),
        {
            "rounds": 1, "data.limit": 200, "data.test_limit": 60, "partition.clients": 3, "model.name": "mlp",
            "model.kind": "deterministic", "fusion.rule": "fedavg", "distill.enabled": True,
            "distill.data": str(tmp_path / "noise.npz"), "distill.epochs": 3, "distill.swa": "none",
            "engine.device": "cpu", "engine.lanes": 1,
        },
    )  # fmt: skip
    result = runner.run(e, write=False)
    (event,) = [x for x in result.events if x["kind"] == "distill"]
    assert event["examples"] == 40
