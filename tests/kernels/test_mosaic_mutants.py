"""Each barrier, fence and wait of the Mosaic kernels is needed: without it the interpreter reports something."""

import pytest
from mosaic_mutant import KERNELS, SHARED, Mutant, mutants, report_on

MUTANTS = [mutant for kernel in KERNELS for mutant in mutants(kernel)]
# Of each line a mutant that runs always: the decode kernel's, the quicker one.
SHORT = [mutant for mutant in mutants("decode") if not mutant.only_if]


def test_all_are_found():
    # Eight lines are both kernels', of which one counts three times; three are of the decode kernel, seven of the prefill
    # kernel, four of the producer of 8-bit caches, of which one counts three times.
    assert len(MUTANTS) == 2 * (8 + 2) + 3 + 7 + 4 + 2
    assert len({(mutant.module, mutant.line) for mutant in MUTANTS}) == 22
    assert {mutant.module for mutant in SHORT} == {SHARED, f"{SHARED}_decode"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_whole_kernels_pass(kernel: str):
    assert report_on(Mutant(kernel)) == ""


@pytest.mark.parametrize(
    "mutant", [pytest.param(mutant, id=str(mutant), marks=[] if mutant in SHORT else [pytest.mark.slow]) for mutant in MUTANTS]
)
def test_without_one(mutant: Mutant):
    assert report_on(mutant) != ""
