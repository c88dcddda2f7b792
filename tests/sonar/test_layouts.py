"""Public sets and one's own folders are read as they lie; recordings and vessels get the right names."""

import zipfile
from collections import Counter

import numpy as np
import pytest

from fedbayes.data.sonar.layouts import LAYOUTS, catalogue
from fedbayes.errors import DataError


def recognised(folder):
    return next(layout.name for layout in LAYOUTS.values() if layout.recognises(folder))


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_class_and_recording_folders(tmp_path):
    touch(tmp_path, "tug/a.wav", "tug/b/1.flac", "tug/b/2.flac", "cargo/a.WAV", "tug/.hidden.wav", "tug/notes.txt")
    found = {str(r.path.relative_to(tmp_path)): (r.label, r.recording) for r in catalogue(tmp_path)}
    assert recognised(tmp_path) == "folder"
    assert found == {
        "cargo/a.WAV": ("cargo", "cargo/a"),
        "tug/a.wav": ("tug", "tug/a"),
        "tug/b/1.flac": ("tug", "tug/b"),
        "tug/b/2.flac": ("tug", "tug/b"),
    }


def test_a_file_outside_of_any_class_is_named(tmp_path):
    touch(tmp_path, "stray.wav", "tug/a.wav")
    with pytest.raises(DataError, match=r"stray.wav lies outside of any class folder"):
        catalogue(tmp_path)


