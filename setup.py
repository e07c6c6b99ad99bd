"""Packaging. `kernels/` is a top-level folder but is imported as `parallax.kernels`, through the link parallax/kernels.

A top-level package called `kernels` would hide the Hugging Face package of that name whenever the checkout is on
sys.path (torchrun puts it there), so the folder has no __init__.py of its own and is found only under parallax.
"""

from setuptools import find_namespace_packages, setup

setup(packages=find_namespace_packages(include=["parallax", "parallax.*"]))
