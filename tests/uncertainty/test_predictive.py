"""Per-input uncertainty against loops written from the formulas."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbayes import uncertainty as u
from fedbayes.uncertainty import _checks


def sampled(m=7, n=40, c=5, seed=0, scale=2.0):
    return torch.softmax(
        torch.randn(m, n, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale, -1
    )


def loops(p):
    """Fischer eqs. 8 and 9, mutual information: plain Python, one number at a time."""
    m, n, c = p.shape
    out = {k: [] for k in ("entropy", "aleatoric", "epistemic", "mutual_information")}
    for i in range(n):
        mean = [sum(p[s][i][k] for s in range(m)) / m for k in range(c)]
        h = -sum(q * math.log(q) for q in mean if q > 0)
        each = [-sum(q * math.log(q) for q in p[s][i] if q > 0) for s in range(m)]
        out["entropy"].append(h / math.log(c))
        out["mutual_information"].append(h - sum(each) / m)
        out["aleatoric"].append(sum(p[s][i][k] * (1 - p[s][i][k]) for s in range(m) for k in range(c)) / m)
        out["epistemic"].append(sum((p[s][i][k] - mean[k]) ** 2 for s in range(m) for k in range(c)) / m)
    return out


def test_per_example_equals_loops():
    p = sampled()
    p[:, 0] = torch.eye(5, dtype=torch.float64)[2]  # exactly 0 and 1, all samples agreed
    p[:, 1] = torch.eye(5, dtype=torch.float64)[torch.arange(7) % 2]  # exactly 0 and 1, samples disagree
    found = u.per_example(p)
    for name, expected in loops(p.numpy()).items():
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-12, atol=1e-15, err_msg=name)
    assert found["entropy"][0] == 0
    assert found["mutual_information"][1] == pytest.approx(found["entropy"][1] * math.log(5))


def test_covariances_are_kwons_matrices():
    p = sampled(m=4, n=6, c=3)
    aleatoric, epistemic = u.covariances(p)
    for i in range(6):
        q = p[:, i].numpy()
        mean = q.mean(0)
        a = sum(np.diag(x) - np.outer(x, x) for x in q) / 4
        e = sum(np.outer(x - mean, x - mean) for x in q) / 4
        np.testing.assert_allclose(aleatoric[i], a, atol=1e-15)
        np.testing.assert_allclose(epistemic[i], e, atol=1e-15)
        # total variance of a one-hot draw from the mean (law of total variance)
        np.testing.assert_allclose(aleatoric[i] + epistemic[i], np.diag(mean) - np.outer(mean, mean), atol=1e-15)
    values = u.per_example(p)
    torch.testing.assert_close(aleatoric.diagonal(dim1=1, dim2=2).sum(-1), values["aleatoric"])
    torch.testing.assert_close(epistemic.diagonal(dim1=1, dim2=2).sum(-1), values["epistemic"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, 3, 25])
def test_equal_samples_have_exactly_no_epistemic_uncertainty(dtype, samples):
    one = sampled(m=1, n=200, c=10).to(dtype)
    values = u.per_example(one.expand(samples, -1, -1))
    for name in ("epistemic", "mutual_information", "predictive_variance"):
        assert (values[name] == 0).all(), name
    torch.testing.assert_close(u.predictive_mean(one.expand(samples, -1, -1)), one[0].double(), rtol=0, atol=0)


def test_tiny_spread_is_not_lost():
    """The thesis reports predictive variances of 1e-11: they must survive float32 inputs of that spread."""
    base = torch.full((2, 1, 2), 0.5, dtype=torch.float64)
    base[0, 0] += torch.tensor([1e-6, -1e-6], dtype=torch.float64)
    assert float(u.per_example(base)["epistemic"][0]) == pytest.approx(2 * 0.25e-12, rel=1e-6)


def test_mutual_information_of_a_tiny_spread():
    """To second order it is the sum of variance / (2 mean); H(mean) - mean H would be rounding error only."""
    mean = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    d = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64) * 1e-8
    p = torch.stack([mean + d, mean - d])[:, None]
    expected = float((d**2 / (2 * mean)).sum())
    assert float(u.per_example(p)["mutual_information"][0]) == pytest.approx(expected, rel=1e-5)


def test_votes_that_are_even_are_a_tie():
    """Three of seven networks say class 0, three class 2: the first of the tied classes, in whatever order they voted."""
    votes = torch.eye(3, dtype=torch.float64)[torch.tensor([2, 0, 1, 0, 2, 2, 0])]
    for shift in range(7):
        assert u.per_example(votes.roll(shift, 0)[:, None])["prediction"].tolist() == [0]


def test_predictive_variance_readings():
    p = sampled()
    variance = p.numpy().var(0)
    np.testing.assert_allclose(u.predictive_variance(p), variance.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(u.predictive_variance(p, "mean"), variance.mean(-1), rtol=1e-12)
    top = p.mean(0).argmax(-1).numpy()
    np.testing.assert_allclose(u.predictive_variance(p, "predicted"), variance[np.arange(40), top], rtol=1e-12)
    torch.testing.assert_close(u.predictive_variance(p), u.per_example(p)["epistemic"])
    with pytest.raises(u.UncertaintyError, match="reading"):
        u.predictive_variance(p, "median")  # type: ignore[arg-type]


def test_ties_go_to_the_first_class():
    p = torch.tensor([[[0.4, 0.2, 0.4], [0.25, 0.5, 0.25]]])
    assert u.per_example(p)["prediction"].tolist() == [0, 1]
    uniform = torch.full((3, 2, 4), 0.25)
    values = u.per_example(uniform)
    assert values["prediction"].tolist() == [0, 0]
    assert values["entropy"].tolist() == [1.0, 1.0]


def test_chunks_change_nothing(monkeypatch):
    p = sampled(n=101).float()
    y = torch.arange(101) % 5
    whole, table = u.per_example(p), u.summarize(p, y)
    monkeypatch.setitem(_checks.CHUNK_ELEMENTS, "cpu", 7 * 5 * 3)
    assert [s.stop - s.start for s in _checks.chunks(p)] == [3] * 33 + [2]
    for name, value in u.per_example(p).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-13, atol=1e-15)
    assert u.summarize(p, y) == pytest.approx(table, rel=1e-12)


def test_work_is_done_in_small_chunks():
    """25 x 50,000 x 100 (not held here: the stride is 0) is worked through some dozen examples at a time."""
    p = torch.ones(1, 1, 1).expand(25, 50_000, 100)
    slices = _checks.chunks(p)
    assert max(s.stop - s.start for s in slices) * 25 * 100 <= _checks.chunk_elements(p.device)
    assert slices[0].start == 0
    assert slices[-1].stop == 50_000
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))


def test_one_class_one_example():
    assert u.per_example(torch.ones(2, 1, 1))["entropy"].tolist() == [0.0]
    assert len(u.per_example(sampled(n=1))["entropy"]) == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.ones(4, 3), r"probabilities\[None\]"),
        (torch.ones(2, 0, 3), "empty"),
        (torch.ones(1, 2, 3, dtype=torch.int64), "floating-point"),
        (torch.randn(2, 3, 4), "softmax"),
        (torch.full((1, 2, 4), 0.5), "sum to 2"),
        (torch.tensor([[[0.5, 0.5], [float("nan"), 0.5]]]), "example 1 in sample 0 are not finite"),
        (torch.tensor([[[0.5, 0.5], [float("inf"), 0.5]]]), "not finite"),
        (torch.tensor([[[1.5, -0.5]]]), "no probabilities"),
    ],
)
def test_what_is_no_probability_gets_one_sentence(bad, words):
    with pytest.raises(u.UncertaintyError, match=words):
        u.per_example(bad)


def test_arrays_are_welcome():
    p = sampled(n=4)
    labels = u.per_example(p)["prediction"].numpy()
    labels[0] = (labels[0] + 1) % 5  # one error, so that every number is defined
    expected = u.summarize(p, torch.as_tensor(labels))
    assert u.summarize(p.numpy(), labels) == expected
    sealed = p.numpy().copy()
    sealed.setflags(write=False)
    assert u.summarize(sealed, labels) == expected  # as memory-mapped files are
    assert u.summarize(p.numpy().astype(">f4" if p.dtype == torch.float32 else ">f8"), labels) == expected
    turned = u.summarize(p.numpy()[:, ::-1], labels[::-1])
    assert turned == pytest.approx(expected)


def test_entropy_takes_arrays_of_any_shape_and_refuses_logits():
    rows = np.array([[[0.5, 0.5], [1, 0]], [[0.25, 0.75], [0, 1]]])
    oracle = [[1, 0], [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2), 0]]
    np.testing.assert_allclose(u.entropy(rows), oracle)
    assert u.entropy([0.5, 0.5]).item() == 1
    for wrong in (torch.tensor([[2.0, -3.0]]), [math.nan, 1.0], 0.5, [], "x"):
        with pytest.raises(u.UncertaintyError):
            u.entropy(wrong)


MEMORY = """
import torch
from fedbayes import uncertainty
def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024
p = torch.rand(25, 10_000, 100)
for sample in p:
    sample /= sample.sum(-1, keepdim=True)
y = torch.zeros(10_000, dtype=torch.int64)
uncertainty.summarize(p[:, :200].clone(), y[:200])
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
uncertainty.summarize(p, y)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
def test_little_memory_is_needed_beside_the_input():
    """Not 20 times the mean prediction, to which the heap grows when small results are kept among large temporaries."""
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 100, "MB beside an input of 100"
