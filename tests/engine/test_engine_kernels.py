"""Operations of our own for lanes: against PyTorch's layers one lane at a time, and the GPU's kernels against float64."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedbayes import nn as fnn
from fedbayes.engine.convolution import convolve_lanes, packed
from fedbayes.engine.lane_layers import LaneBlock, with_lane_layers
from fedbayes.engine.normalization import INTERPRETED, LaneBatchNorm2d, as_pixels, normalize_lanes
from fedbayes.nn.layers import FlipoutConv2d

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# channels in, channels out, (height, width), kernel, stride, padding
CONVOLUTIONS = [
    (16, 16, (6, 6), (3, 3), (1, 1), (1, 1)),
    (3, 16, (7, 5), (3, 3), (1, 1), (1, 1)),
    (16, 32, (8, 8), (3, 3), (2, 2), (1, 1)),
    (5, 20, (9, 7), (5, 3), (2, 1), (2, 0)),
    (16, 32, (8, 8), (1, 1), (2, 2), (0, 0)),
    (3, 32, (12, 11), (3, 3), (1, 1), (0, 0)),
    (64, 64, (8, 8), (3, 3), (1, 1), (1, 1)),
    (33, 128, (5, 5), (3, 3), (3, 3), (1, 1)),
]


def _flipout(x, weight, delta, sign_in, sign_out, stride, padding):
    """A Flipout convolution of one lane from its formula, by PyTorch's convolution."""
    y = nn.functional.conv2d(x, weight, None, stride, padding)
    if delta is None:
        return y
    return y + sign_out[..., None, None] * nn.functional.conv2d(
        x * sign_in[..., None, None], delta, None, stride, padding
    )


def _case(case, noise, lanes=3, batch=5, dtype=torch.float64, device="cpu"):
    channels, out, size, kernel, stride, padding = case
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def signs(*shape):
        return (torch.randint(0, 2, shape, generator=generator) * 2.0 - 1).to(device, dtype)

    x, weight = normal(lanes, batch, channels, *size), normal(lanes, out, channels, *kernel)
    extra = (normal(lanes, out, channels, *kernel), signs(lanes, batch, channels), signs(lanes, batch, out))
    return x, weight, *(extra if noise else (None, None, None)), list(kernel), list(stride), list(padding)


def _ours(x, weight, delta, sign_in, sign_out, kernel, stride, padding):
    pack = vmap(packed)
    noise = None if delta is None else pack(delta)
    return convolve_lanes(x, pack(weight), noise, sign_in, sign_out, kernel, stride, padding)


def _expected(x, weight, delta, sign_in, sign_out, kernel, stride, padding):
    given = (x, weight, delta, sign_in, sign_out)
    lanes = [[None if t is None else t[lane] for t in given] for lane in range(len(x))]
    return torch.stack([_flipout(*lane, stride, padding) for lane in lanes])


