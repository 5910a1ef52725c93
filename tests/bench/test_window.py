import pytest
from windows import window

from bench.window import strayed


def test_what_came_in_between() -> None:
    found = window(came=1000, handled=990, lost=7, packets=993)
    assert found.seconds == 1
    assert (found.came(), found.lost(), found.risen("packets")) == (1000, 7, 993)
    assert (found.handled(0), found.handled(1), found.handled(2)) == (990, 10, 0)


@pytest.mark.parametrize(("handled", "sentences"), [(1000, 0), (980, 0), (979, 1)])
def test_packets_handled_elsewhere_are_told(handled: int, sentences: int) -> None:
    told = strayed(window(came=1000, handled=handled).end, 0)
    assert told == [f"CPU 0 was to handle the packets, and handled {handled} of 1000"] * sentences