def test_csv_with_any_case_and_delimiter(tmp_path):
    table = tmp_path / "list.csv"
    table.write_text("File;Class;Recording;Site;MMSI;start;stop;split\nx/a.wav;tug;r1;north;123;1.5;3;test\nb.wav;cargo;;;;;;\n", encoding="utf-8-sig")  # fmt: skip
    first, second = catalogue(table)
    assert (first.path, first.label, first.recording, first.site, first.vessel) == (tmp_path / "x/a.wav", "tug", "r1", "north", "123")  # fmt: skip
    assert (first.start, first.stop, first.split) == (1.5, 3.0, "test")
    assert (second.recording, second.site, second.split) == ("b", "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,recording\na.wav,r\n", "no column 'class'; its columns are: file, recording"),
        ("file,class\na.wav,\n", "line 2: 'class' is empty"),
        ("file,class,split\na.wav,x,dev\n", "split is 'dev'; it must be train, test"),
        ("file,class,start\na.wav,x,soon\n", "must be seconds, not 'soon'"),
        ("file,class\n", "has no rows"),
    ],
)
def test_a_bad_csv_says_where(tmp_path, text, message):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        catalogue(tmp_path / "list.csv")


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        catalogue(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no recordings"):
        catalogue(tmp_path)
    with pytest.raises(DataError, match="did you mean 'deepship'"):
        catalogue(tmp_path, "deepshp")


def test_deepship_takes_a_ship_only_where_the_metafile_fits(tmp_path, write, make_tone):
    for label, numbers in (("Tug", (1, 2, 3)), ("Cargo", (1, 2, 3))):
        for n in numbers:
            write(tmp_path / label / f"{n}.wav", make_tone(1.0 + n, 4000), 4000)
    (tmp_path / "Tug" / "tug-metafile").write_text("1,52,ALPHA,20160505,1,2,1\n2,52,BETA,20160505,1,3,1\n3,52,ALPHA,20160507,1,4,1\n")  # fmt: skip
    (tmp_path / "Cargo" / "cargo-metafile").write_text("1,70,OMEGA,20160505,1,200,1\n2,70,PSI,20160505,1,3,1\n")
    assert recognised(tmp_path) == "deepship"
    ships = {r.recording: r.vessel for r in catalogue(tmp_path)}
    assert ships == {"Tug/1": "ALPHA", "Tug/2": "BETA", "Tug/3": "ALPHA", "Cargo/1": "", "Cargo/2": "", "Cargo/3": ""}


def test_deepship_recordings_in_folders(tmp_path):
    touch(tmp_path, "Tanker/17/a.wav", "Tanker/17/b.wav", "Passenger/4/a.wav", "Tanker/tanker-metafile")
    assert Counter(r.recording for r in catalogue(tmp_path)) == {"Tanker/17": 2, "Passengership/4": 1}


def test_shipsear_by_table_and_by_letters(tmp_path):
    flat = tmp_path / "flat"
    names = ["6__10_07_13_marDeCangas_Entra.wav", "7__10_07_13_marDeCangas_Espera.wav", "26__19_07_13_zodiac.wav", "95__A__Draga_3.wav"]  # fmt: skip
    touch(flat, *names)
    (flat / "shipsEar.csv").write_text("ID,Filename,Type,Location\n6,x,Passengers,Cangas\n7,x,Passengers,Cangas\n26,x,Motorboat,Vigo\n95,x,Dredger,Moanha\n")  # fmt: skip
    assert recognised(flat) == "shipsear"
    found = {r.recording: (r.label, r.vessel, r.site) for r in catalogue(flat)}
    assert found["6"] == found["7"] == ("passenger", "marDeCangas", "Cangas")
    assert found["26"] == ("motorboat", "", "Vigo")
    assert found["95"] == ("workboat", "Draga", "Moanha")
    letters = tmp_path / "letters"
    touch(letters, f"C/{names[0]}", f"A/{names[3]}", "E/81__25_09_13_H3_ruido.wav")
    assert {r.recording: r.label for r in catalogue(letters)} == {"6": "passenger", "95": "workboat", "81": "ambient"}
    bare = tmp_path / "bare"
    touch(bare, *names)
    with pytest.raises(DataError, match=r"its class is unknown; put shipsEar\.xlsx"):
        catalogue(bare)


def test_shipsear_workbook(tmp_path):
    touch(tmp_path, "6__10_07_13_marDeCangas_Entra.wav", "80__04_10_12_adricristuy.wav")
    shared = ["ID", "Type", "Passengers", "Dredger"]
    sheet = '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData><row><c r="A1" t="s"><v>0</v></c><c r="B1" t="s"><v>1</v></c></row><row><c r="A2"><v>6</v></c><c r="B2" t="s"><v>2</v></c></row><row><c r="A3"><v>80</v></c><c r="B3" t="inlineStr"><is><t>Dredger</t></is></c></row></sheetData></worksheet>'  # fmt: skip
    strings = '<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">' + "".join(f"<si><t>{s}</t></si>" for s in shared) + "</sst>"  # fmt: skip
    with zipfile.ZipFile(tmp_path / "shipsEar.xlsx", "w") as archive:
        archive.writestr("xl/worksheets/sheet1.xml", sheet)
        archive.writestr("xl/sharedStrings.xml", strings)
    assert {r.recording: r.label for r in catalogue(tmp_path)} == {"6": "passenger", "80": "workboat"}


def test_watkins_recordings_are_the_first_five_characters(tmp_path):
    touch(tmp_path, "orca/6202200E.wav", "orca/62022001.wav", "beluga/62022002.wav", "beluga/51041C01.wav", "beluga/7100101J (1).wav")  # fmt: skip
    assert recognised(tmp_path) == "watkins"
    assert Counter(r.recording for r in catalogue(tmp_path)) == {"62022": 3, "51041": 1, "71001": 1}


def test_eight_digits_alone_are_dates_not_watkins(tmp_path):
    touch(tmp_path, "tug/20160505.wav", "cargo/20160506.wav")
    assert recognised(tmp_path) == "folder"
    assert {r.recording for r in catalogue(tmp_path, "watkins")} == {"20160"}


def test_the_real_sets(shared):
    ships, mammals = catalogue(shared / "deepship"), catalogue(shared / "watkins")
    assert (len(ships), len({r.recording for r in ships})) == (21, 21)
    vessels = {r.recording: r.vessel for r in ships}
    assert vessels["Passengership/12"] == vessels["Passengership/16"] == "MALASPINA"
    assert not any(v for name, v in vessels.items() if name.startswith("Tanker"))
    # 58 recordings counted by species; one tape was heard in two species' folders and is one recording
    assert len(mammals) == 470
    assert len({(r.label, r.recording) for r in mammals}) == 58
    assert len({r.recording for r in mammals}) == 57
    assert np.unique([r.label for r in mammals]).size == 9


def table(tmp_path, text, encoding="utf-8"):
    (tmp_path / "list.csv").write_bytes(text.encode(encoding))
    return catalogue(tmp_path / "list.csv")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("file,class\na.wav,tug\nb.wav,cargo\n./a.wav,cargo\n", r"lines 2 and 4: the same part of 'a\.wav' is 'tug' and 'cargo'"),
        ("file,class,start,stop\na.wav,tug,0,5\na.wav,cargo,4.9,9\n", "lines 2 and 3: the same part"),
        ("file,class,start,stop\na.wav,tug,0,9\na.wav,tug,1,2\na.wav,cargo,5,6\n", "lines 2 and 4: the same part"),
        ("file,class,start,stop\na.wav,tug,2,1\n", "line 2: start and stop must be seconds"),
        ("file,class,start,stop\na.wav,tug,nan,1\n", "line 2: start and stop must be seconds"),
        ("file,class,start,stop\na.wav,tug,-1,1\n", "line 2: start and stop must be seconds"),
        ("file,class,start\na.wav,tug,soon\n", "line 2: start and stop must be seconds, not .soon., .."),
        ("file,class\n\0,tug\n", "not a CSV"),
    ],
)  # fmt: skip
def test_a_table_that_contradicts_itself_is_refused(tmp_path, text, sentence):
    with pytest.raises(DataError, match=sentence):
        table(tmp_path, text)


def test_parts_of_one_file_may_differ_in_class_where_they_do_not_overlap(tmp_path):
    found = table(tmp_path, "file,class,recording,start,stop\na.wav,tug,r1,0,5\na.wav,cargo,r2,5,\n")
    assert [(r.label, r.start, r.stop) for r in found] == [("tug", 0, 5), ("cargo", 5, 0)]


def test_other_encodings_are_named_and_empty_rows_of_a_spreadsheet_left_out(tmp_path):
    with pytest.raises(DataError, match="not UTF-8"):
        table(tmp_path, "file,class\nété.wav,tug\n", "latin-1")
    found = table(tmp_path, 'file,class,,\n"d\u00e9j\u00e0, vu.wav",tug,,\n,,,\n')
    assert [(r.path.name, r.label) for r in found] == [("d\u00e9j\u00e0, vu.wav", "tug")]
