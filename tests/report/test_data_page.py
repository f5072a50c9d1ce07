"""The page of `paceline data show`, in a real browser: a contact sheet, and text that stays text."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import Browser
from commands import paceline, write_job
from shown_data import own, photos


@pytest.mark.needs_chromium
def test_the_contact_sheet_has_each_image_with_its_class(tmp_path: Path, browser: Browser) -> None:
    photos(tmp_path / "photos", name="<b>cat")
    data = {"kind": "images", "path": "photos", "shape": [3, 8, 8], "held_out": 0}
    file = write_job(tmp_path / "job.yaml", data=data, global_batch=4)
    page = tmp_path / "page.html"
    outcome = paceline("data", "show", file, "--page", page, folder=tmp_path)
    assert outcome.says(str(page))
    browser.open(page)
    shown = browser.all(".sheet li")
    names = [item.text.split("\n")[0] for item in shown]
    assert sorted(names) == ["<b>cat"] * 6 + ["dog"] * 6
    assert browser.run("return [...document.images].every((image) => image.complete && image.naturalWidth === 8)")
    assert not browser.requests()
    assert not browser.console()
    # the pixels of the page are those of the files, after rescaling
    for item, name in zip(shown, names, strict=True):
        source = item.find_element("tag name", "img").get_attribute("src")
        content = base64.b64decode(str(source).removeprefix("data:image/png;base64,"))
        red = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))[0, 0, 0]
        assert (red > 200) == (name == "dog")


@pytest.mark.needs_chromium
def test_the_page_shows_text_with_masks_and_runs_nothing_in_it(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "page.html"
    file = write_job(tmp_path / "job.yaml", data=own("Answers"), global_batch=4)
    assert paceline("data", "show", file, "--page", page, "--samples", 1, folder=tmp_path).code == 0
    browser.open(page)
    texts = [one.text for one in browser.all(".sample pre")]
    assert texts == ["the catsat </s>", r"\x1b[31mred <script>alert(1)</script></s>"]
    dim = [one.text for one in browser.all(".sample pre i")]
    assert dim == ["the cat", r"\x1b[31mred <script>alert(1)</script>"]
    assert not browser.all("script")
    assert not browser.console()
