"""Case 24: the list "0-3,8" was taken for all CPUs."""

import pytest

from engine.affinity.topology import format_cpu_list, parse_cpu_list, parse_mask


@pytest.mark.parametrize("text", ["0-3,8", "0,2,4", "2-5,7,9-11,64-127", "1"])
def test_holes_are_kept_both_ways(text: str) -> None:
    assert format_cpu_list(parse_cpu_list(text)) == text


def test_the_hole_is_no_cpu() -> None:
    assert parse_cpu_list("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_mask("Cpus_allowed:\t10f\nCpus_allowed_list:\t0-3,8\n") == (0, 1, 2, 3, 8)
