"""Which torch_npu was released for which CANN, as data, and the verdict on a pair.

Source: the release table of torch_npu's README. A pair that is not here has not been released together; it may work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from atb_modules.doctor.data import Verdict

#: CANN -> the torch_npu releases made for it
CANN_RELEASES: dict[str, tuple[str, ...]] = {
    "9.1.0": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
    "9.0.0": ("2.10.0.post2", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC1": ("2.8.0", "2.7.1", "2.6.0.post3", "2.1.0.post17"),
    "8.2.RC1": ("2.6.0", "2.5.1.post1", "2.1.0.post13"),
    "8.1.RC1": ("2.5.1", "2.4.0.post4", "2.3.1.post6", "2.1.0.post12"),
    "8.0.0": ("2.4.0.post2", "2.3.1.post4", "2.1.0.post10"),
}
#: the first CANN whose Python parts are not known to trip over numpy 2
NUMPY_2_FROM = (8, 3)

_CANN = re.compile(r"(?<!\d)(\d+\.\d+\.(?:RC\d+|T\d+|\d+)(?:\.(?:alpha|beta)\d+)?)", re.IGNORECASE)
_PUBLIC = re.compile(r"\d+(?:\.\d+)+(?:\.post\d+)?")


@dataclass(frozen=True)
class PairVerdict:
    """The verdict on a CANN and a torch_npu, with the sentence for it."""

    verdict: Verdict
    reason: str


def cann_version(text: str) -> str | None:
    """The CANN version inside ``text`` ("8.2.RC1", "CANN-8.5.0"), or None."""
    found = _CANN.search(text)
    return None if found is None else found[1].replace("rc", "RC")


def minor(version: str) -> tuple[int, int] | None:
    """(2, 9) of "2.9.0.post2+gitabc"; None of what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def judge_pair(cann: str | None, torch_npu: str | None) -> PairVerdict:
    """Hold a CANN and a torch_npu against the matrix; what follows a ``+`` in torch_npu's version is a build."""
    if cann is None and torch_npu is None:
        return PairVerdict(Verdict.UNKNOWN, "neither CANN nor torch_npu is here: nothing to compare")
    if cann is None or torch_npu is None:
        missing = "CANN" if cann is None else "torch_npu"
        return PairVerdict(Verdict.UNKNOWN, f"no version of {missing} was found to compare with")
    release = torch_npu.split("+")[0]
    made_for = [version for version, releases in CANN_RELEASES.items() if release in releases]
    pair = f"torch_npu {torch_npu} and CANN {cann}"
    if cann in made_for:
        return PairVerdict(Verdict.COMPATIBLE, f"{pair} were released for each other")
    hints = []
    if made_for:
        hints.append(f"torch_npu {release} was released for CANN {', '.join(made_for)}")
    elif not _PUBLIC.fullmatch(release):
        hints.append(f"{release} is no release")
    if cann in CANN_RELEASES:
        hints.append(f"for CANN {cann} there are torch_npu {', '.join(CANN_RELEASES[cann])}")
    return PairVerdict(Verdict.UNKNOWN, "; ".join([f"{pair} are no pair of the matrix", *hints]))
