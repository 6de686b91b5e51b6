"""What of our own programs a host has, in one answer."""

from __future__ import annotations

import pytest

from spark_deploy.hosts.tools import PythonSite, QuantiserSite, Site


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            ["3.12 aarch64", "/usr/local/lib/spark/site-a", "ab", "/usr/local/lib/spark/c", "/t"],
            Site(
                "3.12",
                "aarch64",
                "/usr/local/lib/spark/site-a",
                "ab",
                "/usr/local/lib/spark/c",
                "/t",
            ),
        ),
        (["3.11 x86_64", "-", "-", "-", "-"], Site("3.11", "x86_64", "", "", "", "")),
        (["-", "-", "-", "-", "-"], Site("", "", "", "", "", "")),
        ([], Site("", "", "", "", "", "")),
    ],
)
def test_python_packages_and_tools_are_told_in_one_answer(said: list[str], found: Site) -> None:
    assert PythonSite().process(said) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (["3.12 aarch64", "-", "ab"], Site("3.12", "aarch64", receipt="ab")),
        (["3.11 x86_64", "-", "-"], Site("3.11", "x86_64")),
        (["-", "-", "ab"], Site()),
        ([], Site()),
    ],
)
def test_the_python_of_an_image_is_told_with_what_lies_beside_it(
    said: list[str], found: Site
) -> None:
    assert QuantiserSite().process(said) == found
