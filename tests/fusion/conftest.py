import pytest
import torch

from fedbayes import Posterior


def posterior(seed: int, dtype=torch.float32, sigma=(0.01, 0.5)) -> Posterior:
    """A small posterior with Gaussians, points, a running variance and a counter."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    def variance(*shape):
        u = torch.rand(*shape, generator=rng, dtype=torch.float64)
        return ((sigma[0] + (sigma[1] - sigma[0]) * u) ** 2).to(dtype)

    return Posterior(
        {"conv.weight": (normal(4, 3), variance(4, 3)), "fc.weight": (normal(5), variance(5))},
        {
            "fc.bias": normal(3),
            "bn.running_var": normal(3) ** 2 + 0.1,
            "bn.num_batches_tracked": torch.tensor(3 * seed + 1),
        },
    )


@pytest.fixture
def clients():
    return [posterior(k) for k in range(7)]


@pytest.fixture
def previous():
    wide = posterior(99)
    return Posterior({n: (g.mean, g.variance + 1.0) for n, g in wide.gaussians.items()}, wide.points)
