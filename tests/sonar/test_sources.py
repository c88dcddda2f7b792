"""From files or nothing to data sets: columns, splits, unseen classes, single sites, the cache."""

import numpy as np
import pytest
import torch

from fedbayes.data import load, load_source, partition
from fedbayes.data.sonar import NarrowRecordings, SkippedRecordings, check_clients, check_disjoint, read_site, write_sea
from fedbayes.errors import ConfigError, DataError
from fedbayes.experiment import Data, Partition, Sonar

SEA = Sonar(sites=3, recordings=4, length=2.0, sample_rate=4000, seconds=1.0, bands=16, frames=16, cache=False)
SMALL = Sonar(sample_rate=4000, seconds=1.0, bands=16, frames=16, cache=False)


@pytest.fixture(scope="module")
def synthetic():
    return load_source("sonar-synthetic", sonar=SEA, seed=0)


def test_the_synthetic_sea_needs_no_file(synthetic):
    assert synthetic.classes == ("cargo", "ferry", "tug", "trawler", "motorboat")
    assert synthetic.train.inputs.dtype == torch.uint8
    assert synthetic.input_shape == (1, 16, 16)
    assert len(synthetic.train) + len(synthetic.test) == 3 * 4 * 5 * 3  # sites, recordings, classes, segments
    for part in (synthetic.train, synthetic.test):
        assert part.labels.unique().tolist() == [0, 1, 2, 3, 4]
        names = np.array(synthetic.classes)[part.labels.numpy()]
        assert (names == part.columns["class"]).all()
        assert np.unique(part.columns["site"]).tolist() == ["site-00", "site-01", "site-02"]
    check_disjoint({"training": synthetic.train, "test": synthetic.test})
    assert set(synthetic.ood["unseen"].columns["class"]) == {"submarine", "waterjet"}


def test_a_sea_is_shared_out_by_site_or_recording(synthetic):
    for config in (Partition("column", 0, column="site"), Partition("column", 4, column="recording"), Partition("dirichlet", 4, 0.3)):  # fmt: skip
        shards = partition(config, synthetic.train, 0)
        check_clients(shards, synthetic.train)
        assert sum(map(len, shards)) == len(synthetic.train)
    by_site = partition(Partition("column", 0, column="site"), synthetic.train, 0)
    assert [len(np.unique(synthetic.train.columns["site"][s])) for s in by_site] == [1, 1, 1]


def test_same_seed_same_sea_other_seed_other_sea(synthetic):
    again = load_source("sonar-synthetic", sonar=SEA, seed=0)
    assert torch.equal(again.train.inputs, synthetic.train.inputs)
    assert np.array_equal(again.test.columns["recording"], synthetic.test.columns["recording"])
    other = load_source("sonar-synthetic", sonar=SEA, seed=1)
    assert not torch.equal(other.train.inputs[:50], synthetic.train.inputs[:50])


def test_the_sea_in_the_cache_is_the_same_sea(synthetic, tmp_path, monkeypatch):
    from dataclasses import replace

    from fedbayes.data.sonar import sea

    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path))
    warm = replace(SEA, cache=True)
    assert torch.equal(load_source("sonar-synthetic", sonar=warm).train.inputs, synthetic.train.inputs)
    monkeypatch.setattr(sea, "hear", None)  # nothing is made a second time
    assert torch.equal(load_source("sonar-synthetic", sonar=warm).train.inputs, synthetic.train.inputs)
    with pytest.raises(TypeError):
        load_source("sonar-synthetic", sonar=replace(warm, snr=(0.0, 1.0)))


def test_the_cache_tells_classes_from_unseen_ones(tmp_path, monkeypatch):
    """Three classes and one unseen are another sea than two and two, though their names follow each other alike."""
    from dataclasses import replace

    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path))
    seas = [(("cargo", "ferry", "tug"), ("trawler",)), (("cargo", "ferry"), ("tug", "trawler"))]
    for classes, unseen in seas:
        warm = replace(SEA, sites=2, recordings=2, length=1.0, cache=True, classes=classes, unseen=unseen)
        got = load_source("sonar-synthetic", sonar=warm)
        fresh = load_source("sonar-synthetic", sonar=replace(warm, cache=False))
        assert torch.equal(got.train.inputs, fresh.train.inputs)
        assert torch.equal(got.ood["unseen"].inputs, fresh.ood["unseen"].inputs)


