"""M-RoPE: which frequency turns by which axis of a position (time, height, width). Qwen2-VL, section 2.1.

Sections (2, 3, 3) of eight frequencies, and Qwen3-VL's interleaved sections (4, 2, 2)::

    contiguous    T T H H H W W W
    interleaved   T H W T H W T T
"""

from __future__ import annotations

from collections.abc import Sequence

from atb_modules.checks import check_bool, check_int


def checked_section(section: Sequence[int] | None, interleaved: bool) -> tuple[int, ...] | None:
    """``mrope_section`` as a tuple; raises unless it is None or a sequence of counts."""
    check_bool("mrope_interleaved", interleaved)
    if section is None:
        if interleaved:
            raise ValueError("mrope_interleaved is True and mrope_section None; allowed: both, or neither")
        return None
    if not isinstance(section, Sequence) or isinstance(section, str) or len(section) < 2:
        raise ValueError(f"mrope_section is {section!r}; allowed: None, or one count of frequencies an axis")
    for index, entry in enumerate(section):
        check_int(f"mrope_section[{index}]", entry, 0)
    return tuple(section)


def axis_of_frequency(section: tuple[int, ...], interleaved: bool, frequencies: int) -> tuple[int, ...]:
    """The axis of each frequency, as drawn above."""
    if sum(section) != frequencies:
        raise ValueError(f"mrope_section is {section}, {sum(section)} in all; allowed: {frequencies}, rotary_dim / 2")
    if not interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axes = [0] * frequencies
    for axis, count in enumerate(section[1:], start=1):
        last = axis + len(section) * (count - 1)
        if count and last >= frequencies:
            raise ValueError(
                f"mrope_section is {section}; interleaved, axis {axis} reaches frequency {last} of {frequencies}"
            )
        axes[axis : last + 1 : len(section)] = [axis] * count
    return tuple(axes)
