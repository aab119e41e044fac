"""Sphinx settings: ``sphinx-build -W -b html docs docs/_build/html``."""

from __future__ import annotations

from numbaflash._version import __version__

project = "numbaflash"
copyright = "the numbaflash authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_mock_imports = ["transformers"]  # of which the pages need nothing
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the numpydoc sections say types in words
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
default_role = "code"

html_theme = "furo"
html_title = f"numbaflash {version}"
