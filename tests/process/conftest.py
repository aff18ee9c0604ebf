"""Pools that many tests use."""

import pytest

from holdfast import Pool

from ..conftest import METHODS


@pytest.fixture(params=METHODS)
def pool(request):
    with Pool(2, mp_context=request.param) as made:
        yield made


@pytest.fixture
def forked():
    with Pool(2, mp_context="fork") as made:
        yield made
