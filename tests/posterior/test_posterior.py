"""Posterior: files, KL, checks, statistics."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from fedbayes import Posterior, kl
from fedbayes.errors import PosteriorError
from fedbayes.posterior import Refusal, check, sigma_statistics, snr


def make(seed=0):
    rng = np.random.default_rng(seed)

    def t(*shape):
        return torch.tensor(rng.normal(size=shape), dtype=torch.float32)

    return Posterior(
        {"a.weight": (t(3, 2), t(3, 2) ** 2 + 0.01), "b.weight": (t(4), t(4) ** 2 + 0.01)},
        {"bn.running_var": t(2) ** 2, "bias": t(2), "steps": torch.tensor(5)},
        {"note": "x"},
    )


def changed(posterior, **edits):
    """Copy of a posterior with tensors replaced (None removes); '__' stands for '.'."""
    gaussians, points = dict(posterior.gaussians), dict(posterior.points)
    for name, value in edits.items():
        name = name.replace("__", ".")
        for table in (gaussians, points):
            table.pop(name, None)
        if isinstance(value, tuple):
            gaussians[name] = value
        elif value is not None:
            points[name] = value
    return Posterior(gaussians, points)


def test_file_round_trip_is_bitwise(tmp_path):
    q = make()
    path = q.save(tmp_path / "q.safetensors", {"round": "3"})
    back = Posterior.load(path)
    assert back.same_bits(q)
    assert back.metadata == {"note": "x", "round": "3"}
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]
    with pytest.raises(PosteriorError, match="no such file"):
        Posterior.load(tmp_path / "none.safetensors")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(PosteriorError, match="not a posterior"):
        Posterior.load(tmp_path / "junk")


def test_a_posterior_in_words_is_short():
    q = Posterior({"w": (torch.zeros(1000, 3), torch.ones(1000, 3))}, {"n": torch.tensor(1)})
    assert repr(q) == "Posterior(1 Gaussian tensors of 3,000 weights, 1 point tensors of 1 numbers)"
    assert repr(Posterior(metadata={"round": "3"})).endswith("0 numbers, {'round': '3'})")


def test_numbers_that_no_file_holds_are_told_in_words(tmp_path):
    with pytest.raises(PosteriorError, match=r"no numbers of type torch\.complex128"):
        Posterior(points={"z": torch.zeros(2, dtype=torch.complex128)}).save(tmp_path / "z")
    assert not any(tmp_path.iterdir())


def test_kl_against_torch_distributions():
    q, p = make(1).to(dtype=torch.float64), make(2).to(dtype=torch.float64)
    expected = sum(
        kl_divergence(Normal(g.mean, g.variance.sqrt()), Normal(h.mean, h.variance.sqrt())).sum()
        for g, h in ((q.gaussians[n], p.gaussians[n]) for n in q.gaussians)
    )
    assert float(kl(q, p)) == pytest.approx(float(expected), rel=1e-12)
    assert float(kl(q, q)) == 0


@pytest.mark.parametrize("eps", [1e-4, 1e-6, 1e-7])
def test_kl_of_near_posteriors_does_not_cancel(eps):
    one = torch.ones(1, dtype=torch.float64)
    q, p = Posterior({"w": (one, one * (1 + eps))}), Posterior({"w": (one, one)})
    series = 0.5 * (eps**2 / 2 - eps**3 / 3 + eps**4 / 4)
    assert float(kl(q, p)) == pytest.approx(series, rel=1e-7 if eps == 1e-7 else 1e-8)


@pytest.mark.parametrize(("q", "p"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (-1.0, -1.0)])
def test_kl_needs_positive_variances(q, p):
    q, p = (Posterior({"w": (torch.zeros(2), torch.tensor([1.0, v]))}) for v in (q, p))
    with pytest.raises(PosteriorError, match="'w' has a variance that is not positive"):
        kl(q, p)


PAIR = (torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize(
    ("make_it", "sentence"),
    [
        (lambda: Posterior([1, 2]), "a dictionary by name, not list"),
        (lambda: Posterior(None), "a dictionary by name, not NoneType"),
        (lambda: Posterior({1: PAIR}), "1 is the name of a tensor; it must be text"),
        (lambda: Posterior(points={"b": PAIR[0].to_sparse()}), "'b' is torch.sparse_coo"),
        (lambda: Posterior({"w": tuple(t.to("meta") for t in PAIR)}), "'w' is on meta"),
        (lambda: Posterior({"w": PAIR}, metadata={"x": PAIR[0]}).to_bytes(), "metadata must be text by name"),
        (lambda: Posterior({"w": PAIR}).to(dtype=torch.int32), "cannot be of type torch.int32"),
        (lambda: kl(Posterior(), None), "between two posteriors; this is a NoneType"),
    ],
)
def test_impossible_posteriors_say_what_would_be_right(make_it, sentence):
    with pytest.raises(PosteriorError, match=sentence):
        make_it()


def test_a_narrower_type_keeps_positive_variances_positive():
    q = Posterior({"w": (torch.zeros(3), torch.tensor([0.0, 1e-12, 0.25]))}, {"steps": torch.tensor(5)})
    for dtype, least in ((torch.float16, 2.0**-24), (torch.bfloat16, 1e-12), (torch.float64, 1e-12)):
        g = q.to(dtype=dtype).gaussians["w"]
        assert g.variance.dtype == dtype
        assert g.variance.tolist() == pytest.approx([0.0, least, 0.25], rel=1e-2)


nan, inf = float("nan"), float("inf")
BAD = [
    ("mean NaN", {"b__weight": (torch.tensor([0, nan, 0, 0]), torch.ones(4))}, "b.weight", "NaN"),
    ("mean inf", {"b__weight": (torch.tensor([0, 1, -inf, 0]), torch.ones(4))}, "b.weight", "infinite"),
    ("variance inf", {"b__weight": (torch.zeros(4), torch.tensor([1, inf, 1, 1]))}, "b.weight", "infinite"),
    ("variance 0", {"b__weight": (torch.zeros(4), torch.tensor([1.0, 0, 1, 1]))}, "b.weight", "zero or negative"),
    ("variance < 0", {"b__weight": (torch.zeros(4), torch.tensor([1.0, -2, 1, 1]))}, "b.weight", "1 variances"),
    ("missing", {"a__weight": None}, "a.weight", "missing"),
    ("extra", {"c": torch.zeros(1)}, "c", "not a tensor of this model"),
    ("shape", {"bias": torch.zeros(3)}, "bias", r"shape \(3,\) where \(2,\)"),
    ("kind", {"b__weight": torch.zeros(4)}, "b.weight", "should be a Gaussian"),
    ("type", {"steps": torch.tensor(5.0)}, "steps", "type"),
    ("point NaN", {"bias": torch.tensor([nan, 0])}, "bias", "NaN"),
    ("running variance", {"bn__running_var": torch.tensor([-1.0, 2])}, "bn.running_var", "negative"),
]


@pytest.mark.parametrize(("case", "edits", "tensor", "reason"), BAD, ids=[b[0] for b in BAD])
def test_check_names_client_tensor_and_reason(case, edits, tensor, reason):
    with pytest.raises(Refusal, match=reason) as caught:
        check(changed(make(), **edits), make(1), client=7)
    assert caught.value.client == 7
    assert caught.value.tensor == tensor
    assert "client 7 is refused" in str(caught.value)


def test_check_accepts_the_good():
    check(make(3), make(1))
    check(Posterior(), Posterior())
    zero = changed(make(), b__weight=(torch.zeros(4), torch.zeros(4)))
    check(zero, make(1), allow_zero_variance=True)


def test_sigma_statistics_against_numpy():
    q, before = make(1), make(2)
    s = sigma_statistics(q, before, floor=0.5)
    sigma = np.concatenate([g.variance.double().sqrt().numpy().ravel() for g in q.gaussians.values()])
    old = np.concatenate([g.variance.double().sqrt().numpy().ravel() for g in before.gaussians.values()])
    assert s["mean"] == pytest.approx(sigma.mean())
    for p in (1, 5, 50, 95, 99):
        assert s[f"q{p:02d}"] == pytest.approx(np.quantile(sigma, p / 100))
    assert s["ratio"] == pytest.approx(math.exp(np.log(sigma / old).mean()))
    assert s["floor_share"] == pytest.approx((sigma < 0.5).mean())
    assert s["layers"]["b.weight"] == pytest.approx(q.gaussians["b.weight"].variance.sqrt().mean().item())
    assert "ratio" not in sigma_statistics(q)
    g = q.gaussians["b.weight"]
    torch.testing.assert_close(snr(q)["b.weight"], g.mean.abs() / g.variance.sqrt())
