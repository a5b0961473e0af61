"""An engine on a simulated device, for tests of one that ends by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose.graph_engine import GraphEngine
from tests.unit.rose.simulated_device import Simulation


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = Simulation()
    yield simulation
    simulation.resume()
    simulation.stream.close()


@pytest.fixture
def engine(simulation: Simulation) -> GraphEngine:
    return simulation.engine()
