"""Every claim is of cases that there are, in short runs and in long ones, and no two cases share a name."""

import importlib
import os

import pytest

from bench.place import Place, Side
from bench.runner import EXPERIMENTS, Setting

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPUs are needed")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_are_of_cases(name: str, quick: bool) -> None:
    experiment = importlib.import_module(f"bench.{name}")
    nowhere = Side("none", "192.0.2.1")  # cases are made, not run
    places = tuple(Place(place, nowhere, nowhere) for place in getattr(experiment, "PLACES", ()))
    names = [case.name for case in experiment.cases(Setting(quick, places))]
    assert len(set(names)) == len(names)
    assert {claim.case for claim in experiment.CLAIMS} <= set(names)
    assert {claim.against for claim in experiment.CLAIMS} <= {None, *names}
