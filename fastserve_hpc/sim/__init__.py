"""The core under a virtual clock: what a policy would do on hardware that is not here. Standard library only."""
