# SPDX-License-Identifier: Apache-2.0

from .._MUSAC import device as _sim
from ._utils import _get_musa_device_index

default_generators = tuple(_sim.default_generator(index) for index in range(len(_sim.devices())))


def _default(device=None):
    return default_generators[_get_musa_device_index(device, optional=True)]


def manual_seed(seed):
    _default().manual_seed(int(seed))


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed():
    return _default().seed()


def initial_seed():
    return _default().initial_seed()


def get_rng_state(device="musa"):
    return _default(device).get_state()


def set_rng_state(new_state, device="musa"):
    _default(device).set_state(new_state)


def get_rng_state_all():
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states):
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)