def test_classes_of_the_sea_can_be_chosen_and_are_checked():
    from dataclasses import replace

    few = load_source("sonar-synthetic", sonar=replace(SEA, classes=("tug", "cargo"), unseen=("ferry",)))
    assert few.classes == ("tug", "cargo")
    assert set(few.ood["unseen"].columns["class"]) == {"ferry"}
    with pytest.raises(ConfigError, match="no class 'kraken'"):
        load_source("sonar-synthetic", sonar=replace(SEA, classes=("tug", "kraken")))


@pytest.fixture
def sites(tmp_path):
    return write_sea(tmp_path / "sea", Sonar(sites=2, recordings=3, length=2.0, sample_rate=4000), 0)


def test_a_folder_of_ones_own(sites):
    data = load(Data(name=str(sites[0])), sonar=SMALL)
    assert data.classes == ("cargo", "ferry", "motorboat", "trawler", "tug")
    check_disjoint({"training": data.train, "test": data.test})
    assert len(data.test) > 0
    by_csv = load(Data(name=str(sites[0] / "recordings.csv")), sonar=SMALL)
    assert len(by_csv.train) + len(by_csv.test) == len(data.train) + len(data.test)
    assert set(by_csv.train.columns["vessel"]) != {""}


def test_one_sites_folder_numbers_its_classes_as_told(sites):
    """A node that reads its own folder must number the classes as every other node does, even those it never heard."""
    import shutil

    shutil.rmtree(sites[1] / "ferry")
    (sites[1] / "recordings.csv").unlink()
    classes = ("tug", "ferry", "cargo", "trawler", "motorboat")
    sonar = Sonar(sample_rate=4000, seconds=1.0, bands=16, frames=16, cache=False, classes=classes)
    data = read_site(sites[1], sonar)
    assert data.classes == classes
    assert data.train.labels.unique().tolist() == [0, 2, 3, 4]
    assert len(np.unique(data.train.columns["recording"])) == 12  # all that is there trains
    with pytest.raises(ConfigError, match=r"'sonar\.classes' is empty"):
        read_site(sites[1], SMALL)
    with pytest.raises(DataError, match=r"class 'cargo', which 'sonar\.classes' does not list"):
        load(Data(name=str(sites[1])), sonar=Sonar(sample_rate=4000, seconds=1.0, cache=False, classes=("tug", "ferry")))  # fmt: skip


def test_a_flower_node_reads_its_own_folder(sites):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from fedbayes import config
    from fedbayes.flower.home import Home, prepare_home

    text = f"""
    [data]
    name = "{sites[0]}"
    scale = "none"
    mean = "client"
    [sonar]
    sample_rate = 4000
    seconds = 1.0
    bands = 16
    frames = 16
    cache = false
    classes = ["cargo", "ferry", "motorboat", "trawler", "tug"]
    [model]
    name = "spectrogram-cnn"
    """
    home = Home.read({"data": str(sites[1]), "clients": "1"})
    setup = prepare_home(config.dumps(config.loads(text, "test")), home, 5, (1, 16, 16))
    assert set(setup.dataset.train.columns["site"]) == {""}
    assert len(setup.shards[1]) == len(setup.dataset.train) > 0
    assert len(setup.shards[0]) == 0
    with pytest.raises(DataError, match="is not on this node"):
        Home.read({"data": str(sites[1] / "nowhere")})


