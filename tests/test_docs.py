"""The documentation builds with every link, anchor and docstring in order."""

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT, process_env

from sparsellm.recipe import Recipe
from sparsellm.recipe.keys import describe_keys
from sparsellm.runs.telemetry.metrics import METRICS


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = process_env(PYTHONPATH=str(ROOT), NO_MKDOCS_2_WARNING="1")
    built = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_it_builds_strictly_and_every_page_is_in_the_navigation(site):
    pages = {path.name for path in site.glob("*.html")} - {"404.html"}
    written = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert written <= pages
    assert {"index.html", "changelog.html", "recipe.html", "commands.html"} <= pages


def test_pages_made_from_the_code_say_what_it_says(site):
    recipe = (site / "recipe.html").read_text(encoding="utf-8")
    for key in describe_keys(Recipe):
        assert f"<code>{key.name}</code>" in recipe
    metrics = (site / "metrics.html").read_text(encoding="utf-8")
    for metric in METRICS:
        assert f"<td><code>{metric.name}</code></td>" in metrics
    commands = (site / "commands.html").read_text(encoding="utf-8")
    assert "--drop-dead-tokens" in commands
    api = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="sparsellm.ffn.inference_path.accelerate.accelerate"' in api


def test_nothing_is_fetched_from_other_hosts(site):
    # A reader without a network sees the whole site: fonts, scripts and figures are its own.
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        for attribute in ('src="http', 'href="https://fonts', "cdn."):
            assert attribute not in text, (page.name, attribute)


class _Page(HTMLParser):
    """The places of a page, and where it leads to."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.targets = set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.targets |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


def test_every_link_and_figure_leads_somewhere(site):
    pages = {path.name: _Page(path) for path in site.glob("*.html") if path.name != "404.html"}
    links = 0
    for name, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = unquote(url.path) or name
            assert (site / file).exists(), (name, target)
            if url.fragment and file in pages and not url.fragment.startswith("__"):
                assert unquote(url.fragment) in pages[file].anchors, (name, target)
            links += 1
    assert links > 100


def test_search_works_on_pages_that_are_opened_as_files(site):
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("the search was NOT tried: no chromium or google-chrome on the PATH")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=15000", f"file://{site}/index.html?q=union+format"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"md-search-result__meta\">\d+ matching documents", output)
