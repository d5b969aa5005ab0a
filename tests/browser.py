"""A real browser, headless, for the pages that fxckpt writes."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)


@contextmanager
def open_browser(folder: Path, width: int = 1200, height: int = 1700) -> Iterator[Any]:
    """Chromium with an empty profile in `folder`; the test is skipped where there is none, if that is allowed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("FXCKPT_TEST_BROWSER") == "required":
            pytest.fail("chromium and chromedriver are required, and are not installed")
        pytest.skip("no chromium and chromedriver here")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=ChromeService(executable_path=driver))
    try:
        yield browser
    finally:
        browser.quit()


def set_colours(browser: Any, scheme: str) -> None:
    """What the page is told of the reader's wish: ``"light"`` or ``"dark"``."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def colours(png: bytes) -> int:
    """How many different colours a picture has."""
    image = imread(io.BytesIO(png), format="png")
    return len(np.unique(image.reshape(-1, image.shape[2]), axis=0))