def _slopes(function, arguments, dy):
    leaves = [t.detach().clone().requires_grad_() for t in arguments[:3] if t is not None]
    rest = [None] if arguments[2] is None else []
    y = function(*leaves, *rest, *arguments[3:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_and_its_gradients_are_those_of_every_lane_alone(case, noise):
    arguments = _case(case, noise)
    dy = torch.randn(_expected(*arguments).shape, dtype=torch.float64)
    for found, expected in zip(_slopes(_ours, arguments, dy), _slopes(_expected, arguments, dy), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # weights' partial sums are float32


def test_convolution_folds_mapped_axes_into_lanes():
    x, weight, delta, sign_in, sign_out, *geometry = _case(CONVOLUTIONS[0], True, lanes=4)

    def one(x, weight, delta, sign_in, sign_out):
        return _ours(*(t[None] for t in (x, weight, delta, sign_in, sign_out)), *geometry)[0]

    expected = _expected(x, weight, delta, sign_in, sign_out, *geometry)
    torch.testing.assert_close(vmap(one)(x, weight, delta, sign_in, sign_out), expected)
    shared = _expected(x, weight[:1].expand_as(weight), delta, sign_in, sign_out, *geometry)
    torch.testing.assert_close(vmap(one, (0, None, 0, 0, 0))(x, weight[0], delta, sign_in, sign_out), shared)
    pairs = [t.unflatten(0, (2, 2)) for t in (x, weight, delta, sign_in, sign_out)]
    torch.testing.assert_close(vmap(vmap(one))(*pairs).flatten(0, 1), expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batchnorm_is_pytorchs_in_training_and_in_evaluation(affine, momentum):
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(6, momentum=momentum, affine=affine)
    ours = with_lane_layers(copy.deepcopy(theirs))
    assert type(ours) is LaneBatchNorm2d
    for _ in range(3):
        x = (3 + 2 * torch.randn(4, 6, 5, 7)).requires_grad_()
        dy = torch.randn_like(x)
        (a,) = torch.autograd.grad(theirs(x), x, dy)
        (b,) = torch.autograd.grad(ours(x), x, dy)
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_normalisation_takes_residual_and_relu_with_it(relu, residual):
    torch.manual_seed(1)
    x, dy = torch.randn(2, 3, 4, 5, 6) * 2 + 1, torch.randn(2, 3, 4, 5, 6)
    given = [x, torch.randn(2, 4), torch.randn(2, 4), *([torch.randn_like(x)] if residual else [])]

    def ours(x, weight, bias, extra=None):
        return normalize_lanes(x, weight, bias, extra, relu, 1e-5)[0]

    def expected(x, weight, bias, extra=None):
        lanes = [nn.functional.batch_norm(x[i], None, None, weight[i], bias[i], True) for i in range(len(x))]
        y = torch.stack(lanes) if extra is None else torch.stack(lanes) + extra
        return y.relu() if relu else y

    def slopes(function):
        leaves = [t.clone().requires_grad_() for t in given]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    for found, wanted in zip(slopes(ours), slopes(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["deterministic", "flipout", "dropout"])
def test_a_network_with_lane_layers_is_the_same_network(kind):
    network = fnn.build("resnet20", kind=kind, classes=10, in_channels=3, input_shape=(3, 16, 16)).double().train()
    ours = with_lane_layers(copy.deepcopy(network))
    assert any(type(m) is LaneBlock for m in ours.modules())
    assert list(ours.state_dict()) == list(network.state_dict())
    x = torch.randn(3, 4, 3, 16, 16, dtype=torch.float64)
    shared = {n: p.detach()[None] + 0.01 * torch.randn(3, *p.shape) for n, p in network.named_parameters()}
    if kind == "flipout":  # without noise: signs and noise are drawn in another order
        shared = {n: torch.full_like(p, -60.0) if n.endswith("_rho") else p for n, p in shared.items()}

    def outcome(model):
        leaves = {n: p.clone().requires_grad_() for n, p in shared.items()}
        buffers = {n: b[None].expand(3, *b.shape).clone() for n, b in model.named_buffers()}

        def lane(parameters, buffers, x):
            state = {**parameters, **buffers}
            return functional_call(model, state, (x,)).square().sum(), {n: state[n] for n in buffers}

        torch.manual_seed(3)  # dropout's masks
        loss, moved = vmap(lane, randomness="different")(leaves, buffers, x)
        slopes = torch.autograd.grad(loss.sum(), [p for n, p in leaves.items() if not n.endswith("_rho")])
        return loss.detach(), slopes, moved

    (loss, slopes, moved), (loss0, slopes0, moved0) = outcome(ours), outcome(network)
    torch.testing.assert_close(loss, loss0, rtol=1e-4, atol=1e-4)
    for name in moved0:
        torch.testing.assert_close(moved[name], moved0[name], rtol=1e-4, atol=1e-5)
    for a, b in zip(slopes, slopes0, strict=True):
        assert (
            float((a - b).norm() / b.norm()) < 2e-2
        )  # a ReLU's input at rounding distance from 0 may fall on either side


def test_layers_that_have_no_form_for_lanes_are_left_alone():
    class Own(nn.Conv2d):
        pass

    left = [
        nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(4, 256, 3), Own(4, 4, 3), nn.BatchNorm1d(4),
    ]  # fmt: skip
    kinds = [type(layer) for layer in left]
    assert [type(layer) for layer in with_lane_layers(nn.Sequential(*left))] == kinds
    changed = with_lane_layers(FlipoutConv2d(4, 4, 3, bayesian_bias=True))
    assert type(changed) is not FlipoutConv2d
    assert changed(torch.randn(2, 4, 5, 5)).shape == (2, 4, 3, 3)


def _distance(found, expected):
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


# -- the kernels, interpreted ------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_interpreted_convolutions_are_right_to_float32(case, noise):
    arguments = _case(case, noise, lanes=2, batch=3, dtype=torch.float32)
    exact = [t.double() if isinstance(t, torch.Tensor) else t for t in arguments]
    dy = torch.randn(_expected(*exact).shape)
    for a, b in zip(_slopes(_ours, arguments, dy), _slopes(_expected, exact, dy), strict=True):
        assert _distance(a, b) < 1e-6


@interpreted
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 16, 8, 8), (3, 7, 5, 9, 3)])
def test_interpreted_batchnorm_is_right_to_float32(shape, relu, residual):
    torch.manual_seed(2)
    dy, w, b = torch.randn(shape), torch.randn(shape[0], shape[2]), torch.randn(shape[0], shape[2])
    given = [torch.randn(shape) * 2 + 5, w, b, *([torch.randn(shape)] if residual else [])]

    def outcome(function, tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        results = function(*leaves, *([] if residual else [None]))
        return [*results, *torch.autograd.grad(results[0], leaves, dy.to(results[0].dtype))]

    def ours(x, weight, bias, extra):
        return normalize_lanes(as_pixels(x), weight, bias, None if extra is None else as_pixels(extra), relu, 1e-5)

    def formula(x, weight, bias, extra):
        variance, mean = torch.var_mean(x, (1, 3, 4), correction=0)
        wide = [t[:, None, :, None, None] for t in (mean, variance, weight, bias)]
        y = (x - wide[0]) / (wide[1] + 1e-5).sqrt() * wide[2] + wide[3]
        y = y if extra is None else y + extra
        return y.relu() if relu else y, mean, variance

    found, expected = outcome(ours, given), outcome(formula, [t.double() for t in given])
    for a, c in zip(found, expected, strict=True):
        assert _distance(a, c) < 1e-6 or torch.equal(a.double(), c)


# -- on a GPU ----------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gpu_convolutions_are_right_to_bfloat16(case, noise):
    arguments = _case(case, noise, lanes=3, batch=37, dtype=torch.bfloat16, device="cuda")
    exact = [t.double() if isinstance(t, torch.Tensor) else t for t in arguments]
    dy = torch.randn(_expected(*exact).shape, device="cuda").to(torch.bfloat16)
    found, expected = _slopes(_ours, arguments, dy), _slopes(_expected, exact, dy)
    for a, b in zip(found, expected, strict=True):
        assert torch.isfinite(a).all()
        assert _distance(a, b) < 4e-3


@needs_gpu
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(10, 32, 16, 32, 32), (3, 7, 5, 9, 3), (1, 2, 64, 1, 1)])
def test_gpu_batchnorm_is_right_to_bfloat16(shape, relu, residual):
    torch.manual_seed(2)
    x, dy = (torch.randn(shape, device="cuda") * 2 + 5).bfloat16(), torch.randn(shape, device="cuda").bfloat16()
    w, b = torch.randn(shape[0], shape[2], device="cuda"), torch.randn(shape[0], shape[2], device="cuda")
    extra = [torch.randn(shape, device="cuda").bfloat16()] if residual else []

    def outcome(x, w, b, *extra):
        leaves = [t.detach().clone().requires_grad_() for t in (x, w, b, *extra)]
        y, mean, variance = normalize_lanes(*leaves, *([] if extra else [None]), relu, 1e-5)
        return [y, mean, variance, *torch.autograd.grad(y, leaves, dy.to(y.dtype).to(y.device))]

    found = outcome(as_pixels(x), w, b, *map(as_pixels, extra))
    expected = outcome(x.float().cpu(), w.cpu(), b.cpu(), *(t.float().cpu() for t in extra))
    if shape[1] * shape[3] * shape[4] <= 2:
        found, expected = found[:3], expected[:3]  # gradients of two values normalised are differences of rounding
    for a, c in zip(found, expected, strict=True):
        assert _distance(a.cpu(), c) < (2e-2 if relu else 6e-3)  # a value clipped or not at rounding distance from 0
