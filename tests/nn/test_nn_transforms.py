"""Layers under functional_call, vmap, torch.compile, autocast and CUDA graphs; batch-norm under stacked state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import nn as tnn
from torch.func import functional_call

from fedbayes import nn

STOCHASTIC = ["flipout", "local", "sample", "dropout"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


SHAPES = {"spectrogram-cnn": (1, 12, 12), "waveform-cnn": (2, 200)}  # two-dimensional and one-dimensional convolutions


def small(kind: str, name: str = "spectrogram-cnn") -> tnn.Module:
    return nn.build(name, kind, input_shape=SHAPES[name], width=4, sigma=0.1, classes=3)


def stacked(module: tnn.Module, lanes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {n: torch.stack([p.detach()] * lanes).requires_grad_() for n, p in module.named_parameters()}
    return parameters, {n: torch.stack([b] * lanes) for n, b in module.named_buffers()}


def run_lanes(module: tnn.Module, parameters: dict, buffers: dict, x: Tensor) -> Tensor:
    return torch.vmap(lambda p, b, x: functional_call(module, (p, b), (x,)), randomness="different")(
        parameters, buffers, x
    )


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("name", SHAPES)
def test_functional_call_is_the_module_itself(kind: str, name: str) -> None:
    module = small(kind, name)
    x = torch.randn(4, *SHAPES[name])
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    state = {n: t.clone() for n, t in nn.state_of(module).items()}
    assert torch.equal(functional_call(module, state, (x,)), expected)


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("name", SHAPES)
def test_lanes_draw_on_their_own_and_all_parameters_get_gradients(kind: str, name: str) -> None:
    module = small(kind, name).train()
    parameters, buffers = stacked(module, 3)
    x = torch.randn(4, *SHAPES[name]).expand(3, 4, *SHAPES[name])
    out = run_lanes(module, parameters, buffers, x)
    assert not torch.allclose(out[0], out[1])
    out.square().sum().backward()
    for name, p in parameters.items():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        moved = p.grad.flatten(1).abs().sum(1) > 0
        assert moved.all() or name.startswith("bn"), name


def test_shared_parameters_with_lanes_of_noise_draw_differently() -> None:
    """Monte-Carlo samples as lanes: nothing stacked but the noise."""
    for kind in STOCHASTIC:
        module = small(kind).eval()
        x = torch.randn(2, 1, 12, 12)
        out = torch.vmap(lambda _, m=module: m(x), randomness="different")(torch.zeros(5))  # noqa: B023
        assert len({round(v, 5) for v in out[:, 0, 0].tolist()}) == 5, kind


def test_lanes_of_a_deterministic_network_agree_with_the_plain_loop() -> None:
    modules = [nn.build("resnet20", "deterministic", seed=s).train() for s in range(2)]
    parameters, buffers = torch.func.stack_module_state(modules)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 3, 16, 16)
    out = run_lanes(modules[0], parameters, buffers, x)
    for lane, module in enumerate(modules):
        assert torch.allclose(out[lane], module(x[lane]), atol=2e-5)
        for name, b in module.named_buffers():  # running statistics and counters were written lane by lane
            assert torch.allclose(buffers[name][lane].float(), b.float(), atol=1e-5), name
    assert buffers["bn1.num_batches_tracked"].tolist() == [1, 1]
    run_lanes(modules[0], parameters, buffers, x)
    assert buffers["stage3.2.bn2.num_batches_tracked"].tolist() == [2, 2]


def test_forward_writes_nothing_but_running_statistics() -> None:
    for kind in nn.KINDS:
        module = small(kind).train()
        before = {n: t.clone() for n, t in nn.state_of(module).items()}
        attributes = {n: set(m.__dict__) for n, m in module.named_modules()}
        module(torch.randn(4, 1, 12, 12))
        changed = {n for n, t in nn.state_of(module).items() if not torch.equal(t, before[n])}
        assert changed
        assert all(n.startswith("bn") for n in changed), changed
        assert attributes == {n: set(m.__dict__) for n, m in module.named_modules()}


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("name", SHAPES)
def test_autocast_bf16_runs_forward_and_backward(kind: str, name: str) -> None:
    module = small(kind, name).train()
    x = torch.randn(2, 8, *SHAPES[name])
    with torch.autocast("cpu", torch.bfloat16):
        out = functional_call(module, nn.state_of(module), (x[0],))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in module.parameters())
    parameters, buffers = stacked(module, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = run_lanes(module, parameters, buffers, x)
    out.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in parameters.values())


@pytest.mark.parametrize("kind", ["flipout", "local", "sample"])
def test_autocast_keeps_the_spread(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.bayesianize(tnn.Conv2d(8, 8, 3, padding=1), kind, sigma=0.3)
    x = torch.randn(1, 8, 6, 6)
    with torch.no_grad():
        full = torch.stack([layer(x) for _ in range(600)])
        with torch.autocast("cpu", torch.bfloat16):
            half = torch.stack([layer(x) for _ in range(600)])
    assert half.dtype == torch.bfloat16
    assert abs(half.float().var(0).sum() / full.var(0).sum() - 1) < 0.08


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [("aot_eager", STOCHASTIC), pytest.param("inductor", ["flipout"], marks=pytest.mark.slow)],
)
def test_compiled_lanes_have_exact_moments(backend: str, kinds: list[str]) -> None:
    """Forward and backward as one compiled graph, against the closed form of a pooled convolution."""
    torch.manual_seed(0)
    lanes, plain = 1500, tnn.Conv2d(2, 4, 3, padding=1, bias=False)
    modules = {kind: nn.bayesianize(plain, kind, sigma=0.3, dropout=0.2) for kind in kinds}
    states = {kind: stacked(module, lanes) for kind, module in modules.items()}
    x = torch.randn(1, 1, 2, 5, 5) + 0.5

    def pooled(states: dict, x: Tensor) -> dict[str, Tensor]:
        x = x.expand(lanes, -1, -1, -1, -1)
        return {kind: run_lanes(m, *states[kind], x).mean((-2, -1))[:, 0] for kind, m in modules.items()}

    out = torch.compile(pooled, fullgraph=True, backend=backend)(states, x)
    sum(t.square().sum() for t in out.values()).backward()
    for parameters, _ in states.values():
        for p in parameters.values():
            assert torch.isfinite(p.grad).all()
            assert (p.grad.flatten(1).abs().sum(1) > 0).all()  # every lane
    patches = tnn.functional.unfold(x[0], 3, padding=1)[0]  # (18, 25): what each weight sees
    mean = (plain.weight.flatten(1) @ patches).mean(1)
    variance = {
        "flipout": (0.3 * patches.mean(1)).square().sum(),
        "sample": (0.3 * patches.mean(1)).square().sum(),
        "local": (0.3 * patches / 25).square().sum(),
        "dropout": (plain.weight.flatten(1) @ patches / 25).square().sum(1) * 0.2 / 0.8,
    }
    for kind, y in out.items():
        assert ((y.mean(0) - mean).abs() < 5 * (variance[kind] / lanes).sqrt()).all(), kind
        assert (y.var(0) / variance[kind] - 1).abs().max() < 0.2, kind


@needs_cuda
@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_replays_with_fresh_noise(kind: str, compiled: bool) -> None:
    module = small(kind).cuda().train()
    parameters, buffers = stacked(module, 2)
    x = torch.randn(2, 8, 1, 12, 12, device="cuda")

    def forward(parameters: dict, buffers: dict, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return run_lanes(module, parameters, buffers, x)

    step = torch.compile(forward) if compiled else forward
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(parameters, buffers, x).float().square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    for p in parameters.values():
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(parameters, buffers, x)
        out.float().square().sum().backward()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.float().clone())
    torch.cuda.synchronize()
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])
    assert all(torch.isfinite(p.grad).all() for p in parameters.values())


@needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_a_pooled_flipout_convolution_on_a_gpu_has_the_exact_variance(compiled: bool) -> None:
    """Lanes, bf16, channels-last, strided, padded and grouped: the closed form of ``unfold`` times sigma²."""
    torch.manual_seed(0)
    lanes = 2000
    layer = nn.FlipoutConv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False, sigma=0.3).cuda()
    x = (torch.randn(2, 4, 9, 9, device="cuda") + 0.5).to(memory_format=torch.channels_last)

    def pooled(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            one = lambda _: layer(x).float().mean((-2, -1))  # noqa: E731
            return torch.vmap(one, randomness="different")(torch.zeros(lanes, device="cuda"))

    with torch.no_grad():
        y = (torch.compile(pooled) if compiled else pooled)(x)
        patches = tnn.functional.unfold(x, 3, padding=1, stride=2).mean(
            -1
        )  # (2, 36): a patch's average, channel by channel
        variance = 0.09 * patches.square().view(2, 2, 18).sum(-1).repeat_interleave(
            4, 1
        )  # (2, 8): each group sees half
        assert (y.var(0) / variance - 1).abs().max() < 0.2
        assert abs((y.var(0) / variance).mean() - 1) < 0.05
