"""Posteriors on the wire: exact bits, and lossy codecs whose error is bounded by what they promise."""

import math

import numpy as np
import pytest
import torch

from fedbayes.cohort import Assignment, Update
from fedbayes.errors import ConfigError, PosteriorError
from fedbayes.posterior import Posterior

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbayes.flower.codecs import Layout, get_codec
from fedbayes.flower.records import (
    payload_bytes,
    put_assignments,
    put_error,
    put_posterior,
    put_update,
    take_assignments,
    take_posterior,
    take_updates,
)


def make(seed=0, dtype=torch.float32, points=True):
    g = torch.Generator().manual_seed(seed)
    gaussians = {
        "a.weight": (torch.randn(4, 3, generator=g, dtype=dtype), torch.rand(4, 3, generator=g, dtype=dtype) + 1e-3),
        "b.weight": (
            torch.randn(2, 3, 3, 3, generator=g, dtype=dtype),
            torch.rand(2, 3, 3, 3, generator=g, dtype=dtype) * 1e-8 + 1e-12,
        ),
        "c.bias": (torch.randn((), generator=g, dtype=dtype), torch.rand((), generator=g, dtype=dtype) + 1),
    }
    extra = {
        "bn.running_mean": torch.randn(5, generator=g),
        "bn.num_batches_tracked": torch.tensor(17),
        "dense.weight": torch.randn(6, 7, generator=g),
        "mask": torch.tensor([True, False]),
        "wide": torch.randn(3, generator=g, dtype=torch.float64),
        "half": torch.randn(3, generator=g).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    return Posterior(gaussians, extra if points else {})


def near(p, seed=1, step=0.3):
    """A client's answer: means moved by about ``step`` sigma, variances by about exp(+-step), points a little."""
    g = torch.Generator().manual_seed(seed)
    gaussians = {
        n: (q.mean + step * q.variance.sqrt() * torch.randn(q.mean.shape, generator=g, dtype=q.mean.dtype),
            q.variance * torch.exp(step * torch.randn(q.mean.shape, generator=g, dtype=q.mean.dtype)))
        for n, q in p.gaussians.items()
    }  # fmt: skip
    points = {n: t + 0.1 if t.is_floating_point() else t for n, t in p.points.items()}
    return Posterior(gaussians, points)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exact_codec_keeps_every_bit_of_every_type(dtype):
    p = make(dtype=dtype)
    record = RecordDict()
    put_posterior(record, "q", p)
    assert take_posterior(record, "q").same_bits(p)


def test_exact_codec_carries_nan_and_infinity_unharmed():
    p = Posterior({"w": (torch.tensor([math.nan, math.inf]), torch.tensor([-1.0, 0.0]))})
    record = RecordDict()
    put_posterior(record, "q", p)
    back = take_posterior(record, "q").gaussians["w"]
    assert math.isnan(back.mean[0])
    assert back.mean[1] == math.inf
    assert back.variance.tolist() == [-1.0, 0.0]


def test_float32_costs_eight_bytes_a_weight_and_the_lossy_codecs_four_and_two():
    n = 100_000
    start = Posterior({"w": (torch.zeros(n // 100, 100), torch.ones(n // 100, 100))})
    sizes = {}
    for codec in ("float32", "bf16", "int8"):
        record = RecordDict()
        put_posterior(record, "q", near(start), codec, start)
        sizes[codec] = payload_bytes(record)
    assert sizes["float32"] == pytest.approx(8 * n, rel=0.01)
    assert sizes["bf16"] == pytest.approx(4 * n, rel=0.01)
    assert sizes["int8"] == pytest.approx(2 * n, rel=0.01)


def test_bf16_is_within_half_a_unit_of_eight_bits_of_each_relative_coordinate():
    start, client = make(0), near(make(0))
    record = RecordDict()
    put_posterior(record, "q", client, "bf16", start)
    back = take_posterior(record, "q", start)
    for name, g in client.gaussians.items():
        r = start.gaussians[name]
        move = (g.mean - r.mean).abs()
        slack = 4e-7 * (g.mean.abs() + r.mean.abs())
        assert ((back.gaussians[name].mean - g.mean).abs() <= move * 2**-8 + slack).all()
        log_ratio = torch.log(g.variance / r.variance)
        error = (torch.log(back.gaussians[name].variance / r.variance) - log_ratio).abs()
        assert (error <= log_ratio.abs() * 2**-8 + 2e-6).all()
        assert (back.gaussians[name].variance > 0).all()
    for name in ("bn.running_mean", "bn.num_batches_tracked", "mask", "wide", "half"):
        assert torch.equal(back.points[name], client.points[name])
    assert torch.allclose(back.points["dense.weight"], client.points["dense.weight"], atol=0.1 * 2**-8 + 1e-6)


def test_int8_is_within_one_step_and_unbiased():
    start = Posterior({"w": (torch.zeros(1000), torch.ones(1000))})
    client = near(start)
    coordinates = client.gaussians["w"].mean
    step = coordinates.abs().max() / 127
    mean_error = torch.zeros(1000)
    for i in range(200):
        record = RecordDict()
        put_posterior(record, "q", client, "int8", start, np.random.default_rng(i))
        error = take_posterior(record, "q", start).gaussians["w"].mean - coordinates
        assert (error.abs() <= step * 1.001).all()
        mean_error += error / 200
    assert mean_error.abs().max() < 5 * step / 2 / math.sqrt(200)  # the mean of 200 draws, each of deviation <= step/2


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_bad_posterior_stays_bad_through_a_lossy_codec(codec):
    start = Posterior({"w": (torch.zeros(3), torch.ones(3))})
    for mean, variance in [([math.nan, 0, 0], [1, 1, 1]), ([0, 0, 0], [-1, 1, 1]), ([math.inf, 0, 0], [1, 1, 1])]:
        record = RecordDict()
        put_posterior(record, "q", Posterior({"w": (torch.tensor(mean), torch.tensor(variance))}), codec, start)
        g = take_posterior(record, "q", start).gaussians["w"]
        assert not (torch.isfinite(g.mean).all() and torch.isfinite(g.variance).all() and (g.variance > 0).all())


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_lossy_codecs_need_a_reference_of_the_same_model(codec):
    with pytest.raises(PosteriorError, match="relative to"):
        get_codec(codec).encode(make(), None, None)
    with pytest.raises(PosteriorError, match=r"a\.weight"):
        get_codec(codec).encode(make(), Posterior(), None)


def test_unknown_codec_names_the_nearest():
    with pytest.raises(ConfigError, match="bf16"):
        get_codec("bf61")


def test_layout_tells_models_apart_and_ignores_the_order_of_names():
    p = make()
    shuffled = Posterior(dict(reversed(p.gaussians.items())), dict(reversed(p.points.items())))
    assert Layout.of(p).fingerprint == Layout.of(shuffled).fingerprint
    assert Layout.of(p).fingerprint != Layout.of(make(points=False)).fingerprint
    assert Layout.parse(Layout.of(p).dumps()) == Layout.of(p)


@pytest.mark.parametrize(
    ("arrays", "layout"),
    [
        ({"mean.float32": np.zeros(3, np.float32)}, '[["gaussian","w","float32",[3]]]'),
        ({"mean.float32": np.zeros(3, np.float32), "variance.float32": np.ones(2, np.float32)}, '[["gaussian","w","float32",[3]]]'),
        ({"point.float32": np.zeros(9, np.float32)}, '[["point","w","float32",[3]]]'),
        ({"point.float32": np.zeros(3, np.float64)}, '[["point","w","float32",[3]]]'),
        ({"point.float32": np.zeros(3, np.float32)}, '[["point","w","complex64",[3]]]'),
        ({"point.float32": np.zeros(3, np.float32)}, "not json"),
        ({"point.float32": np.zeros(3, np.float32)}, '[["point","w","float32",[-3]]]'),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_their_layout_are_refused(arrays, layout):
    record = RecordDict(
        {
            "q": ArrayRecord({k: Array(a) for k, a in arrays.items()}),
            "q-layout": ConfigRecord({"layout": layout, "codec": "float32"}),
        }
    )
    with pytest.raises(PosteriorError):
        take_posterior(record, "q")


@pytest.mark.parametrize("prior", ["none", "start", "other"])
def test_assignments_survive_the_journey(prior):
    start = make()
    priors = {"none": None, "start": start, "other": make(5)}
    sent = [
        Assignment(client=c, round=3, start=start, seed=2**62 + 1, learning_rate=1 / 3, epochs=c, steps=2, divisor=1e9 / 7,
                   kl_weight=0.1, prior_std=2.5, prior=priors[prior], l2=1e-4, proximal=0.3, run=1)
        for c in (5, 2)
    ]  # fmt: skip
    record = RecordDict()
    put_assignments(record, sent)
    back = take_assignments(record)
    assert [a.client for a in back] == [2, 5]
    for a, b in zip(sorted(sent, key=lambda a: a.client), back):
        assert (a.round, a.seed, a.learning_rate, a.epochs, a.steps, a.divisor) == (
            b.round,
            b.seed,
            b.learning_rate,
            b.epochs,
            b.steps,
            b.divisor,
        )
        assert (a.kl_weight, a.prior_std, a.l2, a.proximal, a.run) == (
            b.kl_weight,
            b.prior_std,
            b.l2,
            b.proximal,
            b.run,
        )
        assert b.start.same_bits(start)
        assert (b.prior is None) == (a.prior is None)
        assert a.prior is None or b.prior.same_bits(a.prior)


def test_updates_and_errors_survive_the_journey():
    start = make()
    record = RecordDict()
    put_update(record, Update(4, 2, near(start), 120, {"loss": 0.25, "nll": 1 / 3}), 7, "float32", start)
    put_error(record, 9, "no data here")
    error, update = take_updates(record, start)
    assert error == (9, "no data here")
    assert update.posterior.same_bits(near(start))
    assert (update.client, update.round, update.examples, update.metrics) == (4, 2, 120, {"loss": 0.25, "nll": 1 / 3})


def test_a_torn_update_becomes_a_reason_and_the_others_still_arrive():
    start = make()
    record = RecordDict()
    put_update(record, Update(1, 1, near(start), 10), 7, "float32", start)
    put_update(record, Update(2, 1, near(start), 10), 7, "float32", start)
    del record["posterior-1"]["mean.float32"]
    (number, reason), update = take_updates(record, start)
    assert number == 1
    assert "mean.float32" in reason
    assert update.client == 2
