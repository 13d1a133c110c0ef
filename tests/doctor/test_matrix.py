"""The matrix of CANN and torch_npu: every pair in it, and what is said of pairs outside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atb_modules.doctor.matrix import CANN_RELEASES, cann_version, judge_pair, minor

PAIRS = [(cann, release) for cann, releases in CANN_RELEASES.items() for release in releases]
RELEASES = sorted({release for _, release in PAIRS})


@pytest.mark.parametrize("cann,release", PAIRS)
def test_every_pair_of_the_table_is_compatible(cann, release):
    for version in (release, f"{release}+git1a2b3c", f"{release}+cpu"):
        assert judge_pair(cann, version).verdict == "compatible"


@given(cann=st.sampled_from(sorted(CANN_RELEASES)), release=st.sampled_from(RELEASES))
def test_a_pair_outside_the_table_is_unknown_and_says_what_was_released(cann, release):
    found = judge_pair(cann, release)
    if (cann, release) in PAIRS:
        assert found.verdict == "compatible"
        return
    assert found.verdict == "unknown"
    assert f"for CANN {cann} there are torch_npu {CANN_RELEASES[cann][0]}" in found.reason
    made_for = next(c for c, r in PAIRS if r == release)
    assert f"torch_npu {release} was released for CANN {made_for}" in found.reason


@pytest.mark.parametrize(
    "cann,release,hint",
    [
        ("7.0.0", "2.9.0", "was released for CANN 8.5.0"),
        ("9.0.0", "2.14.0", "for CANN 9.0.0 there are"),
        ("9.0.0", "2.10.0.dev20260101", "2.10.0.dev20260101 is no release"),
        ("9.0.0", "2.10.0rc1", "2.10.0rc1 is no release"),
        ("8.5.0.alpha001", "2.9.0", "was released for CANN 8.5.0"),
        (None, "2.9.0", "no version of CANN"),
        ("8.5.0", None, "no version of torch_npu"),
        (None, None, "neither CANN nor torch_npu"),
    ],
)
def test_unknown_pairs(cann, release, hint):
    found = judge_pair(cann, release)
    assert found.verdict == "unknown" and hint in found.reason


@pytest.mark.parametrize(
    "text,version",
    [
        ("8.2.RC1", "8.2.RC1"),
        ("8.3.rc1", "8.3.RC1"),
        ("CANN-8.5.0", "8.5.0"),
        ("8.0.RC2.alpha001", "8.0.RC2.alpha001"),
        ("[V100R001C19]:9.0.0", "9.0.0"),
        ("", None),
        ("latest", None),
        ("8.5", None),
    ],
)
def test_versions_of_cann(text, version):
    assert cann_version(text) == version


def test_minor_versions():
    assert minor("2.9.0.post2+git") == (2, 9) and minor("10.12") == (10, 12)
    assert minor("nightly") is None and minor("2") is None
