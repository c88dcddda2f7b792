"""Any file that libsndfile reads becomes the same mono stream; what cannot be used says why."""

import os

import numpy as np
import pytest

from fedbayes.data.sonar.recordings import Recording, Unreadable, audio_files, facts, read, stream


def recording(path, **kwargs):
    return Recording(path, "ship", "r", **kwargs)


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    [(".wav", "PCM_16"), (".wav", "PCM_24"), (".wav", "PCM_32"), (".wav", "FLOAT"), (".wav", "DOUBLE"), (".wav", "PCM_U8"), (".flac", "PCM_16"), (".flac", "PCM_24")],
)  # fmt: skip
def test_every_sample_format_gives_the_same_sound(tmp_path, write, make_tone, suffix, subtype):
    samples = make_tone()
    got = read(recording(write(tmp_path / f"a{suffix}", samples, subtype=subtype)), 16000)
    step = {"PCM_U8": 2**-7, "PCM_16": 2**-15}.get(subtype, 2**-22)
    assert np.abs(got - samples).max() <= 1.01 * step


@pytest.mark.parametrize("original", [8000, 11025, 44100, 48000, 96000])
def test_a_tone_keeps_its_frequency_and_level_at_any_rate(tmp_path, write, original):
    t = np.arange(original * 2) / original
    path = write(tmp_path / "a.wav", 0.4 * np.sin(2 * np.pi * 1000 * t), original)
    got = read(recording(path), 16000)
    assert abs(len(got) - 32000) <= 2
    middle = got[4000:28000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() * 16000 / len(middle) == pytest.approx(1000, abs=1)
    assert np.sqrt(2 * np.mean(middle**2)) == pytest.approx(0.4, rel=0.01)


def test_nothing_folds_down_from_above_the_new_nyquist(tmp_path, write):
    t = np.arange(96000 * 2) / 96000
    path = write(tmp_path / "a.wav", 0.4 * np.sin(2 * np.pi * 11000 * t), 96000, subtype="FLOAT")
    assert np.sqrt(np.mean(read(recording(path), 16000)[2000:-2000] ** 2)) < 1e-4 * 0.28


@pytest.mark.parametrize("original", [16000, 44100])
def test_streaming_in_small_blocks_equals_reading_at_once(tmp_path, write, make_tone, original):
    path = write(tmp_path / "a.flac", make_tone(3.3, original), original)
    whole = read(recording(path), 16000)
    parts = list(stream(recording(path), 16000, seconds=0.37))
    assert len(parts) > 5
    assert np.allclose(np.concatenate(parts), whole, atol=1e-6)


def test_channels_mean_choice_and_a_missing_one(tmp_path, write, make_tone):
    a, b = make_tone(hertz=300), make_tone(hertz=900, seed=1)
    path = write(tmp_path / "a.wav", np.stack([a, b], 1), subtype="FLOAT")
    assert np.allclose(read(recording(path), 16000), (a + b) / 2, atol=1e-6)
    assert np.allclose(read(recording(path), 16000, channel=1), b)
    with pytest.raises(Unreadable, match=r"has 2 channel\(s\), channel 4"):
        read(recording(path), 16000, channel=4)


def test_a_part_of_a_file(tmp_path, write, make_tone):
    samples = make_tone(4)
    path = write(tmp_path / "a.wav", samples, subtype="FLOAT")
    assert np.array_equal(read(recording(path, start=1.0, stop=2.5), 16000), samples[16000:40000])
    with pytest.raises(Unreadable, match="lies outside"):
        read(recording(path, start=9.0), 16000)


def test_what_is_wrong_is_said(tmp_path, write, make_tone):
    cases = {
        "is silent": write(tmp_path / "silent.wav", np.zeros(16000)),
        "cancel": write(tmp_path / "cancel.wav", np.stack([make_tone(), -make_tone()], 1)),
        "not finite": write(tmp_path / "nan.wav", np.array([0.1, np.nan] * 8000), subtype="FLOAT"),
        "is empty": write(tmp_path / "empty.wav", np.zeros(0)),
    }
    (tmp_path / "text.wav").write_text("not audio")
    cases["cannot be decoded"] = tmp_path / "text.wav"
    whole = write(tmp_path / "whole.flac", make_tone(4)).read_bytes()
    (tmp_path / "torn.flac").write_bytes(whole[: len(whole) // 2])
    for reason, path in cases.items():
        with pytest.raises(Unreadable, match=reason):
            read(recording(path), 16000)
    with pytest.raises(Unreadable, match=r"decoded|ends"):
        read(recording(tmp_path / "torn.flac"), 16000)
    with pytest.raises(Unreadable, match="is not there"):
        read(recording(tmp_path / "absent.wav"), 16000)


@pytest.mark.parametrize("rate", [16000, 22050])
def test_a_constant_offset_is_silence_too(tmp_path, write, rate):
    path = write(tmp_path / "dc.wav", np.full(2 * rate, 0.25), rate, subtype="FLOAT")
    with pytest.raises(Unreadable, match="silent"):
        read(recording(path), 16000)
    assert np.array_equal(np.concatenate(list(stream(recording(path), 16000))), np.full(32000, np.float32(0.25)))


def test_a_rate_is_changed_without_a_click_where_a_recording_with_an_offset_begins_and_ends(tmp_path, write, make_tone):
    tone = make_tone(2, 22050)
    plain = read(recording(write(tmp_path / "a.wav", tone, 22050, subtype="FLOAT")), 8000)
    lifted = read(recording(write(tmp_path / "b.wav", tone + np.float32(5), 22050, subtype="FLOAT")), 8000)
    assert np.abs(lifted - 5 - plain).max() < 1e-5


def test_facts_come_from_the_header(tmp_path, write, make_tone):
    found = facts(write(tmp_path / "a.wav", np.stack([make_tone(2, 8000)] * 3, 1), 8000))
    assert (found.rate, found.channels, found.seconds) == (8000, 3, 2.0)


@pytest.mark.parametrize(
    ("claim", "torn"), [("kept", True), (0, False), (0x7FFFF000, False), (0x7FFFFFFF, False), (0xFFFFFFFF, False)]
)
def test_a_wav_that_ends_before_its_header_says_is_cut_off(tmp_path, write, make_tone, claim, torn):
    """libsndfile reads what is left and says nothing; a recorder that never filled in its sizes claims nothing."""
    path = write(tmp_path / "a.wav", make_tone(2))
    content = bytearray(path.read_bytes()[:-30_000])
    if claim != "kept":
        content[40:44] = int(claim).to_bytes(4, "little")
    path.write_bytes(content)
    if torn:
        with pytest.raises(Unreadable, match="cut off: its header says 64000 bytes of sound, 34000 are there"):
            read(recording(path), 16000)
    elif claim:
        assert len(read(recording(path), 16000)) == 17_000


@pytest.mark.parametrize("container", ["FLAC", "AIFF", "RF64", "W64", "AU", "CAF", "OGG"])
def test_other_containers_that_are_cut_off(tmp_path, write, make_tone, container):
    whole = write(tmp_path / f"a.{container.lower()}", make_tone(8), format=container)
    assert len(read(recording(whole), 16000)) == 128_000
    torn = tmp_path / f"torn.{container.lower()}"
    torn.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(Unreadable, match=r"cut off|cannot be decoded"):
        read(recording(torn), 16000)


def test_a_wrong_size_of_the_whole_file_is_no_damage(tmp_path, write, make_tone):
    content = bytearray(write(tmp_path / "a.wav", make_tone(2)).read_bytes())
    content[4:8] = (10**6).to_bytes(4, "little")
    (tmp_path / "b.wav").write_bytes(content)
    assert len(read(recording(tmp_path / "b.wav"), 16000)) == 32_000


@pytest.mark.parametrize("subtype", ["ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "G721_32"])
def test_coded_wav_is_read_and_cut_where_it_cannot_seek(tmp_path, write, make_tone, subtype):
    samples = make_tone(3, 8000)
    path = write(tmp_path / "a.wav", samples, 8000, subtype=subtype)
    whole = np.concatenate(list(stream(recording(path), 8000)))
    assert np.corrcoef(whole[: len(samples)], samples)[0, 1] > 0.98
    part = np.concatenate(list(stream(recording(path, start=1.0, stop=2.0), 8000)))
    assert len(part) == 8000
    if subtype in ("ULAW", "ALAW", "GSM610", "G721_32"):  # the others seek to the beginning of a block
        assert np.array_equal(part, whole[8000:16000])


def test_numbers_and_parts_beyond_all_measure(tmp_path, write, make_tone):
    huge = write(tmp_path / "huge.wav", make_tone() * np.float32(1e38), subtype="FLOAT")
    with pytest.raises(Unreadable, match="not finite numbers"):
        read(recording(huge), 16000)
    path = write(tmp_path / "a.wav", make_tone(2))
    assert len(read(recording(path, start=1.0, stop=1e308), 16000)) == 16_000
    with pytest.raises(Unreadable, match="the part from 1e\\+308 s to its end lies outside"):
        read(recording(path, start=1e308), 16000)
    (tmp_path / "raw.au").write_bytes(bytes(range(256)) * 40)  # libsndfile takes it for headerless μ-law
    with pytest.raises(Unreadable, match="no header"):
        read(recording(tmp_path / "raw.au"), 16000)
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(Unreadable, match="is not a file"):
        read(recording(tmp_path / "pipe.wav"), 16000)


def test_a_block_is_bounded_in_values_whatever_rate_and_channels(tmp_path, write):
    path = write(tmp_path / "array.wav", np.random.default_rng(0).standard_normal((40_000, 200)) * 0.1, 8000)
    assert max(len(block) for block in stream(recording(path), 8000)) <= 20_000


def test_chunks_before_the_sound_are_no_damage(tmp_path, write, make_tone):
    whole = write(tmp_path / "a.wav", make_tone(1)).read_bytes()
    note = b"LIST" + (5).to_bytes(4, "little") + b"hello\0"  # of odd length, so padded
    path = tmp_path / "b.wav"
    path.write_bytes(b"RIFF" + (len(whole) + len(note) - 8).to_bytes(4, "little") + b"WAVE" + note + whole[12:])
    assert np.array_equal(read(recording(path), 16000), read(recording(tmp_path / "a.wav"), 16000))


def test_hidden_folders_are_left_alone_and_links_followed_once(tmp_path, write, make_tone):
    disk = tmp_path / "disk" / "tug"
    write(disk / "a.wav", make_tone(1))
    home = tmp_path / "home"
    for hidden in (".trash", "__MACOSX", "cargo/.old"):
        write(home / hidden / "x.wav", make_tone(1))
    write(home / "cargo" / "._b.wav", make_tone(1))
    write(home / "cargo" / "b.wav", make_tone(1))
    (home / "tug").symlink_to(disk, target_is_directory=True)
    (disk / "around").symlink_to(home, target_is_directory=True)
    assert audio_files(home) == [home / "cargo" / "b.wav", home / "tug" / "a.wav"]
