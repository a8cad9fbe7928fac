"""Every test sees 8 simulated CPU devices, unless it starts processes of its own."""

import pytest

from jax_dist.testing import simulated_devices

pytest.register_assert_rewrite("watching")  # tests/mapping/watching.py asserts for others
simulated_devices(8)
