"""No recording and no vessel on both sides, whatever is asked."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.data import Examples, partition, split_validation
from fedbayes.data.sonar.extraction import Features
from fedbayes.data.sonar.recordings import Recording
from fedbayes.data.sonar.splits import SameSound, check_clients, check_disjoint, choose_test, groups_of, joined
from fedbayes.data.splits import linked
from fedbayes.errors import ConfigError, DataError
from fedbayes.experiment import Partition


def recordings(rows):
    return [Recording(Path(f"{i}.wav"), "x", recording, vessel=vessel) for i, (recording, vessel) in enumerate(rows)]


def test_groups_hang_together_through_recordings_and_vessels():
    groups = groups_of(recordings([("r1", "A"), ("r1", ""), ("r2", "A"), ("r3", ""), ("r4", ""), ("r5", "B"), ("r2", "B")]))  # fmt: skip
    assert groups.tolist() == [0, 0, 0, 1, 2, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=25))
def test_linked_is_the_connected_components(rows):
    first = np.array([f"r{a}" for a, _ in rows])
    second = np.array(["" if b == 0 else f"v{b}" for _, b in rows])
    got = linked([first, second])
    parent = list(range(len(rows)))

    def root(i):
        while parent[i] != i:
            i = parent[i]
        return i

    for i in range(len(rows)):
        for j in range(i):
            if first[i] == first[j] or (second[i] == second[j] != ""):
                parent[root(i)] = root(j)
    wanted = [root(i) for i in range(len(rows))]
    assert [[a == b for b in got] for a in got] == [[a == b for b in wanted] for a in wanted]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]), st.integers(0, 5))
def test_the_test_never_shares_a_group_and_every_class_stays_in_training(seed, share, folds):
    rng = np.random.default_rng(seed)
    groups = linked([rng.integers(0, 12, 40).astype(str)])
    labels = np.array([g % 3 for g in groups])
    weights = rng.integers(1, 9, 40).astype(float)
    if 2 <= folds <= groups.max() + 1:
        held = [choose_test(groups, labels, weights, share=share, folds=folds, fold=f, seed=seed) for f in range(folds)]
        assert (np.sum(held, axis=0) == 1).all()  # every recording is tested exactly once
    else:
        held = [choose_test(groups, labels, weights, share=share, folds=0, fold=0, seed=seed)]
        assert set(labels[~held[0]]) == set(labels)
        assert held[0].any() == (share > 0 and any(len(set(groups[labels == c])) > 1 for c in set(labels)))
    for mask in held:
        assert not set(groups[mask]) & set(groups[~mask])


def test_the_share_is_met_and_the_seed_matters():
    groups = np.repeat(np.arange(200), 3)
    labels, weights = (groups % 4), np.ones(600)
    a, b = (choose_test(groups, labels, weights, share=0.25, folds=0, fold=0, seed=s) for s in (0, 1))
    assert a.mean() == pytest.approx(0.25, abs=0.011)
    assert [a[labels == c].mean() for c in range(4)] == pytest.approx([0.25] * 4, abs=0.02)
    assert (a != b).any()


def test_leave_one_recording_out():
    groups = np.repeat(np.arange(7), 5)
    for fold in range(7):
        held = choose_test(groups, groups % 2, np.ones(35), share=0.25, folds=7, fold=fold, seed=3)
        assert len(set(groups[held])) == 1
    with pytest.raises(ConfigError, match="it must be 2 to 7"):
        choose_test(groups, groups % 2, np.ones(35), share=0.25, folds=8, fold=0, seed=3)
    with pytest.raises(ConfigError, match=r"'sonar\.fold' is 7"):
        choose_test(groups, groups % 2, np.ones(35), share=0.25, folds=7, fold=7, seed=3)


def examples(n=120, ships=10, seed=0):
    rng = np.random.default_rng(seed)
    recording = rng.integers(0, 30, n)
    return Examples(
        torch.zeros(n, 1, 4, 4, dtype=torch.uint8),
        torch.from_numpy(recording % 3),
        {"recording": np.char.add("r", recording.astype(str)), "vessel": np.array([f"v{r % ships}" if r % 4 else "" for r in recording])},
    )  # fmt: skip


def test_a_shared_recording_or_vessel_is_refused():
    whole = examples()
    check_disjoint({"training": whole.take([0]), "test": whole.take([])})
    with pytest.raises(DataError, match=r"training and test share 30 recording\(s\), 'r\d+' for one"):
        check_disjoint({"training": whole, "test": whole})
    by_recording = whole.columns["recording"]
    train = whole.take(np.flatnonzero(np.isin(by_recording, ["r1", "r2"])))
    test = whole.take(np.flatnonzero(by_recording == "r11"))  # another recording of the ship v1
    with pytest.raises(DataError, match="share 1 vessel"):
        check_disjoint({"training": train, "test": test})


@pytest.mark.parametrize("seed", range(5))
def test_validation_shares_neither_recording_nor_vessel(seed):
    rest, held = split_validation(examples(seed=seed), 0.2, seed)
    assert len(held) > 0
    check_disjoint({"training": rest, "validation": held})


@pytest.mark.parametrize(
    "config",
    [Partition("iid", 5), Partition("dirichlet", 5, 0.5), Partition("dirichlet-unequal", 5, 0.5, minimum=2), Partition("column", 6, column="recording"), Partition("quantity", 4, minimum=2)],
)  # fmt: skip
def test_the_segments_of_a_recording_stay_on_one_client(config):
    train = examples(400)
    shards = partition(config, train, 0)
    check_clients(shards, train)
    assert sorted(np.concatenate(shards).tolist()) == list(range(400))
    torn = [np.arange(0, 200), np.arange(200, 400)]
    with pytest.raises(DataError, match="lies on the clients 0 and 1"):
        check_clients(torn, train)


def features(owners, pictures):
    inputs = torch.tensor(pictures, dtype=torch.uint8).reshape(-1, 1, 1, 1).repeat(1, 1, 4, 4)
    inputs[:, :, 0, 0] += 1  # some contrast
    return Features(inputs, np.array(owners), np.zeros(len(owners)))


def test_the_same_sound_under_two_names_is_one_recording():
    listed = recordings([("a", ""), ("b", ""), ("c", ""), ("d", ""), ("b", "")])
    with pytest.warns(SameSound, match=r"1\.wav \(class x\) is heard in 'a' too; .*2\.wav"):
        got = joined(listed, features([0, 0, 1, 1, 2, 3, 4], [1, 2, 9, 2, 7, 8, 7]))
    assert [r.recording for r in got] == ["a", "a", "a", "d", "a"]  # 0-1 by a picture, 1-4 by name, 4-2 by a picture


def test_parts_of_one_file_that_overlap_are_one_recording(tmp_path):
    (tmp_path / "link.wav").symlink_to(tmp_path / "a.wav")
    parts = [("a.wav", 0, 10), ("link.wav", 9, 20), ("a.wav", 20, 0), ("b.wav", 0, 0)]
    listed = [Recording(tmp_path / f, "x", f"r{i}", start=a, stop=b) for i, (f, a, b) in enumerate(parts)]
    with pytest.warns(SameSound):
        got = joined(listed, features([0, 1, 2, 3], [1, 2, 3, 4]))
    assert [r.recording for r in got] == ["r0", "r0", "r2", "r3"]


def test_pictures_without_contrast_join_nothing():
    blank = Features(torch.full((2, 1, 4, 4), 7, dtype=torch.uint8), np.array([0, 1]), np.zeros(2))
    assert [r.recording for r in joined(recordings([("a", ""), ("b", "")]), blank)] == ["a", "b"]


@pytest.mark.parametrize("seed", range(8))
def test_a_class_heard_only_beside_others_stays_in_training(seed):
    """Group 0 holds three segments of class 0 and the only one of class 1: it must not be drawn for the test."""
    groups, labels = np.array([0, 0, 0, 0, 1, 2, 3, 4]), np.array([0, 0, 0, 1, 0, 0, 2, 2])
    held = choose_test(groups, labels, np.ones(8), share=0.6, folds=0, fold=0, seed=seed)
    assert set(labels[~held]) == {0, 1, 2}
    assert held.any()
