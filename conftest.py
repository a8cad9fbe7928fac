"""Every test sees 8 simulated CPU devices, unless it starts processes of its own."""

from jax_dist.testing import simulated_devices

simulated_devices(8)
