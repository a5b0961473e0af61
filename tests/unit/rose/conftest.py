"""An engine on a simulated device, for tests of one that ends by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose.graph_engine import GraphEngine
from tests.unit.rose.simulated_device import Simulation


@pytest.fixture(params=[False, True], ids=["rows are copied", "the device delivers rows"])
def simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    simulation = Simulation()
    simulation.delivers = request.param
    yield simulation
    simulation.resume()
    simulation.stream.close()


@pytest.fixture
def engine(simulation: Simulation) -> GraphEngine:
    return simulation.engine()
