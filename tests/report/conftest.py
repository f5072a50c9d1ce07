"""A browser for the tests of pages."""

from browser import browser as browser
from browser import chromium as chromium
