"""AUROC, FPR95, retained curves against scikit-learn and brute force, with ties everywhere."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import uncertainty as u

metrics = pytest.importorskip("sklearn.metrics")

scored = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=12)


@settings(max_examples=150, deadline=None)
@given(scored)
def test_auroc_counts_pairs(pairs):
    positive = [s for s, p in pairs if p]
    negative = [s for s, p in pairs if not p]
    found = u.auroc(torch.tensor([float(s) for s, _ in pairs]), torch.tensor([p for _, p in pairs]))
    if not positive or not negative:
        assert math.isnan(found)
        return
    wins = sum((a > b) + 0.5 * (a == b) for a in positive for b in negative)
    assert found == pytest.approx(wins / (len(positive) * len(negative)))


@settings(max_examples=100, deadline=None)
@given(scored)
def test_roc_curve_has_that_area(pairs):
    scores, positive = torch.tensor([float(s) for s, _ in pairs]), torch.tensor([p for _, p in pairs])
    if positive.all() or not positive.any():
        return
    curve = u.roc_curve(scores, positive)
    assert float(torch.trapezoid(curve.y, curve.x)) == pytest.approx(u.auroc(scores, positive))
    fpr, tpr, _ = metrics.roc_curve(positive, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.x, fpr, atol=1e-12)
    np.testing.assert_allclose(curve.y, tpr, atol=1e-12)


def brute_fpr(caught, others, share):
    """Try every threshold: flag what is >= t; least share of others flagged among those that catch enough."""
    options = [
        np.mean(np.asarray(others) >= t)
        for t in sorted({*caught, *others})
        if np.mean(np.asarray(caught) >= t) >= share - 1e-12
    ]
    return min(options)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=45), st.lists(st.integers(0, 6), min_size=1, max_size=45))
def test_detection_equals_brute_force(inside, outside):
    found = u.detection(torch.tensor(inside, dtype=torch.float64), torch.tensor(outside, dtype=torch.float64))
    truth, scores = [0] * len(inside) + [1] * len(outside), inside + outside
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(truth, scores))
    assert found["aupr"] == pytest.approx(metrics.average_precision_score(truth, scores))
    assert found["fpr95"] == pytest.approx(brute_fpr(outside, inside, 0.95))
    assert found["fpr95_inliers"] == pytest.approx(brute_fpr([-s for s in inside], [-s for s in outside], 0.95))


@pytest.mark.parametrize("n", [1, 19, 20, 21, 40, 100])
def test_95_percent_is_met_exactly(n):
    outside = torch.arange(n, dtype=torch.float64)
    found = u.detection(outside, outside)["fpr95"]
    assert found == pytest.approx(math.ceil(round(0.95 * n, 9)) / n)


def test_no_separation_and_perfect_separation():
    same = u.detection(torch.zeros(10), torch.zeros(30))
    assert (same["auroc"], same["fpr95"], same["aupr"]) == (0.5, 1.0, 0.75)
    apart = u.detection(torch.zeros(10), torch.ones(30))
    assert (apart["auroc"], apart["fpr95"], apart["aupr"]) == (1.0, 0.0, 1.0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_retained_curve_is_the_mean_over_all_orders_of_ties(pairs):
    """Brute force: average the plain curve over every ordering that respects the scores."""
    scores, correct = [s for s, _ in pairs], [c for _, c in pairs]
    curves = []
    for order in itertools.permutations(range(len(pairs))):
        if all(scores[a] <= scores[b] for a, b in itertools.pairwise(order)):
            hits = np.cumsum([correct[i] for i in order])
            curves.append(hits / np.arange(1, len(pairs) + 1))
    found = u.retained_curve(torch.tensor(scores, dtype=torch.float64), torch.tensor(correct))
    np.testing.assert_allclose(found.y, np.mean(curves, 0), atol=1e-12)
    np.testing.assert_allclose(found.x, np.arange(1, len(pairs) + 1) / len(pairs))


def test_risk_coverage_and_area():
    scores, correct = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([True, True, False, True])
    curve = u.risk_coverage(scores, correct)
    np.testing.assert_allclose(curve.y, [0, 0, 1 / 3, 1 / 4], atol=1e-12)
    assert u.retained_area(scores, correct) == pytest.approx(1 - (1 / 3 + 1 / 4) / 4)
    assert u.accuracy_at(scores, correct, 0.5) == 1.0
    assert u.accuracy_at(scores, correct, 1.0) == 0.75
    assert u.accuracy_at(scores, correct, 0.01) == 1.0
    with pytest.raises(u.UncertaintyError, match="outside"):
        u.accuracy_at(scores, correct, 0.0)
    with pytest.raises(u.UncertaintyError, match="outside"):
        u.accuracy_at(scores, correct, "half")  # type: ignore[arg-type]


def test_summary_ranks_with_each_uncertainty():
    g = torch.Generator().manual_seed(3)
    p = torch.softmax(torch.randn(5, 200, 4, generator=g, dtype=torch.float64) * 2, -1)
    y = torch.multinomial(p.mean(0), 1, generator=g)[:, 0]
    found, each = u.summarize(p, y), u.per_example(p)
    wrong = each["prediction"] != y
    for name in u.UNCERTAINTIES:
        assert found[f"auroc_error_{name}"] == pytest.approx(metrics.roc_auc_score(wrong, each[name]))
        by_threshold = brute_fpr(each[name][wrong].tolist(), each[name][~wrong].tolist(), 0.95)
        assert found[f"fpr95_error_{name}"] == pytest.approx(by_threshold)
        order = torch.argsort(each[name])
        plain = (~wrong)[order].double().cumsum(0) / torch.arange(1, 201)
        assert found[f"retained_{name}"] == pytest.approx(float(plain.mean()))
    outliers = torch.softmax(torch.randn(5, 60, 4, generator=g, dtype=torch.float64) * 0.2, -1)
    out = u.summarize_outliers(p, outliers)
    far = u.per_example(outliers)["entropy"]
    truth = [0] * 200 + [1] * 60
    assert out["auroc_entropy"] == pytest.approx(metrics.roc_auc_score(truth, torch.cat([each["entropy"], far])))
    assert out["entropy"] == pytest.approx(float(far.mean()))


@pytest.mark.parametrize("votes", [True, False])
def test_no_number_depends_on_the_order_of_examples_or_samples(votes):
    """Even votes are exactly as unsure in whatever order they are summed; ordinary float32 rows rank as before."""
    g = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(25, 333, 10, generator=g), -1)
    p = torch.eye(10)[torch.randint(10, (25, 333), generator=g)] if votes else p
    y = torch.randint(10, (333,), generator=g)
    found, scores = u.summarize(p, y), u.ranking_scores(u.per_example(p))
    for _ in range(3):
        examples, samples = torch.randperm(333, generator=g), torch.randperm(25, generator=g)
        assert u.summarize(p[:, examples], y[examples]) == pytest.approx(found, rel=1e-12)
        assert u.summarize(p[samples], y) == pytest.approx(found, rel=1e-12)
        for name, again in u.ranking_scores(u.per_example(p[samples])).items():
            assert len(again.unique()) == len(scores[name].unique())


def test_small_differences_still_rank():
    """A collapsed posterior's spreads (Loomis: 1e-11) are told apart, and so is what one float32 step makes."""
    spread = torch.tensor([1e-11, 1.001e-11, 1e-20], dtype=torch.float64)
    assert len(u.ranking_scores(dict.fromkeys(u.UNCERTAINTIES, spread))["epistemic"].unique()) == 3


