"""The papers' networks: exact parameter counts, shapes, kinds, initial weights."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn as tnn

from fedbayes import nn
from fedbayes.errors import ConfigError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def trainable(module: tnn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def with_statistics(module: tnn.Module) -> int:
    return trainable(module) + sum(b.numel() for n, b in module.named_buffers() if "num_batches" not in n)


@pytest.mark.parametrize(
    ("name", "options", "parameters", "in_all"),
    [
        ("resnet20", {}, 269_722, 269_722 + 1_376),
        ("resnet20", {"shortcut": "B"}, 273_066, 274_442),
        ("resnet32", {}, 464_154, 466_426),
        ("resnet44", {}, 658_586, 661_754),
        ("resnet56", {}, 853_018, 857_082),
        ("lenet", {}, 62_006, 62_006),
        ("lenet", {"in_channels": 1}, 44_426, 44_426),
        ("reyes-mnist", {"in_channels": 1}, 600_810, 600_810),
        ("reyes-cifar", {}, 4_225_162, 4_225_354),
        ("fedbe-convnet", {}, 122_570, 122_570),
    ],
)
def test_parameter_counts_of_the_papers(name: str, options: dict, parameters: int, in_all: int) -> None:
    for kind in ("deterministic", "dropout"):
        module = nn.build(name, kind, **options)
        assert trainable(module) == parameters
        assert with_statistics(module) == in_all


@pytest.mark.parametrize(("channels", "parameters"), [(3, 120_926), (1, 86_066)])
@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_ozers_lenet_has_bayesian_linear_weights_only(kind: str, channels: int, parameters: int) -> None:
    module = nn.build("lenet", kind, in_channels=channels)
    assert trainable(module) == parameters
    assert nn.gaussian_names(dict(module.named_parameters())) == ["fc1.weight", "fc2.weight", "fc3.weight"]
    everything = nn.build("lenet", kind, in_channels=channels, where="*")
    assert len(nn.gaussian_names(dict(everything.named_parameters()))) == 5


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_resnets_are_fully_variational_but_for_norms_and_biases(shortcut: str) -> None:
    module = nn.build("resnet20", "flipout", shortcut=shortcut)
    gaussian = set(nn.gaussian_names(dict(module.named_parameters())))
    expected = {f"{n}.weight" for n, m in module.named_modules() if isinstance(m, (tnn.Conv2d, tnn.Linear))}
    assert gaussian == expected
    assert len(gaussian) == (20 if shortcut == "A" else 22)
    # a scale more for every weight: 269,722 - 1,376 (batch-norm) - 10 (bias); 273,066 - 1,376 - 794 (biases)
    assert trainable(module) == (269_722 + 268_336 if shortcut == "A" else 273_066 + 270_896)
    dropouts = [m for m in nn.build("resnet20", "dropout", shortcut=shortcut).modules() if isinstance(m, nn.Dropout)]
    assert len(dropouts) == len(expected)
    assert {m.p for m in dropouts} == {0.2}


SHAPES = {
    "mlp": [(1, 8, 8), (13,), (60,)],
    "cnn": [(1, 8, 8), (3, 32, 32), (1, 5, 7)],
    "lenet": [(3, 32, 32), (1, 28, 28)],
    "reyes-mnist": [(1, 28, 28)],
    "reyes-cifar": [(3, 32, 32)],
    "fedbe-convnet": [(3, 32, 32), (1, 28, 28)],
    "resnet20": [(3, 32, 32), (1, 28, 28), (1, 64, 50)],
    "spectrogram-cnn": [(1, 64, 94), (1, 128, 301), (2, 9, 5), (1, 1, 1)],
    "waveform-cnn": [(1, 48000), (1, 1000), (2, 90)],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", nn.KINDS)
def test_every_network_takes_its_shapes_in_every_kind(name: str, kind: str) -> None:
    for shape in SHAPES[name]:
        module = nn.build(name, kind, classes=4, input_shape=shape)
        assert module(torch.randn(2, *shape)).shape == (2, 4)


def test_shortcut_a_is_the_papers_subsampling_with_zero_channels() -> None:
    block = nn.build("resnet20", "deterministic").get_submodule("stage2.0.shortcut")
    x = torch.randn(2, 16, 8, 8)
    y = block(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


@pytest.mark.parametrize("init", sorted(nn.INITIALIZERS))
@pytest.mark.parametrize("name", ["lenet", "resnet20"])
def test_kinds_share_their_means_and_seeds_differ(name: str, init: str) -> None:
    torch.manual_seed(1)
    first = nn.build(name, "deterministic", init=init, seed=4).state_dict()
    for kind in nn.KINDS[1:]:
        torch.manual_seed(2)  # the global generator has no say
        state = nn.build(name, kind, init=init, seed=4).state_dict()
        assert all(torch.equal(state[n], t) for n, t in first.items())
    assert not torch.equal(nn.build(name, init=init, seed=5).state_dict()["conv1.weight"], first["conv1.weight"])


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    nn.build("resnet20", "flipout")
    assert torch.equal(torch.rand(1), expected)


def test_initialisations_have_their_moments() -> None:
    def of(init: str, layer: str = "fc1") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m = nn.build("lenet", "flipout", init=init, where="*", sigma=0.03)
        sigma = F.softplus(m.get_parameter(f"{layer}.weight_rho"))
        return m.get_parameter(f"{layer}.weight"), m.get_parameter(f"{layer}.bias"), sigma

    mean, bias, sigma = of("he")
    assert mean.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert not bias.any()
    assert torch.allclose(sigma, torch.tensor(0.03))
    mean, _, _ = of("he", "conv2")
    assert mean.std().item() == pytest.approx((2 / 150) ** 0.5, rel=0.05)
    mean, bias, sigma = of("xavier")
    assert mean.abs().max().item() == pytest.approx((6 / 520) ** 0.5, rel=0.01)
    assert not bias.any()
    mean, bias, _ = of("torch")
    assert mean.abs().max().item() == pytest.approx(0.05, rel=0.01)
    assert bias.any()
    assert bias.abs().max() <= 0.05
    mean, bias, sigma = of("tfp")
    assert mean.std().item() == pytest.approx(0.1, rel=0.02)
    assert 0.05 < bias.std().item() < 0.15
    assert nn.inverse_softplus(sigma).mean().item() == pytest.approx(-3, abs=0.01)
    assert nn.inverse_softplus(sigma).std().item() == pytest.approx(0.1, rel=0.05)
    mean, bias, sigma = of("bflp")
    assert mean.std().item() == pytest.approx(0.05, rel=0.02)
    assert not bias.any()
    assert sigma.square().log().mean().item() == pytest.approx(-9, abs=0.001)
    assert sigma.square().log().std().item() == pytest.approx(0.001, rel=0.1)


def own_network(classes: int, in_channels: int) -> tnn.Module:
    return tnn.Sequential(
        tnn.Conv2d(in_channels, 3, 3), tnn.AdaptiveAvgPool2d(1), tnn.Flatten(), tnn.Linear(3, classes)
    )


def trained_network(classes: int, in_channels: int) -> tnn.Module:
    network = tnn.Linear(in_channels, classes)
    tnn.init.constant_(network.weight, 0.25)
    return network


def test_own_networks_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("my_networks")
    package.make = own_network  # type: ignore[attr-defined]
    package.shaped = lambda input_shape, classes: tnn.Linear(input_shape[0], classes)  # type: ignore[attr-defined]
    package.trained = trained_network  # type: ignore[attr-defined]
    package.number = 3  # type: ignore[attr-defined]
    package.wrong = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_networks", package)
    kept = nn.build("my_networks:trained", "flipout", init="keep", sigma=0.3)
    assert torch.equal(kept.weight, torch.full((10, 3), 0.25))
    assert torch.allclose(F.softplus(kept.weight_rho), torch.tensor(0.3))
    module = nn.build("my_networks:make", "flipout", classes=7, in_channels=2)
    assert module(torch.randn(2, 2, 6, 6)).shape == (2, 7)
    assert len(nn.gaussian_names(dict(module.named_parameters()))) == 2
    again = nn.build("my_networks:make", "deterministic", classes=7, input_shape=(2, 6, 6))
    assert torch.equal(again[0].weight, module[0].weight)
    assert nn.build("my_networks:shaped", input_shape=(5,))(torch.randn(1, 5)).shape == (1, 10)
    for name, sentence in {
        "my_networks:nothing": "has no 'nothing'",
        "no_such_package:make": "cannot be imported",
        "my_networks:number": "is not a function",
        "my_networks:wrong": "must return a torch.nn.Module",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            nn.build(name)


def test_a_new_network_is_one_line() -> None:
    nn.register(
        "tiny-test", nn.Architecture(lambda classes, input_shape: tnn.Linear(input_shape[0], classes), lambda c: ())
    )
    try:
        assert nn.build("tiny-test", in_channels=6)(torch.randn(1, 6)).shape == (1, 10)
        with pytest.raises(ConfigError, match="exists already"):
            nn.register("tiny-test", nn.NETWORKS["mlp"])
    finally:
        nn.NETWORKS.pop("tiny-test")


def test_impossible_networks_say_what_would_be_right() -> None:
    cases = [
        (("resnet_20",), {}, "did you mean 'resnet20'"),
        (("mlp", "flip"), {}, "did you mean 'flipout'"),
        (("mlp",), {"init": "hee"}, "did you mean 'he'"),
        (("mlp",), {"classes": 1}, "at least 2"),
        (("mlp", "dropout"), {"dropout": 1.5}, "below 1"),
        (("lenet",), {"input_shape": (3, 8, 8)}, "sides of at least 16"),
        (("lenet",), {"input_shape": (13,)}, r"not \(13,\)"),
        (("waveform-cnn",), {"input_shape": (1, 28, 28)}, "waveforms"),
        (("resnet20",), {"shortcut": "C"}, "shortcut 'C'"),
        (("lenet",), {"shortcut": "B"}, "lenet has no shortcut; leave it at 'A'"),
        (("resnet20",), {"width": 8}, "resnet20 has no width"),
        (("mlp",), {"width": -1}, "width is -1"),
        (("lenet",), {"in_channels": 0}, r"no inputs of shape \(0,\)"),
        (("mlp",), {"input_shape": (4, 0)}, r"no inputs of shape \(4, 0\)"),
        (("mlp",), {"input_shape": 5}, "no inputs of shape 5"),
        ((None,), {}, "by its name, not by None"),
        (("mlp",), {"classes": "a"}, "classes is 'a'"),
        (("mlp",), {"classes": 2.5}, "classes is 2.5"),
        (("mlp",), {"width": "a"}, "width is a"),
        (("mlp",), {"dropout": "a"}, "dropout is a"),
        (("math:sqrt",), {}, "cannot be made .missing a required argument: 'x'"),
        (("torch.nn:Linear",), {}, "cannot be made .missing a required argument: 'in_features'"),
        ((":",), {}, "write package.module:function"),
        (("lenet",), {"where": "fc*, cov*"}, r"no layer matches 'cov\*'"),
    ]
    for arguments, options, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            nn.build(*arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropout", "flipout"])
def test_resnet20_overfits_real_images(kind: str) -> None:
    if not (DATA / "cifar10-test.mxz").exists():
        pytest.skip("CIFAR-10 is not in ../shared/data")
    images, labels = cifar()
    x = ((torch.from_numpy(images.copy()).float() / 255 - 0.47) / 0.25).to(memory_format=torch.channels_last)
    y = torch.from_numpy(labels).long()
    module = nn.build("resnet20", kind, dropout=0.05).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    torch.manual_seed(0)
    accuracy = 0.0
    for _ in range(60):
        right = 0
        for batch in torch.randperm(256).split(32):
            with torch.autocast("cpu", torch.bfloat16):
                out = module(x[batch])
            optimizer.zero_grad()
            F.cross_entropy(out.float(), y[batch]).backward()
            optimizer.step()
            right += int((out.argmax(1) == y[batch]).sum())
        accuracy = right / 256
        if accuracy > 0.97:
            break
    assert accuracy > 0.97  # while training, noise on
    with torch.no_grad():  # and in evaluation, by the mean of five noisy passes
        mean = torch.stack([module(x).softmax(-1) for _ in range(5)]).mean(0)
    assert (mean.argmax(1) == y).float().mean() > 0.97


def cifar() -> tuple[np.ndarray, np.ndarray]:
    sys.path.insert(0, str(DATA))
    try:
        import unpack  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    images, labels = unpack.read(DATA / "cifar10-test.mxz")
    return images[:256], np.asarray(labels[:256])
