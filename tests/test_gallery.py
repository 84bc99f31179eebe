"""The gallery draws what it has the models for, and every picture it shows is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from docs import gallery

ROOT = Path(__file__).resolve().parent.parent


def test_what_has_no_model_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs" / "pictures" / "gallery"
    monkeypatch.setattr(gallery, "FOLDER", folder)
    monkeypatch.setattr(sys, "argv", ["gallery", str(tmp_path / "nothing")])
    gallery.main()
    told = capsys.readouterr().out.splitlines()
    assert [path.name for path in folder.iterdir()] == ["excitation.png"]  # its model is trained on the spot
    assert len(told) == len(gallery.PICTURES) + len(gallery.PAGES)
    assert sum("left as it is" in line for line in told) == len(told) - 1
    assert "docs/pictures/gallery/excitation.png" in "\n".join(told)


def test_a_wrong_name_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gallery", ".", "nonsense"])
    with pytest.raises(SystemExit):
        gallery.main()
    assert "there is no picture 'nonsense'" in capsys.readouterr().err


def test_the_gallery_shows_every_picture_and_each_is_there() -> None:
    page = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\(pictures/gallery/(\w+)\.png\)", page))
    assert shown == {*gallery.PICTURES, *gallery.PAGES}
    assert [name for name in sorted(shown) if not (gallery.FOLDER / f"{name}.png").is_file()] == []
