"""Partitions: every example exactly once, sizes, determinism, termination, and refusals that say why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.data import Examples, client_names, partition, partition_record, render, table
from fedbayes.data.partition import SCHEMES, draw_dirichlet
from fedbayes.errors import ConfigError, DataError, FedBayesError
from fedbayes.experiment import Partition


def examples(labels, **columns) -> Examples:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return Examples(torch.zeros(len(labels), 0), labels, columns)


CIFAR = examples(np.repeat(np.arange(10), 5000))
SMALL = examples(np.repeat(np.arange(10), 100))


def counts(shards, train: Examples) -> np.ndarray:
    return np.array([np.bincount(train.labels.numpy()[s], minlength=int(train.labels.max()) + 1) for s in shards])


def assert_exact(shards, n: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(n))


def sensible(scheme: str, n: int, clients: int) -> bool:
    """Whether the request can be met at all; written from the schemes' definitions, not from their code."""
    if scheme in ("iid", "dirichlet"):
        return n >= clients
    if scheme in ("dirichlet-unequal", "quantity"):
        return n >= 2 * clients
    raise AssertionError(scheme)


@settings(max_examples=120, deadline=None)
@given(
    scheme=st.sampled_from(["iid", "dirichlet", "dirichlet-unequal", "quantity"]),
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=150),
    clients=st.integers(1, 30),
    alpha=st.sampled_from([1e-300, 1e-12, 1e-3, 0.05, 0.5, 1.0, 37.0, 1e6, 1e300]),
    seed=st.integers(0, 2**40),
)
def test_every_example_once_for_any_alpha(scheme, labels, clients, alpha, seed):
    train = examples(labels)
    config = Partition(scheme=scheme, clients=clients, alpha=alpha, minimum=2)
    if not sensible(scheme, len(labels), clients):
        with pytest.raises(DataError, match="clients"):
            partition(config, train, seed)
        return
    shards = partition(config, train, seed)
    assert len(shards) == clients
    assert_exact(shards, len(labels))
    sizes = [len(s) for s in shards]
    if scheme in ("iid", "dirichlet"):
        assert max(sizes) - min(sizes) <= 1
    else:
        assert min(sizes) >= 2
    again = partition(config, train, seed)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again))


