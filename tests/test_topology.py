"""Names of slices, their shapes, and errors about unknown ones."""

import pytest

from jaxformer.chips import CHIPS, chip_of
from jaxformer.errors import UserError
from jaxformer.preflight.gpus import TARGETS
from jaxformer.topology import parse_topology, topology_names


@pytest.mark.parametrize(
    ("name", "num_chips", "shape"),
    [
        ("v5e-256", 256, (16, 16)),
        ("v5e-8", 8, (2, 4)),
        ("v6e-64", 64, (8, 8)),
        ("v5p-128", 64, (4, 4, 4)),  # counted in cores
        ("v5p-1024", 512, (8, 8, 8)),
        ("v4-512", 256, (4, 8, 8)),
        ("v4-8", 4, (2, 2, 1)),
        ("tpu7x-128", 64, (4, 4, 4)),
        ("h100-64", 64, (8, 8)),
        ("b200-4", 4, (1, 4)),
    ],
)
def test_names(name, num_chips, shape):
    topology = parse_topology(name)
    assert (topology.name, topology.num_chips, topology.shape) == (name, num_chips, shape)
    assert topology.num_devices == num_chips * (2 if name.startswith("tpu7x") else 1)
    assert parse_topology(f" {name.upper()} ") == topology


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-255", "topology 'v5e-255': there is no slice of 255 v5e: did you mean v5e-256"),
        ("v5p-3", "there is no slice of 3 v5p"),
        ("v5e-512", "there is no slice of 512 v5e"),
        ("h10-64", "topology 'h10-64' is unknown: did you mean h100-64"),
        ("laptop", "topology 'laptop' is unknown"),
    ],
)
def test_unknown_names_are_errors_with_the_nearest_ones(name, message):
    with pytest.raises(UserError) as error:
        parse_topology(name)
    assert message in str(error.value)
    assert "`--topology list` prints all" in str(error.value)


def test_every_listed_name_is_a_topology():
    for chip in CHIPS.values():
        for name in topology_names(chip):
            assert parse_topology(name).name == name


def test_chips_of_devices():
    assert chip_of("TPU v5 lite") is CHIPS["v5e"]
    assert chip_of("NVIDIA H100 80GB HBM3") is CHIPS["h100"]
    assert chip_of("cpu") is None
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)
    assert set(TARGETS) == {chip.name for chip in CHIPS.values() if chip.platform == "gpu"}


def test_other_devices_than_those_of_a_topology_are_an_error():
    topology = parse_topology("v5e-16")
    topology.check_devices("TPU v5 lite", 16)
    with pytest.raises(
        UserError, match=r"mesh.topology=v5e-16 has 16 TPU v5 lite devices, but there are 8 cpu devices"
    ):
        topology.check_devices("cpu", 8)
    with pytest.raises(UserError, match="there are 8 TPU v5 lite devices: start the run there"):
        topology.check_devices("TPU v5 lite", 8)
