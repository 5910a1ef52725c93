import os
import tracemalloc

import cpu_lists
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.affinity import topology
from engine.affinity.topology import format_cpu_list, parse_cpu_list, parse_kernel_list, parse_mask


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("4,2", (4, 2)), ("7-7", (7,)), ("4095", (4095,))],
)
def test_lists_are_read_in_the_order_written(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0\n",
        ",",
        "0,",
        ",0",
        "3-1",
        "1-",
        "-1",
        "+1",
        "1_0",
        "0x1",
        "all",
        "٣",
        "4096",
        "0-4096",
        "10000",
        "00001",
        "1,1",
        "0-3,2",
        "1-2-3",
        "0-8:2/4",
    ],
)
def test_anything_else_is_no_list(text: str) -> None:
    for variant in (text, f" {text}", f"{text} "):
        with pytest.raises(ValueError, match="CPU"):
            parse_cpu_list(variant)


def test_a_list_without_an_end_is_given_up_early() -> None:
    """Fifty times as many ids as there are took 13 ms to refuse, and the memory for all of them."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="names a CPU twice"):
            parse_cpu_list(",".join(["0-4095"] * 10_000))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_ten_thousand_lists_and_masks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_lists.main(["--seed", "5"]) == 0
    assert "10,000 lists and as many masks" in capsys.readouterr().out


@given(st.text("0123456789-, ", max_size=12))
def test_no_text_gives_an_id_out_of_range_or_twice(text: str) -> None:
    try:
        cpus = parse_cpu_list(text)
    except ValueError:
        return
    assert cpus
    assert len(set(cpus)) == len(cpus)
    assert 0 <= min(cpus) <= max(cpus) <= topology.MAX_CPU


@given(st.sets(st.integers(0, topology.MAX_CPU)))
def test_what_is_written_is_read_back(cpus: set[int]) -> None:
    assert parse_kernel_list(format_cpu_list(cpus) + "\n") == tuple(sorted(cpus))


def test_lists_are_written_short() -> None:
    assert format_cpu_list([8, 0, 3, 1, 2, 2]) == "0-3,8"
    assert format_cpu_list([0, 1]) == "0-1"
    assert format_cpu_list([]) == ""


def test_a_threads_mask_is_read_from_its_status() -> None:
    status = "Name:\tx\nCpus_allowed:\t00000114\nCpus_allowed_list:\t2,4,8\nMems_allowed_list:\t0\n"
    assert parse_mask(status) == (2, 4, 8)
    with pytest.raises(ValueError, match="status"):
        parse_mask("Name:\tx\n")


def test_this_machine() -> None:
    allowed = topology.allowed()
    assert allowed
    assert set(allowed) <= set(topology.online()) <= set(topology.present())
    assert topology.mask() == tuple(sorted(os.sched_getaffinity(0)))


def test_asking_what_is_allowed_leaves_the_mask_as_it_was() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert set(topology.allowed()) >= before
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)
