"""Calibration and proper scores against scikit-learn, torchmetrics and loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from fedbayes import uncertainty as u

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def case(n=500, c=6, seed=0, m=3):
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(m, n, c, generator=g, dtype=torch.float64) * 2, -1)
    y = torch.multinomial(p.mean(0), 1, generator=g)[:, 0]
    return p, y


def test_scores_equal_scikit_learn():
    p, y = case()
    found, mean = u.summarize(p, y), p.mean(0).numpy()
    assert found["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(y, mean.argmax(1)))
    assert found["nll"] == pytest.approx(sklearn_metrics.log_loss(y, mean, labels=range(6)))
    onehot = np.eye(6)[y.numpy()]
    assert found["brier"] == pytest.approx(((mean - onehot) ** 2).sum(1).mean())


def ece_by_loop(confidence, correct, edges):
    total = 0.0
    for b, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = [i for i, c in enumerate(confidence) if (low < c <= high) or (b == 0 and c <= high)]
        if inside:
            gap = sum(confidence[i] for i in inside) - sum(correct[i] for i in inside)
            total += abs(gap)
    return total / len(confidence)


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 100])
def test_ece_equals_loop_and_torchmetrics(bins):
    p, y = case()
    mean = p.mean(0)
    confidence, prediction = mean.max(-1)
    expected = ece_by_loop(confidence.tolist(), (prediction == y).double().tolist(), np.linspace(0, 1, bins + 1))
    assert u.ece(p, y, bins) == pytest.approx(expected, rel=1e-9)
    functional = pytest.importorskip("torchmetrics.functional.classification")
    if bins > 1:
        oracle = functional.multiclass_calibration_error(mean, y, num_classes=6, n_bins=bins, norm="l1")
        assert u.ece(p, y, bins) == pytest.approx(float(oracle), abs=1e-6)  # it sums in float32


@pytest.mark.parametrize("bins", [2, 5, 15])
def test_equal_mass_bins_equal_scikit_learns_quantile_curve(bins):
    calibration = pytest.importorskip("sklearn.calibration")
    p, y = case()
    confidence, prediction = p.mean(0).max(-1)
    correct = (prediction == y).double()
    true, predicted = calibration.calibration_curve(correct, confidence, n_bins=bins, strategy="quantile")
    table = u.reliability_table(p, y, bins, "mass")
    np.testing.assert_allclose(table.accuracy, true, rtol=1e-9)
    np.testing.assert_allclose(table.confidence, predicted, rtol=1e-9)
    assert table.count.max() - table.count.min() <= 1
    assert table.count.sum() == 500


def test_equal_mass_bins_never_part_equal_confidences():
    p = torch.tensor([[0.9, 0.1]]).repeat(40, 1)[None]
    y = torch.tensor([0] * 30 + [1] * 10)
    table = u.reliability_table(p, y, 10, "mass")
    assert (table.count > 0).sum() == 1
    assert table.error() == pytest.approx(0.15, abs=1e-6)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert u.ece(p[:, order], y[order], 10, "mass") == pytest.approx(table.error())


def test_classwise_equals_loop():
    p, y = case(c=4)
    mean = p.mean(0).numpy()
    edges = np.linspace(0, 1, 11)
    expected = np.mean([ece_by_loop(mean[:, c], (y.numpy() == c).astype(float), edges) for c in range(4)])
    assert u.ece_classwise(p, y, 10) == pytest.approx(expected, rel=1e-9)


def test_edges_belong_to_the_lower_bin_and_zero_to_the_first():
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]]])
    table = u.reliability_table(p, torch.tensor([0, 0, 1]), 4)
    assert table.count.tolist() == [0, 1, 1, 1]  # 0.5 in (0.25, 0.5], 0.75 in (0.5, 0.75], 1 in the last
    assert torch.isnan(table.accuracy[0])


def test_certain_answers():
    right, wrong = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    y = torch.tensor([0])
    good, bad = u.summarize(right, y), u.summarize(wrong, y)
    assert good["nll"] == good["brier"] == good["ece"] == good["ece_mass"] == good["ece_classwise"] == 0
    assert bad["nll"] == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert bad["brier"] == 2
    assert bad["ece"] == bad["ece_classwise"] == 1
    assert math.isnan(good["auroc_error_entropy"])


def test_single_class_batch():
    p, _ = case(n=50)
    found = u.summarize(p, torch.zeros(50, dtype=torch.int64))
    assert all(math.isfinite(v) for k, v in found.items() if not k.startswith(("auroc", "fpr95")))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), "one per example"),
        (torch.zeros(500), "integer"),
        (torch.full((500,), 6), r"label 6 is outside 0\.\.5"),
        (torch.full((500,), -1), "label -1"),
        ("three", "of type str"),
        (None, "of type NoneType"),
    ],
)
def test_wrong_labels_get_one_sentence(labels, words):
    with pytest.raises(u.UncertaintyError, match=words):
        u.summarize(case()[0], labels)


def test_wrong_bins():
    p, y = case(n=10)
    with pytest.raises(u.UncertaintyError, match="at least 1"):
        u.ece(p, y, 0)
    with pytest.raises(u.UncertaintyError, match="whole number"):
        u.summarize(p, y, bins=2.5)  # type: ignore[arg-type]
    with pytest.raises(u.UncertaintyError, match="'width' and 'mass'"):
        u.ece(p, y, 5, "height")  # type: ignore[arg-type]


@pytest.mark.parametrize("confidence", [[], [[0.5]], [50.0], [-0.1], [float("nan")]])
def test_wrong_confidences(confidence):
    with pytest.raises(u.UncertaintyError, match="confidences"):
        u.tabulate(confidence, [True] * len(confidence))