@settings(max_examples=80, deadline=None)
@given(
    per_class=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    clients=st.integers(1, 12),
    k=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_shards_give_each_client_k_different_classes(per_class, clients, k, seed):
    labels = np.repeat(np.arange(len(per_class)), per_class)
    train, config = examples(labels), Partition(scheme="shards", clients=clients, classes_per_client=k)
    possible = k <= len(per_class) <= clients * k and sum(min(clients, n) for n in per_class) >= clients * k <= len(
        labels
    )
    if not possible:
        with pytest.raises(DataError):
            partition(config, train, seed)
        return
    shards = partition(config, train, seed)
    assert_exact(shards, len(labels))
    held = counts(shards, train)
    assert ((held > 0).sum(1) == k).all()
    for c in range(len(per_class)):  # pieces of one class are of one size, give or take one
        pieces = held[:, c][held[:, c] > 0]
        assert pieces.max() - pieces.min() <= 1


def test_fischer_twenty_shards_of_2500():
    held = counts(partition(Partition(scheme="shards", clients=10, classes_per_client=2), CIFAR, 7), CIFAR)
    assert sorted(np.unique(held)) == [0, 2500]
    assert ((held == 2500).sum(1) == 2).all()
    assert ((held == 2500).sum(0) == 2).all()


def test_shards_pair_classes_at_random():
    """No pair of classes is impossible: over seeds, class 0 meets every other class."""
    met = set()
    for seed in range(60):
        held = counts(partition(Partition(scheme="shards"), SMALL, seed), SMALL) > 0
        met |= {int(c) for client in held if client[0] for c in np.flatnonzero(client)}
    assert met == set(range(10))


def test_step_has_the_posters_numbers():
    train = examples(np.repeat(np.arange(10), 4000))
    held = counts(partition(Partition(scheme="step", clients=10), train, 0), train)
    assert ((held == 10).sum(1) == 8).all()
    assert ((held == 1960).sum(1) == 2).all()


def test_step_with_duplicates_deals_the_minor_examples_twice():
    train = examples(np.repeat(np.arange(10), 4000))
    shards = partition(Partition(scheme="step", duplicates=True), train, 0)
    times = np.bincount(np.concatenate(shards), minlength=len(train))
    assert sorted(np.unique(times)) == [1, 2]
    assert (times == 2).sum() == 10 * 10 * 10
    assert [len(s) for s in shards] == [4100] * 10


def test_step_says_what_is_too_much():
    with pytest.raises(DataError, match="at most 10 minor examples"):
        partition(Partition(scheme="step", minor_examples=20), SMALL, 0)


def test_dirichlet_mixes_follow_the_dirichlet():
    """The first clients served have the exact law: E[p] = 1/C and Var[p] = (1/C)(1-1/C)/(C·alpha+1)."""
    alpha, classes = 0.5, 5
    train = examples(np.repeat(np.arange(classes), 4000))
    config = Partition(scheme="dirichlet", clients=200, alpha=alpha)
    shares = counts(partition(config, train, 3), train) / 100
    # Late clients get what is left, which pulls towards extremes; the spread stays near the law's.
    assert np.allclose(shares.mean(0), 1 / classes, atol=0.001)
    law = (1 / classes) * (1 - 1 / classes) / (classes * alpha + 1)
    assert 0.8 * law < shares.var(0).mean() < 1.5 * law


@pytest.mark.parametrize("alpha", [1e-6, 0.3, 4.0, 1e8])
def test_own_dirichlet_has_the_moments_of_the_law(alpha):
    rng = np.random.default_rng(0)
    draws = np.array([draw_dirichlet(rng, alpha, 4) for _ in range(20000)])
    assert np.isfinite(draws).all()
    assert np.allclose(draws.sum(1), 1)
    assert np.allclose(draws.mean(0), 0.25, atol=0.015)
    assert np.allclose(draws.var(0), 0.25 * 0.75 / (4 * alpha + 1), atol=0.006)


def test_small_alpha_is_more_unequal_than_large():
    def concentration(alpha):
        held = counts(partition(Partition(alpha=alpha), CIFAR, 0), CIFAR)
        return (held.max(1) / held.sum(1)).mean()

    assert concentration(0.05) > 0.6 > 0.3 > concentration(100.0)


def test_unequal_dirichlet_differs_in_size_and_keeps_the_minimum():
    sizes = [len(s) for s in partition(Partition(scheme="dirichlet-unequal", alpha=0.3, minimum=50), CIFAR, 0)]
    assert min(sizes) >= 50
    assert max(sizes) > 1.5 * min(sizes)


def test_unequal_dirichlet_meets_a_minimum_no_draw_would():
    sizes = [len(s) for s in partition(Partition(scheme="dirichlet-unequal", alpha=1e-3, minimum=100), SMALL, 0)]
    assert sizes == [100] * 10


def test_a_thousand_clients_with_tiny_alpha_end_too():
    train = examples(np.repeat(np.arange(100), 500))
    sizes = [len(s) for s in partition(Partition("dirichlet-unequal", clients=1000, alpha=1e-3), train, 0)]
    assert (len(sizes), min(sizes), sum(sizes)) == (1000, 10, 50_000)


def test_quantity_skews_sizes_not_classes():
    shards = partition(Partition(scheme="quantity", alpha=0.5), CIFAR, 1)
    held = counts(shards, CIFAR)
    sizes = held.sum(1)
    assert sizes.max() > 3 * sizes.min()
    assert (np.abs(held - sizes[:, None] / 10) <= 2).all()


def test_column_gives_one_client_per_value():
    hospital = np.array(["b", "a", "c", "a", "b", "a"])
    train = examples([0, 1, 0, 1, 0, 1], hospital=hospital)
    config = Partition(scheme="column", column="hospital", clients=0)
    shards = partition(config, train, 0)
    assert [s.tolist() for s in shards] == [[1, 3, 5], [0, 4], [2]]
    assert client_names(config, train) == ["a", "b", "c"]


def test_column_with_fewer_clients_keeps_values_whole():
    site = np.repeat(np.arange(7), [9, 8, 7, 3, 2, 2, 1])
    train = examples(np.zeros(32), site=site)
    config = Partition(scheme="column", column="site", clients=3)
    shards = partition(config, train, 0)
    assert_exact(shards, 32)
    owners = [set(site[s]) for s in shards]
    assert sum(len(o) for o in owners) == 7
    assert max(map(len, shards)) - min(map(len, shards)) <= 2
    assert client_names(config, train)[0] == " + ".join(str(v) for v in sorted(owners[0]))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in ("column", "step")])