@pytest.mark.parametrize("wrong", [False, True])
def test_all_right_or_all_wrong_has_no_answer(wrong):
    p = torch.softmax(torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0)), -1)
    answers = u.per_example(p)["prediction"]
    found = u.summarize(p, (answers + wrong) % 3)
    for name in u.UNCERTAINTIES:
        assert math.isnan(found[f"auroc_error_{name}"])
        assert math.isnan(found[f"fpr95_error_{name}"])
        assert found[f"retained_{name}"] == 1 - wrong


def test_outliers_are_of_the_same_network():
    with pytest.raises(u.UncertaintyError, match="3 classes and the outliers 4"):
        u.summarize_outliers(torch.full((1, 2, 3), 1 / 3), torch.full((1, 2, 4), 1 / 4))


def test_deterministic_networks_get_the_same_table():
    p = torch.softmax(torch.randn(1, 50, 3, generator=torch.Generator().manual_seed(0)), -1)
    y = torch.arange(50) % 3
    found = u.summarize(p, y)
    assert found.keys() == u.summarize(p.expand(4, -1, -1), y).keys()
    assert found["epistemic"] == found["mutual_information"] == 0
    assert found["auroc_error_epistemic"] == 0.5
    assert found["fpr95_error_epistemic"] == 1
    assert found["retained_epistemic"] == pytest.approx(found["accuracy"])


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (torch.tensor([1.0, float("nan")]), "NaN"),
        (torch.ones(2, 2), "one number per example"),
        (torch.ones(0), "one number"),
    ],
)
def test_bad_scores_get_one_sentence(scores, words):
    with pytest.raises(u.UncertaintyError, match=words):
        u.auroc(scores, torch.ones(2))


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, "NoneType"),
        (["a", "b", "c"], "of type list"),
        ([True, False], "must match"),
        ([0, 1, 7], "prediction == label"),
        ([0.0, 1.0, float("nan")], "prediction == label"),
    ],
)
def test_bad_truth_gets_one_sentence(truth, words):
    for function in (u.auroc, u.retained_curve, u.roc_curve, u.tabulate):
        with pytest.raises(u.UncertaintyError, match=words):
            function([0.1, 0.2, 0.3], truth)
