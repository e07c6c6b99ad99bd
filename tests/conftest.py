"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# A busy machine draws slowly; that says nothing about what is tested.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")
