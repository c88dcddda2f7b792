"""Held-out parts: proportions, no leak between parts of one recording, determinism."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.data import Examples, hold_out, split_validation
from fedbayes.data.splits import balanced_subset, stratified_order
from fedbayes.errors import DataError


def numbered(labels, **columns) -> Examples:
    """Examples whose input is their own number, so that parts can be traced."""
    labels = torch.as_tensor(np.asarray(labels), dtype=torch.int64)
    return Examples(torch.arange(len(labels)).float()[:, None], labels, columns)


def ids(part: Examples) -> set[int]:
    return {int(i) for i in part.inputs[:, 0]}


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=2, max_size=200),
    share=st.floats(0, 0.95),
    seed=st.integers(0, 10**6),
)
def test_parts_are_disjoint_and_whole_and_no_class_is_lost(labels, share, seed):
    train = numbered(labels)
    rest, held = split_validation(train, share, seed)
    assert ids(rest) | ids(held) == set(range(len(labels)))
    assert not ids(rest) & ids(held)
    assert set(rest.labels.tolist()) == set(labels)
    wanted = 0 if share == 0 else max(1, round(share * len(labels)))
    assert len(held) == min(wanted, len(labels) - len(set(labels)))


def test_validation_is_stratified_by_class_and_column():
    labels = np.repeat([0, 1], 1000)
    hospital = np.tile(np.repeat(["a", "b"], [900, 100]), 2)
    _, held = split_validation(numbered(labels, hospital=hospital), 0.1, 0, columns=("hospital",))
    for c in (0, 1):
        for h, n in (("a", 90), ("b", 10)):
            assert abs(((held.labels.numpy() == c) & (held.columns["hospital"] == h)).sum() - n) <= 1


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=4, max_size=40), share=st.floats(0.05, 0.6), seed=st.integers(0, 99))
def test_recordings_never_leak(sizes, share, seed):
    recording = np.repeat(np.arange(len(sizes)), sizes)
    train = numbered(recording % 2, recording=recording)
    for split in (split_validation, hold_out):
        rest, held = split(train, share, seed)
        assert not set(rest.columns["recording"]) & set(held.columns["recording"])
        assert len(rest) + len(held) == len(train)
        assert len(held) > 0
        assert set(rest.labels.tolist()) == {0, 1}


def test_any_column_can_be_the_group():
    train = numbered([0, 1] * 20, ship=np.repeat(np.arange(10), 4))
    rest, held = split_validation(train, 0.3, 0, group="ship")
    assert not set(rest.columns["ship"]) & set(held.columns["ship"])
    with pytest.raises(DataError, match="no column 'boat'"):
        split_validation(train, 0.3, 0, group="boat")


def test_the_two_splits_are_independent_and_repeat():
    train = numbered(np.arange(400) % 4)
    a, b = split_validation(train, 0.25, 9)[1], split_validation(train, 0.25, 9)[1]
    c, d = hold_out(train, 0.25, 9)[1], split_validation(train, 0.25, 10)[1]
    assert ids(a) == ids(b)
    assert ids(a) != ids(c)
    assert ids(a) != ids(d)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_makes_no_sense(share):
    with pytest.raises(DataError, match="at least 0 and below 1"):
        split_validation(numbered([0, 1]), share, 0)


def test_every_stretch_of_the_stratified_order_has_the_proportions():
    strata = np.repeat([0, 1, 2], [600, 300, 100])
    order = strata[stratified_order(strata, np.random.default_rng(0))]
    for start in range(0, 1000, 90):
        found = np.bincount(order[start : start + 100], minlength=3) * 1000 / len(order[start : start + 100]) / 10
        assert np.abs(found - np.array([60, 30, 10])).max() <= 2.1


@settings(max_examples=50, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=80), limit=st.integers(0, 100), seed=st.integers(0, 9))
def test_limits_are_balanced_as_far_as_classes_go(labels, limit, seed):
    labels = np.array(labels)
    chosen = balanced_subset(labels, limit, np.random.default_rng(seed))
    if limit == 0 or limit >= len(labels):
        assert chosen.tolist() == list(range(len(labels)))
        return
    assert len(set(chosen.tolist())) == len(chosen) == limit
    have, got = np.bincount(labels, minlength=5), np.bincount(labels[chosen], minlength=5)
    short = got < have  # classes that could give more got as many as any other, give or take one
    assert not short.any() or got.max() - got[short].min() <= 1