def test_unseen_classes_of_a_folder_become_out_of_distribution(sites):
    sonar = Sonar(sample_rate=4000, seconds=1.0, bands=16, frames=16, cache=False, unseen=("motorboat",))
    data = load(Data(name=str(sites[0])), sonar=sonar)
    assert "motorboat" not in data.classes
    assert set(data.ood["unseen"].columns["class"]) == {"motorboat"}
    assert "motorboat" not in set(data.train.columns["class"]) | set(data.test.columns["class"])


def test_left_out_files_are_named_in_a_warning_and_in_the_notes(sites, write):
    write(sites[0] / "tug" / "dead.wav", np.zeros(8000), 4000)
    with pytest.warns(SkippedRecordings, match=r"dead\.wav: is silent"):
        data = load(Data(name=str(sites[0])), sonar=SMALL)
    assert "dead.wav: is silent" in data.notes


def test_recorders_too_narrow_for_the_band_are_warned_of(sites, write, make_tone):
    import warnings
    from dataclasses import replace

    write(sites[0] / "tug" / "narrow.wav", make_tone(2, 1000), 1000)
    with pytest.warns(
        NarrowRecordings, match=r"^1 of \d+ recordings have .* 2000 Hz .* 1000 Hz: .*; sonar\.high = 500"
    ):
        data = load(Data(name=str(sites[0])), sonar=SMALL)
    assert "sonar.high = 500" in data.notes
    with pytest.warns(NarrowRecordings):
        read_site(sites[0], replace(SMALL, classes=data.classes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "sonar.high" not in load(Data(name=str(sites[0])), sonar=replace(SMALL, high=500.0)).notes

    write(sites[0] / "tug" / "narrow.wav", make_tone(20, 5, 1), 5)
    with pytest.warns(
        SkippedRecordings, match=r"narrow\.wav: has a rate of 5 Hz: nothing above 2\.5 Hz, .* from 20 Hz"
    ):
        left = load(Data(name=str(sites[0])), sonar=SMALL)
    assert not any("narrow.wav" in name for part in (left.train, left.test) for name in part.columns["file"])
    write(sites[0] / "tug" / "narrow.wav", make_tone(20, 50, 1), 50)
    with pytest.warns(
        NarrowRecordings, match=r"nothing above 25 Hz\), so that the recorder can give the class away\.$"
    ):
        load(Data(name=str(sites[0])), sonar=SMALL)  # and no advice to hear from 20 to 25 Hz


def test_a_split_column_is_obeyed_and_a_lying_one_refused(tmp_path, write, make_tone):
    rows = ["file,class,recording,vessel,split"]
    for i in range(8):
        write(tmp_path / f"{i}.wav", make_tone(1.5, 4000, 200 + 50 * i, seed=i), 4000)
        rows.append(f"{i}.wav,{'ab'[i % 2]},r{i},v{i // 2},{'test' if i >= 6 else 'train'}")
    (tmp_path / "list.TSV").write_text("\n".join(rows).replace(",", "\t"))
    data = load(Data(name=str(tmp_path / "list.TSV")), sonar=SMALL)
    assert set(data.test.columns["recording"]) == {"r6", "r7"}
    rows[8] = rows[8].replace("test", "train")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"training and test share 1 vessel\(s\), 'v3' for one"):
        load(Data(name=str(tmp_path / "list.csv")), sonar=SMALL)


def test_one_class_is_not_a_task(tmp_path, write, make_tone):
    write(tmp_path / "tug" / "a.wav", make_tone(2, 4000), 4000)
    with pytest.raises(DataError, match=r"all of one class \(tug\)"):
        load(Data(name=str(tmp_path)), sonar=SMALL)


def test_public_sets_by_name(shared):
    with pytest.raises(DataError, match="deepship is not in the data directory"):
        load(Data(name="deepship"), sonar=SMALL, data_dir=shared / "nowhere")
    data = load(Data(name="deepship"), sonar=SMALL, data_dir=shared)
    assert data.classes == ("Passengership", "Tanker")
    assert len(np.unique(np.concatenate([data.train.columns["recording"], data.test.columns["recording"]]))) == 21
    check_disjoint({"training": data.train, "test": data.test})


@pytest.mark.parametrize("kind", ["lofar", "demon", "waveform"])
def test_every_picture_of_the_sea(kind):
    from dataclasses import replace

    data = load_source("sonar-synthetic", sonar=replace(SEA, picture=kind, sites=1, recordings=2, bands=0, frames=0))
    assert data.train.inputs.dtype == (torch.float16 if kind == "waveform" else torch.uint8)
    assert torch.isfinite(data.train.inputs.float()).all()
    assert float(data.train.inputs.float().std()) > 0.5


def test_a_class_of_one_recording_trains_and_is_said_to_be_untested(tmp_path, write, make_tone):
    for name in ("tug/a", "cargo/a", "cargo/b", "cargo/c"):
        write(
            tmp_path / f"{name}.wav",
            make_tone(2, 4000, 300 + 50 * len(list(tmp_path.rglob("*"))), seed=len(name)),
            4000,
        )
    data = load(Data(name=str(tmp_path)), sonar=SMALL)
    assert "no recording of class tug" in data.notes
    assert set(data.train.columns["class"]) == {"tug", "cargo"}
    assert set(data.test.columns["class"]) == {"cargo"}
    for name in ("b", "c"):
        (tmp_path / "cargo" / f"{name}.wav").unlink()
    with pytest.raises(DataError, match="no test examples"):
        load(Data(name=str(tmp_path)), sonar=SMALL)


def test_a_copy_under_another_name_is_on_the_same_side(tmp_path, write, make_tone):
    for i in range(6):
        samples = (
            np.round(make_tone(2, 4000, 300 + 90 * i, seed=i) * 2**15) / 2**15
        )  # what 16 bits hold, so no copy differs
        write(tmp_path / "ab"[i % 2] / f"{i}.wav", samples, 4000)
        write(tmp_path / "ab"[i % 2] / f"copy of {i}.flac", samples, 4000)
    with pytest.warns(UserWarning, match=r"copy of 5\.flac \(class b\) is heard in 'b/5' too"):
        data = load(Data(name=str(tmp_path)), sonar=SMALL)
    assert len(np.unique(np.concatenate([data.train.columns["recording"], data.test.columns["recording"]]))) == 6
    assert len(data.test) > 0
    check_disjoint({"training": data.train, "test": data.test})


def test_a_written_sea_holds_out_the_ships_that_a_run_tests(tmp_path, synthetic):
    """What a node reads from its site's folder is what that site's client trains on in a run on the same sea."""
    from dataclasses import replace

    folders = write_sea(tmp_path, SEA, 0, unseen=("submarine", "waterjet"), hold_out=True)
    sonar = replace(SEA, classes=synthetic.classes, unseen=("submarine", "waterjet"))
    listed = load(Data(name=str(tmp_path / "recordings.csv")), sonar=sonar)
    for part, other in ((listed.train, synthetic.train), (listed.test, synthetic.test), (listed.ood["unseen"], synthetic.ood["unseen"])):  # fmt: skip
        assert set(part.columns["recording"]) == set(other.columns["recording"])
    shards = partition(Partition("column", 0, column="site"), listed.train, 0)
    assert [f.name for f in folders] == ["site-00", "site-01", "site-02"]
    for folder, shard in zip(folders, shards, strict=True):
        own = read_site(folder, sonar).train
        assert torch.equal(own.inputs, listed.train.take(shard).inputs)
        assert torch.equal(own.labels, listed.train.take(shard).labels)


def test_a_site_does_not_train_on_what_its_list_marks_as_test(tmp_path, write, make_tone):
    rows = ["file,class,split"]
    for i in range(4):
        write(tmp_path / f"{i}.wav", make_tone(2, 4000, 300 + 90 * i, seed=i), 4000)
        rows.append(f"{i}.wav,{'ab'[i % 2]},{'test' if i == 3 else ''}")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    from dataclasses import replace

    own = read_site(tmp_path / "list.csv", replace(SMALL, classes=("a", "b")))
    assert set(own.train.columns["recording"]) == {"0", "1", "2"}
