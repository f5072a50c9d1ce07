"""The page of a directory with a file survey.txt, for `paceline report`."""

from pathlib import Path

from paceline.report import DirectoryPage


def is_survey(folder: Path) -> bool:
    return (folder / "survey.txt").is_file()


def write(folder: Path) -> Path:
    page = folder / "survey.html"
    page.write_text("<!doctype html><title>Survey</title>")
    return page


PAGE = DirectoryPage(is_survey, write)
