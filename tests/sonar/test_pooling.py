"""Pooling segments into recordings against loops and limits."""

import numpy as np
import pytest
import torch

from fedbayes import uncertainty
from fedbayes.data.sonar.pooling import confusion, pool
from fedbayes.errors import DataError


def sampled(m=6, n=20, c=4, seed=0):
    return torch.rand(m, n, c, generator=torch.Generator().manual_seed(seed)).double().pow(3).softmax(-1)


NAMES = np.array(["b", "a", "c", "a"] * 5)


@pytest.mark.parametrize("method", ["mean", "product"])
def test_pooling_equals_a_loop(method):
    p = sampled()
    pooled = pool(p, NAMES, method=method)
    assert pooled.names.tolist() == ["a", "b", "c"]
    assert pooled.segments.tolist() == [10, 5, 5]
    for r, name in enumerate(pooled.names):
        own = p[:, name == NAMES]
        wanted = own.mean(1) if method == "mean" else own.log().mean(1).exp()
        wanted = wanted / wanted.sum(-1, keepdim=True)
        assert torch.allclose(pooled.probabilities[:, r], wanted)
        spread = own.mean(0).var(0, correction=0).sum()
        assert float(pooled.disagreement[r]) == pytest.approx(float(spread))


def test_one_segment_per_recording_changes_nothing():
    p, names = sampled(), np.array([f"{i:02d}" for i in range(20)])
    pooled = pool(p, names, torch.arange(20) % 4)
    single = uncertainty.per_example(p)
    assert torch.allclose(pooled.probabilities, p)
    for name in ("entropy", "aleatoric", "epistemic"):
        assert torch.allclose(pooled.values[name], single[name])
    assert float(pooled.disagreement.abs().max()) == 0
    assert torch.equal(torch.argsort(-single["entropy"], stable=True), torch.from_numpy(pooled.order()))


def test_a_network_that_is_unsure_of_a_recording_stays_so_however_long_it_is():
    """Networks that each call the whole recording another class: the recording's epistemic uncertainty is theirs."""
    calls = torch.eye(4).double()[torch.tensor([0, 1, 2, 3])]  # network m says class m, for every segment
    p = calls[:, None].expand(4, 50, 4)
    same = pool(p, np.array(["r"] * 50))
    assert float(same.values["epistemic"][0]) == pytest.approx(0.75)
    # the same predictions with draws that segments do not share: pooling within a pass would average them away
    shuffled = torch.stack([calls[torch.randperm(4, generator=torch.Generator().manual_seed(i))] for i in range(50)], 1)
    naive = pool(shuffled, np.array(["r"] * 50))
    told = pool(shuffled, np.array(["r"] * 50), shared_draws=False)
    assert float(naive.values["epistemic"][0]) < 0.1
    assert float(told.values["epistemic"][0]) == pytest.approx(0.75)


def test_two_classes_in_one_recording_count_once_each():
    labels = torch.tensor([0, 0, 1, 1])
    pooled = pool(sampled(n=4), np.array(["r", "r", "r", "s"]), labels)
    assert list(zip(pooled.names.tolist(), pooled.labels.tolist(), strict=True)) == [("r", 0), ("r", 1), ("s", 1)]


def test_accuracy_retained_and_confusion():
    p = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.45, 0.55], [0.3, 0.7]]])
    labels = torch.tensor([0, 0, 0, 1])
    pooled = pool(p, np.array(["a", "b", "c", "d"]), labels)
    assert pooled.accuracy == 0.75
    assert pooled.order()[0] == 2
    curve = pooled.retained()
    assert float(torch.as_tensor(curve.y)[torch.as_tensor(curve.x) <= 0.75].max()) == 1.0
    assert confusion(pooled.values["prediction"], labels, 2).tolist() == [[2, 1], [0, 1]]


def test_bad_requests():
    with pytest.raises(DataError, match="for 3 segments"):
        pool(sampled(), np.array(["a"] * 3))
    with pytest.raises(DataError, match="valid are: mean, product"):
        pool(sampled(), NAMES, method="vote")
    with pytest.raises(DataError, match="without their labels"):
        _ = pool(sampled(), NAMES).accuracy