def test_recordings_are_never_torn_apart(scheme):
    recording = np.repeat(np.arange(60), np.arange(60) % 5 + 1)
    train = examples(recording % 4, recording=np.array([f"r{r:02d}" for r in recording]))
    shards = partition(Partition(scheme=scheme, clients=4, minimum=2), train, 5)
    assert_exact(shards, len(train))
    owners = [set(recording[s]) for s in shards]
    assert sum(len(o) for o in owners) == 60


def test_a_column_that_tears_recordings_is_refused():
    train = examples([0, 0, 1, 1], recording=np.array(["r", "r", "s", "s"]), half=np.array([0, 1, 0, 1]))
    with pytest.raises(DataError, match="tears a recording apart"):
        partition(Partition(scheme="column", column="half", clients=0), train, 0)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "column"])
def test_seed_decides(scheme):
    config = Partition(scheme=scheme, minor_examples=3)
    first, other = partition(config, SMALL, 0), partition(config, SMALL, 1)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other))
    assert all(s.dtype == np.int64 and (np.diff(s) > 0).all() for s in first)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (Partition(scheme="iid", clients=1001), "at most 1000 clients"),
        (Partition(clients=0), "partition.clients must be at least 1"),
        (Partition(alpha=0.0), "partition.alpha must be a positive number"),
        (Partition(alpha=float("nan")), "partition.alpha must be a positive number"),
        (Partition(scheme="dirichlet-unequal", minimum=101), "at most 9 clients"),
        (Partition(scheme="quantity", minimum=1001), "even one client would need 1001"),
        (Partition(scheme="odd-one", clients=1000), "leaves 980 for 999 others"),
        (Partition(scheme="quantity", minimum=0), "partition.minimum must be at least 1"),
        (Partition(scheme="shards", classes_per_client=11), "between 1 and the 10 classes"),
        (Partition(scheme="shards", clients=3), "at least 5 clients or 4 classes"),
        (Partition(scheme="step"), "lower partition.minor_examples"),
        (Partition(scheme="column", column="hospital"), "not a column of the data; it has: none"),
        (Partition(scheme="dirichlett"), "did you mean 'dirichlet'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_impossible_requests_say_why(config, sentence):
    with pytest.raises((DataError, ConfigError), match=sentence):
        partition(config, SMALL, 0)


def test_too_many_clients_for_a_column():
    train = examples([0, 1], hospital=np.array(["a", "b"]))
    with pytest.raises(FedBayesError, match="at most 2, or 0 for one client per value"):
        partition(Partition(scheme="column", column="hospital", clients=10), train, 0)


def test_table_counts_and_prints():
    train = examples([0, 0, 1, 2, 2, 2], site=np.array(["x", "y", "x", "x", "x", "x"]))
    rows = table([np.array([0, 1, 2]), np.array([3, 4, 5])], train.labels, ("a", "b", "c"), train.columns)
    assert [r.counts for r in rows] == [(2, 1, 0), (0, 0, 3)]
    assert [r.columns["site"] for r in rows] == [2, 1]
    lines = render(rows, ("a", "b", "c")).splitlines()
    assert lines[0].split() == ["client", "examples", "a", "b", "c", "sites"]
    assert lines[2].split() == ["client", "0", "3", "2", "1", "·", "2"]
    assert lines[-1].split() == ["all", "6", "2", "1", "3"]
    assert len({len(line) for line in lines[1:3]}) == 1
    record = partition_record(rows, ("a", "b", "c"))
    assert record["counts"] == [[2, 1, 0], [0, 0, 3]]
    assert record["sizes"] == [3, 3]
