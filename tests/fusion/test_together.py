"""Clients absorbed at once: the bits, the refusals and the weights of absorbing them one by one."""

import pytest
import torch

from fedbayes import Posterior
from fedbayes.fusion import Accumulator, rules
from fedbayes.fusion.together import absorb_together
from fedbayes.posterior import Gaussian


def _client(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    gaussians = {
        "a.weight": Gaussian(torch.randn(3, 4, generator=g) * scale, torch.rand(3, 4, generator=g) * scale + 1e-6),
        "b.weight": Gaussian(torch.randn(5, generator=g), torch.rand(5, generator=g) * 1e-9 + 1e-12),
    }
    points = {
        "bn.running_mean": torch.randn(4, generator=g),
        "bn.running_var": torch.rand(4, generator=g),
        "bn.num_batches_tracked": torch.tensor(2**40 + seed),
    }
    return Posterior(gaussians, points)


@pytest.mark.parametrize("rule", [r.name for r in rules()])
def test_together_gives_the_bits_of_one_by_one(rule):
    clients = [_client(k, 10.0 ** (3 * k % 7)) for k in range(1, 9)]
    weights, names, previous = [0.0, 1.0, 2.5, 1e-3, 7.0, 100.0, 1e6, 3.0], [f"c{k}" for k in range(8)], _client(0)
    line, once = (Accumulator(rule, previous, previous) for _ in range(2))
    for p, w, n in zip(clients, weights, names, strict=True):
        line.absorb(p, w, n)
    assert absorb_together(once, clients[:3], weights[:3], names[:3]) == {}
    assert absorb_together(once, clients[3:], weights[3:], names[3:]) == {}
    assert once.weights == line.weights
    assert once.conclude().posterior.same_bits(line.conclude().posterior)


def test_unfit_clients_are_refused_with_absorbs_sentence_and_the_rest_is_used():
    good = [_client(k) for k in range(1, 4)]
    nan, negative, other = _client(4), _client(5), _client(6)
    nan.points["bn.running_mean"][1] = float("nan")
    negative.gaussians["a.weight"].variance[0, 0] = -1.0
    other = Posterior({"a.weight": other.gaussians["a.weight"]}, other.points)
    clients, names = [good[0], nan, good[1], negative, other, good[2]], list(range(6))
    total, line = Accumulator("conflation", _client(0)), Accumulator("conflation", _client(0))
    refused = absorb_together(total, clients, [1.0] * 6, names)
    assert sorted(refused) == [1, 3, 4]
    assert refused[1].tensor == "bn.running_mean"
    assert "NaN" in refused[1].reason
    assert refused[3].tensor == "a.weight"
    assert refused[4].tensor == "b.weight"
    for n in (0, 2, 5):
        line.absorb(clients[n], 1.0, n)
    assert total.conclude().posterior.same_bits(line.conclude().posterior)
    again = absorb_together(total, [good[0]], [1.0], [0])
    assert "already" in again[0].reason
